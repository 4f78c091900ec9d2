"""What a machine with a GPU must show, in one call of a few minutes: a table, and reports/gpu_check.json.

python tools/gpu_check.py [--parts NAMES] [--families NAMES] [--out FILE]

parts:
  kernels   attention, grouped products, norms, rotary embeddings, gates and gradients of weights against
            plain references
  parity    logits, loss and gradients of tiny models against Transformers, in fp32 and bf16
  speed     the attention kernel's operations a second beside PyTorch's own attention; what is compiled
            beside the same as written
  step      a training step against Transformers, as in tools/bench_step.py
  memory    the peak memory of a training step against `megatron-vlm plan`
It exits with 1 if a value is beyond its limit. Without CUDA, parts that need it are left out and the others
use the CPU's kernels: that tests this script, not a GPU. It has not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers"), str(ROOT / "tools")]

import numpy as np  # noqa: E402
import parity  # noqa: E402
import torch  # noqa: E402

import bench_step  # noqa: E402
from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig  # noqa: E402
from megatron_vlm.models.families import FAMILIES, describe  # noqa: E402
from megatron_vlm.models.hf import load_config  # noqa: E402
from megatron_vlm.models.layers.attention import Attend  # noqa: E402
from megatron_vlm.models.layers.fused import compiled_on  # noqa: E402
from megatron_vlm.models.layers.kernel_checks import (  # noqa: E402
    disagreement,
    fused_cases,
    fused_disagreement,
    tower_disagreement,
    weight_gradient_disagreement,
)
from megatron_vlm.models.layers.kernels import KERNELS  # noqa: E402
from megatron_vlm.models.layers.tower_attention import backend, view_of  # noqa: E402
from megatron_vlm.parallel import setup  # noqa: E402
from megatron_vlm.parallel.weight_gradients import wgrad_gemm_accum_fp32  # noqa: E402
from megatron_vlm.planning.plan import RESERVE, make_plan  # noqa: E402
from tiny.checkpoints import build_tiny_checkpoint  # noqa: E402

ON_CUDA = torch.cuda.is_available()
WIDTHS = (64, 72, 80, 128, 256)
SIZES = {  # as in Qwen3-VL-8B and Gemma3-4B
    "SwiGLU": SimpleNamespace(
        hidden_size=4096,
        kv_channels=128,
        ffn_hidden_size=12_288,
        activation_func=torch.nn.functional.silu,
        layernorm_zero_centered_gamma=False,
    ),
    "GeGLU": SimpleNamespace(
        hidden_size=2560,
        kv_channels=256,
        ffn_hidden_size=10_240,
        activation_func=partial(torch.nn.functional.gelu, approximate="tanh"),
        layernorm_zero_centered_gamma=True,
    ),
}
for config in SIZES.values():
    config.tensor_model_parallel_size = 1
    config.params_dtype = torch.bfloat16 if ON_CUDA else torch.float32
BF16_LOSS = 0.02  # of tiny random models, against fp32
ROWS = ["t", "it", "ititit"]  # without an image, with one and with three


@dataclass(frozen=True)
class Row:
    """One line of the table; `limit` is the largest right value. Without one the value is only shown."""

    part: str
    what: str
    value: float | str
    limit: float | None = None

    @property
    def verdict(self) -> str:
        if self.limit is None:
            return ""
        return "ok" if self.value <= self.limit else "WRONG"


def kernels(families: list[str]) -> Iterator[Row]:
    device, dtype = setup.device(), torch.bfloat16 if ON_CUDA else torch.float32
    for width in WIDTHS:
        for groups in (8, 2):
            sizes = (8, groups, width)
            problem = disagreement(backend(device), sizes, {None, 128}, device, dtype)
            yield verdict("kernels", f"{backend(device)}, 8 heads, {groups} of keys, {width} wide", problem)
        if width <= 128:
            problem = tower_disagreement(8, width, device, dtype)
            yield verdict("kernels", f"{backend(device)} in a tower, {width} wide", problem)
    yield Row(
        "kernels", "grouped product against a loop, with empty groups", grouped_error(device, dtype), 2e-2
    )
    for model, config in SIZES.items():
        problem = fused_disagreement(config, device)
        yield verdict("kernels", f"norm, rotary, gates, {model}, compiled against written", problem)
    for kind in (torch.bfloat16, torch.float32):
        problem = weight_gradient_disagreement(device, kind)
        yield verdict("kernels", f"gradients of weights added by their product, {kind}", problem)


def verdict(part: str, what: str, problem: str | None) -> Row:
    return Row(part, f"{what}: {problem}" if problem else what, float(problem is not None), 0)


def grouped_error(device: torch.device, dtype: torch.dtype) -> float:
    """Of outputs and gradients, relative to the largest, against one product for each group."""
    torch.manual_seed(0)
    counts = [0, 100, 0, 1, 27, 0]
    rows = torch.randn(sum(counts), 64, device=device, dtype=dtype)
    weights = torch.randn(len(counts), 96, 64, device=device, dtype=dtype)
    ends = torch.tensor(counts, device=device).cumsum(0).int()

    def grouped(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.grouped_mm(rows, weights.mT, offs=ends)

    def loop(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        parts = zip(rows.split(counts), weights, strict=True)
        return torch.cat([part @ weight.T for part, weight in parts])

    found, expected = (with_gradients(function, rows, weights) for function in (grouped, loop))
    pairs = zip(found, expected, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def with_gradients(function: Callable, *inputs: torch.Tensor) -> list[torch.Tensor]:
    inputs = [x.clone().requires_grad_() for x in inputs]
    output = function(*inputs)
    return [x.float() for x in (output, *torch.autograd.grad(output.square().sum(), inputs))]


def parity_rows(families: list[str]) -> Iterator[Row]:
    limits = (parity.MAX_ABS_LOGITS, parity.MAX_ABS_LOSS, parity.MAX_REL_GRAD)
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            path = str(build_tiny_checkpoint(family, folder))
            padded = parity.case_for(path, ROWS)
            cases = {"padded": padded, "packed": parity.packed(padded)}
            for name, case in cases.items():
                found = parity.compare(ParallelConfig(), path, case)
                for key, limit in zip(("max_abs_logits", "abs_loss", "max_rel_grad"), limits, strict=True):
                    yield Row("parity", f"{family}, fp32, {name}, {key}", found[key], limit)
                found = parity.compare(ParallelConfig(), path, case, dtype="bf16")
                yield Row("parity", f"{family}, bf16, {name}, abs_loss", found["abs_loss"], BF16_LOSS)
                # no limit: where bf16 chooses another expert, gradients are others
                yield Row("parity", f"{family}, bf16, {name}, max_rel_grad", found["max_rel_grad"])


def speed(families: list[str]) -> Iterator[Row]:
    """Forward and backward over 16 segments of 1,024 tokens with all keys, 16 heads."""
    if not ON_CUDA:
        return
    lengths, device = np.full(16, 1024), setup.device()
    view = view_of(lengths, device)
    for width in WIDTHS:
        operations = 3.5 * 4 * 16 * width * float((lengths**2).sum())  # the backward pass is 2.5 forward
        shape = (int(lengths.sum()), 16, width)
        inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3)]
        scale = width**-0.5

        def ours(*x: torch.Tensor, scale: float = scale) -> torch.Tensor:
            return Attend.apply(*x, view, KERNELS["varlen"], scale)

        def batched(*x: torch.Tensor) -> torch.Tensor:
            rows = (part.unflatten(0, (16, 1024)).transpose(1, 2) for part in x)
            return torch.nn.functional.scaled_dot_product_attention(*rows)

        for name, function in (("varlen", ours), ("PyTorch, batched", batched)):
            seconds = seconds_on_gpu(lambda f=function, x=inputs: with_gradients(f, *x))
            yield Row("speed", f"{name}, {width} wide, TFLOP/s", round(operations / seconds / 1e12, 1))
    yield from speed_of_compiled(device)
    yield speed_of_weight_gradients(device)


def speed_of_compiled(device: torch.device) -> Iterator[Row]:
    """Norms, rotary embeddings and gates over 8,192 tokens."""

    def seconds(device_type: str | None, function: Callable, given: list[torch.Tensor]) -> float:
        *inputs, gradient = (x.requires_grad_() for x in given)
        with compiled_on(device_type):
            return seconds_on_gpu(lambda: torch.autograd.grad(function(*inputs), inputs, gradient))

    for model, config in SIZES.items():
        for name, case in fused_cases(config, 8192, device).items():
            times = round(seconds(None, *case) / seconds("cuda", *case), 2)
            yield Row("speed", f"{name}, {model}, compiled over written", times)


def speed_of_weight_gradients(device: torch.device) -> Row:
    """That of a feed-forward of Qwen3-VL-8B, over 8,192 tokens."""
    x, grad = (torch.randn(8192, n, device=device, dtype=torch.bfloat16) for n in (4096, 24_576))
    total = torch.zeros(24_576, 4096, device=device)
    made = seconds_on_gpu(lambda: total.add_(grad.t() @ x))
    times = made / seconds_on_gpu(lambda: wgrad_gemm_accum_fp32(x, grad, total))
    return Row("speed", "gradient of a weight, added by its product over made first", round(times, 2))


def seconds_on_gpu(call: Callable[[], object], rounds: int = 10) -> float:
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / rounds


def step(families: list[str]) -> Iterator[Row]:
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            path = build_tiny_checkpoint(family, folder, text=bench_step.text_config(family))
            for row in bench_step.measure(path):
                yield Row("step", f"{family}, {row['mode']}, speed over Transformers", row["speed_over_hf"])
                share = round(row["peak_memory"] / row["hf_peak_memory"], 2)
                yield Row("step", f"{family}, {row['mode']}, peak memory of theirs", share, 1.0)


def memory(families: list[str]) -> Iterator[Row]:
    """A step of the bench's model on its packed row, against what `megatron-vlm plan` says of such a row."""
    if not ON_CUDA:
        return
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            path = build_tiny_checkpoint(family, folder, text=bench_step.text_config(family))
            peak, tokens, images = peak_of_a_step(path)
            planned = planned_bytes(path, tokens, images)
        yield Row("memory", f"{family}, measured over planned", round(peak / planned, 2))


def peak_of_a_step(path: Path) -> tuple[int, int, int]:
    """(bytes, tokens of the row, those of images)."""
    torch.cuda.empty_cache()
    parts = bench_step.built(path, RunConfig(model=ModelConfig(dtype="bf16")))
    _, ours = bench_step.batches(path, load_config(path))
    row = ours["packed"]
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        bench_step.step.train_step(*parts, [row])
    images = int((parts[0][0].module.visual_kinds(row["input_ids"]) > 0).sum())
    return torch.cuda.max_memory_allocated(), row["input_ids"].shape[1], images


def planned_bytes(path: Path, tokens: int, images: int) -> float:
    """In a process of its own: a plan lays the process out anew."""
    config = RunConfig(run_dir=str(path), model=ModelConfig(hf_path=str(path), dtype="bf16"))
    config.data.train_data_path, config.data.seq_length = str(path), tokens
    config.data.visual_share, config.train.global_batch_size = images / tokens, 1
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(fullest, config, path).result()


def fullest(config: RunConfig, path: Path) -> float:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    plan = make_plan(config, describe(load_config(path)), 1)
    return max(stage.memory - RESERVE for stage in plan.stages)


PARTS = {"kernels": kernels, "parity": parity_rows, "speed": speed, "step": step, "memory": memory}


def write(path: Path, rows: list[Row]) -> None:
    about = {
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
    listed = [asdict(row) | {"verdict": row.verdict} for row in rows]
    path.write_text(json.dumps(about | {"rows": listed}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "gpu_check.json")
    arguments = parser.parse_args()
    if not ON_CUDA:
        print("no CUDA: this tests the script on a CPU and says nothing about a GPU; no report is written")
    setup.init_distributed(ParallelConfig(), seed=1)
    torch.backends.cudnn.allow_tf32 = False  # fp32 is compared with a CPU's
    rows, began = [], time.monotonic()
    for part in arguments.parts:
        for row in PARTS[part](arguments.families):
            rows.append(row)
            value = row.value if isinstance(row.value, str) else f"{row.value:.3g}"
            limit = "" if row.limit is None else f"<= {row.limit:g}"
            print(f"{row.verdict:5}  {part:8} {value:>10} {limit:10} {row.what}", flush=True)
        if ON_CUDA:
            write(arguments.out, rows)
    wrong = [row for row in rows if row.verdict == "WRONG"]
    print(f"{len(rows)} values, {len(wrong)} beyond their limits, {time.monotonic() - began:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
