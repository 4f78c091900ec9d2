"""`batch.check`: a batch that breaks the contract is named by key and row."""

from __future__ import annotations

import pytest
import torch

from megatron_vlm.batch import IGNORE_INDEX, GenericVisualInputs, check


def good() -> dict:
    """Two rows: two documents and padding; one document."""
    documents = torch.tensor([[1, 1, 2, 2, 0], [1, 1, 1, 1, 1]], dtype=torch.int32)
    labels = torch.tensor([[7, IGNORE_INDEX, 8, IGNORE_INDEX, IGNORE_INDEX], [1, 2, 3, 4, IGNORE_INDEX]])
    return {
        "input_ids": torch.arange(10).view(2, 5),
        "labels": labels,
        "loss_mask": (labels != IGNORE_INDEX).float(),
        "position_ids": torch.tensor([[0, 1, 0, 1, 0], [0, 1, 2, 3, 4]]),
        "attention_mask": documents,
        "visual_inputs": GenericVisualInputs(
            pixel_values=torch.zeros(8, 12, dtype=torch.uint8), image_grid_thw=torch.tensor([[1, 2, 4]])
        ),
        "__key__": [["a", "b"], ["c"]],
        "__restore_key__": [0],
    }


def test_a_right_batch_comes_back():
    batch = good()
    assert check(batch) is batch
    batch["position_ids"] = batch["position_ids"].expand(3, 2, 5)
    batch["__restore_key__"] = [("Webdataset", 3, "a.tar"), [[0, 17]], None]
    check(batch)


def set_at(key: str, row: int, token: int, value: int):
    return lambda batch: batch[key].__setitem__((row, token), value)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda batch: batch.pop("labels"), "labels missing"),
        (lambda batch: batch.update(position_ids=torch.zeros(2, 4).long()), r"position_ids is .* \(2, 4\)"),
        (set_at("loss_mask", 1, 4, 1), "loss_mask and labels disagree; row 1, token 4"),
        (
            lambda batch: (set_at("labels", 1, 2, 5)(batch), set_at("loss_mask", 1, 2, -1)(batch)),
            "loss weight is negative or no number; row 1, token 2",
        ),
        (set_at("attention_mask", 0, 2, 4), "documents are not counted; row 0, token 2"),
        (set_at("attention_mask", 0, 0, 2), "first document is not 1; row 0, token 0"),
        (
            lambda batch: (set_at("labels", 0, 1, 5)(batch), set_at("loss_mask", 0, 1, 1)(batch)),
            "trained to predict the next; row 0, token 1",
        ),
        (lambda batch: batch["__key__"].pop(), "__key__ has 1 lists for 2 rows"),
        (lambda batch: batch["__restore_key__"].append([{"images": b""}]), "__restore_key__ holds a dict"),
        (
            lambda batch: setattr(batch["visual_inputs"], "image_grid_thw", torch.tensor([[1, 2, 2]])),
            "pixel_values has 8 patches, image_grid_thw 4",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_place(harm, said):
    batch = good()
    harm(batch)
    with pytest.raises(ValueError, match=said):
        check(batch)
