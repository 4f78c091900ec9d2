"""The Python examples of the README and of the policy's page run, and their results are Transformers'."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import torch
from PIL import Image
from programs import run_program
from transformers import AutoModelForImageTextToText

from tiny.checkpoints import build_tiny_checkpoint

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SAVED = "\nimport torch; torch.save((logs['loss'], gradients, dict(encoded)), 'results.pt')"
MISTAKE = """
from megatron_vlm import load_recipe, train
try:
    train(load_recipe("gemma3_vl_4b")(hf_path="my", train_data_path="no.jsonl", dataset_type="hf", tp=1))
except FileNotFoundError:
    pass  # as in a notebook, which goes on
"""
SCORES = """
from megatron_vlm import evaluate
print(evaluate("my-model/", "conversations.jsonl", ["contained"], samples=2))
"""


def python_of(page: str, word: str) -> str:
    """The page's Python example that holds a word."""
    (code,) = [
        code
        for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if re.search(rf"\b{word}\b", code)
    ]
    return code


def test_the_readme_trains_exports_and_answers(tmp_path):
    """On a CPU; recipes are for bf16 and a step of 128 samples, which takes too long here."""
    build_tiny_checkpoint("gemma3", tmp_path / "my-gemma")
    Image.effect_noise((64, 48), 80).convert("RGB").save(tmp_path / "photo.jpg")
    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}]
    record = json.dumps({"images": ["photo.jpg"], "messages": turns})
    (tmp_path / "conversations.jsonl").write_text(f"{record}\n" * 8)
    code = python_of(README, "load_recipe").replace("steps=10", 'steps=2, dtype="fp32", global_batch_size=2')
    (tmp_path / "example.py").write_text(MISTAKE + code + SCORES)
    ran = run_program(tmp_path / "example.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    answers, scores = ran.stdout.splitlines()[-2:]
    assert isinstance(eval(answers)[0], str) and eval(scores)["contained"] in (0, 0.5, 1)
    AutoModelForImageTextToText.from_pretrained(tmp_path / "my-model")
    card = (tmp_path / "my-model/README.md").read_text()
    assert "of `my-gemma`" in card and "| steps | 2 |" in card and str(tmp_path) not in card


def test_the_policy_has_the_loss_and_gradients_of_transformers(tmp_path):
    path = build_tiny_checkpoint("gemma3", tmp_path / "my-gemma")
    Image.effect_noise((64, 48), 80).convert("RGB").save(tmp_path / "photo.jpg")
    page = (ROOT / "docs/reference/policy.md").read_text(encoding="utf-8")
    (tmp_path / "example.py").write_text(python_of(page, "AutoProcessor") + SAVED)
    ran = run_program(tmp_path / "example.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    loss, gradients, encoded = torch.load(tmp_path / "results.pt")
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    reference = model(**encoded, labels=encoded["input_ids"]).loss
    reference.backward()
    assert abs(loss - reference.item()) < 1e-5
    norms = [norm(gradients.values()), norm(p.grad for p in model.parameters() if p.grad is not None)]
    assert abs(norms[0] / norms[1] - 1) < 1e-4


def norm(tensors) -> float:
    return sum(tensor.double().square().sum().item() for tensor in tensors) ** 0.5


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, megatron_vlm\n"
        "print(sorted(megatron_vlm.__all__) == [name for name in dir(megatron_vlm) if name[0] != '_'])\n"
        "print({'torch', 'pydantic', 'transformers', 'yaml'} & set(sys.modules))\n"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True\nset()\n"


def test_the_first_screen_is_short():
    lines = README.splitlines()
    assert len(lines) <= 120 and lines.index("    make test     # the tests") < 10
