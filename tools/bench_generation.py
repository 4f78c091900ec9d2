"""Measure generation against Transformers and against itself without a cache; prints a table.

python tools/bench_generation.py [--families gemma3 qwen3_vl] [--tokens 128] [--rounds 3] [--tiny]

The same weights and four prompts with 0, 1, 1 and 3 images, fp32 on one thread, greedy. Ours and the
`generate` of Transformers, with its cache, answer in turns within one process, and their answers must be
equal. Seconds are medians of CPU time. "no cache" computes whole rows for every token; it is measured at five
of the lengths. The language model has 8 layers of 512 channels (`bench_step.py`), or with --tiny those of the
tests, where nearly all of the time is that of Python.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

import numpy as np  # noqa: E402
import parity  # noqa: E402
import torch  # noqa: E402

import bench_step  # noqa: E402
from megatron_vlm.batch import GenericVisualInputs, Prompt  # noqa: E402
from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig  # noqa: E402
from megatron_vlm.generation.generate import generate  # noqa: E402
from megatron_vlm.generation.rows import batch_of  # noqa: E402
from megatron_vlm.models.families import describe  # noqa: E402
from megatron_vlm.models.hf import load_config, load_model, load_processor  # noqa: E402
from megatron_vlm.models.opened import build_model  # noqa: E402
from megatron_vlm.models.weights.importing import import_hf  # noqa: E402
from megatron_vlm.parallel import setup  # noqa: E402
from megatron_vlm.training.evaluate import logits_of  # noqa: E402
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint  # noqa: E402

PROMPTS = ("t", "it", "it", "ititit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--families", nargs="+", default=["gemma3", "qwen3_vl"], choices=list(TINY_FAMILIES))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    setup.init_distributed(ParallelConfig(), seed=1)
    torch.set_num_threads(1)
    print("family         ours s  Transformers s  ratio  no cache s  ratio")
    for family in options.families:
        with tempfile.TemporaryDirectory() as folder:
            text = {} if options.tiny else bench_step.text_config(family, 8192)
            path = build_tiny_checkpoint(family, Path(folder), text=text)
            ours, theirs, uncached = measure(path, options.tokens, options.rounds)
        print(
            f"{family:<13} {ours:7.2f} {theirs:15.2f} {theirs / ours:6.2f} {uncached:11.1f} "
            f"{uncached / ours:6.1f}",
            flush=True,
        )


def measure(path: Path, tokens: int, rounds: int) -> tuple[float, float, float]:
    hf_config, processor = load_config(path), load_processor(path)
    description, rng = describe(hf_config), np.random.default_rng(0)
    encoded = [parity.encode_row(processor, parity.conversation(rng, parts)[:1]) for parts in PROMPTS]
    needs = description.data_needs
    prompts = [prompt_of(outputs, needs) for outputs in encoded]
    chunks = build_model(RunConfig(model=ModelConfig(dtype="fp32")), description, setup.device())
    import_hf(chunks, path, description.weight_map)
    model = load_model(path, torch.float32)
    model.generation_config.eos_token_id = None  # all answers have all tokens
    inputs = left_padded(encoded, processor.tokenizer.pad_token_id)

    def ours() -> list[list[int]]:
        return [answer.tokens for [answer] in generate(chunks, prompts, tokens)]

    def theirs() -> list[list[int]]:
        found = model.generate(**inputs, do_sample=False, max_new_tokens=tokens)
        return found[:, inputs["input_ids"].shape[1] :].tolist()

    if ours() != theirs():
        raise SystemExit(f"{path}: not the answers of Transformers")
    times = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    mine, hf = (statistics.median(column) for column in zip(*times, strict=True))
    return mine, hf, without_cache(chunks, prompts, tokens)


def prompt_of(outputs: dict, needs) -> Prompt:
    tensors = {key: outputs[key] for key in needs.visual_keys if key in outputs}
    visual = GenericVisualInputs(**tensors) if tensors else None
    input_ids = outputs["input_ids"][0]
    positions = needs.position_ids(input_ids, visual)
    return {"input_ids": input_ids, "position_ids": positions, "visual_inputs": visual}


def left_padded(encoded: list[dict], pad_token: int) -> dict[str, torch.Tensor]:
    """The arguments of Transformers' `generate` for all prompts together."""
    longest, inputs = max(row["input_ids"].shape[1] for row in encoded), {}
    for key in {key for row in encoded for key in row}:
        rows = [row[key] for row in encoded if key in row]
        if all(row.shape == other["input_ids"].shape for row, other in zip(rows, encoded, strict=False)):
            fill = pad_token if key == "input_ids" else 0
            rows = [torch.nn.functional.pad(row, (longest - row.shape[1], 0), value=fill) for row in rows]
        inputs[key] = torch.cat(rows)
    return inputs


def without_cache(chunks: list[torch.nn.Module], prompts: list[Prompt], tokens: int) -> float:
    """Seconds for all tokens, from those of whole rows at five lengths."""
    times = []
    for more in np.linspace(0, tokens - 1, 5).astype(int):
        batch = batch_of([longer(prompt, int(more)) for prompt in prompts])
        last_B = (np.arange(len(prompts)) + 1) * batch["input_ids"].shape[1] - 1
        times.append(seconds(lambda batch=batch, last_B=last_B: logits_of(chunks, [batch], [last_B])))
    return statistics.mean(times) * tokens


def longer(prompt: Prompt, tokens: int) -> Prompt:
    ids, positions = prompt["input_ids"], prompt["position_ids"]
    after = (positions.max() + 1 + torch.arange(tokens)).expand(*positions.shape[:-1], -1)
    return {
        "input_ids": torch.cat((ids, ids[:1].expand(tokens))),
        "position_ids": torch.cat((positions, after), dim=-1),
        "visual_inputs": prompt["visual_inputs"],
    }


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


if __name__ == "__main__":
    main()
