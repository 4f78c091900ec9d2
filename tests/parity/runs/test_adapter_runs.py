"""Runs that train adapters: replicas stay equal, checkpoints hold adapters alone, peft reads the export."""

from __future__ import annotations

import json
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import adapter_parity
import parity
import pytest
import saved_cases
import torch
import torch.distributed as dist
from adapter_runs import Run, digest
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForImageTextToText, AutoProcessor

from megatron_vlm import adapter_settings
from megatron_vlm.adapter_settings import with_peft_settings
from megatron_vlm.config import AdapterConfig, ConfigError, ModelConfig, ParallelConfig, RunConfig
from megatron_vlm.models.adapters.files import _config_for_peft
from megatron_vlm.models.adapters.targets import find_targets, find_whole, hf_modules
from megatron_vlm.models.hf import open_source
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

# ---- in the ranks


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


def continues(run: RunConfig, case: dict) -> bool:
    """Whether a run that trains, saves and goes on is bit-equal to one that was not interrupted."""
    whole = Run(run)
    whole.train(case, 1)
    whole.save(1)
    whole.train(case, 1)
    continued = Run(run)
    continued.train(case, 1)
    return continued.digests() == whole.digests()


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


def train_and_look(path: str, other: str, cases: str, root: str) -> dict[str, Any]:
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


def export_checkpoint(path: str, root: str, adapter: bool) -> None:
    """What the command line's `export` does with the run of `train_and_look`, in one process."""
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
        "shape": weights | {first: torch.zeros(3, 3)},
        "nan": weights | {first: weights[first] * torch.nan},
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


# ---- the tests


FAMILY = "gemma3"


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """(checkpoint, file of a case, folder)"""
    folder = tmp_path_factory.mktemp("adapters")
    return *written_case(FAMILY, folder), folder


@pytest.fixture(scope="module")
def story(parts):
    """What both ranks found, and the folder with what they wrote."""
    path, case, folder = parts
    other = build_tiny_checkpoint(FAMILY, folder / "other", seed=5)
    found = run_distributed(2, train_and_look, *map(str, (path, other, case, folder)), timeout=400)
    return found, folder


@pytest.mark.long
def test_replicas_stay_bit_equal_and_a_missing_sum_is_seen(parts):
    path, case, _ = parts
    for found in run_distributed(2, replicas, str(path), str(case), timeout=400):
        assert found == {name: "without" not in name for name in found}
        assert len(found) == 7


@pytest.mark.long
def test_the_base_is_as_before_and_adapters_learn(story):
    for found in story[0]:
        assert found["base kept"]
        assert found["losses"][-1] < found["losses"][0] - 0.1


@pytest.mark.long
def test_a_continued_run_is_bit_equal(story):
    for found in story[0]:
        assert found["continued losses"] == found["losses"][HALF:]
        assert found["continued equal"]


@pytest.mark.long
def test_a_checkpoint_holds_adapters_and_their_moments_alone(story):
    [step] = (story[1] / "run/checkpoints").glob("step_*")
    entries = FileSystemReader(step).read_metadata().state_dict_metadata
    tensors = {key for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    exported = load_file(story[1] / "exported/adapter_model.safetensors")
    names = {key.removeprefix("base_model.model.").removesuffix(".weight") for key in exported}
    kinds = ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
    assert tensors >= {f"{kind}adapters.{name}" for kind in kinds for name in names}
    assert all(key.partition("adapters.")[2] in names for key in tensors)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["TP2", "PP2·VPP2"])
def test_another_layout_exports_the_same(story, layout):
    found, folder = story
    assert found[0]["step"] == HALF
    assert_equal_adapters(folder / "exported", folder / f"exported from {layout}")


def assert_equal_adapters(*folders):
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert one.keys() == other.keys() and one
    assert all(torch.equal(one[key], other[key]) for key in one)


def of_run(rows: list[torch.Tensor], case) -> torch.Tensor:
    """(tokens, V) of a run's logits of each row, without padding."""
    masks = [row["attention_mask"][0].bool() for row in case["rows"]]
    return torch.cat([logits[mask] for logits, mask in zip(rows, masks, strict=True)])


def of_model(model, case) -> torch.Tensor:
    """(tokens, V) of the logits of a model of Transformers or peft, without padding."""
    hf = {key: value for key, value in case["hf"].items() if key != "labels"}
    with torch.no_grad():
        logits = model.eval()(**hf, use_cache=False).logits
    return logits[case["batch"]["attention_mask"].bool()]


def loaded(path):
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)


@pytest.mark.long
def test_peft_loads_what_is_exported_and_it_is_what_the_run_computes(parts, story):
    found, folder = story
    case = saved_cases.read(parts[1])
    expected = of_run(found[1]["logits"], case)  # of the last stage
    base = of_model(loaded(parts[0]), case)
    assert (base - expected).abs().max() > 0.05, "the adapters change nothing"
    exported = of_model(PeftModel.from_pretrained(loaded(parts[0]), folder / "exported"), case)
    merged = of_model(loaded(folder / "merged"), case)
    for name, logits in {"peft": exported, "merged": merged}.items():
        assert (logits - expected).abs().max() < parity.MAX_ABS_LOGITS, name
    assert (of_run(found[0]["imported logits"], case) - expected).abs().max() < parity.MAX_ABS_LOGITS


@pytest.mark.long
def test_modules_trained_whole_are_written_as_peft_does_and_continue(parts, story):
    found, folder = story
    case = saved_cases.read(parts[1])
    assert all(rank["modules"]["continued equal"] for rank in found)
    assert_equal_adapters(folder / "modules", folder / "modules from PP2·VPP2")
    assert_equal_adapters(folder / "modules", folder / "modules imported")
    stored = load_file(folder / "modules/adapter_model.safetensors")
    trained = {key: value for key, value in stored.items() if "lora_" not in key}
    base = loaded(parts[0]).state_dict()
    assert {key.rpartition("language_model.")[2] for key in trained} >= {"norm.weight", *MLP}
    assert all(not torch.equal(value, base[key.removeprefix(PREFIX)]) for key, value in trained.items())
    expected = of_run(found[0]["modules"]["logits"], case)
    exported = of_model(PeftModel.from_pretrained(loaded(parts[0]), folder / "modules"), case)
    assert (exported - expected).abs().max() < parity.MAX_ABS_LOGITS


MLP = [f"layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
PREFIX = "base_model.model."


@pytest.mark.long
def test_dora_begins_as_the_base_and_peft_loads_what_it_became(parts):
    path, file, folder = parts
    case = saved_cases.read(file)
    found = run_distributed(2, dora, *map(str, (path, file, folder)), timeout=300)[0]
    base = of_model(loaded(path), case)
    assert found["replicas"]
    assert (of_run(found["start"], case) - base).abs().max() < parity.MAX_ABS_LOGITS
    expected = of_run(found["trained"], case)
    assert (expected - base).abs().max() > 0.05, "the adapters change nothing"
    exported = of_model(PeftModel.from_pretrained(loaded(path), folder / "dora"), case)
    merged = of_model(loaded(folder / "dora merged"), case)
    assert (exported - expected).abs().max() < parity.MAX_ABS_LOGITS
    assert (merged - expected).abs().max() < parity.MAX_ABS_LOGITS


def written_case(family: str, folder: Path) -> tuple[Path, Path]:
    """(checkpoint, file of a case) of a family, in `folder`."""
    path, file = build_tiny_checkpoint(family, folder / "checkpoint"), folder / "case.pt"
    source = open_source(path)
    parity.save_case(source, ["it", "t"], file)
    return path, file


@pytest.mark.long
def test_adapters_of_gate_and_up_in_one_tensor_are_the_same_in_another_layout(tmp_path):
    path, case = written_case("glm4v", tmp_path)
    assert all(run_distributed(2, fused, *map(str, (path, case, tmp_path)), timeout=400))
    assert_equal_adapters(tmp_path / "TP2", tmp_path / "PP2")
    written = load_file(tmp_path / "TP2/adapter_model.safetensors")
    of_B = [value for key, value in written.items() if "gate_up_proj.lora_B" in key]
    assert len(of_B) == 4 and all(value.abs().max() > 0 for value in of_B)


@pytest.fixture(scope="module")
def of_experts(tmp_path_factory):
    """(checkpoint, case, what ranks found, folder) of a run that trains adapters of experts."""
    folder = tmp_path_factory.mktemp("experts")
    path, case = written_case("qwen3_vl_moe", folder)
    found = run_distributed(2, experts, *map(str, (path, case, folder)), timeout=400)
    return path, saved_cases.read(case), found, folder


@pytest.mark.long
def test_adapters_of_experts_continue_bit_equal_and_leave_the_base(of_experts):
    for found in of_experts[2]:
        assert found["base kept"] and found["continued equal"] and found["down alone"]
        assert found["losses"][1] < found["losses"][0]


@pytest.mark.long
@pytest.mark.parametrize("layout", ["TP2", "PP2·VPP2"])
def test_adapters_of_experts_export_the_same_from_another_layout(of_experts, layout):
    assert_equal_adapters(of_experts[3] / "EP2", of_experts[3] / layout)


@pytest.mark.long
def test_peft_loads_adapters_of_experts(of_experts):
    path, case, found, folder = of_experts
    expected, base = of_run(found[0]["logits"], case), of_model(loaded(path), case)
    assert (base - expected).abs().max() > 0.05, "the adapters change nothing"
    stored = load_file(folder / "EP2/adapter_model.safetensors")
    assert {key.rpartition("experts.")[2] for key in stored if "experts." in key} == {
        f"{inside}lora_{matrix}.weight" for inside in ("", "base_layer.") for matrix in "AB"
    }
    exported = of_model(PeftModel.from_pretrained(loaded(path), folder / "EP2"), case)
    assert (exported - expected).abs().max() < parity.MAX_ABS_LOGITS
    assert (of_model(loaded(folder / "merged"), case) - expected).abs().max() < parity.MAX_ABS_LOGITS


@pytest.mark.long
@pytest.mark.parametrize("adapter", [True, False])
def test_the_command_exports_the_same_in_one_process(parts, story, adapter):
    run_distributed(1, export_checkpoint, str(parts[0]), str(story[1]), adapter)
    names = ("exported", "adapters by command") if adapter else ("merged", "merged by command")
    one, other = ({}, {})
    for tensors, name in zip((one, other), names, strict=True):
        for file in (story[1] / name).glob("*.safetensors"):  # each pipeline stage wrote one
            tensors |= load_file(file)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    AutoProcessor.from_pretrained(story[1] / names[1])
    assert ("library_name: peft" in (story[1] / names[1] / "README.md").read_text()) == adapter


@pytest.mark.long
def test_a_checkpoint_of_another_base_or_of_other_adapters_is_refused_by_name(story):
    for found in story[0]:
        base, none, other = found["refusals"]
        assert "holds adapters of a base model with fingerprint" in base
        assert "holds adapters, and this run trains whole weights" in none
        assert "holds adapters of other modules, ranks or scales; set adapter.* as it was" in other


# ---- folders of strangers, and names that fit nothing ------------------------------------------------------


@pytest.fixture(scope="module")
def source(parts):
    return open_source(parts[0])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target_modules": ["q_porj"]}, r"q_porj fits no module of the model; did you mean q_proj\?"),
        ({"target_modules": ["lm_head"]}, "lm_head is the output layer"),
        ({"alpha_pattern": {"proj": 8}}, "alpha_pattern: proj fits no module"),
        ({"modules_to_save": ["lm_head"]}, "lm_head.weight is both embedding and output layer of this model"),
        (
            {"target_parameters": ["q_proj.weight"]},
            "q_proj.weight is .* and holds no routed experts; .*_modules",
        ),
    ],
)
def test_a_name_that_fits_nothing_is_refused_with_what_was_meant(source, settings, said):
    with pytest.raises(ConfigError, match=said):
        named = AdapterConfig(**{"r": 4} | settings), source.description
        find_targets(*named), find_whole(*named)


SLOW = r"(?:.|\w|l)*[XZ]"  # each name is tried in more ways than there is time


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": SLOW},
        {"rank_pattern": {SLOW: 8}},
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": [SLOW]},
    ],
)
def test_a_pattern_that_never_ends_is_refused_by_name(source, monkeypatch, settings):
    monkeypatch.setattr(adapter_settings, "SECONDS", 0.1)
    began = time.process_time()
    with pytest.raises(
        ConfigError, match=r"the pattern .*\(\?:\.\|.* was not done with .* after 0.1 s; write it"
    ):
        find_targets(AdapterConfig(r=4, **settings), source.description)
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    "settings",
    [
        {"layers_to_transform": [1], "target_modules": ["q_proj", "fc1"]},
        {"layers_to_transform": 0, "target_modules": ["q_proj"], "lora_alpha": 0.5},
        {
            "layers_to_transform": [0, 2],
            "layers_pattern": "language_model.layers",
            "target_modules": ["v_proj"],
        },
        {
            "layers_to_transform": [1],
            "layers_pattern": ["h", r"enc\w+\.layers"],
            "target_modules": ["v_proj"],
        },
    ],
)
def test_layers_to_transform_are_those_of_peft(source, parts, tmp_path, settings):
    """So are scales that are no whole numbers; and peft reads what is written of them."""
    theirs = adapter_parity.peft_model(parts[0], {"r": 4} | settings)
    theirs.save_pretrained(tmp_path)
    adapter = with_peft_settings(AdapterConfig(start=str(tmp_path)))
    ours = find_targets(adapter, source.description)
    found = {n: m for n, m in theirs.named_modules() if hasattr(m, "lora_A")}
    assert found.keys() == {f"base_model.model.{target.module}" for target in ours}
    assert 0 < len(ours) < 12
    assert {m.scaling["default"] for m in found.values()} == {target.scale for target in ours}
    written = LoraConfig(**_config_for_peft(adapter, [], "base"))
    names = hf_modules(source.description.hf_config)
    again = [name for name in names if check_target_module_exists(written, name)]
    assert again == [target.module for target in ours]


def test_no_name_means_the_language_model_and_a_list_means_ends_of_names_as_in_peft(source):
    def modules(**settings):
        targets = find_targets(AdapterConfig(r=4, **settings), source.description)
        return {target.module for target in targets}

    language = {name for name in modules(target_modules="all-linear") if "language_model" in name}
    assert modules() == language and len(language) == 7 * source.description.text.num_hidden_layers
    both = modules(target_modules=["q_proj"])
    assert any("vision_tower" in name for name in both) and any("language_model" in name for name in both)
    assert modules(target_modules=["q_proj"], exclude_modules=r".*vision_tower.*") == both & language
    assert modules(target_modules=["q_proj"], exclude_modules=["lm_head", "fc1"]) == both


SOUND = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_dora": False}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "IA3"}, "describes peft_type 'IA3'; only LoRA"),
        ({"use_dora": True, "target_parameters": ["x"]}, "use_dora: True with target_parameters: peft has"),
        (
            {"layers_to_transform": [1], "target_modules": ".*q_proj"},
            r"layers_to_transform: \[1\] with the re",
        ),
        ({"target_modules": "(" * 5000}, r"\(\(.* is no regular expression \(maximum recursion"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa changed the base weights"),
        ({"r": 0}, "r 0 is no rank; give the folder of another adapter.$"),
    ],
)
def test_a_folder_of_another_kind_of_adapter_is_refused_with_the_reason(tmp_path, change, said):
    (tmp_path / "adapter_config.json").write_text(json.dumps(SOUND | change))
    with pytest.raises(ConfigError, match=f"adapter_config.json.*{said}"):
        with_peft_settings(AdapterConfig(start=str(tmp_path)))
    (tmp_path / "adapter_config.json").write_text(json.dumps(SOUND))
    assert with_peft_settings(AdapterConfig(start=str(tmp_path))).r == 4


@pytest.mark.long
def test_a_damaged_or_foreign_file_of_weights_is_refused_by_name(parts, story):
    path, _, folder = parts
    [said] = run_distributed(1, damaged, str(path), str(story[1] / "exported"), str(folder))
    assert "has no adapter_model.safetensors; save the adapter as safetensors" in said["pickle"]
    assert "is no whole safetensors file" in said["cut"]
    assert "lacks 1 tensors, such as base_model" in said["lacks"]
    assert "has, and the model does not, 1 tensors, such as base_model.foreign" in said["more"]
    assert "and must be floats of shape [4," in said["shape"]
    assert "holds values that are not finite" in said["nan"]
