"""Measure what a layer costs the host, beside Megatron's own linears: python tools/bench_host.py

A GPU waits for the host where its work for a layer takes less. The layers are Qwen3-VL's with tiny tensors,
on one thread of a CPU, so that the processor's time is that of calls. Both kinds of linears take turns in one
process, and the least time of each is printed. Norms, rotary embeddings and gates are compiled, as on CUDA,
but for this CPU; the last lines are without that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402

from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig  # noqa: E402
from megatron_vlm.models.families import describe  # noqa: E402
from megatron_vlm.models.hf import as_hf_config  # noqa: E402
from megatron_vlm.models.layers.attention_plan import AttentionPlan, Placement  # noqa: E402
from megatron_vlm.models.layers.fused import Fused  # noqa: E402
from megatron_vlm.models.opened import build_model  # noqa: E402
from megatron_vlm.parallel import linears, setup  # noqa: E402
from megatron_vlm.recipes.published import CONFIGS  # noqa: E402

NAME, LAYERS, TOKENS, WIDTH, ROUNDS, CALLS = "qwen3_vl_8b", 8, 16, 64, 15, 12
TEXT = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2}
ROPE = {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": WIDTH}
IDS = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502}
OURS = linears.ColumnParallelLinear.forward, linears.RowParallelLinear.forward
MEGATRONS = (
    linears.tensor_parallel.ColumnParallelLinear.forward,
    linears.tensor_parallel.RowParallelLinear.forward,
)


def decoder() -> tuple[torch.nn.Module, AttentionPlan]:
    config = json.loads((CONFIGS / f"{NAME}.json").read_text(encoding="utf-8")) | IDS
    sizes = {"head_dim": 16, "num_hidden_layers": LAYERS, "vocab_size": 512, "rope_scaling": ROPE}
    config["text_config"] |= TEXT | sizes
    config["vision_config"] |= VISION | {"deepstack_visual_indexes": [0]}
    run = RunConfig(model=ModelConfig(hf_path=NAME, dtype="fp32", load_weights=False))
    setup.init_distributed(ParallelConfig(), seed=1)
    [chunk] = build_model(run, describe(as_hf_config(config, CONFIGS / NAME)), setup.device())
    model = chunk.language_model
    plan = AttentionPlan(Placement([TOKENS], [], 1), 0, TOKENS, {None}, setup.device())
    plan.turns = model.rotary.turns(torch.arange(TOKENS).expand(3, 1, TOKENS), model.config)
    plan.query_scale = None
    return model.decoder, plan


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    layers, plan = decoder()
    routes = torch.zeros(1, TOKENS, 1, 1, dtype=torch.int16)

    def forward() -> torch.Tensor:
        hidden = torch.randn(TOKENS, 1, WIDTH, requires_grad=True)
        for layer in layers.layers:
            hidden, _ = layer(hidden, packed_seq_params=plan, padding_mask=routes)
        return hidden

    passes = {"forward": forward, "forward and backward": lambda: forward().sum().backward()}
    least: dict[tuple[str, str], float] = {}
    kinds = {"ours": (OURS, "cpu"), "Megatron's": (MEGATRONS, "cpu"), "written": (OURS, None)}
    for _ in range(ROUNDS):
        for kind, (methods, Fused.compiles_on) in kinds.items():
            linears.ColumnParallelLinear.forward, linears.RowParallelLinear.forward = methods
            for name, function in passes.items():
                least[kind, name] = min(least.get((kind, name), math.inf), microseconds(function))
    for name in passes:
        ours, megatrons = least["ours", name], least["Megatron's", name]
        print(f"{name}: {ours:.0f} us a layer, {ours / megatrons:.2f} of that with Megatron's linears")
    for name in passes:
        print(f"{name}, nothing compiled: {least['written', name]:.0f} us a layer")


def microseconds(function: Callable[[], object]) -> float:
    function()
    began = time.process_time()
    for _ in range(CALLS):
        function()
    return 1e6 * (time.process_time() - began) / CALLS / LAYERS


if __name__ == "__main__":
    main()
