"""The README's example runs, and its loss is Transformers'."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from PIL import Image
from programs import run_program
from transformers import AutoModelForImageTextToText

from tiny.checkpoints import build_tiny_checkpoint

README = Path(__file__).parents[2] / "README.md"
SAVED = "\nimport torch; torch.save((logs['loss'], gradients, dict(encoded)), 'results.pt')"


def test_the_example_gives_the_loss_of_transformers_and_gradients(tmp_path):
    path = build_tiny_checkpoint("gemma3", tmp_path / "my-gemma")
    Image.effect_noise((64, 48), 80).convert("RGB").save(tmp_path / "photo.jpg")
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "example.py").write_text(code + SAVED)
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


def test_the_first_screen_is_short():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 110 and lines.index("    make test     # the tests") < 10
