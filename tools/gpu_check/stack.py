"""A few layers of Qwen3-VL-8B in its widths, random weights, packed rows: ours beside Transformers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module
from transformers import AutoModelForImageTextToText

from gpu_check.clock import seconds
from gpu_check.rows import Row, read
from gpu_check.sizes import ON_CUDA, About, Sizes, described, documents_of
from megatron_vlm.batch import Batch, GenericVisualInputs, Prompt
from megatron_vlm.config import ModelConfig, RunConfig
from megatron_vlm.extras.plan.rehearsal import example_batch
from megatron_vlm.models.costs import StepWork
from megatron_vlm.models.description import Description
from megatron_vlm.models.language_model import DTYPES
from megatron_vlm.models.opened import build_model
from megatron_vlm.overrides import apply_overrides
from megatron_vlm.parallel import setup
from megatron_vlm.training.figures import peak_flops
from megatron_vlm.training.optimizer import build_optimizer
from megatron_vlm.training.step import data_parallel, train_step

MODEL = "qwen3_vl_8b"
PUBLISHED = described(MODEL, {}).architecture["num_layers"]
VISUAL_SHARE = 0.25  # of the tokens of a document
IMPLEMENTATIONS = ("flash_attention_2", "sdpa")  # of Transformers' attention


def run_config(tokens: int, dtype: str | None = None) -> RunConfig:
    """One row of so many tokens a step, with random weights."""
    config = RunConfig(model=ModelConfig(hf_path=MODEL, dtype=dtype or ("bf16" if ON_CUDA else "fp32")))
    config.run_dir = config.data.train_data_path = MODEL  # of which nothing is read or written
    config.model.load_weights = False
    config.data.seq_length = tokens
    config.data.visual_share = VISUAL_SHARE
    config.train.global_batch_size = config.train.micro_batch_size = 1
    return config


def built(config: RunConfig, name: str, changed: dict[str, Any]) -> tuple[list[Module], Description]:
    """The chunks of a published model with these changes, and what is known of it."""
    description = described(name, changed)
    return build_model(config, description, setup.device()), description


@dataclass(frozen=True)
class Case:
    """A packed row of so many tokens, and with which settings and how many layers its step is measured."""

    tokens: int
    depths: tuple[int, ...]  # the last is the deepest
    settings: tuple[str, ...] = ()
    is_first: bool = False  # in which also decoding is measured

    @property
    def name(self) -> str:
        layers = (f"{self.depths[-1]} layers",) if self.settings else ()
        return ", ".join((f"{self.tokens} tokens", *self.settings, *layers))

    def config(self, dtype: str | None = None) -> RunConfig:
        return apply_overrides(run_config(self.tokens, dtype), self.settings)


def cases(sizes: Sizes) -> Iterator[Case]:
    """Each row as it is, and the shortest with recomputation and with Adam's state on the host. All of that
    state is moved, so that one depth shows it."""
    for tokens in sizes.rows:
        yield Case(tokens, sizes.depths, is_first=tokens == sizes.rows[0])
    for how in ("selective", "full"):
        yield Case(sizes.rows[0], sizes.depths, (f"model.recompute={how}",))
    yield Case(sizes.rows[0], sizes.depths[:1], ("optimizer.offload=true",))


def rows_of_documents(sizes: Sizes) -> Iterator[tuple[str, int, list[int]]]:
    """(name, tokens, lengths of documents) of the rows. Of one document Transformers needs no mask, and then
    PyTorch takes FlashAttention for it."""
    for tokens in sizes.rows:
        yield f"{tokens} tokens", tokens, documents_of(tokens)
        yield f"{tokens} tokens, one document", tokens, [tokens]


def documents(lengths: list[int], description: Description) -> list[Batch]:
    """The documents of a packed row, each as a row with its images."""
    return [example_batch(run_config(length), description) for length in lengths]


def packed(rows: list[Batch]) -> Batch:
    """One row of all documents."""
    names = ("input_ids", "labels", "loss_mask", "position_ids")
    batch = {name: torch.cat([row[name] for row in rows], dim=-1) for name in names}
    numbered = [torch.full_like(row["attention_mask"], number) for number, row in enumerate(rows, 1)]
    batch["attention_mask"] = torch.cat(numbered, dim=-1)
    batch["visual_inputs"] = images_of(rows)
    keys = {"__key__": [[]], "__restore_key__": None}
    return batch | keys


def example_prompt(tokens: int, description: Description) -> Prompt:
    row = example_batch(run_config(tokens), description)
    return Prompt(
        input_ids=row["input_ids"][0],
        position_ids=row["position_ids"][..., 0, :],
        visual_inputs=row["visual_inputs"] and row["visual_inputs"].to(setup.device()),
    )


def images_of(rows: list[Batch]) -> GenericVisualInputs:
    """Those of all documents; short ones have none."""
    return GenericVisualInputs.cat([r["visual_inputs"] for r in rows if r["visual_inputs"] is not None])


class OurStep:
    """A model with random weights and its optimizer; called with a row, it takes a step."""

    def __init__(self, config: RunConfig, description: Description):
        self.description = description
        self.chunks = build_model(config, description, setup.device())
        # schedules may then be timed alone, without the reductions of a step
        self.model = data_parallel(self.chunks, config, one_backward=False)
        self.optimizer, self.scheduler = build_optimizer(self.model, config)

    def __call__(self, batch: Batch) -> float:
        return train_step(self.model, self.optimizer, self.scheduler, [batch])[0]


def flops_of(batch: Batch, description: Description) -> float:
    return StepWork(run_config(batch["input_ids"].shape[-1]), description).of(batch).flops


def measured(
    part: str, what: str, step: Callable[[], float], tokens: int, flops: float, sizes: Sizes
) -> Iterator[Row]:
    """Seconds, tokens a second, MFU and memory of a step. A step that does not fit says so."""
    try:
        loss = step()
        if ON_CUDA:
            torch.cuda.reset_peak_memory_stats()
        took = seconds(step, max(1, sizes.rounds // 2))
    except torch.OutOfMemoryError:
        yield Row(part, what, "out of memory")
        return
    yield Row(part, f"{what}, loss at random weights", loss)
    yield Row(part, f"{what}, seconds", took)
    yield Row(part, f"{what}, tokens/s", tokens / took)
    yield Row(part, f"{what}, model TFLOP/s", flops / took / 1e12)
    if not ON_CUDA:
        return
    peak = peak_flops(torch.cuda.get_device_name())
    yield Row(part, f"{what}, MFU", flops / took / peak if peak else "the card's peak is not known")
    yield Row(part, f"{what}, peak GiB", torch.cuda.max_memory_allocated() / 2**30)
    yield Row(part, f"{what}, reserved GiB", torch.cuda.max_memory_reserved() / 2**30)


def free() -> None:
    gc.collect()
    if ON_CUDA:
        torch.cuda.empty_cache()


# --- Transformers -----------------------------------------------------------------------------------------


def theirs(sizes: Sizes, about: About) -> Iterator[Row]:
    """The same documents through Transformers, as padded rows, and what our step is of it."""
    description = described(MODEL, sizes.dense)
    dtype = DTYPES[run_config(1).model.dtype]
    for attention in IMPLEMENTATIONS:
        try:
            with setup.device():
                model = AutoModelForImageTextToText.from_config(
                    description.hf_config,
                    dtype=dtype,
                    attn_implementation=attention,
                    trust_remote_code=False,
                )
        except (ImportError, ValueError) as error:
            yield Row("transformers", f"{attention}: {str(error).splitlines()[0][:200]}", "not installed")
            continue
        step = their_step(model.train())
        for name, tokens, lengths in rows_of_documents(sizes):
            rows = documents(lengths, description)
            flops, arguments = flops_of(packed(rows), description), padded(rows)
            what = f"{name}, {attention}"
            call = lambda given=arguments, step=step: step(given)  # noqa: E731
            yield from measured("transformers", what, call, tokens, flops, sizes)
            yield from quotient(about, name, what)
            free()
        del model, step
        free()


def their_step(model: Module) -> Callable[[dict[str, torch.Tensor]], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(arguments: dict[str, torch.Tensor]) -> float:
        optimizer.zero_grad()
        loss = model(**arguments, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def padded(rows: list[Batch]) -> dict[str, torch.Tensor]:
    """The arguments of Transformers for a batch of documents, padded to the longest."""
    longest = max(row["input_ids"].shape[-1] for row in rows)
    batch = {}
    fills = {"input_ids": 0, "attention_mask": 0, "labels": -100, "position_ids": 0}
    for name, fill in fills.items():
        parts = [torch.nn.functional.pad(r[name], (0, longest - r[name].shape[-1]), value=fill) for r in rows]
        batch[name] = torch.cat(parts, dim=-2).to(setup.device())
    visual = images_of(rows).normalized_for_model()
    on_device = {name: x.to(setup.device()) for name, x in visual.items()}
    return batch | on_device


def quotient(about: About, name: str, what: str) -> Iterator[Row]:
    seconds_of = {row.what: row.value for row in read(about.folder) if row.what.endswith("seconds")}
    mine, other = seconds_of.get(f"{name}, seconds"), seconds_of.get(f"{what}, seconds")
    if mine and other:
        yield Row("transformers", f"{what}, its seconds over ours", other / mine)
