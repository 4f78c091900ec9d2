"""What a policy cannot take is an error on every rank and leaves nothing; no number is silently wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import policy_in_ranks
import pytest
import saved_cases
import torch
from torch import distributed as dist

from megatron_vlm.config import AdapterConfig, ParallelConfig, RunConfig
from megatron_vlm.models.hf import open_source
from megatron_vlm.rl.containers import TensorBatch
from megatron_vlm.rl.micro_batches import check_tokens, documents_of
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint
from tiny.distributed import run_distributed

# ---- what runs in the ranks


FIELDS = ["advantage"]


def loss(log_probs, _, fields):
    from megatron_vlm.rl import losses

    return losses.policy_gradient(log_probs, fields["advantage"])


def said(call: Callable[[], Any]) -> str:
    """The kind and text of what a call raises; empty if it returns."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - any kind is looked at
        return f"{type(error).__name__}: {error}"
    return ""


def gradients(policy) -> torch.Tensor:
    """Of all calls since the last step, as this rank has them before they are reduced."""
    found = torch.cat([buffer.grad_data for buffer in policy.chunks[0].buffers]).clone()
    policy._empty()
    return found


def measure(path: str, held: str, run_dir: str) -> dict[str, Any]:
    samples, _ = saved_cases.read(held)
    found = {"errors": errors(path, samples), "kinds": kinds(path, samples)}
    return found | {"run": from_run(path, samples, run_dir)}


def errors(path: str, samples: list[dict]) -> dict[str, Any]:
    """On two data-parallel ranks: what calls raise if the second brings something wrong, and leave."""
    from megatron_vlm.rl.losses import Loss

    policy, second = policy_in_ranks.policy_of(path, ParallelConfig(), 300), dist.get_rank() == 1

    def learn(given: list = samples, function=loss, normalizer: float = 5, **more) -> dict[str, float]:
        return policy.forward_backward(given, function, normalizer, fields=FIELDS, **more)

    first, weights = learn(), [param.clone() for param in policy.chunks[0].parameters()]
    expected, found = gradients(policy), {}

    def raised(*_) -> None:
        raise KeyError("critic")

    def turned(total: Callable) -> Callable:
        """A loss function that is right on the first rank."""
        return lambda x, *rest: Loss(total(x), {}) if second else loss(x, *rest)

    short = samples[1] | {"loss_mask": samples[1]["loss_mask"][:-1]}
    lacking = {key: value for key, value in samples[1].items() if key != "advantage"}
    unknown = samples[1] | {"advantage": samples[1]["advantage"] * math.nan}
    calls = {
        "sample": lambda: learn([samples[0], short] if second else samples),
        "logprobs": lambda: policy.logprobs([samples[0], short] if second else samples),
        "field": lambda: learn([samples[0], lacking] if second else samples),
        "function": lambda: learn(function=raised if second else loss),
        "loss": lambda: learn([unknown, samples[0]] if second else samples),
        "fields": lambda: policy.forward_backward(samples, loss, 5, fields="advantage" if second else FIELDS),
        "tensor": lambda: learn(function=(lambda x, *_: x.sum()) if second else loss),
        "no gradient": lambda: learn(function=turned(lambda x: x.detach().sum())),
    }
    for name, call in calls.items():
        text = said(call)
        learn()  # what failed has left nothing
        found[name] = text, torch.equal(gradients(policy), expected), policy.chunks[0].training
    found["nothing"] = learn([])
    learn(function=turned(lambda x: (x.sum() * 0).sqrt()))  # 0, and its gradient is infinite times 0
    found["step"] = said(policy.step)
    found["same weights"] = all(map(torch.equal, weights, policy.chunks[0].parameters()))
    found["again"] = learn() == first
    return found


def kinds(path: str, samples: list[dict]) -> dict[str, Any]:
    """Under tensor parallelism: what scores keep, and what is said of samples that do not fit."""
    from megatron_vlm.generation.generate import generate

    policy, second = policy_in_ranks.policy_of(path, ParallelConfig(tp=2), 300), dist.get_rank() == 1
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        scores = policy.logprobs(samples, entropy=True)
    before = scores.log_probs
    found: dict[str, Any] = {"kept": len(saved), "gradient": before[0].requires_grad}
    found["other samples"] = said(lambda: policy.logprobs(samples[1:] if second else samples))
    other = samples[1] | {"input_ids": samples[1]["input_ids"].roll(1 if second else 0)}
    found["other tokens"] = said(lambda: policy.logprobs([other]))
    ids = samples[1]["input_ids"]
    prompt = {"input_ids": ids, "position_ids": torch.arange(len(ids)), "visual_inputs": None}
    found["prompt"] = said(lambda: generate(policy.chunks, [prompt], 2))
    found["goes on"] = all(map(torch.equal, policy.logprobs(samples).log_probs, before))
    return found


def from_run(path: str, samples: list[dict], run_dir: str) -> dict[str, Any]:
    """A policy that takes a step and is saved, and those that other layouts load."""
    from megatron_vlm.parallel import setup
    from megatron_vlm.rl.policy import Policy
    from megatron_vlm.training import checkpoint

    found: dict[str, Any] = {}
    adapter = AdapterConfig(r=4, lora_alpha=8, target_modules="all-linear")
    for name, adapted in (("whole", None), ("adapters", adapter)):
        folder = f"{run_dir}/{name}"
        policy = policy_in_ranks.policy_of(path, ParallelConfig(tp=2), 300, adapted)
        start = policy.logprobs(samples).log_probs
        policy.forward_backward(samples, loss, 5, fields=FIELDS)
        policy.step()
        trained = policy.logprobs(samples).log_probs
        checkpoint.save(folder, 7, policy.chunks, policy.optimizer, policy.scheduler)
        found[name] = {"moved": far(start, trained)}
        for layout in (ParallelConfig(tp=2), ParallelConfig(pp=2), ParallelConfig()):
            setup.reset_layout(layout, seed=2)
            config = RunConfig(run_dir=folder, parallel=layout)
            config.model.hf_path, config.model.dtype, config.adapter = path, "fp32", policy.config.adapter
            loaded = Policy.from_run(config, 300)
            found[name][f"tp {layout.tp} pp {layout.pp}"] = far(loaded.logprobs(samples).log_probs, trained)
            own = samples if layout.tp * layout.pp == 2 else samples[dist.get_rank() :: 2]
            loaded.forward_backward(own, loss, 5, fields=FIELDS)
            found[name][f"norm tp {layout.tp} pp {layout.pp}"] = loaded.step()
    return found


def far(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


# ---- the tests


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
    "too large": (lambda s: with_token(s[0], 10**6), "token 1000000 is none of the model's"),
    "padding": (
        lambda s: s[0] | {"attention_mask": torch.tensor([[0, 0] + [1] * (len(s[0]["input_ids"]) - 2)])},
        "attention_mask has 2 zeros; give its tokens and fields without padding",
    ),
    "no image": (
        lambda s: {"input_ids": s[1]["input_ids"]},
        r"\d+ placeholders for 0 features of its images",
    ),
    "an image too many": (
        lambda s: s[0] | {"pixel_values": s[1]["pixel_values"]},
        r"0 placeholders for \d+ features",
    ),
    "weights": (
        lambda s: s[0] | {"loss_mask": torch.full((len(s[0]["input_ids"]),), 0.5)},
        r"loss_mask is \(.*\) for .* tokens, or holds more than 0 and 1; give",
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
    return run_distributed(2, measure, *given, timeout=600)


SAID = {  # of a call: what the rank that brings it says
    "sample": "sample 1: loss_mask is",
    "logprobs": "sample 1: loss_mask is",
    "field": "sample 1: lacks advantage, which other samples have",
    "fields": "fields is 'advantage'; give a list of names",
    "function": "KeyError: 'critic'",
    "loss": "the loss of samples [0, 1] is not finite; correct the fields: advantage of sample 0 is nan.",
    "tensor": "a loss function returned Tensor of shapes {}; return losses.Loss(total, logs)",
    "no gradient": "a loss function returned total of shapes {'total': ()}; return",
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
