"""A document of any tokens is in any company what it is alone: its scores, its gradient, its answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import parity
import policy_in_ranks
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from megatron_vlm.batch import GenericVisualInputs, document_spans
from megatron_vlm.config import ParallelConfig
from megatron_vlm.models.families import describe
from megatron_vlm.models.positions import IMAGE, TEXT, VIDEO
from megatron_vlm.models.stream import StreamLayout
from megatron_vlm.models.vlm import in_evaluation
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint
from tiny.distributed import run_distributed

# ---- what runs in the ranks


# rounding: the worst measured over all families, 30 examples each, is 6e-6 and 1e-6
MOST_LOG_PROBS, MOST_GRADIENT = 1e-4, 1e-4
NEW_TOKENS = 3
REFUSALS = (
    ValueError,
    RuntimeError,
    StopIteration,
    TypeError,
)  # Transformers', of what placeholders stand for
COUNTED = ("documents", "with media", "refused", "as Transformers", "companies", "generated")


def measure(path: str, examples: int, start: int) -> dict[str, Any]:
    """How often the property was tried, and the worst differences."""
    company = Company(path)

    @seed(start)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(company.documents(), min_size=3, max_size=6), st.integers(0, 2**32))
    def hold(documents: list[tuple], number: int) -> None:
        company.check([company.sample(*document) for document in documents], np.random.default_rng(number))

    hold()
    return company.seen


class Company:
    """One model of a family, and Transformers'."""

    def __init__(self, path: str):
        from transformers import AutoModelForImageTextToText

        self.policy = policy_in_ranks.policy_of(path, ParallelConfig(), 10**6)
        source = self.policy.source
        self.description, self.processor = source.description, source.processor
        self.kinds = source.description.visual_kinds
        self.model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        self.seen = dict.fromkeys(COUNTED, 0) | {"log_probs": 0.0, "gradient": 0.0}
        rng = np.random.default_rng(1)
        media = ["i", "ii"] + ["v"] * parity.takes_videos(self.description)
        talks = [parity.encode_row(self.processor, parity.conversation(rng, kind)) for kind in media]
        self.media = [self._medium(outputs) for outputs in talks]
        every = np.arange(source.description.text.vocab_size)
        self.texts = every[np.asarray(self.kinds(every)) == 0].tolist()
        added = {*self.processor.tokenizer.all_special_ids, *self.processor.tokenizer.added_tokens_decoder}
        self.special = sorted(added & set(self.texts))
        hf_config = source.description.hf_config
        named = [value for key, value in vars(hf_config).items() if key.endswith("_token_id")]
        self.markers = [token for token in self.texts if token in named]

    def _medium(self, outputs: dict) -> tuple[list[int], dict]:
        """The tokens from the first placeholder to the last and two more on either side, and the tensors."""
        ids = outputs["input_ids"][0]
        where = np.flatnonzero(self.kinds(ids.numpy()))
        tensors = {key: value for key, value in outputs.items() if key not in parity.TEXT_KEYS}
        return ids[where[0] - 2 : where[-1] + 3].tolist(), tensors

    def documents(self) -> st.SearchStrategy:
        """The arguments of `sample`."""
        token = st.sampled_from(self.texts) | st.sampled_from(self.special)
        plain = st.lists(token, min_size=1, max_size=6)
        marker = st.sampled_from(self.markers or self.special)
        marked = st.builds(lambda one, each, other: [*one, each, *other], plain, marker, plain)
        medium = st.sampled_from([None, *range(len(self.media))])
        stray = st.one_of(*[st.none()] * 4, st.tuples(st.floats(0, 1), token))
        cut = st.sampled_from([*[(0, 0)] * 5, (1, 0), (0, 1), (1, 1)])
        return st.tuples(st.one_of(plain, plain, marked), medium, marked, stray, cut)

    def sample(self, before: list, medium: int | None, after: list, stray: tuple | None, cut: tuple) -> dict:
        run, tensors = ([], {}) if medium is None else self.media[medium]
        run = run[cut[0] : len(run) - cut[1]]
        if run and stray:
            place = round(stray[0] * len(run))
            run = [*run[:place], stray[1], *run[place:]]
        return {"input_ids": torch.tensor([*before, *run, *after])} | tensors

    # ---- the property -------------------------------------------------------------------------------------

    def check(self, samples: list[dict], rng: np.random.Generator) -> None:
        taken, alone = [], []
        for sample in samples:
            self.seen["documents"] += 1
            expected = self._transformers(sample)
            try:
                scores = self.policy.logprobs([sample], entropy=True)
            except ValueError as error:
                self.seen["refused"] += 1
                assert expected is None, f"refused, and Transformers takes it: {error}"
                continue
            taken, alone = [*taken, sample], [*alone, scores]
            self.seen["with media"] += len(sample) > 1
            if expected is not None:
                self.seen["as Transformers"] += 1
                self._close(scores.log_probs[0], of_tokens(expected, sample), sample)
        if len(taken) > 1:
            self.seen["companies"] += 1
            scores = self.policy.logprobs(taken, entropy=True)
            for number, each in enumerate(alone):
                self._close(scores.log_probs[number], each.log_probs[0], taken[number])
                self._close(scores.entropies[number], each.entropies[0], taken[number])
            self._trains_alike(taken)
            self._batches_alike(taken, [each.log_probs[0] for each in alone], rng)
            self._generates_alike(taken)

    def _close(self, found: torch.Tensor, expected: torch.Tensor, sample: dict) -> None:
        off = (found - expected).abs().max().item()
        self.seen["log_probs"] = max(self.seen["log_probs"], off)
        assert off < MOST_LOG_PROBS, f"{off} in {sample['input_ids'].tolist()}"

    def _transformers(self, sample: dict) -> torch.Tensor | None:
        """(T, V) log-probabilities of the document alone; None if Transformers cannot take it."""
        ids = sample["input_ids"][None]
        types = torch.tensor(self.processor.create_mm_token_type_ids(ids.tolist()))
        name = "token_type_ids" if self.description.model_type == "gemma3" else "mm_token_type_ids"
        given = {"attention_mask": torch.ones_like(ids), name: types, "use_cache": False}
        try:
            with torch.no_grad():
                return self.model(**sample | {"input_ids": ids}, **given).logits[0].log_softmax(-1)
        except REFUSALS:
            return None

    def _trains_alike(self, samples: list[dict]) -> None:
        together, apart = self._gradient([samples]), self._gradient([[sample] for sample in samples])
        off = ((together - apart).norm() / apart.norm().clamp(min=1e-6)).item()  # all may be padding
        self.seen["gradient"] = max(self.seen["gradient"], off)
        assert off < MOST_GRADIENT, f"gradient {off}"

    def _gradient(self, calls: list[list[dict]]) -> torch.Tensor:
        from megatron_vlm.rl.losses import policy_gradient

        for samples in calls:
            self.policy.forward_backward(samples, lambda x, *_: policy_gradient(x, torch.ones_like(x)), 1)
        found = torch.cat([buffer.grad_data for buffer in self.policy.chunks[0].buffers]).clone()
        self.policy._empty()
        return found

    def _batches_alike(
        self, samples: list[dict], alone: list[torch.Tensor], rng: np.random.Generator
    ) -> None:
        """As training has them: several rows, of which some hold documents, and padding of any tokens."""
        from megatron_vlm.training.evaluate import logits_of

        rows = np.sort(rng.integers(0, 2, len(samples)))
        batch, places = self._batch(samples, rows, rng)
        with in_evaluation(self.policy.chunks):
            (logits,) = logits_of(self.policy.chunks, [batch])
        for sample, place, expected in zip(samples, places, alone, strict=True):
            found = logits[place : place + len(sample["input_ids"])].log_softmax(-1)
            self._close(of_tokens(found, sample), expected, sample)

    def _batch(
        self, samples: list[dict], rows: np.ndarray, rng: np.random.Generator
    ) -> tuple[dict, list[int]]:
        """The batch, and where each document begins in it; of its keys those that logits need."""
        from megatron_vlm.batch import GenericVisualInputs
        from megatron_vlm.rl.micro_batches import documents_of

        documents, lengths = documents_of(samples, self.policy.source.needs), [0, 0]
        starts = []
        for row, document in zip(rows, documents, strict=True):
            starts.append(lengths[row])
            lengths[row] += len(document.input_ids)
        size = max(lengths) + 3
        axes = documents[0].position_ids.shape[:-1]
        batch = {
            "input_ids": torch.from_numpy(rng.integers(0, max(self.texts) + 1, (2, size))),
            "attention_mask": torch.zeros(2, size, dtype=torch.int32),
            "position_ids": torch.zeros(*axes, 2, size, dtype=torch.int64),
            "visual_inputs": GenericVisualInputs.cat([d.visual for d in documents if d.visual is not None]),
        }
        for row, start, document in zip(rows, starts, documents, strict=True):
            here = slice(start, start + len(document.input_ids))
            batch["input_ids"][row, here] = document.input_ids
            batch["position_ids"][..., row, here] = document.position_ids
            batch["attention_mask"][row, here] = batch["attention_mask"][row].max() + 1
        return batch, [int(row) * size + start for row, start in zip(rows, starts, strict=True)]

    def _generates_alike(self, samples: list[dict]) -> None:
        from megatron_vlm.generation.generate import generate
        from megatron_vlm.rl.micro_batches import documents_of

        documents = documents_of(samples, self.policy.source.needs)
        prompts = [
            {"input_ids": d.input_ids, "position_ids": d.position_ids, "visual_inputs": d.visual}
            for d in documents
        ]
        together = generate(self.policy.chunks, prompts, NEW_TOKENS)
        for prompt, (found,) in zip(prompts, together, strict=True):
            ((expected,),) = generate(self.policy.chunks, [prompt], NEW_TOKENS)
            self.seen["generated"] += 1
            for token, other, *scores in zip(
                found.tokens, expected.tokens, found.logprobs_at_1, expected.logprobs_at_1, strict=True
            ):
                assert abs(scores[0] - scores[1]) < MOST_LOG_PROBS, prompt["input_ids"].tolist()
                if token != other:  # of two that are equally likely
                    break


def of_tokens(log_probs_TV: torch.Tensor, sample: dict) -> torch.Tensor:
    """(T - 1,) those of the document's own tokens."""
    return log_probs_TV[:-1].gather(1, sample["input_ids"][1:, None])[:, 0]


# ---- the tests


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
    (seen,) = run_distributed(1, measure, checkpoint(family), examples, seed, timeout=3000)
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
