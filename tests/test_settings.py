"""Every setting that is a number has a range, is finite, and is refused by name outside of it."""

from __future__ import annotations

import warnings
from dataclasses import fields, is_dataclass
from math import inf, nan

import pytest

from megatron_vlm.checks.layout import check_gpus
from megatron_vlm.checks.settings import _NAMES, CHOICES, EVERY, LEAST, MOST, validate
from megatron_vlm.config import ConfigError, RunConfig, all_settings
from megatron_vlm.overrides import apply_overrides, from_yaml, to_yaml

GOOD = {"run_dir": "run", "model.hf_path": "checkpoint", "data.train_data_path": "data"}
NOT_ABOVE_ONE = ("data.max_drop_share", "data.visual_share", "optimizer.beta1", "optimizer.beta2")
NOT_ABOVE_ONE += ("data.validation_share",)
NOT_ABOVE_ONE += ("adapter.lora_dropout",)


def numbers(config: object = RunConfig(), prefix: str = "") -> dict[str, type]:
    found = {}
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value):
            found |= numbers(value, f"{each.name}.")
        elif each.type.split(" ")[0] in ("int", "float"):
            found[prefix + each.name] = int if each.type.startswith("int") else float
    return found


def said(key: str, value: float) -> str:
    with pytest.raises(ConfigError) as refused:
        validate(apply_overrides(RunConfig(), GOOD | {key: str(value)}))
    return "\n".join(line for line in str(refused.value).splitlines() if line.startswith(f"{key}: "))


def test_every_number_has_a_range():
    assert LEAST.keys() == numbers().keys()
    validate(apply_overrides(RunConfig(), GOOD))


@pytest.mark.parametrize("key", numbers())
def test_a_number_out_of_range_is_refused_by_name(key):
    assert f"is less than {LEAST[key]}" in said(key, LEAST[key] - 1)
    if numbers()[key] is int:
        assert f"is more than {MOST}" in said(key, MOST + 1)
    else:
        for value in (nan, inf, -inf):
            assert "is not a finite number" in said(key, value)
    if key in NOT_ABOVE_ONE:
        assert "is not " in said(key, 1.5)


@pytest.mark.parametrize("key", ["name", "run_dir", "model.hf_path", "data.media_dir", "data.lengths_cache"])
def test_an_empty_name_is_refused_and_is_not_the_folder_one_stands_in(key):
    with pytest.raises(ConfigError, match=f"{key}: is empty; give a name"):
        validate(apply_overrides(RunConfig(), GOOD | {"data.dataset_type": "hf", key: ""}))


NAMES = ("data.train_data_path", "data.valid_data_path", "logging.wandb_project", *_NAMES)
LISTS = ("model.freeze", "data.columns", "data.datasets")  # each has rules of its own
LISTS += ("optimizer.lr_by_part", "optimizer.weight_decay_by_part")
LISTS += ("adapter.target_parameters", "adapter.modules_to_save")
LISTS += tuple(f"adapter.{n}" for n in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"))
LISTS += ("adapter.layers_to_transform", "adapter.layers_pattern")


def test_every_other_setting_is_a_switch_a_choice_a_name_or_a_list():
    """A new setting without a rule fails here."""
    others = {key: value for key, value in all_settings(RunConfig()) if key not in numbers()}
    switches = [key for key, value in others.items() if isinstance(value, bool)]
    optional = ["parallel.sp", "parallel.vision_dp"]  # switches that may be left to the layout
    known = [*switches, *optional, *CHOICES, *NAMES, *LISTS, *EVERY]
    assert sorted(known) == sorted(others)


@pytest.mark.parametrize("key", EVERY)
def test_what_is_counted_in_steps_or_epochs_has_a_range_and_no_other_words(key):
    for value in (-1, MOST + 1):
        assert f"{value} is neither a number of steps from 0 to {MOST} nor epoch" in said(key, value)
    validate(apply_overrides(RunConfig(), GOOD | {key: "epoch"}))


@pytest.mark.parametrize("key", CHOICES)
def test_a_choice_that_does_not_exist_is_refused(key):
    with pytest.raises(ConfigError, match=f"{key}: nonsense does not exist; "):
        validate(apply_overrides(RunConfig(), GOOD | {key: "nonsense"}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(key, "maybe") for key, value in all_settings(RunConfig()) if isinstance(value, bool)],
        *[("parallel.sp", "maybe"), ("parallel.vision_dp", "2.5")],
        *[("model.freeze", "[towers]")],
        *[("data.columns", "{images: [a]}"), ("data.datasets", "[[a]]"), ("data.datasets", "[a]")],
        *[("data.train_data_path", "[]"), ("data.valid_data_path", "[null]")],
        *[("adapter.target_modules", value) for value in ("[]", "[[a]]", "[1]", "(", "")],
        *[("adapter.exclude_modules", value) for value in ("[]", "*")],
        *[("adapter.rank_pattern", value) for value in ("{q_proj: 0}", "{q_proj: a}", "{(: 8}")],
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
        (ADAPTER | {"adapter.lora_alpha": "0"}, "adapter.lora_alpha: 0 makes adapters that change nothing"),
        (ADAPTER | {"model.freeze": "[tower]"}, "whose model is frozen as a whole"),
        (ADAPTER | {"model.load_weights": "false"}, "leaves nothing that adapters could adapt"),
    ],
)
def test_settings_that_do_not_go_with_adapters_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        validate(apply_overrides(RunConfig(), settings))


def test_the_best_of_one_checkpoint_is_refused():
    with pytest.raises(ConfigError, match="train.keep_best: with train.save_every=0 only the end is saved"):
        validate(apply_overrides(RunConfig(), GOOD | {"train.keep_best": "true"}))
    validate(apply_overrides(RunConfig(), GOOD | {"train.keep_best": "true", "train.save_every": "epoch"}))


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


def test_limits_of_pixels_that_no_image_meets_are_refused():
    with pytest.raises(ConfigError, match="data.min_pixels: 10 is over data.max_pixels 9; lower it"):
        validate(apply_overrides(RunConfig(), GOOD | {"data.min_pixels": "10", "data.max_pixels": "9"}))


def test_a_core_attention_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="model.attention: flash does not exist; known are auto"):
        validate(apply_overrides(RunConfig(), GOOD | {"model.attention": "flash"}))


def test_a_process_without_a_gpu_of_its_own_is_refused_where_there_are_any():
    check_gpus(8, 8)
    check_gpus(8, 0)
    with pytest.raises(
        ConfigError, match=r"--nproc: 8 processes need a GPU each, .* shows 4; start at most 4"
    ):
        check_gpus(8, 4)


def test_nproc_is_compared_with_the_gpus_before_any_process_starts():
    from megatron_vlm.commands.program import torchrun

    with pytest.raises(ConfigError, match="--nproc: 3 processes"):
        torchrun(3, ["--never-started"], gpus=2)
