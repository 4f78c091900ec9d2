"""What a policy cannot take is an error on every rank and leaves nothing; no number is silently wrong."""

from __future__ import annotations

import math

import policy_in_ranks
import policy_limits
import pytest
import torch

from megatron_vlm.models.hf import open_source
from megatron_vlm.rl.containers import TensorBatch
from megatron_vlm.rl.micro_batches import check_tokens, documents_of
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint
from tiny.distributed import run_distributed

long = pytest.mark.long


@pytest.fixture(scope="module")
def source(tiny_gemma3):
    return open_source(tiny_gemma3)


@pytest.fixture(scope="module")
def samples(tiny_gemma3) -> list[dict]:
    return policy_in_ranks.samples_of("gemma3", tiny_gemma3)


def with_token(sample: dict, token: int) -> dict:
    return sample | {"input_ids": torch.cat([sample["input_ids"][:-1], torch.tensor([token])])}


WRONG = {
    "no tokens": (
        lambda s: {"pixel_values": s[1]["pixel_values"]},
        r"input_ids are torch.float32 \(0,\); give whole",
    ),
    "rows": (lambda s: s[1] | {"input_ids": s[1]["input_ids"][None]}, r"\(1, \d+\); give whole numbers"),
    "no token": (lambda s: {"input_ids": torch.empty(0).long()}, r"\(0,\); give whole numbers"),
    "too large": (lambda s: with_token(s[0], 10**6), "token 1000000 is none of the model's"),
    "negative": (lambda s: with_token(s[0], -100), "token -100 is none of the model's"),
    "padding": (
        lambda s: s[0] | {"attention_mask": torch.tensor([[0, 0] + [1] * (len(s[0]["input_ids"]) - 2)])},
        "attention_mask has 2 zeros; give its tokens and fields without padding",
    ),
    "no image": (
        lambda s: {"input_ids": s[1]["input_ids"]},
        r"\d+ placeholders for 0 features of its images",
    ),
    "another's images": (
        lambda s: s[1] | {"pixel_values": s[2]["pixel_values"]},
        r"\d+ placeholders for \d+ features",
    ),
    "an image too many": (
        lambda s: s[0] | {"pixel_values": s[1]["pixel_values"]},
        r"0 placeholders for \d+ features",
    ),
    "weights": (
        lambda s: s[0] | {"loss_mask": torch.full((len(s[0]["input_ids"]),), 0.5)},
        r"loss_mask is \(.*\) for .* tokens, or holds more than 0 and 1; give",
    ),
    "no mask": (
        lambda s: s[0] | {"loss_mask": torch.full((len(s[0]["input_ids"]),), math.nan)},
        "or holds more than 0 and 1; give",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_sample_that_cannot_be_scored_is_named(source, samples, name):
    make, text = WRONG[name]
    with pytest.raises(ValueError, match=f"sample 1: .*{text}"):
        documents = documents_of([samples[0], make(samples)], source.needs)
        check_tokens(documents, source)
        assert documents[1].scored.any()  # looks at the mask


@long
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_batch_holds_texts_beside_what_every_processor_makes(family, tmp_path):
    """Images, videos and neither, as samples and as a batch: the same tokens and visual inputs."""
    path = build_tiny_checkpoint(family, tmp_path / "checkpoint")
    given, source = policy_in_ranks.samples_of(family, path), open_source(path)
    documents = documents_of(TensorBatch.from_samples(given), source.needs)
    check_tokens(documents, source)
    for one, other in zip(documents_of(given, source.needs), documents, strict=True):
        assert torch.equal(one.position_ids, other.position_ids) and (one.visual is None) == (
            other.visual is None
        )
        for key, value in one.visual.as_model_kwargs().items() if one.visual is not None else ():
            assert torch.equal(value, getattr(other.visual, key)), key
    assert [document.visual is None for document in documents[:3]] == [True, False, False]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("limits")
    path = build_tiny_checkpoint("gemma3", folder / "checkpoint")
    torch.save((policy_in_ranks.samples_of("gemma3", path), None), folder / "held.pt")
    given = str(path), str(folder / "held.pt"), str(folder / "runs")
    return run_distributed(2, policy_limits.measure, *given, timeout=600)


SAID = {  # of a call: what the rank that brings it says
    "sample": "sample 1: loss_mask is",
    "logprobs": "sample 1: loss_mask is",
    "field": "sample 1: lacks advantage, which other samples have",
    "fields": "fields is 'advantage'; give a list of names",
    "function": "KeyError: 'critic'",
    "loss": "the loss of samples [0, 1] is not finite; correct the fields: advantage of sample 0 is nan.",
    "tensor": "a loss function returned Tensor of shapes {}; return losses.Loss(total, logs)",
    "axis": "a loss function returned total of shapes {'total': (1,)}; return",
    "no gradient": "a loss function returned total of shapes {'total': ()}; return",
    "log": "a loss function returned mean, total of shapes {'mean': (), 'total': ()}; return",
}


@long
@pytest.mark.parametrize("name", SAID)
def test_an_error_of_one_rank_is_one_of_all_and_leaves_nothing(found, name):
    for rank, of_rank in enumerate(found):
        text, as_before, training = of_rank["errors"][name]
        assert SAID[name] in text and as_before and training
        assert ("rank 1 has failed: " in text) == (rank == 0)


@long
def test_no_samples_on_any_rank_have_no_loss(found):
    assert [of_rank["errors"]["nothing"] for of_rank in found] == [{"loss": 0.0}] * 2


@long
def test_a_step_that_would_ruin_the_weights_is_not_taken(found):
    for of_rank in found:
        assert "step: the norm of the gradients is nan, so no step was taken" in of_rank["errors"]["step"]
        assert of_rank["errors"]["same weights"] and of_rank["errors"]["again"]


@long
def test_scores_keep_nothing_for_a_backward_pass(found):
    for of_rank in found:
        assert of_rank["kinds"]["kept"] == 0 and not of_rank["kinds"]["gradient"]


@long
def test_ranks_that_share_a_model_give_the_same_samples(found):
    for of_rank in found:
        assert "samples: ranks 0 and 1 share a model, but give 3 and 2" in of_rank["kinds"]["other samples"]
        assert "share a model, but give 1 and 1" in of_rank["kinds"]["other tokens"]


@long
def test_a_prompt_that_the_model_cannot_take_is_an_error_of_all_ranks_that_ends_nothing(found):
    for of_rank in found:
        said = of_rank["kinds"]["prompt"]
        assert said.startswith("ValueError: prompt 0: ") and "placeholders for 0 features" in said
        assert of_rank["kinds"]["goes on"]


@long
@pytest.mark.parametrize("name", ["whole", "adapters"])
def test_a_run_is_loaded_in_every_layout(found, name):
    for of_rank in found:
        said = dict(of_rank["run"][name])
        assert said.pop("moved") > 1e-3
        norms = [value for key, value in said.items() if key.startswith("norm")]
        far = [value for key, value in said.items() if not key.startswith("norm")]
        assert len(far) == len(norms) == 3 and max(far) <= 1e-5 and far[0] == 0
        assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)
