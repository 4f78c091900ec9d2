"""Runs with `train.upload_to`: what is in the store is whole, and another machine goes on from it alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from logged_figures import figures
from prepared_shards import prepare
from programs import COMMAND, run_program
from sources import write_sharegpt

pytest.importorskip("moto", reason="moto is not installed")
from store_server import BUCKET, KEY, SECRET, Line, forget, leaked, put, store  # noqa: E402

from megatron_vlm import stores  # noqa: E402
from megatron_vlm.config import ConfigError, RunConfig  # noqa: E402
from megatron_vlm.report.history import read_history  # noqa: E402
from megatron_vlm.run_folder import uploads  # noqa: E402

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
    assert set(stores.names(copy)) == files | {"metrics.jsonl"}
    for name in files:
        assert stores.read(f"{copy}/{name}", 1 << 30) == (there / name).read_bytes()

    export = ["export", str(there), f"{AT}/exported"]
    ended = run_program(COMMAND, *export)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, f"wrote {AT}/exported")
    names = sorted(stores.names(f"{AT}/exported"))
    assert names == sorted(file.name for file in (there / "exports/step_00000040").iterdir())
    for name in names:
        exported = (there / "exports/step_00000040" / name).read_bytes()
        assert stores.read(f"{AT}/exported/{name}", 1 << 30) == exported
    assert sorted(os.listdir(there / "exports")) == ["step_00000020", "step_00000040"]
    again = run_program(COMMAND, *export)
    said = f"{AT}/exported exists; give a new name or remove it."
    assert again.returncode == 2 and again.stderr.strip().endswith(said)


def in_the_store(address: str, files: dict[str, str]) -> None:
    with stores.at(address) as (client, path):
        for name, text in files.items():
            client.write(f"{path}/{name}", text.encode())


def test_what_is_no_file_of_a_run_is_not_fetched(folder, tmp_path):
    """Nothing is written outside the run folder, nor taken for a checkpoint, also with a slash at the end."""
    step = "checkpoints/step_00000010"
    in_the_store(
        f"{AT}/odd", {f"{step}/state.json": "{}", f"{step}_bak/state.json": "{}", "b/state.json": ""}
    )
    in_the_store(
        f"{AT}/odd", {"a/config.yaml/../../../evil/config.yaml": "", f"{step}/../../../evil.json": ""}
    )
    config = RunConfig(run_dir=str(tmp_path / "run"))
    config.train.upload_to = f"{AT}/odd/"
    uploads.restore(config)
    found = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    assert found == {f"run/{step}/state.json", "run/checkpoints/latest"}


def test_another_runs_copy_is_not_replaced(folder, tmp_path):
    config = RunConfig(run_dir=str(tmp_path))
    config.train.upload_to = f"{AT}/theirs"
    in_the_store(config.train.upload_to, {"starts.jsonl": "theirs", "config.yaml": "theirs"})
    (tmp_path / "checkpoints/step_00000040").mkdir(parents=True)
    (tmp_path / "checkpoints/step_00000040/state.json").write_text("{}")
    (tmp_path / "starts.jsonl").write_text("mine\n")
    with pytest.raises(ConfigError, match="holds another run"):
        uploads.restore(config)
    assert stores.read(f"{AT}/theirs/config.yaml", 99) == b"theirs"


def test_a_run_killed_while_it_copies_goes_on_from_the_copy_before(folder, train, tmp_path):
    """The line to the store is slow. The second run begins in an empty folder, as if never killed."""
    local, killed, moved = (tmp_path / name for name in ("local", "killed", "moved"))
    copy = f"{AT}/runs/killed"
    assert train(local, f"{folder}/data/energon").returncode == 0
    address = os.environ["AWS_ENDPOINT_URL"]
    line = Line(int(address.rpartition(":")[2]), seconds=0.02)

    def half_there() -> bool:
        names = stores.names(f"{copy}/checkpoints")
        later = [name for name in names if "step_00000010" < name.split("/")[0] < "step_9"]
        return "step_00000010/state.json" in names and len(later) > 1

    try:
        os.environ["AWS_ENDPOINT_URL"] = line.address
        settings = [f"{AT}/data/energon", f"train.upload_to={copy}", "train.keep_checkpoints=4"]
        assert train(killed, *settings, until=half_there).returncode == -9
    finally:
        os.environ["AWS_ENDPOINT_URL"] = address
        line.cut()
        forget()
    names = stores.names(f"{copy}/checkpoints")
    [newest] = [name for name in names if name.endswith("state.json")]
    assert newest == "step_00000010/state.json" and len({name.split("/")[0] for name in names}) > 1
    assert train(moved, *settings).returncode == 0
    assert [start["step"] for start in read_history(moved).starts][-1] == 11
    assert figures(moved) == figures(local)
    assert {name.split("/")[0] for name in stores.names(f"{copy}/checkpoints")} == {
        "latest",
        *(f"step_{step:08d}" for step in (10, 20, 30, 40)),
    }


def test_a_store_that_goes_away_is_told_and_gets_all_later(folder, train, tmp_path):
    copy, run_dir = f"{AT}/runs/away", tmp_path / "run"
    address = os.environ["AWS_ENDPOINT_URL"]
    line = Line(int(address.rpartition(":")[2]))
    settings = [f"{folder}/data/rows/data.jsonl", f"train.upload_to={copy}"]

    def cut_after_the_first() -> bool:
        if stores.is_file(f"{copy}/checkpoints/step_00000010/state.json"):
            line.cut()
        return False

    try:
        os.environ["AWS_ENDPOINT_URL"] = line.address
        ended = train(run_dir, *settings, until=cut_after_the_first)
        assert ended.returncode == 0
        said = f"train.upload_to: checkpoints/step_00000040 is not copied: {copy}/checkpoints/step_00000040"
        assert ended.stdout.count(said) == 1 and "the store does not answer (" in ended.stdout
        refused = train(run_dir, *settings)
        assert refused.returncode == 2 and "train.upload_to: " + copy in refused.stderr.splitlines()[-1]
        line.mend()
        assert train(run_dir, *settings).returncode == 0
    finally:
        os.environ["AWS_ENDPOINT_URL"] = address
        line.cut()
        forget()
    assert {name.split("/")[0] for name in stores.names(f"{copy}/checkpoints")} == {
        "latest",
        "step_00000030",
        "step_00000040",
    }


def test_a_folder_behind_the_store_is_refused(folder, train, tmp_path):
    run_dir, data, copy = tmp_path / "run", f"{folder}/data/rows/data.jsonl", f"{AT}/runs/ahead"
    with stores.at(f"{copy}/checkpoints/step_00000090/state.json") as (client, path):
        client.write(path, b"{}")
    assert train(run_dir, data, "steps=10").returncode == 0
    refused = train(run_dir, data, f"train.upload_to={copy}")
    said = f"train.upload_to: {copy} has step_00000090, and {run_dir} only step_00000010; give a new run_dir"
    assert refused.returncode == 2 and said in refused.stderr.splitlines()[-1]
