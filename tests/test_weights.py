"""Hugging Face weights in and out: bit-equal under every layout, complete, and loadable by Transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig
from megatron_vlm.models.families import load
from megatron_vlm.testing.distributed import run_distributed
from megatron_vlm.testing.tiny import TINY_FAMILIES, build_tiny_checkpoint

LAYOUTS = {"TP1": ParallelConfig(), "TP2": ParallelConfig(tp=2), "PP2": ParallelConfig(pp=2)}
LAYOUTS["PP2·VPP2"] = ParallelConfig(pp=2, vpp=2)
EXPERT_LAYOUTS = {"EP2": ParallelConfig(ep=2), "EP2·TP2": ParallelConfig(ep=2, tp=2)}
OTHER_FAMILIES = [family for family in TINY_FAMILIES if family != "gemma3"]
EXPERT_FAMILIES = [family for family in TINY_FAMILIES if load(family).has_experts]
# how checkpoints hold experts, apart from what Transformers writes
EXPERT_SOURCES = ["glm4v_moe fused", "glm4v_moe bf16", "qwen3_vl_moe turned"]
EXPERT_CELLS = [(layout, kind) for layout in EXPERT_LAYOUTS for kind in EXPERT_FAMILIES + EXPERT_SOURCES]


def round_trips(jobs: list[tuple[str, str, str]]) -> None:
    """(layout, source, output) one after the other: import, export."""
    from transformers import AutoConfig

    from megatron_vlm.models import weights
    from megatron_vlm.models.families import family_for
    from megatron_vlm.models.vlm import build_model
    from megatron_vlm.parallel import setup

    weights.SHARD_BYTES = 100_000  # several files from a tiny model
    setup.init_distributed(ParallelConfig(), seed=1)
    for name, source, output in jobs:
        layout = (LAYOUTS | EXPERT_LAYOUTS)[name]
        setup.reset_layout(layout, seed=1)
        hf_config = AutoConfig.from_pretrained(source)
        family = family_for(hf_config)
        run = RunConfig(parallel=layout, model=ModelConfig(dtype="bf16" if "bf16" in source else "fp32"))
        chunks = build_model(run, family, hf_config, setup.device())
        weights.import_hf(chunks, source, family, hf_config)
        weights.export_hf(chunks, output, source, family, hf_config)


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        part = load_file(file)
        assert not part.keys() & tensors.keys()
        tensors |= part
    return tensors


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints as they are found: fp32, bf16, hub tower names, untied output weights."""
    folder = tmp_path_factory.mktemp("sources")
    plain = build_tiny_checkpoint("gemma3", folder / "fp32")
    bf16 = build_tiny_checkpoint("gemma3", folder / "bf16", dtype=torch.bfloat16)

    hub = folder / "hub"
    shutil.copytree(plain, hub)
    tensors = load_file(plain / "model.safetensors")
    save_file(
        {k.replace("vision_tower.", "vision_tower.vision_model."): v for k, v in tensors.items()},
        hub / "model.safetensors",
        metadata={"format": "pt"},
    )

    untied = folder / "untied"
    shutil.copytree(plain, untied)
    config = json.loads((plain / "config.json").read_text())
    (untied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    embedding = tensors["language_model.model.embed_tokens.weight"]
    save_file(
        tensors | {"language_model.lm_head.weight": embedding.flip(0).contiguous()},
        untied / "model.safetensors",
        metadata={"format": "pt"},
    )
    others = {family: build_tiny_checkpoint(family, folder / family) for family in OTHER_FAMILIES}
    experts = dict(zip(EXPERT_SOURCES, expert_sources(folder, others), strict=True))
    return {"fp32": plain, "bf16": bf16, "hub": hub, "untied": untied, **others, **experts}


def expert_sources(folder: Path, plain: dict[str, Path]) -> list[Path]:
    """GLM's experts fused as in memory, GLM in bf16, and Qwen3-VL's experts turned as its hub files are."""
    fused = AutoModelForImageTextToText.from_pretrained(plain["glm4v_moe"])
    fused.save_pretrained(folder / "glm-fused", save_original_format=False)
    bf16 = build_tiny_checkpoint("glm4v_moe", folder / "glm-bf16", dtype=torch.bfloat16)
    turned = folder / "qwen-turned"
    shutil.copytree(plain["qwen3_vl_moe"], turned)
    tensors = load_file(turned / "model.safetensors")
    experts = {key: value.mT.contiguous() for key, value in tensors.items() if ".experts." in key}
    save_file(tensors | experts, turned / "model.safetensors", metadata={"format": "pt"})
    return [folder / "glm-fused", bf16, turned]


@pytest.fixture(scope="module")
def exports(sources, tmp_path_factory) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("exports")
    wanted = {(layout, "fp32"): 1 if layout == "TP1" else 2 for layout in LAYOUTS}
    wanted |= {("TP2", kind): 2 for kind in ("bf16", "hub", "untied")} | {("PP2", "untied"): 2}
    wanted |= {(layout, family): 2 for layout in ("TP2", "PP2") for family in OTHER_FAMILIES}
    wanted |= dict.fromkeys(EXPERT_CELLS, 2)
    for processes in (1, 2):
        keys = [key for key, count in wanted.items() if count == processes]
        jobs = [(layout, str(sources[kind]), str(folder / f"{layout}-{kind}")) for layout, kind in keys]
        run_distributed(processes, round_trips, jobs)
    return {(layout, kind): folder / f"{layout}-{kind}" for layout, kind in wanted}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_is_bit_equal(exports, sources, layout):
    check_equal(exports[layout, "fp32"], sources["fp32"])


@pytest.mark.parametrize("layout", ["TP2", "PP2"])
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_round_trip_of_every_family_is_bit_equal(exports, sources, family, layout):
    check_equal(exports[layout, family], sources[family])


@pytest.mark.parametrize(("layout", "kind"), EXPERT_CELLS)
def test_round_trip_of_experts_is_bit_equal(exports, sources, layout, kind):
    check_equal(exports[layout, kind], sources[kind])


def test_the_selection_bias_stays_fp32_in_a_bf16_checkpoint(exports):
    tensors = all_tensors(exports["EP2", "glm4v_moe bf16"])
    dtypes = {key.split(".")[-1]: value.dtype for key, value in tensors.items() if ".mlp.gate." in key}
    assert dtypes == {"weight": torch.bfloat16, "e_score_correction_bias": torch.float32}


@pytest.mark.parametrize(
    ("layout", "kind"), [("TP2", "bf16"), ("TP2", "hub"), ("TP2", "untied"), ("PP2", "untied")]
)
def test_round_trip_keeps_dtypes_and_names(exports, sources, layout, kind):
    check_equal(exports[layout, kind], sources[kind])


def check_equal(exported: Path, source: Path) -> None:
    mine, theirs = all_tensors(exported), all_tensors(source)
    assert mine.keys() == theirs.keys() and len(mine) > 50
    for key, tensor in theirs.items():
        assert mine[key].dtype == tensor.dtype and torch.equal(mine[key], tensor), key


def test_export_has_everything_but_weights_as_it_was(exports, sources):
    exported, source = exports["TP2", "fp32"], sources["fp32"]
    names = {file.name for file in source.iterdir()} - {"model.safetensors"}
    assert {"config.json", "tokenizer.json", "processor_config.json", "chat_template.jinja"} <= names
    for name in names:
        assert (exported / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize(
    ("layout", "kind"),
    [(layout, "fp32") for layout in LAYOUTS] + [("TP2", family) for family in OTHER_FAMILIES],
)
def test_transformers_loads_the_export_without_a_missing_key(exports, layout, kind):
    folder = exports[layout, kind]
    _, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    AutoProcessor.from_pretrained(folder)


def import_one(source: str) -> None:
    round_trips([("TP1", source, source + "-out")])


def broken(source: Path, target: Path, change) -> str:
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


NORM = "language_model.model.norm.weight"


def add_key(tensors):
    tensors["language_model.model.layers.0.extra.weight"] = torch.zeros(2)


def drop_key(tensors):
    del tensors[NORM]


def reshape_key(tensors):
    tensors[NORM] = torch.zeros(65)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            add_key,
            r"1 keys that gemma3 does not have, such as \['language_model.model.layers.0.extra.weight'\]",
        ),
        (drop_key, rf"lacks \['{NORM}'\], needed for .*final_layernorm.weight \(64,\)"),
        (reshape_key, rf"'{NORM}': \(65,\).* but .*final_layernorm.weight is \(64,\)"),
    ],
    ids=["extra", "missing", "shape"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_key(sources, tmp_path, change, message):
    with pytest.raises(RuntimeError, match=message):
        run_distributed(1, import_one, broken(sources["fp32"], tmp_path / "broken", change))
