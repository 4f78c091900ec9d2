"""Short runs that train adapters, in the processes that `test_adapter_runs.py` starts."""

from __future__ import annotations

import hashlib
import resource
import shutil
from pathlib import Path
from typing import Any

import parity
import saved_cases
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_vlm.config import AdapterConfig, ModelConfig, ParallelConfig, RunConfig

EVERYTHING = AdapterConfig(r=4, lora_alpha=8, target_modules="all-linear")
DROPPING = AdapterConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.2)
WHOLE = ["multi_modal_projector", "language_model.layers.1.mlp", "language_model.norm"]
WITH_MODULES = AdapterConfig(r=4, lora_alpha=8, modules_to_save=WHOLE)
QUERY_AND_VALUE = AdapterConfig(r=4, target_modules=["q_proj", "v_proj"], exclude_modules=r".*vision.*")
DORA = AdapterConfig(r=4, lora_alpha=8, target_modules="all-linear", use_dora=True, lora_dropout=0.1)
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
DOWN_ALONE = AdapterConfig(r=3, target_modules=[], target_parameters=PARAMETERS[1:])
FIRST_STAGE = AdapterConfig(r=3, target_modules=r".*vision_tower.*\.[qv]_proj")
EXPERTS = AdapterConfig(r=3, lora_alpha=8, target_parameters=PARAMETERS, rank_pattern={"down_proj": 5})
STEPS, HALF = 4, 2


def config(path: str, layout: ParallelConfig, adapter: AdapterConfig, run_dir: Any = "none") -> RunConfig:
    run = RunConfig(run_dir=str(run_dir), parallel=layout, adapter=adapter)
    run.model = ModelConfig(hf_path=path, dtype="fp32")
    run.optimizer.lr, run.train.steps = 3e-2, STEPS
    return run


class Run:
    """A model with adapters and its optimizer, continued from the run folder if that has a checkpoint."""

    def __init__(self, run: RunConfig):
        from megatron_vlm.models.hf import open_source
        from megatron_vlm.parallel import setup
        from megatron_vlm.run_folder.folder import with_own_start
        from megatron_vlm.train import starting_model
        from megatron_vlm.training import checkpoint
        from megatron_vlm.training.optimizer import build_optimizer

        setup.reset_layout(run.parallel, seed=1)
        run = with_own_start(run)
        self.config, self.source = run, open_source(run.model.hf_path)
        self.model = starting_model(run, self.source)
        self.optimizer, self.scheduler = build_optimizer(self.model, run)
        self.state = checkpoint.load_latest(run.run_dir, self.model, self.optimizer, self.scheduler)
        self.chunks = [chunk.module for chunk in self.model]

    def train(self, case: dict, steps: int) -> list[float]:
        from megatron_vlm.training.step import train_step

        mine = self.micro_batches(case)
        return [train_step(self.model, self.optimizer, self.scheduler, mine)[0] for _ in range(steps)]

    def micro_batches(self, case: dict) -> list[dict]:
        return [parity.on_device(batch) for batch, _ in parity.my_micro_batches(case, self.config.parallel)]

    def save(self, step: int) -> None:
        from megatron_vlm.training import checkpoint

        checkpoint.save(self.config.run_dir, step, self.model, self.optimizer, self.scheduler)

    def logits(self, case: dict) -> list[torch.Tensor]:
        """Of each row, in a layout without data parallelism; empty where they are not computed."""
        from megatron_vlm.training.evaluate import logits_of

        for chunk in self.model:
            chunk.eval()
        return logits_of(self.model, self.micro_batches(case)) or []

    def digests(self) -> tuple[str, str]:
        """Of the bytes of this rank's base weights, and of its adapters and their moments."""
        from megatron_vlm.training.optimizer import torch_adams

        named = [pair for chunk in self.chunks for pair in chunk.named_parameters()]
        base = [p for n, p in named if not n.startswith("adapters.")]
        adapters = [p for n, p in named if n.startswith("adapters.")]
        for adam in torch_adams(self.optimizer):
            for group in adam.param_groups:
                adapters += [value for p in group["params"] for _, value in sorted(adam.state[p].items())]
        return digest(base), digest(adapters)


def continues(run: RunConfig, case: dict) -> bool:
    """Whether a run that trains, saves and goes on is bit-equal to one that was not interrupted."""
    whole = Run(run)
    whole.train(case, 1)
    whole.save(1)
    whole.train(case, 1)
    continued = Run(run)
    continued.train(case, 1)
    return continued.digests() == whole.digests()


def digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def replicas_equal(run: Run) -> bool:
    """Whether the adapters that tensor-parallel ranks hold whole are the same on all, to the bit."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    whole = [
        getattr(part, name)
        for chunk in run.chunks
        for part in chunk.adapters.modules()
        for name, axis in getattr(part, "axes", {}).items()
        if axis is None
    ]
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, digest(whole), group=group)
    assert any(weight.abs().sum() > 0 for weight in whole if len(weight) != 4), "nothing was trained"
    return len(set(found)) == 1


def replicas(path: str, cases: str) -> dict[str, bool]:
    """layout, and what is broken in it -> whether replicas are equal after two steps; at last, whether a
    run with recomputed layers and the same dropout is the same."""
    from megatron_vlm.parallel import setup

    setup.init_distributed(ParallelConfig(tp=2), seed=1)
    case, found = saved_cases.read(cases), {}
    layouts = {"TP2": ParallelConfig(tp=2, sp=False), "TP2+SP": ParallelConfig(tp=2)}
    for name, layout in layouts.items():
        for adapter in (EVERYTHING, DROPPING):
            run = Run(config(path, layout, adapter))
            run.train(case, 2)
            found[f"{name}, dropout {adapter.lora_dropout}"] = replicas_equal(run)
    recomputed = config(path, layouts["TP2+SP"], DROPPING)
    recomputed.model.recompute = "full"
    run_again = Run(recomputed)
    run_again.train(case, 2)
    pairs = zip(run.chunks[0].adapters.parameters(), run_again.chunks[0].adapters.parameters(), strict=True)
    found["TP2+SP, recomputed"] = all(torch.allclose(*pair, atol=1e-5) for pair in pairs)
    for flag in ("sequence_parallel", "average_gradients_across_tp_domain"):
        run = Run(config(path, layouts["TP2+SP"], EVERYTHING))
        for chunk in run.chunks:
            for weight in chunk.adapters.parameters():
                if hasattr(weight, flag):
                    setattr(weight, flag, False)
        run.train(case, 2)
        found[f"TP2+SP without {flag}"] = replicas_equal(run)
    return found


def story(path: str, other: str, cases: str, root: str) -> dict[str, Any]:
    """Train, save, continue in this and in other layouts, export in three ways."""
    from megatron_vlm.config import ConfigError
    from megatron_vlm.models.adapters.files import save_adapters
    from megatron_vlm.models.adapters.model import merge
    from megatron_vlm.models.weights.exporting import export_hf
    from megatron_vlm.parallel import setup

    folder, case, found = Path(root), saved_cases.read(cases), {}
    tensor, stages = ParallelConfig(tp=2), ParallelConfig(pp=2)
    setup.init_distributed(tensor, seed=1)
    settings = config(path, tensor, DROPPING, folder / "run")
    whole = Run(settings)
    before, _ = whole.digests()
    found["losses"] = whole.train(case, HALF)
    whole.save(HALF)
    found["losses"] += whole.train(case, STEPS - HALF)
    found["base kept"] = whole.digests()[0] == before
    continued = Run(settings)
    found["continued losses"] = continued.train(case, STEPS - HALF)
    found["continued equal"] = continued.digests() == whole.digests()
    elsewhere = Run(config(path, stages, DROPPING, folder / "run"))
    found["step"] = elsewhere.state.step
    found["logits"] = elsewhere.logits(case)
    save_adapters(elsewhere.chunks, folder / "exported", DROPPING, path)
    for chunk in elsewhere.chunks:
        merge(chunk)
    export_hf(elsewhere.chunks, folder / "merged", path, elsewhere.source.weight_map)
    save_adapters(Run(settings).chunks, folder / "exported from TP2", DROPPING, path)
    virtual = Run(config(path, ParallelConfig(pp=2, vpp=2), DROPPING, folder / "run"))
    save_adapters(virtual.chunks, folder / "exported from PP2·VPP2", DROPPING, path)
    start = AdapterConfig(start=str(folder / "exported"))
    imported = Run(config(path, tensor, start, folder / "from exported"))
    found["imported logits"] = imported.logits(case)
    found["modules"] = modules_kept(path, case, folder)
    found["first stage"] = continues(config(path, stages, FIRST_STAGE, folder / "first stage"), case)
    few = Run(config(path, tensor, QUERY_AND_VALUE))
    few.train(case, 1)
    save_adapters(few.chunks, folder / "query and value", QUERY_AND_VALUE, path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))  # as if the disk were full
    try:
        save_adapters(few.chunks, folder / "too large", QUERY_AND_VALUE, path)
    except OSError as error:
        found["too large"] = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    beyond = few.micro_batches(case)[0]
    beyond["input_ids"][0, 1] = few.chunks[0].config.vocab_size
    try:
        few.chunks[0].layout(beyond)
    except ValueError as error:
        found["beyond"] = str(error)
    found["refusals"] = []
    for model, adapter in ((other, DROPPING), (path, AdapterConfig()), (path, QUERY_AND_VALUE)):
        try:
            Run(config(model, tensor, adapter, folder / "run"))
        except ConfigError as error:
            found["refusals"].append(str(error))
    return found


def modules_kept(path: str, case: dict, folder: Path) -> dict[str, Any]:
    """A run that trains modules whole next to adapters: exported, saved, continued in other layouts."""
    from megatron_vlm.models.adapters.files import save_adapters

    settings = config(path, ParallelConfig(tp=2), WITH_MODULES, folder / "run with modules")
    whole = Run(settings)
    whole.train(case, HALF)
    whole.save(HALF)
    save_adapters(whole.chunks, folder / "modules", WITH_MODULES, path)
    found = {"logits": whole.logits(case)}
    for chunk in whole.chunks:
        chunk.train()
    whole.train(case, 1)
    continued = Run(settings)
    continued.train(case, 1)
    found["continued equal"] = continued.digests() == whole.digests()
    elsewhere = Run(config(path, ParallelConfig(pp=2, vpp=2), WITH_MODULES, folder / "run with modules"))
    save_adapters(elsewhere.chunks, folder / "modules from PP2·VPP2", WITH_MODULES, path)
    start = AdapterConfig(start=str(folder / "modules"))
    imported = Run(config(path, ParallelConfig(pp=2), start, folder / "from modules"))
    save_adapters(imported.chunks, folder / "modules imported", WITH_MODULES, path)
    return found


def dora(path: str, cases: str, root: str) -> dict[str, Any]:
    """Logits before and after two steps, and what is written then."""
    from megatron_vlm.models.adapters.files import save_adapters
    from megatron_vlm.models.adapters.model import merge
    from megatron_vlm.models.weights.exporting import export_hf
    from megatron_vlm.parallel import setup

    setup.init_distributed(ParallelConfig(tp=2), seed=1)
    case = saved_cases.read(cases)
    run = Run(config(path, ParallelConfig(tp=2), DORA))
    found = {"start": run.logits(case)}
    run.train(case, 2)
    found |= {"replicas": replicas_equal(run), "trained": run.logits(case)}
    save_adapters(run.chunks, Path(root) / "dora", DORA, path)
    for chunk in run.chunks:
        merge(chunk)
    export_hf(run.chunks, Path(root) / "dora merged", path, run.source.weight_map)
    return found


def fused(path: str, cases: str, root: str) -> bool:
    """Train with TP2, save, go on with PP2, export from both; whether a continued run is bit-equal."""
    from megatron_vlm.models.adapters.files import save_adapters
    from megatron_vlm.parallel import setup

    folder, case = Path(root), saved_cases.read(cases)
    tensor, stages = ParallelConfig(tp=2), ParallelConfig(pp=2)
    setup.init_distributed(tensor, seed=1)
    settings = config(path, tensor, DORA, folder / "run")
    whole = Run(settings)
    whole.train(case, HALF)
    whole.save(HALF)
    save_adapters(whole.chunks, folder / "TP2", DORA, path)
    whole.train(case, 1)
    continued = Run(settings)
    continued.train(case, 1)
    elsewhere = Run(config(path, stages, DORA, folder / "run"))
    save_adapters(elsewhere.chunks, folder / "PP2", DORA, path)
    return continued.digests() == whole.digests()


def experts(path: str, cases: str, root: str) -> dict[str, Any]:
    """Train adapters of experts with EP2, save, continue, go on in other layouts, export in three ways."""
    from megatron_vlm.models.adapters.files import save_adapters
    from megatron_vlm.models.adapters.model import merge
    from megatron_vlm.models.weights.exporting import export_hf
    from megatron_vlm.parallel import setup

    folder, case, found = Path(root), saved_cases.read(cases), {}
    setup.init_distributed(ParallelConfig(ep=2), seed=1)
    settings = config(path, ParallelConfig(ep=2), EXPERTS, folder / "run")
    whole = Run(settings)
    before, _ = whole.digests()
    found["losses"] = whole.train(case, HALF)
    whole.save(HALF)
    save_adapters(whole.chunks, folder / "EP2", EXPERTS, path)
    whole.train(case, 1)
    found["base kept"] = whole.digests()[0] == before
    continued = Run(settings)
    continued.train(case, 1)
    found["continued equal"] = continued.digests() == whole.digests()
    for name, layout in {"TP2": ParallelConfig(tp=2), "PP2·VPP2": ParallelConfig(pp=2, vpp=2)}.items():
        elsewhere = Run(config(path, layout, EXPERTS, folder / "run"))
        save_adapters(elsewhere.chunks, folder / name, EXPERTS, path)
    found["down alone"] = continues(config(path, ParallelConfig(ep=2), DOWN_ALONE, folder / "down"), case)
    both = ParallelConfig(tp=2, ep=2)
    imported = Run(config(path, both, AdapterConfig(start=str(folder / "EP2")), folder / "from EP2"))
    found["logits"] = imported.logits(case)
    for chunk in imported.chunks:
        merge(chunk)
    export_hf(imported.chunks, folder / "merged", path, imported.source.weight_map)
    return found


def exported(path: str, root: str, adapter: bool) -> None:
    """What the command line's `export` does with the run of `story`, in one process."""
    from megatron_vlm.commands.runs import export_run

    name = "adapters by command" if adapter else "merged by command"
    run = config(path, ParallelConfig(), DROPPING, Path(root) / "run")
    export_run(run, Path(root) / name, adapter)


def damaged(path: str, sound: str, root: str) -> dict[str, str]:
    """What is said of a copy of the folder `sound` whose weights are spoilt in a way."""
    from megatron_vlm.config import ConfigError
    from megatron_vlm.parallel import setup

    setup.init_distributed(ParallelConfig(), seed=1)
    folder, name, found = Path(root), "adapter_model.safetensors", {}
    weights = load_file(Path(sound) / name)
    first = min(weights)
    changes = {
        "lacks": {key: value for key, value in weights.items() if key != first},
        "more": weights | {"base_model.foreign": torch.zeros(2)},
        "of another program": {f"module.{key}": value for key, value in weights.items()},
        "shape": weights | {first: torch.zeros(3, 3)},
        "nan": weights | {first: weights[first] * torch.nan},
        "fp8": weights | {first: weights[first].to(torch.float8_e4m3fn)},
    }
    for how in ("pickle", "cut", *changes):
        copy = folder / f"spoilt {how}"
        shutil.copytree(sound, copy)
        if how == "pickle":
            (copy / name).rename(copy / "adapter_model.bin")
        elif how == "cut":
            (copy / name).write_bytes((copy / name).read_bytes()[:40])
        else:
            save_file(changes[how], copy / name)
        try:
            Run(config(path, ParallelConfig(), AdapterConfig(start=str(copy)), folder / "spoilt"))
        except ConfigError as error:
            found[how] = str(error)
    return found
