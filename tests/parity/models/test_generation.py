"""Generated answers: those of Transformers if greedy, the same in every layout if sampled, and with the
log-probabilities of a training forward pass."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import saved_cases
import torch

from megatron_vlm.batch import GenericVisualInputs, Prompt
from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig
from megatron_vlm.data.image_processors import get_image_spec
from megatron_vlm.models.families import load
from megatron_vlm.models.families.qwen3_5 import Qwen35
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint
from tiny.distributed import run_distributed

PROMPTS = ("t", "it", "ititit", "iit")
NEW_TOKENS, SAMPLED_TOKENS, ANSWERS = 20, 6, 3
TEMPERATURE, TOP_P = 0.8, 0.9
MAX_REL_LOGPROB = 5e-6  # of the largest logit, fp32; the worst seen is 2.1e-6


# ---- in the launched processes ----------------------------------------------------------------------------


def answers_of_all(asked: dict[str, tuple]) -> dict[str, dict[str, dict]]:
    """By family and layout, its answers; one family after another in the same processes."""
    from megatron_vlm.parallel import setup

    setup.init_distributed(ParallelConfig(), seed=1)
    return {family: answers_in(*arguments) for family, arguments in asked.items()}


def answers_in(names: list[str], path: str, prompts_file: str, stop: list[int]) -> dict[str, dict[str, Any]]:
    """The answers in every named layout, and how far their log-probabilities are from a forward pass."""
    from megatron_vlm.generation.cache import bytes_per_row
    from megatron_vlm.generation.generate import generate
    from megatron_vlm.parallel import setup

    prompts = saved_cases.read(prompts_file)
    found = {}
    for name in names:
        layout = parity.LAYOUTS[name][1]
        setup.reset_layout(layout, seed=1)
        run = RunConfig(parallel=layout, model=ModelConfig(dtype="fp32"))
        _, chunks = parity.load_chunks(path, run)
        longest = max(len(prompt["input_ids"]) for prompt in prompts) + SAMPLED_TOKENS - 1
        sampling = {"temperature": TEMPERATURE, "top_p": TOP_P, "answers": ANSWERS, "seed": 5}
        # several waves, and the answers to a prompt in two of them
        sampling["cache_bytes"] = 2 * bytes_per_row(chunks[0].config, longest)
        sampled = generate(chunks, prompts, SAMPLED_TOKENS, **sampling)
        found[name] = {
            "greedy": plain(generate(chunks, prompts, NEW_TOKENS, stop=stop)),
            "sampled": plain(sampled),
            "in training": all(chunk.training for chunk in chunks),
            "difference": difference(chunks, prompts, sampled),
        }
    return found


def plain(answers: list[list]) -> list[list[dict]]:
    return [[dataclasses.asdict(answer) for answer in of_prompt] for of_prompt in answers]


def difference(chunks: list, prompts: list[Prompt], sampled: list[list]) -> float:
    """The largest of both log-probabilities to those of whole rows and Transformers' own filter for top-p, in
    multiples of the largest logit, as rounding is."""
    from transformers import TopPLogitsWarper

    from megatron_vlm.generation.rows import batch_of
    from megatron_vlm.training.evaluate import logits_of

    worst = 0.0
    for chunk in chunks:
        chunk.eval()
    for prompt, answers in zip(prompts, sampled, strict=True):
        tokens_RN = torch.tensor([answer.tokens for answer in answers])
        # a placeholder without an image is none in training; what follows it is not compared
        placeholders_RN = chunks[0].visual_kinds(tokens_RN) > 0
        known_RN = placeholders_RN.cumsum(1) == 0
        whole = batch_of([with_answer(prompt, row) for row in tokens_RN.masked_fill(placeholders_RN, 0)])
        length, first = whole["input_ids"].shape[1], len(prompt["input_ids"]) - 1
        wanted = np.arange(len(answers))[:, None] * length + np.arange(first, length - 1)
        for logits in logits_of(chunks, [whole] * stages(), [wanted.ravel()] * stages())[:1]:
            kept = TopPLogitsWarper(TOP_P)(None, logits / TEMPERATURE)
            for scores, name in ((kept, "logprobs"), (logits, "logprobs_at_1")):
                given_RN = torch.tensor([getattr(answer, name) for answer in answers])
                found = scores.log_softmax(-1).gather(1, tokens_RN.view(-1, 1)).view_as(given_RN)
                gap = (found - given_RN)[known_RN].abs().max() / logits.abs().max()
                worst = max(worst, gap.item())
    for chunk in chunks:
        chunk.train()
    return worst


def stages() -> int:
    """The interleaved schedule wants as many micro batches as stages."""
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_world_size()


def with_answer(prompt: Prompt, tokens: torch.Tensor) -> Prompt:
    positions = prompt["position_ids"]
    after = (positions.max() + 1 + torch.arange(len(tokens))).expand(*positions.shape[:-1], -1)
    return {
        "input_ids": torch.cat((prompt["input_ids"], tokens)),
        "position_ids": torch.cat((positions, after), dim=-1),
        "visual_inputs": prompt["visual_inputs"],
    }


# ---- Transformers -----------------------------------------------------------------------------------------


def prompts_of(path: Path) -> tuple[list[dict], list[Prompt]]:
    """What the processor makes of each prompt, and our prompts."""
    from megatron_vlm.models.families import describe
    from megatron_vlm.models.hf import load_config, load_processor

    hf_config, processor = load_config(path), load_processor(path)
    needs, rng = describe(hf_config).data_needs, np.random.default_rng(3)
    kinds = (*PROMPTS, "vt") if needs.videos else PROMPTS
    encoded = [parity.encode_row(processor, parity.conversation(rng, parts)[:1]) for parts in kinds]
    prompts = []
    for outputs in encoded:
        outputs = get_image_spec(processor).unpad(outputs)
        tensors = {key: outputs[key] for key in needs.visual_keys if key in outputs}
        visual = GenericVisualInputs(**tensors) if tensors else None
        input_ids = outputs["input_ids"][0]
        positions = needs.position_ids(input_ids, visual)
        prompts.append({"input_ids": input_ids, "position_ids": positions, "visual_inputs": visual})
    return encoded, prompts


def greedy_of_transformers(path: Path, encoded: list[dict]) -> tuple[list[int], list[dict]]:
    """Two stop tokens, and `generate`'s answers to each prompt with their log-probabilities."""
    from megatron_vlm.models.hf import load_model

    model = parity.as_meant(load_model(path, torch.float32)).eval()

    def generated(row: dict, stop: list[int] | None, tokens: int) -> dict:
        model.generation_config.eos_token_id = stop
        out = model.generate(
            **row,
            do_sample=False,
            max_new_tokens=tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
        answer_N = out.sequences[0, row["input_ids"].shape[1] :]
        logprobs = torch.cat(out.logits).log_softmax(-1).gather(1, answer_N[:, None])[:, 0]
        return {"tokens": answer_N.tolist(), "logprobs": logprobs.tolist()}

    ends = (5, NEW_TOKENS // 2 + 1)  # the first two answers end here
    free = [generated(row, None, end)["tokens"] for row, end in zip(encoded, ends, strict=False)]
    stop = [answer[-1] for answer in free]
    return stop, [generated(row, stop, NEW_TOKENS) for row in encoded]


@pytest.fixture(scope="module")
def answers_of(request, tmp_path_factory):
    """(stop tokens, Transformers' greedy answers, ours by rank) of a family in a layout."""

    @functools.cache
    def prepared(family: str) -> tuple:
        folder = tmp_path_factory.mktemp(family)
        # small random weights only repeat the last token, and so do large ones of Gemma; with large ones of a
        # gated delta net Transformers' own fp32 forward pass is 7e-5 of the largest logit from its fp64 one
        size = 0.05 if issubclass(load(family), Qwen35) or family == "gemma4_unified" else 0.2
        text = {} if family in ("gemma3", "gemma4") else {"initializer_range": size}
        text |= {"vocab_size": 577} if family == "gemma3" else {}  # which tensor parallelism does not divide
        path = build_tiny_checkpoint(family, folder / "checkpoint", text=text)
        encoded, prompts = prompts_of(path)
        torch.save(prompts, folder / "prompts.pt")
        if family == "qwen2_5_vl":  # Transformers' own positions are wrong after its videos
            for row, prompt in zip(encoded, prompts, strict=True):
                given = torch.cat((torch.arange(len(prompt["input_ids"]))[None], prompt["position_ids"]))
                row |= {"position_ids": given[:, None]} if "pixel_values_videos" in row else {}
        return str(path), str(folder / "prompts.pt"), *greedy_of_transformers(path, encoded)

    @functools.cache
    def launched(processes: int) -> list[dict[str, dict[str, dict]]]:
        """By rank. One launch serves all families; one process is what sampled answers are compared to."""
        names = parity.asked_for(request, processes, parity.LAYOUTS)
        if processes == 1:
            names = dict.fromkeys(sorted(families), ["1 process"])
        asked = {family: (layouts, *prepared(family)[:3]) for family, layouts in names.items()}
        return run_distributed(processes, answers_of_all, asked, timeout=1800)

    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    families = {item.callspec.params["family"] for item in here if "family" in item.callspec.params}

    def answers(family: str, layout: str) -> tuple[list[int], list[dict], list[dict]]:
        *_, stop, theirs = prepared(family)
        return stop, theirs, [of_rank[family][layout] for of_rank in launched(parity.LAYOUTS[layout][0])]

    return answers


def layouts_of(family: str) -> list[str]:
    return [
        name for name in parity.layouts_of(family) if "images on each" not in name and "dist." not in name
    ]


OFTEN = ("TP2+SP",)
CELLS = parity.cells(layouts_of, OFTEN)


# ---- the tests --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "layout"), CELLS)
def test_greedy_answers_are_those_of_transformers(answers_of, family, layout):
    stop, theirs, ranks = answers_of(family, layout)
    check_greedy(stop, theirs, ranks)


def check_greedy(stop: list[int], theirs: list[dict], ranks: list[dict]) -> None:
    for ours in ranks:
        answers = [answer for [answer] in ours["greedy"]]
        assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in theirs]
        for mine, hf in zip(answers, theirs, strict=True):
            assert mine["finish_reason"] == ("stop" if hf["tokens"][-1] in stop else "length")
            assert mine["logprobs"] == [0.0] * len(hf["tokens"])
            assert np.abs(np.subtract(mine["logprobs_at_1"], hf["logprobs"])).max() < 1e-4
    lengths = {len(answer["tokens"]) for answer in theirs}
    assert len(lengths) > 1 and len({token for answer in theirs for token in answer["tokens"]}) > 4


@pytest.mark.long
@pytest.mark.parametrize(("family", "variant"), [("gemma4", "small"), ("mistral3", "mistral4")])
def test_answers_of_other_layers(family, variant, tmp_path):
    """Gemma 4's small ones share one cache and have inputs of their own with each new token; Mistral 4's have
    keys and values from latents, and queries that grow with their position."""
    path = build_tiny_checkpoint(family, tmp_path / "checkpoint", **TINY_FAMILIES[family].variants[variant])
    encoded, prompts = prompts_of(path)
    torch.save(prompts, tmp_path / "prompts.pt")
    stop, theirs = greedy_of_transformers(path, encoded)
    asked = {family: (["TP2+SP"], str(path), str(tmp_path / "prompts.pt"), stop)}
    ranks = run_distributed(2, answers_of_all, asked, timeout=600)
    found = [of_rank[family]["TP2+SP"] for of_rank in ranks]
    check_greedy(stop, theirs, found)
    assert max(ours["difference"] for ours in found) < MAX_REL_LOGPROB


@pytest.mark.parametrize(("family", "layout"), CELLS)
def test_log_probabilities_are_those_of_a_forward_pass(answers_of, family, layout):
    *_, ranks = answers_of(family, layout)
    assert max(ours["difference"] for ours in ranks) < MAX_REL_LOGPROB
    assert all(ours["in training"] for ours in ranks)


@pytest.mark.parametrize(("family", "layout"), CELLS)
@pytest.mark.long
def test_sampled_answers_do_not_depend_on_the_layout(answers_of, family, layout):
    *_, ranks = answers_of(family, layout)
    *_, others = answers_of(family, "1 process")

    def tokens(ours: dict) -> list:
        return [[answer["tokens"] for answer in of_prompt] for of_prompt in ours["sampled"]]

    assert all(tokens(ours) == tokens(ranks[0]) for ours in ranks)
    # a draw may lie within rounding of the bound between two tokens, and that answer then goes another way
    pairs = zip(sum(tokens(ranks[0]), []), sum(tokens(others[0]), []), strict=True)
    assert sum(ours != theirs for ours, theirs in pairs) <= 1
    assert all(len({tuple(answer) for answer in of_prompt}) > 1 for of_prompt in tokens(others[0]))


@pytest.mark.parametrize("top_p", [1.0, 0.75])
def test_tokens_are_drawn_as_often_as_they_are_likely(top_p):
    from megatron_vlm.generation.sampling import Sampling

    draws, p = 10_000, torch.tensor([0.05, 0.5, 0.15, 0.3])
    logits = (p.log() * 2).expand(draws, -1)  # temperature 2 makes p of it
    chosen = Sampling(2.0, top_p, seed=0).choose(logits, (np.arange(draws) + 0.5) / draws)
    expected = p if top_p == 1 else torch.tensor([0, 0.5, 0, 0.3]) / 0.8
    share = torch.bincount(chosen[0].long(), minlength=4) / draws
    assert (share - expected).abs().max() <= 1 / draws
    assert (chosen[1] - expected.log()[chosen[0].long()]).abs().max() < 1e-6
    assert (chosen[2] - (p**2 / (p**2).sum()).log()[chosen[0].long()]).abs().max() < 1e-6


def test_a_layer_with_a_window_keeps_no_more_than_that():
    from megatron_vlm.generation.cache import bytes_per_row
    from megatron_vlm.models.language_model import LanguageModelConfig

    sizes = {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8, "hidden_size": 32}
    config = LanguageModelConfig(**sizes, num_layers=3, layer_windows=(16, None, 16))
    assert bytes_per_row(config, 100) == (16 + 100 + 16) * 2 * 2 * 8 * 4
