"""Count what a stranger has to open: files, moves and calls of six walks through the package.

    python tools/walks.py            print the figures; with --files also the files, in their order
    python tools/walks.py --write    record the figures in tests/walks.json

A walk is traced while it runs (tiny Gemma3, one process, CPU). A move is a change of the source file on top
of the stack, frames of the package only. tests/unit/core/test_walks.py holds files and moves: they may only
fall.
"""

import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.dont_write_bytecode = True
REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY)]
ROOT = str(REPOSITORY / "src/megatron_vlm") + "/"
FILE = REPOSITORY / "tests/walks.json"
figures: dict[str, dict[str, int]] = {}  # walk -> files and moves
WORK = Path(tempfile.mkdtemp(prefix="walks-"))


class Walk:
    """Context manager that prints the files, moves and calls of what runs inside it."""

    def __init__(self, name: str):
        self.name, self.sequence, self.stack, self.calls = name, [], [], 0

    def profile(self, frame, event, argument):
        filename = frame.f_code.co_filename
        if not filename.startswith(ROOT):
            return
        short = filename[len(ROOT) :]
        if event == "call":
            self.calls += 1
            self.stack.append(short)
        elif event == "return" and self.stack:
            self.stack.pop()
        top = self.stack[-1] if self.stack else None
        if top and (not self.sequence or self.sequence[-1] != top):
            self.sequence.append(top)

    def __enter__(self):
        sys.setprofile(self.profile)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)
        files = list(dict.fromkeys(self.sequence))
        lines = sum(Path(ROOT + file).read_text().count("\n") for file in files)
        moves = max(0, len(self.sequence) - 1)
        figures[self.name] = {"files": len(files), "moves": moves}
        print(f"{self.name}: {len(files)} files, {moves} moves, {self.calls} calls, {lines} lines in them")
        if "--files" in sys.argv:
            print("   ", " ".join(files))


def write_dataset() -> None:
    """Write a tiny checkpoint and eight records with an image each."""
    from PIL import Image

    from tiny.checkpoints import build_tiny_checkpoint

    build_tiny_checkpoint("gemma3", WORK / "gemma3", text={"vocab_size": 577})
    (WORK / "images").mkdir()
    with open(WORK / "data.jsonl", "w") as file:
        for number in range(8):
            encoded = io.BytesIO()
            Image.new("RGB", (24, 16), (number * 20, 50, 90)).save(encoded, "JPEG")
            (WORK / f"images/{number}.jpg").write_bytes(encoded.getvalue())
            turns = [
                {"from": "human", "value": "<image>\nWhich number?"},
                {"from": "gpt", "value": f"number {number}"},
            ]
            file.write(json.dumps({"images": [f"images/{number}.jpg"], "conversations": turns}) + "\n")


def run_config():
    """Return the configuration of the run that is walked through."""
    from megatron_vlm.config import DataConfig, ModelConfig, RunConfig, TrainConfig

    return RunConfig(
        name="walks",
        run_dir=str(WORK / "run"),
        model=ModelConfig(hf_path=str(WORK / "gemma3"), dtype="fp32"),
        data=DataConfig(
            dataset_type="hf", train_data_path=str(WORK / "data.jsonl"), num_workers=0, seq_length=256
        ),
        train=TrainConfig(steps=3, global_batch_size=1, micro_batch_size=1),
    )


def walk_data(config) -> None:
    from megatron_vlm.data.run_data import RunData
    from megatron_vlm.models.hf import open_source

    with Walk("open a checkpoint"):
        source = open_source(config.model.hf_path)
    data = RunData(config, source.processor, source.needs, 0, 1)
    batches = iter(data.train_loader)
    next(batches)
    with Walk("one JSONL sample to a batch"):
        next(batches)
    data.close()
    shutil.rmtree(WORK / "run", ignore_errors=True)


def walk_command_line(config) -> None:
    import megatron_vlm.cli as cli
    import megatron_vlm.training.loop as training
    from megatron_vlm.overrides import to_yaml

    class Reached(Exception):
        pass

    real_train = training.train

    def reached(config, *arguments, **named):
        sys.setprofile(None)
        raise Reached

    training.train = reached
    (WORK / "run.yaml").write_text(to_yaml(config))
    try:
        with Walk("command line to train()"):
            cli.app(
                ["train", "--config", str(WORK / "run.yaml")],
                standalone_mode=False,
                prog_name="megatron-vlm",
            )
    except Reached:
        pass
    training.train = real_train
    shutil.rmtree(WORK / "run", ignore_errors=True)


def walk_step(config) -> None:
    import megatron_vlm.models.opened as opened
    import megatron_vlm.training.loop as training

    real_step, real_import = training.train_one_step, opened.import_hf
    steps = [0]

    def traced_step(run):
        steps[0] += 1
        if steps[0] != 2:  # the first imports, and the last saves
            return real_step(run)
        with Walk("one step with its sample"):
            return real_step(run)

    def traced_import(*arguments, **named):
        with Walk("import a checkpoint"):
            return real_import(*arguments, **named)

    training.train_one_step, opened.import_hf = traced_step, traced_import
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29677")
    training.train(config)


def walk_export(config) -> None:
    from megatron_vlm.commands.runs import export_run

    with Walk("export a run"):
        export_run(config, WORK / "exported")


def main() -> None:
    write_dataset()
    config = run_config()
    walk_data(config)
    walk_command_line(config)
    walk_step(config)
    walk_export(config)
    shutil.rmtree(WORK, ignore_errors=True)
    if "--write" in sys.argv:
        FILE.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
