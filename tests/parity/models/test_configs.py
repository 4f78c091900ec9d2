"""A config is read whole: whatever key of config.json changes, we equal Transformers or refuse it by name."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import config_fields
import odd_configs
import pytest
from config_changes import (
    ELSEWHERE,
    NOT_ALONE,
    SPELLINGS,
    WITHOUT_A_TRACE,
    T,
    V,
    changes_of,
    few_changes,
    keys_by_part,
    rows_of,
    without_effect,
)
from odd_configs import Cell
from parity import FAMILIES, IN_LAYOUTS, IN_LONG
from programs import OLDEST, OLDEST_VERSION, run_anew, run_program

from megatron_vlm.config import ParallelConfig
from megatron_vlm.models.families import describe
from megatron_vlm.models.family_parts.limits import ASKED_FOR, COMMON, PARTS, dotted
from megatron_vlm.models.hf import as_hf_config
from megatron_vlm.recipes.published import CONFIGS
from megatron_vlm.supported import SUPPORTED
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint
from tiny.distributed import run_distributed

OF_ENGINES = {"mamba_ssm_dtype", "output_gate_type"}  # of gated delta nets, in vLLM
VARIANTS = [(family, name) for family, parts in TINY_FAMILIES.items() for name in parts.variants]


class Checkpoints(dict[str, Path]):
    """A tiny one of each family and of its variants, each made when it is first asked for."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __missing__(self, name: str) -> Path:
        family, _, variant = name.partition(" ")
        sizes = TINY_FAMILIES[family].variants[variant] if variant else {}
        self[name] = build_tiny_checkpoint(family, self._folder / name, **sizes)
        config = self[name] / "config.json"
        config.write_text(json.dumps(as_published(json.loads(config.read_text()))))
        return self[name]


def as_published(config: dict[str, Any]) -> dict[str, Any]:
    """Gemma 4's config.json with the heads of full attention in two keys, as on the hub."""
    text = dict(config["text_config"])
    if layers := text.pop("per_layer_config", None):
        full = layers[str(text["layer_types"].index("full_attention"))]
        text["global_head_dim"] = full.get("head_dim", text["head_dim"])
        if "num_key_value_heads" in full:
            text["num_global_key_value_heads"] = full["num_key_value_heads"]
    return config | {"text_config": text}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


# ---- every field of the config classes --------------------------------------------------------------------


def fields(overlay: Path | None, folders: list[Path]) -> dict[str, Any]:
    paths = [str(overlay) if overlay else None, *sys.path]
    program = run_program if overlay is None else run_anew
    done = program(
        Path(config_fields.__file__),
        *folders,
        timeout=600,
        PYTHONPATH=os.pathsep.join(filter(None, paths)),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def versions(checkpoints) -> list[dict[str, Any]]:
    """What the newest and the oldest Transformers have and ask for."""
    names = [*TINY_FAMILIES, *(f"{family} {name}" for family, name in VARIANTS)]
    old = [name for name in names if not SUPPORTED[name.split()[0]].since]
    tried = ((None, names), (OLDEST, old))
    return [fields(overlay, [checkpoints[name] for name in names]) for overlay, names in tried]


def of_both_versions(test):
    """It takes the oldest supported version, and long."""
    missing = pytest.mark.skipif(not OLDEST.is_dir(), reason=f"no {OLDEST}; `make test-oldest` fetches it")
    return pytest.mark.soak(missing(test))


@of_both_versions
def test_every_field_is_read_without_effect_or_refused_by_name(versions):
    assert versions[1]["version"] == OLDEST_VERSION < versions[0]["version"]
    for version in versions:
        for family, found in version["families"].items():
            assert len(found["fields"][1]) > 20
            assert not found["unrefused"], (version["version"], family)


@of_both_versions
def test_whatever_transformers_asks_its_configs_for_is_declared(versions):
    undeclared = set()
    for version in versions:
        for family, found in version["families"].items():
            for name, asked, has, kept in zip(
                PARTS, found["asked"], found["fields"], found["kept"], strict=True
            ):
                assert len(asked) > 10
                missing = set(asked) - set(has) - set(kept)
                undeclared |= {(version["version"], family, name, key) for key in missing}
    assert not undeclared


@of_both_versions
def test_nothing_is_declared_that_no_version_has_or_asks_for(versions):
    """Nor a published config.json has, nor an inference engine reads."""
    found = [each for version in versions for each in version["families"].values()]
    published = [json.loads(file.read_text()) for file in CONFIGS.glob("*.json")]
    for number, name in enumerate(PARTS):
        known = {key for each in found for key in (*each["asked"][number], *each["fields"][number])}
        known.update(OF_ENGINES, *(config.get(name, {}) if name else config for config in published))
        assert COMMON[name].keys() <= known
        for family, entry in versions[0]["families"].items():
            assert {*entry["limits"][number]} <= known, family


# ---- every key changed ------------------------------------------------------------------------------------


# (checkpoint, which of the changes of its keys); of a variant those of the text model
TRIED = [pytest.param((family, "few"), id=family, marks=pytest.mark.long) for family in IN_LONG]
TRIED += [
    pytest.param((name, "all"), id=f"{name} all", marks=pytest.mark.soak)
    for name in [*TINY_FAMILIES, *(f"{family} {variant}" for family, variant in VARIANTS)]
]


@pytest.fixture(scope="module")
def few(checkpoints) -> Callable[[str], dict[str, list[dict]]]:
    """A function (family) -> key -> the changes of it that `make test-long` tries, if any."""

    @cache
    def of_all() -> dict[str, dict[str, list[dict]]]:
        return few_changes({family: config_of(checkpoints[family]) for family in IN_LAYOUTS})

    return lambda family: of_all()[family]


def config_of(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "config.json").read_text())


@pytest.fixture(scope="module", params=TRIED)
def tried(request, checkpoints, few, tmp_path_factory) -> tuple[dict, dict[str, dict]]:
    """(key -> its changes' names, name of a change -> what came of it) of a family."""
    checkpoint, which = request.param
    source, family = checkpoints[checkpoint], checkpoint.split()[0]
    config = config_of(source)
    changes = changes_of(family, config)
    if family != checkpoint:
        changes = {path: each for path, each in changes.items() if path.startswith(T)}
    at_once = few(family) if which == "few" else changes
    every = [change for each in at_once.values() for change in each] + ELSEWHERE
    every += SPELLINGS.get(family, []) if family == checkpoint else []
    cells = {cell.name: cell for cell in (Cell(change, rows_of(family, change)) for change in every)}
    nothing = without_effect(family, config)
    cells["nothing"] = Cell(nothing, rows_of(family, nothing), same_weights=True, name="nothing")
    of_keys = {
        path: [Cell(change, rows_of(family, change)) for change in changes[path]]
        for path in at_once
        if path not in NOT_ALONE
    }
    run = run_distributed(
        1,
        odd_configs.verdicts,
        str(source),
        str(tmp_path_factory.mktemp(family) / "work"),
        list(cells.values()),
        [ParallelConfig()],
        [(each, path in WITHOUT_A_TRACE) for path, each in of_keys.items()],
        timeout=3000,
    )[0]
    found = {row["name"]: row for row in run}
    names = {
        path: [name for change in changes[path] if (name := Cell(change).name) in found] for path in at_once
    }
    return names, found


def test_a_changed_key_is_refused_or_gives_what_transformers_gives(tried):
    _, found = tried
    assert len(found) > len(ELSEWHERE) + 5
    assert not (bad := wrong(found.values())), json.dumps(bad, indent=1)


def wrong(rows: Iterable[dict]) -> list[dict]:
    """Also what Transformers cannot run and we do not refuse, unless something must change with the key."""
    bad = [row for row in rows if row["verdict"] in ("wrong", "crash", "fails")]
    return [row for row in bad if row["verdict"] != "fails" or not NOT_ALONE & set(row["keys"])]


def test_every_read_key_is_seen_to_matter(tried):
    """A guard: at least one change of it is equal and moves Transformers' logits, or all are refused."""
    names, found = tried
    unseen = []
    for path, changes in names.items():
        rows = [found[name] for name in changes]
        shown = any(odd_configs.shows_a_key(row, path in WITHOUT_A_TRACE) for row in rows)
        refused = rows and all(row["verdict"] == "refused" for row in rows)
        if not (shown or refused or path in NOT_ALONE):
            unseen.append((path, rows))
    assert not unseen, json.dumps(unseen, indent=1)


def test_keys_without_effect_change_nothing(tried):
    _, found = tried
    assert found["nothing"]["verdict"] == "equal" and found["nothing"]["effect"] == 0, found["nothing"]


# ---- nulls, and keys that nobody reads --------------------------------------------------------------------

UNTRIED = {"model_type", "architectures", "id2label", "label2id"}  # Transformers itself takes these apart
NAMED_BY = {T + "head_dim": "mrope_section"}  # which fits the width of heads
IN_RULES = ("rope_type", "partial_rotary_factor", "original_max_position_embeddings", "factor")


def nulls_of(config: dict[str, Any], family: str) -> dict[str, None]:
    """A null for every key that the family reads, has, or that Transformers may ask for."""
    nulls = {}
    for name, keys in keys_by_part(family, config).items():
        values = config[name] if name else config
        tried = {*keys, *ASKED_FOR, *values} - {*PARTS, *UNTRIED}
        nulls |= {dotted(name, key): None for key in sorted(tried)}
        rule = values.get("rope_parameters") if name == "text_config" else None
        if rule:
            rules = {f"{kind}.": rule[kind] for kind in rule if isinstance(rule[kind], dict)} or {"": rule}
            keys_of_rules = [kind + key for kind in rules for key in (*rules[kind], *IN_RULES)]
            nulls |= {dotted(name, f"rope_parameters.{key}"): None for key in keys_of_rules}
    return nulls


def strays_of(hf_config: Any) -> dict[str, Any]:
    """Keys that the family's classes do not have: some that were once read, and names that no class has."""
    odd = {"": {"video_token_id": 5}, "vision_config": {"temporal_patch_size": 3}}
    odd["vision_config"]["deepstack_visual_indexes"] = [0, 1]
    strays = {dotted(name, "of_no_class"): [1, None] for name in PARTS}
    for name, changes in odd.items():
        part = getattr(hf_config, name) if name else hf_config
        known = {*vars(part), *part.attribute_map}
        strays |= {dotted(name, key): value for key, value in changes.items() if key not in known}
    return strays


def refused_or_accepted(
    config: dict, changes: dict[str, Any], family: str
) -> tuple[list[str], dict[str, Any]]:
    """The keys that are refused without their name, and the changes that are accepted, each tried alone."""
    unnamed = []
    accepted = {}
    for path, value in changes.items():
        try:
            describe(as_hf_config(odd_configs.changed(config, {path: value}), family))
        except ValueError as error:
            key = path.rpartition(".")[2]
            named = (key, NAMED_BY.get(path, key), "Transformers refuses its")
            if not any(name in str(error) for name in named):
                unnamed.append(path)
        else:
            accepted[path] = value
    return unnamed, accepted


@pytest.mark.long
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_nulls_and_stray_keys_are_refused_by_name_or_accepted(checkpoints, family):
    config = config_of(checkpoints[family])
    changes = nulls_of(config, family) | strays_of(as_hf_config(config, family))
    assert not refused_or_accepted(config, changes, family)[0]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_accepted_nulls_and_stray_keys_give_what_transformers_gives(checkpoints, family, tmp_path):
    config = config_of(checkpoints[family])
    _, nulls = refused_or_accepted(config, nulls_of(config, family), family)
    _, strays = refused_or_accepted(config, strays_of(as_hf_config(config, family)), family)
    read = {dotted(name, key) for name, keys in keys_by_part(family, config).items() for key in keys}
    cells = [
        Cell({path: None}, rows_of(family, {path: None}))
        for path in nulls
        if path in read or ".rope_parameters." in path
    ]
    cells.append(Cell(strays, rows_of(family, strays), same_weights=True, name="strays"))
    given = str(checkpoints[family]), str(tmp_path / "work"), cells, [ParallelConfig()]
    rows = run_distributed(1, odd_configs.verdicts, *given, timeout=3000)[0]
    assert not (bad := [row for row in rows if row["verdict"] != "equal"]), json.dumps(bad, indent=1)
    assert rows[-1]["effect"] == 0


# ---- refused before anything is built ---------------------------------------------------------------------

EXPERTS = {T + "first_k_dense_replace": None}, {T + "moe_intermediate_size": None}, {T + "v_head_dim": None}
NO_GROUPS = {T + "n_group": None, T + "topk_group": None}
UNUSABLE = [
    *(("kimi_k25", change) for change in (*EXPERTS, NO_GROUPS)),
    *(("mistral3 mistral4", change) for change in (*EXPERTS, NO_GROUPS)),
    *(
        (family, {"video_token_id": "image"})
        for family in ("qwen3_5", "qwen2_vl", "kimi_k25", "gemma4_unified")
    ),
    ("llava_onevision", {"video_token_index": "image"}),
    ("qwen3_5", {"video_token_id": None}),
    ("qwen3_vl", {V + "num_attention_heads": None}),
    *((family, {V + "num_heads": 7}) for family in ("qwen3_vl", "qwen2_vl", "qwen2_5_vl")),
    *((family, {V + "num_attention_heads": 7}) for family in ("internvl", "gemma3", "kimi_k25")),
    ("qwen3_vl", {V + "rope_parameters.rope_theta": None}),
    ("gemma4", {V + "output_proj_dims": None}),
    *((family, {T + "sliding_window": -5}) for family in ("gemma3", "gemma4", "mistral3")),
    *((family, {T + "rope_parameters.rope_theta": -1}) for family in ("qwen3_vl", "internvl")),
    ("llava_onevision", {T + "hidden_size": 10**12}),
]


@pytest.mark.parametrize(("checkpoint", "change"), UNUSABLE)
def test_values_of_which_no_model_can_be_built_are_refused_by_name(checkpoints, checkpoint, change):
    config = config_of(checkpoints[checkpoint])
    image = config.get("image_token_id", config.get("image_token_index"))
    change = {path: image if value == "image" else value for path, value in change.items()}
    with pytest.raises(ValueError, match=next(iter(change)).removeprefix(T).removeprefix(V)):
        describe(as_hf_config(odd_configs.changed(config, change), checkpoint))
