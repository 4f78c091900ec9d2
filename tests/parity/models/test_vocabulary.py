"""Tokens of a tokenizer that are none of its model's: said when a run begins, not in the midst of it."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from sources import write_sharegpt
from transformers import AutoProcessor

from megatron_vlm.feed import vocabulary_notes
from megatron_vlm.recipes import compose
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed


@pytest.fixture()
def processor(tiny_gemma3):
    """One of its own for each test: they change it."""
    return AutoProcessor.from_pretrained(tiny_gemma3)


def test_a_token_that_nothing_writes_is_told_and_trains(processor):
    size = len(processor.tokenizer)
    processor.tokenizer.add_tokens(["<tool>", *(f"<more{number}>" for number in range(9))])
    [said] = vocabulary_notes(processor, size)
    assert f"its tokenizer has 10 tokens, <tool> ({size}), <more0> ({size + 1}), " in said
    assert f" more, and the model has {size} (vocab_size" in said and said.endswith("model.hf_path")


def begun(root: str, checkpoint: str) -> str:
    """What a run of a step says, or why it did not begin."""
    from megatron_vlm.training.loop import train

    settings = ["train.steps=1", "tp=1", "micro_batch_size=2", "global_batch_size=4", "data.dataset_type=hf"]
    paths = {"run_dir": f"{root}/run", "hf_path": checkpoint, "train_data_path": f"{root}/rows/data.jsonl"}
    config = compose("gemma3_tiny_digits", settings=[*settings, "num_workers=0"], arguments=paths)
    said = io.StringIO()
    with redirect_stdout(said):
        train(config)
    return said.getvalue() + (Path(root) / "run/metrics.jsonl").read_text()


@pytest.mark.long
def test_a_run_trains_with_padding_that_is_no_token_of_the_model(tmp_path):
    path = build_tiny_checkpoint("gemma3", tmp_path / "checkpoint")
    processor = AutoProcessor.from_pretrained(path)
    size = json.loads((path / "config.json").read_text())["text_config"]["vocab_size"]
    new = [f"<unused{number}>" for number in range(size - len(processor.tokenizer))]
    processor.tokenizer.add_tokens([*new, "<beyond>"])
    processor.tokenizer.pad_token = "<beyond>"
    processor.save_pretrained(path)
    write_sharegpt(tmp_path / "rows", 8)
    [said] = run_distributed(1, begun, str(tmp_path), str(path))
    assert '"loss"' in said and f"its tokenizer has 1 token, <beyond> ({size})" in said
