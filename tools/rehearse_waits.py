"""Rehearse all that a run does, on the first and the last rank of each layout, for each family, and count
where the host waits for the device: reports/waits.json. What a GPU refuses, such as an operation on tensors
of host and device, raises. `tests/unit/core/test_waits.py` fails for a place that REASONS does not name.

python tools/rehearse_waits.py            every family in the kinds of layouts
python tools/rehearse_waits.py gemma3     the rows of some families, the others stay
python tools/rehearse_waits.py --every    in every layout
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a rehearsal refuses to see a GPU
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

import parity  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from device_waits import WaitRecorder, waiting_on_shapes  # noqa: E402
from megatron_vlm.batch import GenericVisualInputs  # noqa: E402
from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig  # noqa: E402
from megatron_vlm.extras.plan.recorder import META  # noqa: E402
from megatron_vlm.extras.plan.rehearsal import as_on_a_gpu, example_batch, example_row  # noqa: E402
from megatron_vlm.generation.generate import generate  # noqa: E402
from megatron_vlm.models.description import Description  # noqa: E402
from megatron_vlm.models.families import describe  # noqa: E402
from megatron_vlm.models.opened import build_model  # noqa: E402
from megatron_vlm.objectives import objective_of  # noqa: E402
from megatron_vlm.rl.losses import ppo_clip  # noqa: E402
from megatron_vlm.rl.policy import Policy  # noqa: E402
from megatron_vlm.training.evaluate import validation_loss  # noqa: E402
from megatron_vlm.training.figures import StepFigures  # noqa: E402
from megatron_vlm.training.optimizer import build_optimizer  # noqa: E402
from megatron_vlm.training.step import data_parallel, train_step  # noqa: E402
from megatron_vlm.training.tensor_files import sharded_state  # noqa: E402
from tiny.checkpoints import TINY_FAMILIES  # noqa: E402
from tiny.corpus import default_corpus  # noqa: E402

REPORT = ROOT / "reports" / "waits.json"
MICRO_BATCHES, NEW_TOKENS = 2, 3
SOURCE = "a"  # of the samples, so that there are figures of it
PARTS = {  # run -> its parts
    "training": ("train", "validate", "generate", "save"),
    "preferences": ("train on preferences",),
    "policy": ("logprobs", "policy backward", "policy step"),
}


class Reason(NamedTuple):
    """Why the host waits at a place, and how often at most in a part of a run; None: for every tensor."""

    why: str
    most: int | None


WRITTEN = Reason("a checkpoint is written by the host", None)
REASONS = {
    "models/layers/moe.py ExpertExchange.__init__": Reason(
        "the numbers of rows that travel to and from the experts of other ranks: once a layer", None
    ),
    "core/optimizer/clip_grads.py get_grad_norm_fp32": Reason(
        "Megatron's clipping has the norm of gradients on the host, after all work of a step: once for all, "
        "once for a group that has none here; without the distributed optimizer, for experts and the rest",
        8,
    ),
    "megatron_vlm/training/step.py mean_loss": Reason(
        "loss and figures of a step or a validation, in one read at its end", 2
    ),
    "megatron_vlm/training/evaluate.py validation_loss": Reason(
        "figures by source, in one read at the end of a validation", 1
    ),
    "megatron_vlm/generation/generate.py broadcast_from_last_stage": Reason(
        "the tokens that were chosen: once a step of all rows", NEW_TOKENS
    ),
    "megatron_vlm/generation/generate.py _any_runs": Reason(
        "whether rows of any rank that shares the experts go on: once a step of all rows", 2 * NEW_TOKENS
    ),
    "megatron_vlm/rl/agreement.py means": Reason("what the losses log, in one read", 1),
    "core/optimizer/distrib_optimizer.py DistributedOptimizer.state_dict": WRITTEN,
    "core/optimizer/optimizer.py MegatronOptimizer._extract_common_per_param_step": WRITTEN,
    "core/optimizer/optimizer.py Float16OptimizerWithFloat16Params.sharded_state_dict": WRITTEN,
    ("megatron_vlm/training/optimizer.py ShardedOptimizer.sharded_param_state_fully_reshardable"): WRITTEN,
}
OF_EACH_KIND = ("1 process", "TP2+SP", "PP2·VPP2", "CP2", "EP2")


def main() -> None:
    old = json.loads(REPORT.read_text(encoding="utf-8"))["rows"] if REPORT.exists() else []
    reasons = {place: reason.why for place, reason in REASONS.items()}
    every = "--every" in sys.argv
    for family in [name for name in sys.argv[1:] if name != "--every"] or TINY_FAMILIES:
        began = time.monotonic()
        rows = [row for layout in layouts_of(family, every) for row in rows_of(family, layout)]
        old = [row for row in old if row["family"] != family] + rows
        report = json.dumps({"reasons": reasons, "rows": old}, indent=1, ensure_ascii=False)
        REPORT.write_text(report + "\n", encoding="utf-8")
        print(f"{family}: {time.monotonic() - began:.0f} s", flush=True)


def layouts_of(family: str, every: bool) -> list[str]:
    """Its layouts: all, or one for each kind of parallelism."""
    return [layout for layout in parity.layouts_of(family) if every or layout in OF_EACH_KIND]


def rows_of(family: str, layout: str) -> Iterator[dict]:
    """What the first and the last rank of a layout do, and how often they wait where."""
    gpus, parallel = parity.LAYOUTS[layout]
    for rank in sorted({0, gpus - 1}):
        yield {"family": family, "layout": layout, "rank": rank, "waits": waits(family, parallel, gpus, rank)}


def waits(
    family: str, parallel: ParallelConfig, gpus: int, rank: int, runs: Iterable[str] = tuple(PARTS)
) -> dict[str, dict[str, int]]:
    """By part of these runs: place in the code -> how often the host waits there."""
    config, found = run_of(parallel, gpus), {}
    description = description_of(family)
    for run in runs:
        with waiting_on_shapes(config, description, gpus, rank) as recorder:
            for name, do in PARTS_OF[run](config, description):
                found[name] = places(recorder, do)
    return found


def places(recorder: WaitRecorder, do: Callable[[], object]) -> dict[str, int]:
    recorder.waits = Counter()
    do()
    waits: Counter[str] = Counter()
    for place, count in recorder.waits.items():
        waits[re.sub(r":\d+", "", place)] += count
    return dict(waits)


def description_of(family: str) -> Description:
    parts = TINY_FAMILIES[family]
    return describe(parts.config(parts.processor(default_corpus(), parts.template), {}, {}))


def run_of(parallel: ParallelConfig, gpus: int) -> RunConfig:
    """Micro batches of a row of 256 tokens, with images."""
    run = RunConfig(parallel=parallel, run_dir="none")
    run.model = ModelConfig(hf_path="none", dtype="bf16")
    run.data.train_data_path, run.data.seq_length, run.data.max_pixels = "none", 256, 112**2
    run.train.global_batch_size = MICRO_BATCHES * gpus // parallel.model_size
    run.train.micro_batch_size = 1
    return as_on_a_gpu(run)


Parts = Iterator[tuple[str, Callable[[], object]]]


def built(config: RunConfig, description: Description, **settings: bool) -> list:
    with META:
        chunks = build_model(config, description, META)
    return data_parallel(chunks, config, **settings)


def training_parts(config: RunConfig, description: Description) -> Parts:
    model = built(config, description)
    optimizer, scheduler = build_optimizer(model, config)
    optimizer.step()  # makes its state
    step_loss = objective_of(config).step_loss(config, model)
    batches = [example_batch(config, description) | {"__key__": [[f"{SOURCE}-1"]]}] * MICRO_BATCHES
    figures = StepFigures(config, description, model, [SOURCE])

    def steps() -> None:
        for goes_on in (True, False):  # the second one meets parameters on their way
            train_step(model, optimizer, scheduler, batches, figures, goes_on, step_loss)

    yield "train", steps

    def take(count: int) -> list:
        taken = batches[:count]
        del batches[:count]
        return taken

    yield "validate", lambda: validation_loss(config, model, step_loss, take, [SOURCE])
    ids_T, images = example_row(config, description)
    visual = GenericVisualInputs.cat(images)
    positions = description.position_ids(ids_T, visual)
    prompt = {"input_ids": ids_T, "position_ids": positions, "visual_inputs": visual}
    # other ranks, who would answer other prompts, do not exist
    some = 1 if parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1 else 2
    sampling = {"temperature": 0.7, "top_p": 0.9, "answers": some}
    yield "generate", lambda: generate(model, [prompt] * some, NEW_TOKENS, **sampling)
    yield "save", lambda: sharded_state(model, optimizer, loading=False)


def preference_parts(config: RunConfig, description: Description) -> Parts:
    config = deepcopy(config)
    config.train.objective = "dpo"
    model = built(config, description)
    optimizer, scheduler = build_optimizer(model, config)
    optimizer.step()
    step_loss = objective_of(config).step_loss(config, model)
    batches = [example_batch(config, description)] * MICRO_BATCHES
    yield (
        "train on preferences",
        lambda: train_step(model, optimizer, scheduler, batches, step_loss=step_loss),
    )


def policy_parts(config: RunConfig, description: Description) -> Parts:
    source = SimpleNamespace(description=description, needs=description.data_needs)
    model = built(config, description, one_backward=False)
    policy = Policy(config, source, model, config.data.seq_length)
    ids_T, images = example_row(config, description)
    sample = GenericVisualInputs.cat(images).as_model_kwargs() | {"input_ids": ids_T, "advantage": 1.0}
    samples = [sample] * MICRO_BATCHES

    def loss(log_probs, entropies, fields):
        return ppo_clip(log_probs, log_probs.detach(), fields["advantage"])

    yield "logprobs", lambda: policy.logprobs(samples, entropy=True)
    yield "policy backward", lambda: policy.forward_backward(samples, loss, 1.0, fields=["advantage"])
    yield "policy step", policy.step


PARTS_OF = {"training": training_parts, "preferences": preference_parts, "policy": policy_parts}

if __name__ == "__main__":
    main()
