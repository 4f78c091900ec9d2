"""`--profile`: a trace and a table, and the run's numbers are what they are without."""

import gzip
import json

import pytest
import torch
from programs import COMMAND, run_program
from run_results import saved_tensors
from sources import write_hf_folder, write_sharegpt
from torch.profiler import profile, record_function
from torch.utils.checkpoint import checkpoint

from megatron_vlm.callbacks.profiler import seconds_by_part

STEPS = 5


@pytest.fixture(scope="module")
def runs(tiny_gemma3, tmp_path_factory):
    """The same run without a profile, and with one of its last two steps."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_hf_folder(folder / "data", write_sharegpt(folder / "source", 20))
    command = [
        "train",
        "--recipe",
        "gemma3_tiny_digits",
        "--hf_path",
        str(tiny_gemma3),
        "--dataset_type",
        "hf",
    ]
    command += ["--train_data_path", str(data), "tp=1", "micro_batch_size=1", "global_batch_size=2"]
    command += [f"steps={STEPS}", "warmup_steps=0", "eval_every=0", "num_workers=1"]
    said = {}
    for name, more in {"plain": [], "profiled": ["--profile", "2"]}.items():
        done = run_program(COMMAND, *command, "--run_dir", folder / name, *more)
        assert done.returncode == 0, done.stderr[-4000:]
        said[name] = done.stdout
    return folder, said


def rows(run_dir) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.soak
def test_a_profile_changes_no_number(runs):
    folder, _ = runs
    plain, profiled = (saved_tensors(folder / name, STEPS) for name in ("plain", "profiled"))
    assert plain.keys() == profiled.keys() and len(plain) > 50
    assert [name for name in plain if not plain[name].equal(profiled[name])] == []
    plain, profiled = ([row["loss"] for row in rows(folder / name)] for name in ("plain", "profiled"))
    assert plain == profiled


@pytest.mark.long
def test_the_trace_holds_the_steps_after_the_warm_up(runs):
    folder, said = runs
    assert sorted(file.name for file in (folder / "profiled/profile").iterdir()) == [
        "steps_4-5_rank0.json.gz",
        "steps_4-5_rank0.txt",
    ]
    assert not (folder / "plain/profile").exists() and "ms a step" not in said["plain"]
    with gzip.open(folder / "profiled/profile/steps_4-5_rank0.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("step") == names.count("data") == 2 and names.count("optimizer") == 2
    assert {n for n in names if n.startswith("ProfilerStep")} == {"ProfilerStep#3", "ProfilerStep#4"}


@pytest.mark.long
def test_the_table_says_where_the_time_of_the_steps_went(runs):
    folder, said = runs
    text = (folder / "profiled/profile/steps_4-5_rank0.txt").read_text()
    assert text in said["profiled"]
    found = {line[:16].strip(): float(line[16:28]) for line in text.splitlines()[1:]}
    assert {"attention", "head", "tower", "language model", "optimizer", "data", "other"} <= found.keys()
    assert sum(found.values()) - found["all"] == pytest.approx(found["all"], rel=0.01)
    logged = sum(row["seconds"] for row in rows(folder / "profiled")[3:5]) / 2
    assert found["all"] / 1000 == pytest.approx(logged, rel=0.2)
    assert found["other"] < 0.4 * found["all"]
    assert min(found[name] for name in ("tower", "language model", "attention", "head")) > 0


def test_a_backward_pass_belongs_to_the_part_of_its_forward_pass():
    """Also that of a function with its own backward, and what is computed again."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            torch.linalg.svd(torch.ones(150, 150))  # much longer than the forward pass
            return 2 * gradient * ctx.saved_tensors[0]

    def head(x):
        with record_function("head"):
            return torch.linalg.svdvals(x @ x)

    x = torch.ones(200, 200, requires_grad=True)
    with profile(acc_events=True) as recorded, record_function("step"):
        with record_function("attention"):
            squares = Square.apply(x)
        checkpoint(head, squares, use_reentrant=False).sum().backward()
    seconds = seconds_by_part(recorded.events())
    own = {name: sum(e.cpu_time_total for e in recorded.events() if e.name == name) / 1e6 for name in SLOW}
    assert min(own.values()) > 0
    assert seconds["attention"] >= own["SquareBackward"]
    assert seconds["head"] >= own["aten::linalg_svdvals"]
    assert [e.name for e in recorded.events()].count("aten::linalg_svdvals") == 2
    assert sum(seconds.values()) - seconds["all"] == pytest.approx(seconds["all"])


SLOW = ("aten::linalg_svdvals", "SquareBackward")
