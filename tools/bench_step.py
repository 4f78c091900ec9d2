"""Measure a training step against Transformers and write reports/bench_step.json.

python tools/bench_step.py [--families gemma3 qwen3_vl] [--recompute none full] [--out FILE]

The same weights, conversations and optimizer (AdamW, fp32 on a CPU, bf16 on a GPU) in one process: eight
conversations of very different length with an image each, half of their text trained, through a language
model of 8 layers of 512 channels and a vocabulary of 32,768. Transformers takes them as eight padded rows, or
one after the other ("alone"), whose gradients add up; ours are the same padded rows, or packed into one. With
recomputation, Transformers' gradient checkpointing is on, and ours is "full". Seconds are medians over rounds
taken in turns (CPU time of one thread; wall time on a GPU). Peak memory is that of the tensors that a step
makes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

import numpy as np  # noqa: E402
import parity  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

from megatron_vlm.batch import Batch, GenericVisualInputs  # noqa: E402
from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig  # noqa: E402
from megatron_vlm.extras.plan.recorder import TensorMemory  # noqa: E402
from megatron_vlm.models.families import describe  # noqa: E402
from megatron_vlm.models.hf import load_config, load_model, load_processor  # noqa: E402
from megatron_vlm.models.language_model import DTYPES  # noqa: E402
from megatron_vlm.models.opened import build_model  # noqa: E402
from megatron_vlm.models.weights.importing import import_hf  # noqa: E402
from megatron_vlm.parallel import setup  # noqa: E402
from megatron_vlm.training import step  # noqa: E402
from megatron_vlm.training.optimizer import build_optimizer  # noqa: E402
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint  # noqa: E402

REPLY_WORDS = (200, 60, 120, 30, 160, 40, 80, 100)
VOCABULARY = 32_768
ROUNDS = 3
ROPE = {  # of heads of 64 channels
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), {"mrope_section": [8, 12, 12]}),
    **dict.fromkeys(
        ("glm4v", "glm46v", "glmga", "glm4v_moe"),
        {"mrope_section": [4, 6, 6], "partial_rotary_factor": 0.5},
    ),
}


def text_config(family: str, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    text = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
    text |= {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": vocabulary}
    if family.startswith("qwen3"):
        text["head_dim"] = 32
    if family.endswith("moe"):
        text["moe_intermediate_size"] = 512
    if family == "kimi_k25":  # each head has its own keys and values, and its size says config.json otherwise
        text |= {"num_key_value_heads": 8, "moe_intermediate_size": 512}
        del text["head_dim"]
    if family in ROPE:
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, **ROPE[family]}
    if family == "gemma3":
        text |= {"query_pre_attn_scalar": 64, "sliding_window": 128}
    return text


def conversation(rng: np.random.Generator, words: int) -> list[dict]:
    vocabulary = "the cat shows a table and two people near the sofa".split()

    def text(count: int) -> dict:
        return {"type": "text", "text": " ".join(rng.choice(vocabulary, count))}

    image = Image.fromarray(rng.integers(0, 255, (224, 224, 3), dtype=np.uint8))
    question = [{"type": "image", "image": image}, text(20)]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": [text(words)]}]


def batches(path: Path, hf_config: Any) -> tuple[dict, dict[str, Batch]]:
    """The arguments of Transformers, and ours, padded and packed."""
    description = describe(hf_config)
    rng = np.random.default_rng(0)
    made = iter([conversation(rng, words) for words in REPLY_WORDS])
    rows = ["it"] * len(REPLY_WORDS)
    hf, padded, single = parity.encode(load_processor(path), description, rows, lambda *_: next(made))
    if description.model_type == "kimi_k25":  # Transformers' convolution takes each patch as an image
        side = hf_config.vision_config.patch_size
        hf["pixel_values"] = hf["pixel_values"].reshape(-1, 3, side, side)
    lengths = [int((row["attention_mask"] > 0).sum()) for row in single]
    names = ("input_ids", "labels", "loss_mask", "position_ids")
    packed: dict[str, Any] = {
        name: torch.cat([row[name][..., :length] for row, length in zip(single, lengths, strict=True)], -1)
        for name in names
    }
    documents = [torch.full((1, length), i, dtype=torch.int32) for i, length in enumerate(lengths, 1)]
    packed["attention_mask"] = torch.cat(documents, -1)
    packed["visual_inputs"] = GenericVisualInputs.cat([row["visual_inputs"] for row in single])
    device = setup.device()
    for batch in (padded, packed):
        batch["visual_inputs"] = batch["visual_inputs"].to(device)
    return {name: tensor.to(device) for name, tensor in hf.items()}, {"padded": padded, "packed": packed}


def documents_alone(hf: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Each row of the arguments of Transformers without its padding, and with its own image."""
    rows, length = hf["input_ids"].shape
    axes = {name: 1 if tensor.shape[1:] == (rows, length) else 0 for name, tensor in hf.items()}
    axes |= {name: -1 for name, tensor in hf.items() if tensor.shape[0] == 1}  # images side by side
    parts = {name: tensor.chunk(rows, axes[name]) for name, tensor in hf.items()}
    lengths = hf["attention_mask"].sum(1).tolist()
    return [
        {
            name: parts[name][row][..., : lengths[row]] if tensor.shape[-1] == length else parts[name][row]
            for name, tensor in hf.items()
        }
        for row in range(rows)
    ]


def seconds_of(call: Callable[[], Any]) -> float:
    on_gpu = torch.cuda.is_available()
    clock = time.perf_counter if on_gpu else time.process_time
    start = clock()
    call()
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - start


def peak_of(call: Callable[[], Any]) -> int:
    with TensorMemory() as memory:
        call()
    return memory.peak


def built(path: Path, config: RunConfig) -> tuple[list, Any, Any]:
    """Our model from the checkpoint, its optimizer and schedule."""
    setup.reset_layout(ParallelConfig(), seed=1)
    hf_config = load_config(path)
    description = describe(hf_config)
    chunks = build_model(config, description, setup.device(), load_processor(path))
    import_hf(chunks, path, description.weight_map)
    ddp = step.data_parallel(chunks, config)
    return ddp, *build_optimizer(ddp, config)


def measure(path: Path, recompute: str = "none") -> list[dict[str, Any]]:
    """Rows of the report for the checkpoint in `path`, padded and packed."""
    hf_config = load_config(path)
    on_gpu = torch.cuda.is_available()
    config = RunConfig(model=ModelConfig(dtype="bf16" if on_gpu else "fp32", recompute=recompute))
    ddp, optimizer, scheduler = built(path, config)
    hf_model = load_model(path, DTYPES[config.model.dtype])
    hf_model.to(setup.device()).train()
    if recompute == "full":
        hf_model.gradient_checkpointing_enable()
    hf_optimizer = torch.optim.AdamW(hf_model.parameters(), lr=1e-5, fused=True)
    hf_arguments, ours = batches(path, hf_config)
    alone = documents_alone(hf_arguments)

    def hf_step(calls: list[dict[str, torch.Tensor]]) -> None:
        hf_optimizer.zero_grad()
        for arguments in calls:
            hf_model(**arguments, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(hf_model.parameters(), 1.0)
        hf_optimizer.step()

    def our_step(mode: str) -> None:
        step.train_step(ddp, optimizer, scheduler, [ours[mode]])

    steps = {"hf": lambda: hf_step([hf_arguments]), "alone": lambda: hf_step(alone)}
    steps |= {mode: lambda mode=mode: our_step(mode) for mode in ours}
    peaks = {name: peak_of(call) for name, call in steps.items()}  # also the warm-up
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, call in steps.items():
            times[name].append(seconds_of(call))
    seconds = {name: statistics.median(values) for name, values in times.items()}
    return [
        {
            "family": describe(hf_config).model_type,
            "mode": mode,
            "recompute": recompute,
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "seconds": round(seconds[mode], 3),
            "hf_seconds": round(seconds["hf"], 3),
            "hf_alone_seconds": round(seconds["alone"], 3),
            "speed_over_hf": round(seconds["hf"] / seconds[mode], 2),
            "speed_over_hf_alone": round(seconds["alone"] / seconds[mode], 2),
            "peak_memory": peaks[mode],
            "hf_peak_memory": peaks["hf"],
        }
        for mode in ours
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    families = ["gemma3", "qwen3_vl", "qwen3_5"]
    parser.add_argument("--families", nargs="+", default=families, choices=list(TINY_FAMILIES))
    parser.add_argument("--recompute", nargs="+", default=["none"], choices=["none", "full"])
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "bench_step.json")
    arguments = parser.parse_args()
    setup.init_distributed(ParallelConfig(), seed=1)
    rows = []
    for family in arguments.families:
        for recompute in arguments.recompute:
            with tempfile.TemporaryDirectory(prefix="bench_step_") as folder:
                path = build_tiny_checkpoint(family, folder, text=text_config(family))
                rows += measure(path, recompute)
            for row in rows[-2:]:
                print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
