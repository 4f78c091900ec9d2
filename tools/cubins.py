"""The fused functions as Triton kernels for a Hopper card, compiled without one: registers, spills, memory.

python tools/cubins.py                 write reports/cubins.json; `python tools/tables.py` then shows it
python tools/cubins.py gate head       print the rows of functions whose name begins so

Torch traces the functions on shapes that say they are on a card, and is told of a card's properties. Nothing
runs, so this finds what does not compile or spills, and not what is wrong. Sizes are Qwen3-VL-8B's, but the
kernels are for any.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes import joint_graph
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._subclasses import fake_tensor
from torch.nn.functional import silu
from torch.utils import _triton
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision
from triton.backends.compiler import GPUTarget

from megatron_vlm.models import head
from megatron_vlm.models.layers import fused, fused_towers
from megatron_vlm.parallel import cpu

REPORT = Path(__file__).resolve().parent.parent / "reports" / "cubins.json"
TOKENS, WIDTH, FFN, VOCABULARY = 8192, 4096, 12_288, 151_936
GROUPS, QUERIES, CHANNELS = 8, 4, 128  # of keys; query heads of each; of a head
SHARED = 232_448  # bytes that a block can have
HOPPER = SimpleNamespace(
    **{"name": "NVIDIA H100", "major": 9, "minor": 0, "warp_size": 32, "multi_processor_count": 132},
    **{"regs_per_multiprocessor": 65_536, "max_threads_per_multi_processor": 2048},
    **{"max_threads_per_block": 1024, "shared_memory_per_block": 49_152, "gcnArchName": ""},
    **{"shared_memory_per_block_optin": SHARED, "shared_memory_per_multiprocessor": 233_472},
    **{"L2_cache_size": 50 << 20, "total_memory": 80 << 30, "is_integrated": 0, "uuid": ""},
)


def on_card(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def cases() -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """Functions as written, with what they are given; queries are a part of a product."""
    rows, weight, rms = on_card(TOKENS, WIDTH), on_card(WIDTH), on_card(TOKENS, 1, dtype=torch.float32)
    keys = TOKENS * GROUPS
    queries, of_head = on_card(keys, QUERIES + 2, CHANNELS)[:, :QUERIES], on_card(CHANNELS)
    query_rms = on_card(keys, QUERIES, 1, dtype=torch.float32)
    heads = on_card(TOKENS, GROUPS, QUERIES + 2, CHANNELS)
    rms_of_heads = [on_card(TOKENS, GROUPS, n, 1, dtype=torch.float32) for n in (QUERIES, 1)]
    turned = on_card(TOKENS, GROUPS * QUERIES, CHANNELS)
    whole, part = ([on_card(TOKENS, 1, n)] * 2 for n in (CHANNELS, CHANNELS // 2))
    gate_up, of_rows = on_card(TOKENS, 2 * FFN), on_card(TOKENS)
    logits, columns = on_card(TOKENS, VOCABULARY), on_card(TOKENS, dtype=torch.int64)
    of_tokens, settings = on_card(6, TOKENS, dtype=torch.float32), (1.0, None, VOCABULARY)
    of_inner, gate_backward = on_card(TOKENS, FFN), fused._gate_backward.written
    activation = silu, fused.DERIVATIVES[silu]
    norm, backward = fused.normed.written, fused._norm_backward.written
    of_heads = [turned, *[on_card(TOKENS, GROUPS, CHANNELS)] * 2, None]
    turned_by, gate = fused.rotate_rows.written, fused._gate.written
    how = fused.HeadSettings(1e-6, False, False, False, False)
    return {
        "norm": (norm, [rows, weight, 1e-6, False, False]),
        "norm, zero-centered": (norm, [rows, weight, 1e-6, True, False]),
        "norm of queries": (norm, [queries, of_head, 1e-6, False, False]),
        "norm's backward": (backward, [rows, rows, weight, rms, False, True]),
        "norm's backward, queries": (
            backward,
            [queries.contiguous(), queries, of_head, query_rms, False, True],
        ),
        "rotary embedding": (turned_by, [turned, *whole, False]),
        "rotary embedding of a part": (turned_by, [turned, *part, False]),
        "rotary embedding of neighbours": (turned_by, [turned, *part, True]),
        "heads": (fused._turned_heads.written, [heads, of_head, of_head, *whole, *whole, how]),
        "heads' backward": (
            fused._turned_heads_backward.written,
            [*of_heads, heads, of_head, of_head, *whole, *whole, *rms_of_heads, how, True],
        ),
        "gate": (gate, [gate_up, silu, None]),
        "gate with weights": (gate, [gate_up, silu, of_rows]),
        "gate's backward": (gate_backward, [of_inner, gate_up, *activation, None]),
        "gate's backward, weights": (gate_backward, [of_inner, gate_up, *activation, of_rows]),
        **tower_cases(),
        "head": (head._reduced.written, [logits, columns, (True, True), settings]),
        "head's backward": (head._gradient.written, [logits, columns, of_tokens, (True, True), settings]),
    }


def tower_cases() -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """Functions of towers, with the sizes of Qwen2.5-VL's; Pixtral's rotary embedding is Llama's."""
    q, k, _ = on_card(TOKENS, 3, 16, 80).unbind(1)
    table, fp32_table = on_card(TOKENS, 80), on_card(TOKENS, 80, dtype=torch.float32)
    half = on_card(TOKENS, 3420)
    activation = silu, fused.DERIVATIVES[silu]
    return {
        "rotary embedding of a tower": (apply_rotary_pos_emb_vision, [q, k, fp32_table, fp32_table]),
        "rotary embedding of Pixtral": (apply_rotary_pos_emb, [q, k, table, table, 1]),
        "gate of a tower": (fused_towers.gate_rows.written, [half, half, silu]),
        "gate's backward of a tower": (
            fused_towers.gate_rows_backward.written,
            [half, half, half, *activation],
        ),
    }


class Driver:
    """What Triton asks of a card's driver before it compiles."""

    launcher_cls = None
    utils = SimpleNamespace(
        get_device_properties=lambda _: {
            "max_shared_mem": SHARED,
            "multiprocessor_count": 132,
            "warpSize": 32,
        }
    )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda


class NoDevice:
    """In the place of a context that makes a card the current one."""

    def __init__(self, *_: Any):
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


def always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def pretend_a_card() -> None:
    """Changes torch and Triton in this process, which is good for nothing else then."""
    torch._C._ensureCUDADeviceGuardSet()  # which makes a card current, and does nothing where none is
    triton.runtime.driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = always(None)
    fake_tensor.init_gpu_context = always(None)
    joint_graph.lazy_init = always(None)  # patterns of attention and products, made with tensors of a card
    answers = {
        **{"is_available": True, "is_initialized": True, "is_bf16_supported": True, "device_count": 1},
        **{"current_device": 0, "get_device_name": HOPPER.name, "get_device_capability": (9, 0)},
        **{"get_device_properties": HOPPER, "_lazy_init": None, "synchronize": None, "set_device": None},
        **{
            "memory_allocated": 0,
            "is_current_stream_capturing": False,
            "set_rng_state": None,
            "get_rng_state": torch.get_rng_state(),
        },
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, always(answer))
    torch.accelerator.is_available = always(False)  # so that nobody asks for its streams
    torch.accelerator.current_accelerator = always(None)
    torch.cuda.device = torch.cuda._DeviceGuard = CudaInterface.device = NoDevice
    CudaInterface.is_available = staticmethod(always(True))
    CudaInterface.get_compute_capability = staticmethod(always(90))
    CudaInterface.get_multi_processor_count = staticmethod(always(132))
    CudaInterface.get_device_properties = staticmethod(always(HOPPER))
    CudaInterface.Worker.get_device_properties = staticmethod(always(HOPPER))
    torch._C._cuda_getDevice, torch._C._cuda_getDeviceCount = always(0), always(1)
    torch._C._cuda_getCurrentRawStream = always(0)
    _triton.has_triton = _triton.has_triton_package = always(True)


class NothingRuns(Exception):
    """Ends the call of a function that is compiled."""


def compiled(written: Callable[..., Any], arguments: list[Any]) -> list[Any]:
    """Triton's kernels of a function as `Fused` compiles it, each with every configuration to choose from."""
    kernels: list[Any] = []

    def precompile(self: CachingAutotuner, *_: Any, **__: Any) -> None:
        for configuration in self.configs:
            self._precompile_config(configuration)

    def noted(*given: Any, **options: Any) -> Any:
        kernels.append(by_triton(*given, **options))
        return kernels[-1]

    def end(*_: Any) -> None:
        raise NothingRuns

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable:
        compile_fx(graph, inputs, config_patches={"emulate_precision_casts": True})
        return end

    settings = {"compile_threads": 1, "fx_graph_cache": False, "triton.autotune_at_compile_time": False}
    settings["joint_graph_constant_folding"] = False  # which computes with tensors of a card
    CachingAutotuner.precompile = precompile
    by_triton, triton.compile = triton.compile, noted
    torch._dynamo.reset()
    try:
        with torch._inductor.config.patch(settings), contextlib.suppress(NothingRuns):
            torch.compile(written, dynamic=True, fullgraph=True, backend=backend)(*arguments)
    finally:
        triton.compile = by_triton
    return kernels


def row(function: str, kernel: Any, folder: Path) -> dict[str, Any]:
    """Registers and bytes of stack, where spilled registers lie, of a thread; shared memory of a block."""
    file = folder / "kernel.cubin"
    file.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", said))
    return {
        "function": function,
        "kernel": kernel.metadata.name,
        "warps": kernel.metadata.num_warps,
        "registers": int(numbers["REG"]),
        "stack": int(numbers["STACK"]),
        "shared": kernel.metadata.shared,
    }


def rows(beginnings: tuple[str, ...] = ("",)) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="cubins_") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = folder
        pretend_a_card()
        with cpu.stand_in(torch.device("cuda", 0)):
            with fake_tensor.FakeTensorMode():
                given = cases()
            for name, (function, arguments) in given.items():
                if name.startswith(beginnings):
                    kernels = compiled(function, arguments)
                    assert kernels, f"{name} has no kernel: it was not compiled for a card"
                    yield from (row(name, kernel, Path(folder)) for kernel in kernels)


def main() -> None:
    if len(sys.argv) > 1:
        for each in rows(tuple(sys.argv[1:])):
            print(json.dumps(each), flush=True)
        return
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "rows": list(rows()),
    }
    REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
