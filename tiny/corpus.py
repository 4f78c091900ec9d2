"""Made-up text, always the same, to train the tiny tokenizers on."""

from __future__ import annotations

import random

THINGS = [
    "the cat",
    "a dog",
    "the red square",
    "a blue circle",
    "this picture",
    "the second photo",
    "the chart",
]
VERBS = ["shows", "contains", "is next to", "is above", "sits on", "looks like", "describes", "matches"]
PLACES = ["a table", "the sofa", "three apples", "two people", "the answer", "a street sign", "nothing"]
QUESTIONS = [
    "What is in the image?",
    "How many objects are there?",
    "Describe the picture in detail.",
    "Compare the two images.",
    "Which digit is this?",
    "What is the sum of these two digits?",
    "Answer with one word.",
]


def default_corpus(lines: int = 1500) -> list[str]:
    """Short questions, statements, runs of newlines and the role names that templates write."""
    rng = random.Random(0)
    statements = (
        f"{rng.choice(THINGS).capitalize()} {rng.choice(VERBS)} {rng.choice(PLACES)}." for _ in range(lines)
    )
    others = [*QUESTIONS, "\n\n", "\n\n\n\n", "system", "user", "assistant", "model", "tool"]
    return [*statements, *others * 20]
