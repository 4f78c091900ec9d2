"""Every setting that is a number has a range, is finite, and is refused by name outside of it."""

from __future__ import annotations

import warnings
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from megatron_vlm.config import MOST, ConfigError, RunConfig, all_settings, setting_types
from megatron_vlm.overrides import apply_overrides, from_yaml, to_yaml
from megatron_vlm.validate import check_gpus, validate

GOOD = {"run_dir": "run", "model.hf_path": "checkpoint", "data.train_data_path": "data"}


def bare(hint: Any) -> list[Any]:
    """The types in a hint that are there without a rule; the keys of mappings need none."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is None:
        return [hint]
    if kind is Literal or (kind is Annotated and get_origin(inner[0]) is None):
        return []
    if kind in (Annotated, dict):
        inner = inner[:1] if kind is Annotated else inner[1:]
    return [each for one in inner for each in bare(one)]


CHOICES = [key for key, hint in setting_types().items() if get_origin(hint) is Literal]


def test_every_setting_has_a_rule_unless_it_is_a_switch():
    """A new setting without a rule fails here."""
    without = {key for key, hint in setting_types().items() if set(bare(hint)) - {bool, type(None)}}
    anything = {"data.chat_template_kwargs", "data.image_processor_kwargs"}  # as other programs take it
    assert without - anything == {"train.objective"}  # its rule is the registry, `objectives.OBJECTIVES`
    assert len(CHOICES) == 11
    validate(apply_overrides(RunConfig(), GOOD))


@pytest.mark.parametrize("value", [-1, MOST + 1, True])
def test_a_rule_holds_for_a_configuration_that_was_written_in_python(value):
    config = apply_overrides(RunConfig(), GOOD)
    config.train.seed = value
    with pytest.raises(ConfigError, match=f"^train.seed: {value}"):
        validate(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(key, "maybe") for key, value in all_settings(RunConfig()).items() if isinstance(value, bool)],
        *[("model.freeze", "[towers]")],
        *[("data.columns", "{images: [a]}"), ("data.datasets", "[[a]]"), ("data.datasets", "[a]")],
        *[("adapter.target_modules", value) for value in ("[]", "[[a]]", "(", "")],
        *[("adapter.exclude_modules", value) for value in ("[]", "*")],
        *[("adapter.alpha_pattern", "{q_proj: 0}"), ("adapter.r", "2.5")],
    ],
)
def test_a_value_that_no_run_can_use_is_refused_by_name(key, value):
    with pytest.raises(ConfigError, match=f"^{key}"):
        validate(apply_overrides(RunConfig(), GOOD | {key: value}))


ADAPTER = GOOD | {"adapter.r": "16"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (GOOD | {"adapter.lora_alpha": "32"}, "adapter.lora_alpha: is set, and adapter.r is 0"),
        (ADAPTER | {"adapter.start": "folder"}, "adapter.r: is settled by the folder of adapter.start"),
        (ADAPTER | {"model.freeze": "[tower]"}, "whose model is frozen as a whole"),
        (ADAPTER | {"model.load_weights": "false"}, "leaves nothing that adapters could adapt"),
    ],
)
def test_settings_that_do_not_go_with_adapters_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        validate(apply_overrides(RunConfig(), settings))


def test_modules_of_adapters_are_a_regex_or_a_list_and_come_back_from_yaml():
    for text, value in {
        "[q_proj,v_proj]": ["q_proj", "v_proj"],
        r".*\.q_proj": r".*\.q_proj",
        "null": None,
    }.items():
        config = apply_overrides(RunConfig(), ADAPTER | {"adapter.target_modules": text})
        validate(config)
        assert from_yaml(to_yaml(config)).adapter.target_modules == value
    config = apply_overrides(RunConfig(), [r"adapter.rank_pattern.layers\.0\.q_proj=8", "adapter.r=16"])
    assert config.adapter.rank_pattern == {r"layers\.0\.q_proj": 8}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = apply_overrides(config, {"adapter.rank_pattern.o_proj": "4"})
    assert again.adapter.rank_pattern["o_proj"] == 4


def test_a_process_without_a_gpu_of_its_own_is_refused_where_there_are_any():
    check_gpus(8, 8)
    check_gpus(8, 0)
    with pytest.raises(
        ConfigError, match=r"--nproc: 8 processes need a GPU each, .* shows 4; start at most 4"
    ):
        check_gpus(8, 4)


def test_metrics_of_scores_need_scores_and_rewards_have_a_direction():
    config = apply_overrides(RunConfig(), {**GOOD, "train.score_metric": "anls"})
    with pytest.raises(ConfigError, match="train.score_metric: nothing is scored; set train.score_every, or"):
        validate(config)
    validate(apply_overrides(config, {"train.score_every": 5}))
    validate(apply_overrides(RunConfig(), {**GOOD, "train.best_by": "valid_reward"}))
