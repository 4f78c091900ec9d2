"""Train a tower on images before there is a run, as published towers are; a language model is not trained.

Each visual token is asked which digit lies on its cell, or none, and where: the tens and units of its box's
coordinates in pixels. A digit is named by the language model's embedding of its word, as it stands, so
the two parts have a language in common. The linears that say where are thrown away.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ProcessorMixin

from make_boxes import CELL, CELLS, SIDE, Box, draw, scans

NONE = 10  # the class of a cell without a digit
STEPS, BATCH, RATE, WARM_UP = 300, 32, 3e-3, 30
CLASSES, TENS, UNITS = 3.0, 3.0, 0.3  # weights of the losses


def train_tower(folder: Path, steps: int = STEPS, seed: int = 0) -> list[float]:
    """Train the tower of the checkpoint in `folder`, and save it there; returns the loss of each step.

    Only training scans are shown. All weights but the tower's and its projector's stay as they are.
    """
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=False)
    tower, rng = model.model.visual, random.Random(seed)
    torch.manual_seed(seed)
    words = processor.tokenizer.convert_tokens_to_ids([str(digit) for digit in range(10)])
    answers = Answers(model.get_input_embeddings().weight[words].detach())
    weights = [*tower.parameters(), *answers.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    losses = []
    for _ in range(steps):
        drawn = [draw(scans("train"), rng.randint(1, 3), rng) for _ in range(BATCH)]
        loss = answers.loss(features(model, processor, drawn), drawn)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.save_pretrained(folder)
    return losses


def rate(step: int, steps: int) -> float:
    """The share of the highest learning rate: a rise, then half a cosine."""
    return min(1, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2


def features(model: PreTrainedModel, processor: ProcessorMixin, drawn: list) -> Tensor:
    """The visual tokens (M, D) of canvases, those of a canvas row by row."""
    images = processor.image_processor([canvas.convert("RGB") for canvas, _ in drawn], return_tensors="pt")
    return model.model.visual(images["pixel_values"], grid_thw=images["image_grid_thw"]).pooler_output


class Answers(nn.Module):
    """What visual tokens say about their cells."""

    def __init__(self, words: Tensor):
        super().__init__()
        self.register_buffer("words", words)
        self.none = nn.Linear(words.shape[1], 1)
        self.numbers = nn.Linear(words.shape[1], 4 * 2 * 10)  # coordinates; tens and units; digits

    def loss(self, features_MD: Tensor, drawn: list) -> Tensor:
        asked = [true_answers(boxes) for _, boxes in drawn]
        classes_M = torch.cat([classes for classes, _ in asked])
        numbers_M42 = torch.cat([numbers for _, numbers in asked])
        there_M = classes_M != NONE
        said = torch.cat((features_MD @ self.words.T, self.none(features_MD)), -1)
        where = self.numbers(features_MD[there_M]).unflatten(-1, (4, 2, 10))
        tens, units = (
            cross_entropy(where[:, :, place].flatten(0, 1), numbers_M42[there_M][:, :, place].flatten())
            for place in (0, 1)
        )
        which = cross_entropy(said, classes_M) + cross_entropy(said[there_M], classes_M[there_M])
        return CLASSES * which + TENS * tens + UNITS * units


def true_answers(boxes: dict[int, Box]) -> tuple[Tensor, Tensor]:
    """The class of each cell (M,), and tens and units of its box's coordinates in pixels (M, 4, 2)."""
    classes_M = torch.full((CELLS**2,), NONE)
    pixels_M4 = torch.zeros(CELLS**2, 4, dtype=torch.long)
    for digit, box in boxes.items():
        cell = box[1] // CELL * CELLS + box[0] // CELL
        classes_M[cell] = digit
        pixels_M4[cell] = torch.tensor(box).clamp(max=SIDE - 1)
    return classes_M, torch.stack((pixels_M4 // 10, pixels_M4 % 10), -1)
