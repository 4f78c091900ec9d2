"""A document of any tokens is in any company what it is alone: its scores, its gradient, its answer."""

from __future__ import annotations

import company
import parity
import pytest
import torch
from transformers import AutoConfig

from megatron_vlm.batch import GenericVisualInputs, document_spans
from megatron_vlm.models.families import describe
from megatron_vlm.models.positions import IMAGE, TEXT, VIDEO
from megatron_vlm.models.stream import StreamLayout
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint
from tiny.distributed import run_distributed

TRIED = {"": (4, 1), "long": (8, 2), "soak": (300, 3)}  # examples and seed
QUICK = ("glm4v",)  # whose placeholders mean what the markers before them say
IN_LONG = ("glm4v", *parity.IN_LONG)
CASES = [
    pytest.param(
        family, *tried, id=f"{family} {tried[0]}", marks=[getattr(pytest.mark, mark)] if mark else []
    )
    for mark, tried in TRIED.items()
    for family in {"": QUICK, "long": IN_LONG, "soak": TINY_FAMILIES}[mark]
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny one of a family, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("company")

    def path(family: str) -> str:
        return str(folder / family if (folder / family).is_dir() else build(family))

    def build(family: str):
        return build_tiny_checkpoint(family, folder / family)

    return path


@pytest.mark.parametrize(("family", "examples", "seed"), CASES)
def test_any_documents_are_in_any_company_what_they_are_alone(checkpoint, family, examples, seed):
    (seen,) = run_distributed(1, company.measure, checkpoint(family), examples, seed, timeout=3000)
    assert seen["companies"] > examples / 2 and seen["generated"] > examples, seen
    assert seen["with media"] > examples / 2 and seen["as Transformers"] > examples, seen


def test_documents_of_a_batch_lie_where_their_numbers_say():
    mask = torch.tensor([[1, 1, 2, 0], [1, 2, 3, 3], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    found = [(each.start, each.stop) for each in document_spans(mask.int())]
    assert found == [(0, 2), (2, 3), (4, 5), (5, 6), (6, 8), (12, 16), (16, 17)]
    assert document_spans(torch.zeros(2, 3, dtype=torch.int32)) == []


def test_a_video_that_is_not_closed_ends_with_its_document(checkpoint):
    config = AutoConfig.from_pretrained(checkpoint("glm4v"))
    begin, end, image = config.video_start_token_id, config.video_end_token_id, config.image_token_id
    ids = torch.tensor(
        [[begin, 1, image, image, begin, image, end, image], [end, 2, begin, image, 3, 4, 5, 6]]
    )
    mask = torch.tensor([[1, 1, 2, 2, 3, 3, 3, 3], [1, 1, 2, 2, 2, 0, 0, 0]], dtype=torch.int32)
    batch = {"input_ids": ids, "attention_mask": mask}
    layout = StreamLayout(batch, describe(config).visual_kinds, False, 1)
    first = [TEXT, TEXT, IMAGE, IMAGE, TEXT, VIDEO, TEXT, IMAGE]
    assert layout.kinds.tolist() == [*first, TEXT, TEXT, TEXT, VIDEO, TEXT]


def test_features_of_an_image_fill_no_placeholders_of_a_video(checkpoint):
    """Nor could they in Transformers; in a packed row they would get those of another document."""
    config = AutoConfig.from_pretrained(checkpoint("qwen2_vl"))
    misfit = describe(config).data_needs.misfit
    vision = config.vision_config
    pixels = torch.zeros(16, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
    image = GenericVisualInputs(pixel_values=pixels, image_grid_thw=torch.tensor([[1, 4, 4]]))
    assert misfit(torch.tensor([1, *[config.image_token_id] * 4]), image) is None
    told = misfit(torch.tensor([1, *[config.video_token_id] * 4]), image)
    assert told == "0 placeholders for 4 features of its images"
