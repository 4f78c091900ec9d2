"""Runs with `train.upload_to`: what is in the store is whole, and another machine goes on from it alone."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash
from prepared_shards import prepare
from programs import COMMAND, run_program
from run_results import figures
from sources import write_sharegpt

pytest.importorskip("moto", reason="moto is not installed")
from store_server import BUCKET, KEY, SECRET, Line, forget, put, store  # noqa: E402
from store_server import names as names_in  # noqa: E402

from megatron_vlm import stores  # noqa: E402
from megatron_vlm.config import ConfigError, RunConfig  # noqa: E402
from megatron_vlm.extras.stores import uploads  # noqa: E402
from megatron_vlm.run_folder import latest_checkpoint, state_text  # noqa: E402

STEPS = 40
pytestmark = pytest.mark.long
AT = f"s3://{BUCKET}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uploads")
    source = write_sharegpt(folder / "data/rows", 8)
    prepare(source, folder / "data/energon", splits={"train": 1.0})
    with store():
        put(folder / "data", f"{AT}/data")
        yield folder


def leaked(folder: Path) -> list[Path]:
    """The files of a folder in which a key of the store stands."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [file for file in files if any(key.encode() in file.read_bytes() for key in (KEY, SECRET))]


@pytest.fixture
def train(folder, tiny_gemma3):
    def train(
        run_dir: Path, data: str, *settings: str, until: Callable[[], bool] | None = None
    ) -> subprocess.CompletedProcess:
        kind = "hf" if data.endswith(".jsonl") else "energon"
        paths = [f"--train_data_path={data}", f"--dataset_type={kind}"]
        words = [
            f"model.hf_path={tiny_gemma3}",
            "tp=1",
            f"steps={STEPS}",
            "micro_batch_size=1",
            "global_batch_size=2",
            "train.save_every=10",
        ]
        words += ["data.num_workers=1", f"--run_dir={run_dir}", *paths, *settings]
        ended = run_program(COMMAND, "train", "--recipe=gemma3_tiny_digits", *words, until=until)
        assert not leaked(run_dir) and KEY not in (said := ended.stdout + ended.stderr) and SECRET not in said
        return ended

    return train


def test_a_run_from_a_store_is_the_run_from_disk_and_its_copy_is_a_run_folder(
    folder, train, tiny_gemma3, tmp_path
):
    local, there, copy = tmp_path / "local", tmp_path / "there", f"{AT}/runs/first"
    assert train(local, f"{folder}/data/rows/data.jsonl").returncode == 0
    put(tiny_gemma3, f"{AT}/model")
    settings = [f"model.hf_path={AT}/model", f"train.upload_to={copy}", "train.export_every=20"]
    ended = train(there, f"{AT}/data/rows/data.jsonl", *settings)
    assert (ended.returncode, figures(there)) == (0, figures(local))
    kept = [f"checkpoints/step_000000{step}" for step in (30, 40)]
    kept += [f"exports/step_000000{step}" for step in (20, 40)]
    files = {str(file.relative_to(there)) for name in kept for file in (there / name).iterdir()}
    files |= {"config.yaml", "starts.jsonl", "checkpoints/latest"}
    assert set(names_in(copy)) == files | {"metrics.jsonl"}
    for name in files:
        assert stores.read(f"{copy}/{name}", 1 << 30) == (there / name).read_bytes()


def in_the_store(address: str, files: dict[str, str]) -> None:
    with stores.at(address) as (client, path):
        for name, text in files.items():
            client.write(f"{path}/{name}", text.encode())


def checkpoint_files(step: int) -> dict[str, str]:
    """The files of a complete checkpoint, with checksums as a run saves them."""
    place, sums = f"checkpoints/step_{step:08d}", [1, xxhash.xxh3_64(b"a").hexdigest()]
    state = {"step": step, "files": {"a.pt": sums, "b.pt": sums}}
    return {f"{place}/a.pt": "a", f"{place}/b.pt": "a", f"{place}/state.json": state_text(state)}


def config_of(run_dir: Path, copy: str) -> RunConfig:
    config = RunConfig(run_dir=str(run_dir))
    config.train.upload_to = copy
    return config


@contextmanager
def through_a_line(seconds: float = 0.0) -> Iterator[Line]:
    """What is started meanwhile asks the store through a line, as slow as that; so does who forgets."""
    address = os.environ["AWS_ENDPOINT_URL"]
    names_in(AT)  # this process has a client that asks directly
    line = Line(int(address.rpartition(":")[2]), seconds)
    try:
        os.environ["AWS_ENDPOINT_URL"] = line.address
        yield line
    finally:
        os.environ["AWS_ENDPOINT_URL"] = address
        line.cut()
        forget()


@pytest.mark.parametrize(("name", "text"), [("b.pt", "b"), ("b.pt", ""), ("state.json", "{")])
def test_of_a_damaged_copy_the_one_before_is_fetched(folder, tmp_path, name, text):
    copy = f"{AT}/damaged_{name}_{len(text)}"
    in_the_store(copy, checkpoint_files(10) | checkpoint_files(20))
    in_the_store(copy, {f"checkpoints/step_00000020/{name}": text})
    lines = uploads.restore(config_of(tmp_path / "run", copy)).splitlines()
    assert "step_00000020" in lines[0] and "is damaged, and is left out" in lines[0]
    assert lines[1].startswith("train.upload_to: fetched step_00000010 of ")
    assert latest_checkpoint(tmp_path / "run").name == "step_00000010"
    assert uploads.restore(config_of(tmp_path / "run", copy)) == ""  # the next start


def test_what_is_no_file_of_a_run_is_not_fetched(folder, tmp_path):
    """Nothing is written outside the run folder, nor taken for a checkpoint, also with a slash at the end."""
    step = "checkpoints/step_00000010"
    in_the_store(f"{AT}/odd", checkpoint_files(10))
    in_the_store(f"{AT}/odd", {f"{step}_bak/state.json": "{}", "b/state.json": ""})
    in_the_store(
        f"{AT}/odd", {"a/config.yaml/../../../evil/config.yaml": "", f"{step}/../../../evil.json": ""}
    )
    uploads.restore(config_of(tmp_path / "run", f"{AT}/odd/"))
    found = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    assert found == {f"run/{name}" for name in checkpoint_files(10)} | {"run/checkpoints/latest"}


def test_another_runs_copy_is_not_replaced(folder, tmp_path):
    config = config_of(tmp_path, f"{AT}/theirs")
    in_the_store(config.train.upload_to, checkpoint_files(40) | {"starts.jsonl": "theirs"})
    there = names_in(f"{AT}/theirs")
    (tmp_path / "checkpoints/step_00000040").mkdir(parents=True)
    (tmp_path / "checkpoints/step_00000040/state.json").write_text("{}")
    (tmp_path / "starts.jsonl").write_text("mine\n")
    with pytest.raises(ConfigError, match="holds another run"):
        uploads.restore(config)
    assert names_in(f"{AT}/theirs") == there


def test_a_run_whose_machine_is_lost_again_and_again_goes_on(folder, train, tmp_path):
    """It is killed after random numbers of changes in the store. What counts as complete there is so."""
    local, lost, copy = tmp_path / "local", tmp_path / "lost", f"{AT}/runs/lost"
    settings = [f"{folder}/data/energon", "train.export_every=5"]
    assert train(local, *settings).returncode == 0
    numbers = random.Random(5)
    code, kills = None, 0
    with through_a_line(0.02):
        while code != 0:
            shutil.rmtree(lost, ignore_errors=True)
            before = names_in(copy)
            changes = numbers.randint(1, 12) if kills < 6 else 1 << 30

            def killed(before=before, changes=changes) -> bool:
                return len(names_in(copy).items() ^ before.items()) >= changes

            code = train(lost, *settings, f"train.upload_to={copy}", until=killed).returncode
            kills += code != 0
            names = names_in(copy)
            assert code in (0, -9)
            complete = [
                name.split("/")[1] for name in names if re.fullmatch("checkpoints/.*/state.json", name)
            ]
            for step in range(5, int(max(complete, default="step_0")[5:]) + 1, 5):
                assert f"exports/step_{step:08d}/config.json" in names
    assert kills > 2 and figures(lost) == figures(local)


def test_a_store_that_goes_away_is_told_and_gets_all_later(folder, train, tmp_path):
    copy, run_dir = f"{AT}/runs/away", tmp_path / "run"
    settings = [f"{folder}/data/rows/data.jsonl", f"train.upload_to={copy}"]

    def cut_after_the_first() -> bool:
        if stores.is_file(f"{copy}/checkpoints/step_00000010/state.json"):
            line.cut()
        return False

    with through_a_line() as line:
        ended = train(run_dir, *settings, until=cut_after_the_first)
        assert ended.returncode == 0
        assert ended.stdout.count(f"train.upload_to: {copy}: the store does not answer") == 1
        refused = train(run_dir, *settings)
        assert refused.returncode == 2 and "train.upload_to: " + copy in refused.stderr.splitlines()[-1]
        line.mend()
        assert train(run_dir, *settings).returncode == 0
    assert {name.split("/")[0] for name in names_in(f"{copy}/checkpoints")} == {
        "latest",
        "step_00000030",
        "step_00000040",
    }
