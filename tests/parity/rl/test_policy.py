"""A policy's log-probabilities, entropies and gradients are Transformers', however samples lie on ranks."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Any

import parity
import policy_in_ranks
import pytest
import saved_cases
import torch
from safetensors.torch import load_file

from megatron_vlm.config import ConfigError, ParallelConfig
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint
from tiny.distributed import run_distributed

# ---- in the ranks


def details_of(path: str, held: str, exported: str) -> dict[str, Any]:
    """On two processes: what holds besides the numbers, by name."""
    from megatron_vlm.models.weights.exporting import export_hf
    from megatron_vlm.rl import losses

    samples, _ = saved_cases.read(held)
    found: dict[str, Any] = {}
    policy = policy_in_ranks.policy_of(path, ParallelConfig(tp=2), 300)
    found["balancing"] = [policy.config.model.load_balancing]
    try:
        policy_in_ranks.policy_of(path, ParallelConfig(tp=2), 300, load_balancing=0.1)
    except ConfigError as error:
        found["balancing"].append(str(error))
    before = policy.logprobs(samples).log_probs
    found["order"] = 0.0
    for order in itertools.islice(itertools.permutations(range(len(samples))), 1, None):
        again = policy.logprobs([samples[number] for number in order]).log_probs
        differences = ((before[n] - x).abs().max().item() for n, x in zip(order, again, strict=True))
        found["order"] = max(found["order"], *differences)
    rollout = [x.clone() for x in before]
    rollout[1][samples[1]["loss_mask"][1:].nonzero()[-1]] += 0.5
    found["compare"] = {name: asdict(each) for name, each in policy.compare(samples, rollout).items()}
    scored = [
        sample | {"old": old, "reward": float(number)}
        for number, (sample, old) in enumerate(zip(samples, before, strict=True))
    ]

    def clipped(log_probs, _, fields):
        return losses.ppo_clip(log_probs, fields["old"], fields["reward"])

    found["first"] = policy.forward_backward(scored, clipped, 7, fields=["old", "reward"])
    found["norm"] = policy.step()
    found["second"] = policy.forward_backward(scored, clipped, 7, fields=["old", "reward"])
    found["moved"] = max(
        (a - b).abs().max().item() for a, b in zip(before, policy.logprobs(samples).log_probs, strict=True)
    )
    # two ranks of data parallelism, one without samples
    policy = policy_in_ranks.policy_of(path, ParallelConfig(), 300)
    own = scored if torch.distributed.get_rank() else []
    found["alone"] = policy.forward_backward(own, clipped, 7, fields=["old", "reward"])
    found["alone norm"] = policy.step()
    found["none"] = len(policy.logprobs(own).log_probs)
    policy = policy_in_ranks.policy_of(path, ParallelConfig(pp=2), 300)
    found["weights"] = {name: tensor.clone() for name, tensor in policy.hf_weights()}
    chunks = [chunk.module for chunk in policy.chunks]
    export_hf(chunks, exported, policy.source.folder, policy.source.weight_map)
    return found


COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "white": (1, 1, 1)}


def colour_samples(path: Path | str, brightness: int) -> list[list[dict[str, torch.Tensor]]]:
    """For an image of each colour a sample for each colour as the answer; only the answer's tokens count."""
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(path)
    answers = {name: "ABCD"[number] for number, name in enumerate(COLOURS)}

    def sample(shade: tuple[int, ...], answer: str) -> dict[str, torch.Tensor]:
        image = Image.new("RGB", (64, 64), tuple(brightness * x for x in shade))
        asked = [{"type": "image", "image": image}, {"type": "text", "text": "the table"}]
        told = [{"type": "text", "text": answer}]
        talk = [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
        found = parity.encode_row(processor, talk)
        return {key: value[0] if key in parity.TEXT_KEYS else value for key, value in found.items()}

    rows = [[sample(shade, answer) for answer in answers.values()] for shade in COLOURS.values()]
    for row in rows:
        ids = torch.stack([each["input_ids"] for each in row])
        for each in row:
            each["loss_mask"] = (ids != ids[0]).any(0)
    return rows


def learns_colours(path: str, steps: int) -> dict[str, Any]:
    """The log-probability of each colour for an image of each, before and after training on other shades."""
    from megatron_vlm.rl import losses

    policy = policy_in_ranks.policy_of(path, ParallelConfig(tp=2), 600)
    held_out, shown = colour_samples(path, 180), [colour_samples(path, light) for light in (140, 255)]
    right = [rows[number][number] for rows in shown for number in range(len(COLOURS))]

    def scores() -> list[list[float]]:
        found = policy.logprobs([sample for row in held_out for sample in row]).log_probs
        sums = [each.sum().item() for each in found]
        return [sums[start : start + len(COLOURS)] for start in range(0, len(sums), len(COLOURS))]

    before, tokens = scores(), sum(int(sample["loss_mask"].sum()) for sample in right)
    for _ in range(steps):
        policy.forward_backward(
            right, lambda log_probs, *_: losses.policy_gradient(log_probs, torch.ones_like(log_probs)), tokens
        )
        policy.step()
    return {"before": before, "after": scores()}


# ---- the tests


def held(family, path):
    samples = policy_in_ranks.samples_of(family, path)
    return samples, policy_in_ranks.reference(path, samples)


@pytest.fixture(scope="module")
def rows_of(request, tmp_path_factory):
    return parity.measured(request, tmp_path_factory, parity.LAYOUTS, held, policy_in_ranks.measure)


@pytest.mark.parametrize(
    ("family", "layout"),
    parity.cells(policy_in_ranks.layouts_of, ("TP2+SP",)),
)
def test_scores_and_gradients_are_those_of_transformers(rows_of, family, layout):
    rows = rows_of(parity.LAYOUTS[layout][0])
    found = [row for row in rows if (row["family"], row["layout"]) == (family, layout)]
    assert_alike(found)


def assert_alike(rows: list[dict]) -> None:
    assert [row["max_tokens"] for row in rows] == [1, 300]
    for row in rows:
        assert row["wrong"] == 0, "a first ratio is not 1, or a token is of another sample"
        assert row["log_probs"] <= 1e-5 and row["gradient"][0] <= 1e-4 and row["loss"] <= 1e-4, row


@pytest.mark.long
def test_layers_with_inputs_of_their_own_and_shared_keys_have_the_gradients_of_transformers(tmp_path):
    """Gemma 4 E2B's parts; the tests above have 26B-A4B's."""
    sizes = TINY_FAMILIES["gemma4"].variants["small"]
    path = build_tiny_checkpoint("gemma4", tmp_path / "checkpoint", **sizes)
    torch.save(held("gemma4", path), tmp_path / "held.pt")
    for layout in ("TP2+SP", "CP2"):
        measured = run_distributed(
            2, policy_in_ranks.measure, [layout], str(path), str(tmp_path / "held.pt"), timeout=600
        )
        assert_alike(measured[0])


@pytest.fixture(scope="module")
def details(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    path = build_tiny_checkpoint("gemma3", folder / "checkpoint", text={"vocab_size": 577})
    torch.save((policy_in_ranks.samples_of("gemma3", path), None), folder / "held.pt")
    given = str(path), str(folder / "held.pt"), str(folder / "export")
    return run_distributed(2, details_of, *given, timeout=600), folder / "export"


@pytest.mark.long
def test_samples_may_come_in_every_order(details):
    assert details[0][0]["order"] <= 1e-5


def test_the_first_ratio_is_one_and_a_step_moves_it(details):
    first, second = (details[0][0][name] for name in ("first", "second"))
    assert first["ratio"] == 1 and first["clip_share"] == 0 and first["old_kl"] == 0
    assert second["ratio"] != 1 and details[0][0]["moved"] > 1e-3 and details[0][0]["norm"] > 0


def test_a_rank_without_samples_takes_part(details):
    ranks, _ = details
    assert [rank["none"] for rank in ranks] == [0, 3]
    for rank in ranks:
        assert rank["alone"]["loss"] == pytest.approx(rank["first"]["loss"], rel=1e-7)  # of fp32
        assert rank["alone norm"] == pytest.approx(rank["norm"], rel=1e-5)


def test_a_policy_adds_no_load_balancing_loss(details):
    assert details[0][0]["balancing"] == [
        0.0,
        "model.load_balancing: is 0.1, but a policy's gradients are those of its losses alone; leave it out.",
    ]


def test_compare_says_where_an_engine_differs(details):
    found = details[0][0]["compare"]
    assert found["text"]["max"] == 0 and found["text"]["tokens"] > 10
    assert found["after image"]["max"] == pytest.approx(0.5) and found["after image"]["worst_sample"] == 1


def test_weights_for_an_engine_are_those_of_an_export(details):
    ranks, folder = details
    exported = {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}
    assert len(exported) > 50
    for rank in ranks:
        assert rank["weights"].keys() == exported.keys()
        for name, tensor in exported.items():
            assert torch.equal(rank["weights"][name], tensor) and rank["weights"][name].dtype == tensor.dtype


@pytest.mark.long
def test_a_policy_learns_to_name_solid_colours(tmp_path):
    """The right answer has the highest log-probability, for shades that were not shown."""
    path = build_tiny_checkpoint("gemma3", tmp_path / "checkpoint")
    for found in run_distributed(2, learns_colours, str(path), 25):
        best = {
            when: [max(range(4), key=scores.__getitem__) for scores in found[when]]
            for when in ("before", "after")
        }
        assert best["after"] == [0, 1, 2, 3] != best["before"]
