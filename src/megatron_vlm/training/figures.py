"""The figures of a step: how well it used its devices, what it had to do; see docs/reference/metrics.md."""

import re
import resource
from collections.abc import Collection, Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor
from torch import distributed as dist

from megatron_vlm.batch import IGNORE_INDEX, Batch
from megatron_vlm.config import RunConfig
from megatron_vlm.job import stops
from megatron_vlm.models.costs import StepWork, Work
from megatron_vlm.models.description import Description
from megatron_vlm.models.layers.moe import Router
from megatron_vlm.objectives import objective_of
from megatron_vlm.parallel import setup
from megatron_vlm.parallel.setup import on_device

# Operations per second in bf16 on tensor cores without sparsity, from NVIDIA's data sheets. The first line of
# which a device's name has all words counts.
PEAKS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100 HBM3": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}


def peak_flops(device_name: str) -> float | None:
    """The most operations per second in bf16; None if the device is not in the table, or a part of one."""
    words = set(re.findall(r"\w+", device_name))
    if "MIG" in words:
        return None
    return next((peak for name, peak in PEAKS.items() if words.issuperset(name.split())), None)


class StepFigures:
    """Gathers the figures of a step on every rank without waiting for anything: they are added over ranks
    together with the loss (`training.step.train_step`).

    While it lives, the routers of `chunks` count the tokens of each expert. Of the `sources` that keys of
    samples begin with, each has figures of its own.
    """

    def __init__(
        self,
        config: RunConfig,
        description: Description,
        chunks: list[torch.nn.Module],
        sources: Sequence[str] = (),
    ):
        self._work = StepWork(config, description) if counts_data() else None
        self._by_source = BySource(sources, objective_of(config).figures)
        self._done = Work(0, 0, 0, 0)
        self.sums: list[float] = []  # over all ranks, of what `of_this_rank` returned
        self.asked_to_stop: list[str] = []  # the ways in which any rank was, up to the last step
        self.is_saving = False  # whether this rank still writes a checkpoint; set before each step
        self.any_rank_saves = False  # up to the last step
        on_gpu = setup.device().type == "cuda"
        name = torch.cuda.get_device_name() if on_gpu and config.model.dtype == "bf16" else ""
        self._peak = peak_flops(name)
        experts = description.architecture.get("num_moe_experts", 0)
        layers = description.architecture["num_layers"] if experts else 0
        self._expert_tokens = torch.zeros(layers, experts, dtype=torch.int64, device=setup.device())
        for router in (module for chunk in chunks for module in chunk.modules()):
            if isinstance(router, Router):
                router.expert_tokens = self._expert_tokens[router.layer_number - 1]

    def count(self, micro_batches: list[Batch], reports: list[dict[str, Tensor]]) -> None:
        """Called when a step's work is under way on the device, which needs no host meanwhile; `reports` are
        what `losses.token_loss` says of the micro batches on the last stage."""
        self._by_source.count(micro_batches, reports)
        if self._work:
            work = [self._done, *map(self._work.of, micro_batches)]
            self._done = Work(*map(sum, zip(*work, strict=True)))

    def of_this_rank(self) -> Tensor:
        """The numbers to add over all ranks, fp64 on the device."""
        memory = [0.0] * dist.get_world_size()  # added, it has that of each rank
        memory[dist.get_rank()] = _peak_memory()
        numbers = np.array([*self._done, *stops.stop_flags(), self.is_saving, *memory], np.float64)
        self._done = Work(0, 0, 0, 0)
        numbers = on_device(numbers, setup.device())
        experts = self._expert_tokens.flatten().double()
        self._expert_tokens.zero_()
        return torch.cat((numbers, experts, self._by_source.sums()))

    def of_step(self, seconds: float, data_seconds: float) -> dict[str, float]:
        """The figures of a step that took `seconds`, and waited for data for `data_seconds` of them."""
        done, ranks = Work(*self.sums[: len(Work._fields)]), dist.get_world_size()
        sizes = [len(stops.WAYS), 1, ranks, self._expert_tokens.numel()]
        parts = np.split(np.array(self.sums[len(done) :]), np.cumsum(sizes))
        stop_counts, saving, memory, experts, by_source = parts
        self.any_rank_saves = bool(saving.any())
        self.asked_to_stop = [way for way, number in zip(stops.WAYS, stop_counts, strict=True) if number]
        device_seconds = max(seconds, 1e-9) * ranks
        figures = {
            "mfu": done.flops / device_seconds / self._peak if self._peak else None,
            "tflops_per_device": done.flops / device_seconds / 1e12,
            "tokens_per_second": done.tokens / max(seconds, 1e-9),
            "tokens_per_second_per_device": done.tokens / device_seconds,
            "images_per_second_per_device": done.images / device_seconds,
            "padding": 1 - done.tokens / done.places if done.places else 0.0,
            "data_seconds": data_seconds,
            "peak_memory_gb": memory.max().item() / 1e9,
            **_balance(experts.reshape(self._expert_tokens.shape)),
            **self._by_source.figures(by_source),
        }
        return {name: value for name, value in figures.items() if value is not None}


def counts_data() -> bool:
    """Whether this is the one rank that counts data, of all ranks that share it."""
    first = parallel_state.get_pipeline_model_parallel_rank() == 0
    return first and parallel_state.get_tensor_and_context_parallel_rank() == 0


class BySource:
    """Mean loss, trained tokens and samples of a step, or of a validation, for each source in `names`.
    The longest name that begins a sample's key is its source. `logged` in the reports' `logs` have a mean."""

    def __init__(self, names: Sequence[str], logged: Collection[str] = ()):
        self._names, self._logged = list(names), list(logged)
        self._prefixes = sorted(((f"{name}-", n) for n, name in enumerate(names)), key=lambda p: -len(p[0]))
        self._clear()

    def _clear(self) -> None:
        self._losses = torch.zeros(len(self._names), dtype=torch.float64, device=setup.device())
        self._others = np.zeros((3, len(self._names)))  # weights, trained tokens, samples
        self._logs = torch.zeros(2, len(self._logged), dtype=torch.float64, device=setup.device())

    def count(self, micro_batches: list[Batch], reports: list[dict[str, Tensor]]) -> None:
        """Adds these micro batches to what `sums` will return."""
        for report in reports if self._logged and _speaks() else ():
            self._logs += torch.stack([report["logs"][name] for name in self._logged], dim=1)
        if not self._names:
            return
        device, number = self._losses.device, len(self._names)
        row_numbers = torch.arange(number, device=device)[:, None]
        losses = reports if _speaks() else []
        for index, batch in enumerate(micro_batches):
            samples, tokens, weights = self.sources_of(batch)
            if counts_data():
                counted = ((tokens, weights), (tokens, None), (samples, None))
                self._others += [np.bincount(of, by, minlength=number) for of, by in counted]
            for report in losses[index : index + 1]:
                of_loss = on_device(tokens, device)[report["places"]]
                self._losses += ((of_loss == row_numbers) * report["losses"].double()).sum(1)

    def sources_of(self, batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The numbers of the sources of each sample, of each trained token, and these tokens' weights."""
        of_rows = [[self._source(key) for key in keys] for keys in batch["__key__"]]
        first = np.cumsum([0, *map(len, of_rows)])  # the number of a row's first sample in the batch
        rows, places = np.nonzero(batch["labels"].numpy() != IGNORE_INDEX)
        samples = np.array([number for row in of_rows for number in row], np.int64)
        documents = batch["attention_mask"].numpy()[rows, places]
        return samples, samples[first[rows] + documents - 1], batch["loss_mask"].numpy()[rows, places]

    def _source(self, key: str) -> int:
        return next(number for prefix, number in self._prefixes if key.startswith(prefix))

    def sums(self) -> Tensor:
        """The sums to add over all ranks, fp64 on the device; counting then begins at 0 again."""
        sums = torch.cat(
            (self._logs.ravel(), self._losses, on_device(self._others.ravel(), self._losses.device))
        )
        self._clear()
        return sums

    def figures(self, sums: np.ndarray) -> dict[str, float]:
        """The figures of the sources that were there; `sums` are added over all ranks."""
        logs, sums = np.split(sums, [2 * len(self._logged)])
        sums_and_counts = zip(self._logged, *logs.reshape(2, -1).tolist(), strict=True)
        figures = {name: total / count for name, total, count in sums_and_counts if count}
        for name, (loss, weight, tokens, samples) in zip(self._names, sums.reshape(4, -1).T, strict=True):
            if samples:
                figures |= {f"trained_tokens/{name}": int(tokens), f"samples/{name}": int(samples)}
            if weight:
                figures[f"loss/{name}"] = float(loss / weight)
        return figures


def _speaks() -> bool:
    """Whether this rank's reports count: tensor-parallel ranks have equal ones."""
    return parallel_state.get_tensor_model_parallel_rank() == 0


def _balance(tokens_LX: np.ndarray) -> dict[str, float]:
    """The tokens of the busiest expert over the mean, for the layers that have experts."""
    tokens_LX = tokens_LX[tokens_LX.any(1)] if tokens_LX.size else tokens_LX
    if not tokens_LX.size:
        return {}
    balance_L = tokens_LX.max(1) / tokens_LX.mean(1)
    return {"expert_balance": balance_L.mean().item(), "expert_balance_worst": balance_L.max().item()}


def _peak_memory() -> int:
    """Bytes: the most that tensors had on this GPU since the last call; on a CPU, the most that this process
    ever had in memory."""
    if setup.device().type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
