"""A config is read whole: whatever key of config.json changes, we equal Transformers or refuse it by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import odd_configs
import parity
import pytest
from odd_configs import REMOVED, Cell
from test_transformers_versions import OLDEST

from megatron_vlm.config import ParallelConfig
from megatron_vlm.models.families import load
from megatron_vlm.models.families.keys import ASKED_FOR, NAMES, NO_EFFECT
from megatron_vlm.testing.distributed import run_distributed
from megatron_vlm.testing.tiny import TINY_FAMILIES, build_tiny_checkpoint

T, V = "text_config.", "vision_config."
ROPE = T + "rope_parameters."


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """A tiny one of each family that every supported Transformers reads."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found = {family: build_tiny_checkpoint(family, folder / family) for family in TINY_FAMILIES}
    for family, path in found.items():
        config = path / "config.json"
        config.write_text(json.dumps(load(family).portable_config(json.loads(config.read_text()))))
    return found


# ---- every field of the config classes --------------------------------------------------------------------


def fields(overlay: Path | None, folders: list[Path]) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("config_fields.py")), *map(str, folders)]
    paths = [str(overlay) if overlay else None, *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def versions(checkpoints) -> list[dict[str, Any]]:
    """What the newest and the oldest Transformers have and ask for."""
    return [fields(overlay, list(checkpoints.values())) for overlay in (None, OLDEST)]


needs_oldest = pytest.mark.skipif(not OLDEST.is_dir(), reason=f"no {OLDEST}; `make setup` installs it")


@needs_oldest
def test_every_field_is_read_without_effect_or_refused_by_name(versions):
    assert versions[1]["version"] == "5.12.1" < versions[0]["version"]
    for version in versions:
        for family, found in version["families"].items():
            assert len(found["fields"][1]) > 20
            assert not found["unrefused"], (version["version"], family)


@needs_oldest
def test_whatever_transformers_asks_its_configs_for_is_declared(versions):
    for version in versions:
        for family, found in version["families"].items():
            for section, asked, has in zip(
                load(family).sections, found["asked"], found["fields"], strict=True
            ):
                assert len(asked) > 10
                undeclared = set(asked) - set(has) - section.known()
                assert not undeclared, (version["version"], family, section.model_types)


@needs_oldest
def test_nothing_is_declared_that_no_version_has_or_asks_for(versions):
    found = [each for version in versions for each in version["families"].values()]
    for number in range(len(NAMES)):
        known = {key for each in found for key in (*each["asked"][number], *each["fields"][number])}
        for family in TINY_FAMILIES:
            section = load(family).sections[number]
            assert section.known() <= known | {*NO_EFFECT, *ASKED_FOR, *NAMES}, family


# ---- every key changed ------------------------------------------------------------------------------------


def others(value: Any) -> list[Any]:
    """Other values of the kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, value + 1]
    if isinstance(value, float):
        return [2 * value or 0.5]
    if isinstance(value, str):
        return ["relu"]
    return [[7]] if value is None else [list(value)[:-1]]


# key -> changes of it with what must go with it
PARTNERS: dict[str, list[dict[str, Any]]] = {
    T + "hidden_size": [{T + "hidden_size": 96, V + "out_hidden_size": 96}],
    T + "rms_norm_eps": [{T + "rms_norm_eps": 0.1}],
    T + "num_attention_heads": [{T + "num_attention_heads": 8}],
    T + "num_key_value_heads": [{T + "num_key_value_heads": 1}, {T + "num_key_value_heads": 4}],
    T + "head_dim": [{T + "head_dim": 64}, {T + "head_dim": 16}],
    T + "num_hidden_layers": [{T + "num_hidden_layers": n, T + "layer_types": REMOVED} for n in (1, 3, 6)],
    T + "hidden_act": [{T + "hidden_act": name} for name in ("relu", "gelu", "prelu", "nothing")],
    T + "hidden_activation": [
        {T + "hidden_activation": name} for name in ("relu", "silu", "prelu", "nothing")
    ],
    T + "sliding_window": [{T + "sliding_window": 5}, {T + "sliding_window": None}],
    T + "pad_token_id": [{T + "pad_token_id": token} for token in (5, -1, None, 100000)],
    T + "layer_types": [{T + "layer_types": [f"{kind}_attention"] * 4} for kind in ("full", "sliding")],
    T + "text_config": [{T + "text_config": {"hidden_size": 7}}],
    T + "num_experts_per_tok": [{T + "num_experts_per_tok": n} for n in (1, 2, 5, 9)],
    T + "num_experts": [{T + "num_experts": n} for n in (0, 4)],
    T + "mlp_only_layers": [{T + "mlp_only_layers": [0, 2]}],
    T + "n_group": [{T + "n_group": n} for n in (1, 4, 8)],
    T + "topk_group": [{T + "topk_group": 2}],
    T + "n_shared_experts": [{T + "n_shared_experts": n} for n in (0, 2)],
    T + "first_k_dense_replace": [{T + "first_k_dense_replace": n} for n in (0, 4)],
    T + "num_local_experts": [{T + "num_local_experts": 4}],
    T + "output_router_logits": [{T + "output_router_logits": True, T + "router_aux_loss_coef": 0.0}],
    T + "rope_parameters": [],
    V + "hidden_size": [{V + "hidden_size": 96}],
    V + "num_heads": [{V + "num_heads": 2}],
    V + "num_attention_heads": [{V + "num_attention_heads": 1}],
    V + "depth": [{V + "depth": n} for n in (2, 3)],
    V + "num_hidden_layers": [{V + "num_hidden_layers": n} for n in (1, 3)],
    V + "head_dim": [{V + "head_dim": 12}, {V + "head_dim": 24}],
    V + "num_position_embeddings": [{V + "num_position_embeddings": 100}],
    V + "rope_parameters": [{V + "rope_parameters": {"rope_theta": 50.0}}],
    V + "deepstack_visual_indexes": [
        {V + "deepstack_visual_indexes": indexes}
        for indexes in ([], [1], [3, 0], [2, 2, 0], [0, 1, 9], [-1, 1])
    ],
    V + "window_size": [{V + "window_size": 28}],
    V + "layer_norm_eps": [{V + "layer_norm_eps": 0.1}],
    V + "rms_norm_eps": [{V + "rms_norm_eps": 0.1}],
    "vision_feature_layer": [{"vision_feature_layer": layer} for layer in ([-1], -2, [0], [-2, -1])],
    "mm_tokens_per_image": [{"mm_tokens_per_image": n} for n in (15, 64)],
    **{key: [{key: 500}] for key in ("image_token_id", "image_token_index", "video_token_id")},
    **{key: [{key: 501}] for key in ("video_start_token_id", "video_end_token_id")},
}
QWEN2_5 = {  # heads are as wide as hidden_size says, and M-RoPE's sections with them
    T + "hidden_size": [
        {T + "hidden_size": 96, V + "out_hidden_size": 96, ROPE + "mrope_section": [4, 4, 4]}
    ],
    T + "num_attention_heads": [{T + "num_attention_heads": 8, ROPE + "mrope_section": [1, 1, 2]}],
    T + "head_dim": [{T + "head_dim": 16}, {T + "head_dim": 32}],
}
GLM = {T + "head_dim": [{T + "head_dim": 64, ROPE + "mrope_section": [4, 6, 6]}, {T + "head_dim": 16}]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
RULES = [
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e4},
    *(
        YARN,
        YARN | {"attention_factor": 1.5, "truncate": False},
        LLAMA3,
        LLAMA3 | {"partial_rotary_factor": 0.5},
    ),
    {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.25},
]


def rope_changes(family: str, config: dict) -> list[dict[str, Any]]:
    rule = config["text_config"]["rope_parameters"]
    if family == "gemma3":
        return [{ROPE + "full_attention": rule} for rule in RULES] + [{ROPE + "sliding_attention": YARN}]
    own = {
        key: rule[key]
        for key in ("mrope_section", "llama_4_scaling_beta", "partial_rotary_factor")
        if key in rule
    }
    own |= {"original_max_position_embeddings": 64} if family == "mistral3" else {}
    whole = [{T + "rope_parameters": own | rule} for rule in RULES]
    missing = [{ROPE + key: REMOVED} for key in own if key in rule]
    mrope = [[3, 3, 2], [1, 1, 1], [24, 20, 20], [1, 1, 2, 2, 1, 1], [3, 3], [-1, 5, 4]]
    sections = [{ROPE + "mrope_section": each} for each in mrope] if "mrope_section" in rule else []
    return whole + missing + sections + [{ROPE + "mrope_interleaved": value} for value in (True, False)]


# Older spellings, other names, and keys that change another one
SPELLINGS: dict[str, list[dict[str, Any]]] = {
    "gemma3": [
        {T + "sliding_window_pattern": 2, T + "layer_types": REMOVED},
        {T + "hidden_act": "relu"},
        {T + "rope_parameters": REMOVED, T + "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {T + "rope_parameters": REMOVED, T + "rope_theta": 100.0, T + "rope_local_base_freq": 50.0},
    ],
    "mistral3": [{T + "layer_types": ["full_attention"] * 4}],
    "glm4v_moe": [{ROPE + "partial_rotary_factor": REMOVED, T + "partial_rotary_factor": 0.5}],
    "qwen2_5_vl": [
        {T + "rope_parameters": REMOVED, T + "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        {T + "use_sliding_window": True, T + "sliding_window": 5, T + "layer_types": REMOVED}
        | {T + "max_window_layers": 2},
        {T + "use_sliding_window": True, T + "sliding_window": 5}
        | {T + "layer_types": ["sliding_attention", "full_attention"] * 2},
        {T + "layer_types": ["sliding_attention"] * 4},
    ],
    "qwen3_vl": [
        {T + "rope_parameters": REMOVED},
        {T + "num_hidden_layers": 2, V + "deepstack_visual_indexes": [0, 1, 2, 3]},
        {V + "depth": REMOVED, V + "num_hidden_layers": 3},
    ],
    "qwen3_vl_moe": [
        {T + "num_experts": REMOVED, T + "num_local_experts": 4},
        {T + "sliding_window": 5},
        {T + "mlp_only_layers": [0, 1, 2, 3]},
    ],
}
ELSEWHERE = [  # no fields, but Transformers asks for them
    *({T + "is_causal": False}, {T + "per_layer_config": {"0": {"intermediate_size": 64}}}),
    *({"transformers_weights": "other.safetensors"}, {T + "decoder": {"hidden_size": 3}}),
    *({T + "mlp_layer_types": ["dense"] * 4}, {"output_attentions": True}, {V + "layer_types": ["conv"]}),
    *({T + "model_type": "llama"}, {T + "of_no_class": 3, "of_no_class": "x", V + "of_no_class": None}),
]


NOTHING = {  # key -> another value, of keys without effect; token ids are 9
    **{"architectures": ["Other"], "auto_map": {"AutoModel": "other.Model"}, "dtype": "bfloat16"},
    **{"transformers_version": "4.0.0", "id2label": {"0": "a", "1": "b", "2": "c"}, "num_labels": 3},
    **{"label2id": {"a": 0, "b": 1, "c": 2}, "problem_type": "multi_label_classification"},
    **{"output_hidden_states": True, "use_cache": False, "gradient_checkpointing": True},
    **{"initializer_range": 0.5, "initializer_factor": 3.0, "init_std": 0.5, "name_or_path": "other"},
    **{"vision_aspect_ratio": "pad", "vision_feature_select_strategy": "full"},
}


def without_effect(family: str) -> dict[str, Any]:
    """All keys of all sections that have no effect, changed."""
    return {
        (f"{name}." if name else "") + key: NOTHING.get(key, 9)
        for name, section in zip(NAMES, load(family).sections, strict=True)
        for key in (*NO_EFFECT, *section.no_effect)
    }


def rows_of(family: str, change: dict[str, Any]) -> tuple[str, ...]:
    takes_video = "pixel_values_videos" in load(family).visual_keys
    if load(family).images_or_videos and any(key.startswith("video_") for key in change):
        return ("vt",)
    return ("it", "vt") if takes_video and not load(family).images_or_videos else ("it", "t")


def changes_of(family: str, config: dict) -> dict[str, list[dict[str, Any]]]:
    """Key -> its changes."""
    partners = PARTNERS | {"qwen2_5_vl": QWEN2_5, "glm4v_moe": GLM}.get(family, {})
    found = {}
    for name, section in zip(NAMES, load(family).sections, strict=True):
        prefix = f"{name}." if name else ""
        values = config[name] if name else config
        for key in section.reads:
            path = prefix + key
            generic = [{path: value} for value in others(values.get(key))]
            if path in partners or key in values:
                found[path] = partners.get(path, generic)
    found[T + "rope_parameters"] = rope_changes(family, config)
    return {path: [_possible(change, config) for change in changes] for path, changes in found.items()}


def _possible(change: dict[str, Any], config: dict) -> dict[str, Any]:
    """Without removals and partners of what the config does not have."""
    return {
        path: value
        for path, value in change.items()
        if not (value == REMOVED or path == V + "out_hidden_size") or _has(config, path)
    }


def _has(config: dict, path: str) -> bool:
    *sections, key = path.split(".")
    for section in sections:
        config = config.get(section, {})
    return key in config


@pytest.fixture(scope="module", params=parity.FAMILIES)
def tried(request, checkpoints, tmp_path_factory) -> tuple[dict, dict[str, dict]]:
    """(key -> its changes' names, name of a change -> what came of it) of a family."""
    family, source = request.param, checkpoints[request.param]
    config = json.loads((source / "config.json").read_text())
    changes = changes_of(family, config)
    every = [change for each in changes.values() for change in each] + SPELLINGS[family] + ELSEWHERE
    cells = {cell.name: cell for cell in (Cell(change, rows_of(family, change)) for change in every)}
    nothing = without_effect(family)
    cells["nothing"] = Cell(nothing, rows_of(family, nothing), same_weights=True, name="nothing")
    work = str(tmp_path_factory.mktemp(family) / "work")
    run = run_distributed(
        1, odd_configs.verdicts, str(source), work, list(cells.values()), [ParallelConfig()], timeout=3000
    )[0]
    names = {path: [Cell(change).name for change in each] for path, each in changes.items()}
    return names, {row["name"]: row for row in run}


def test_a_changed_key_is_refused_or_gives_what_transformers_gives(tried):
    _, found = tried
    assert len(found) > 60
    bad = [row for row in found.values() if row["verdict"] in ("wrong", "crash")]
    assert not bad, json.dumps(bad, indent=1)


def test_keys_without_effect_change_nothing(tried):
    _, found = tried
    assert found["nothing"]["verdict"] == "equal" and found["nothing"]["effect"] == 0, found["nothing"]


# ---- under every layout -----------------------------------------------------------------------------------

CUT = [ParallelConfig(tp=2, sp=False), ParallelConfig(tp=2), ParallelConfig(pp=2)]
WINDOWS = SPELLINGS["qwen2_5_vl"][2]
BIASED = {T + "attention_bias": True}
LAYOUTS = {  # family -> changes and layouts
    "gemma3": ([BIASED | {T + "hidden_activation": "relu", T + "pad_token_id": "the"}], CUT),
    "qwen2_5_vl": ([WINDOWS], CUT),
    "qwen3_vl": ([BIASED | {T + "num_hidden_layers": 2, V + "deepstack_visual_indexes": [3, 0, 9, 1]}], CUT),
    "qwen3_vl_moe": ([BIASED | {T + "hidden_act": "relu"}, {T + "num_experts": 0}], CUT[1:]),
}


def in_layouts(sources: dict[str, str], work: str) -> dict[str, list[dict]]:
    from transformers import AutoTokenizer

    found = {}
    for family, (changes, layouts) in LAYOUTS.items():
        token = AutoTokenizer.from_pretrained(sources[family])(" the").input_ids[-1]
        cells = [
            Cell({key: token if value == "the" else value for key, value in change.items()}, ("it", "t"))
            for change in changes
        ]
        found[family] = odd_configs.verdicts(sources[family], f"{work}_{family}", cells, layouts)
    return found


def test_what_is_read_equals_transformers_in_every_layout(checkpoints, tmp_path):
    sources = {family: str(checkpoints[family]) for family in LAYOUTS}
    for family, rows in run_distributed(2, in_layouts, sources, str(tmp_path / "work"), timeout=900)[
        0
    ].items():
        assert len(rows) == len(LAYOUTS[family][0])
        for row in rows:
            assert row["verdict"] == "equal", (family, row)
