"""A stranger's adapter_config.json is read as peft reads it, or refused by file and key, whatever it says."""

import json

import pytest
from peft import LoraConfig

from megatron_vlm.adapter_settings import READ, WITHOUT_EFFECT, adapter_problems, with_peft_settings
from megatron_vlm.config import AdapterConfig, ConfigError, RunConfig
from megatron_vlm.run_folder import begin, complete, with_own_start

SOUND = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
OTHERS = ["bias", "init_lora_weights", "megatron_config", "use_qalora", "something_new"]
VALUES = [
    *(None, True, False, -1, 0, 4, 0.5, 10.0**30, float("nan")),
    *("", "a", "1", "true", "null", "[qk]_proj", "${oc.env:HOME}", "x" * 200_000),
    *([], ["a"], [1], [None], [[1]], {}, {"a": 1}, {"a": {"b": [1]}}),
]


def read_or_refused(folder, key, value):
    """The adapter with this value, or None if it is refused by file and key."""
    (folder / "adapter_config.json").write_text(json.dumps(SOUND | {key: value}))
    try:
        return with_peft_settings(AdapterConfig(start=str(folder)))
    except ConfigError as error:
        last = str(error).splitlines()[-1]
        assert "adapter_config.json" in last and key in last, (key, value, last)
        return None


@pytest.mark.parametrize("key", READ)
def test_a_value_is_read_as_it_stands_or_refused_by_file_and_key(tmp_path, key):
    read = 0
    for value in VALUES:
        adapter = read_or_refused(tmp_path, key, value)
        if adapter is None:
            continue
        read += 1
        default = LoraConfig().lora_alpha if key == "lora_alpha" else getattr(AdapterConfig(), key)
        wanted = default if value in (None, "", [], {}) else value
        as_list = key == "layers_to_transform" and type(value) is int
        assert getattr(adapter, key) == ([value] if as_list else wanted)
    assert 0 < read < len(VALUES) - 3


@pytest.mark.parametrize("key", ["peft_type", *OTHERS])
def test_what_is_not_read_is_refused_by_file_and_key_where_it_has_an_effect(tmp_path, key):
    refused = [read_or_refused(tmp_path, key, value) is None for value in VALUES]
    assert sum(refused) > len(VALUES) // 2


def test_of_several_wrong_values_each_is_named_with_the_file(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(SOUND | {"lora_alpha": 0, "lora_dropout": 2}))
    with pytest.raises(ConfigError) as raised:
        with_peft_settings(AdapterConfig(start=str(tmp_path)))
    lines = str(raised.value).splitlines()
    assert len(lines) == 2 and all("adapter_config.json: adapter.lora_" in line for line in lines)


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_what_has_no_effect_is_never_refused(tmp_path, key):
    plain = read_or_refused(tmp_path, key, None)
    assert all(read_or_refused(tmp_path, key, value) == plain for value in VALUES)


def test_lora_alpha_follows_r_unless_it_is_set():
    assert (AdapterConfig(r=16).alpha, AdapterConfig(r=16, lora_alpha=8.0).alpha) == (32.0, 8.0)


@pytest.mark.parametrize("settings", [{"r": 0}, {"start": "folder"}])
def test_a_configuration_of_an_earlier_version_with_pefts_default_is_valid(settings):
    run = RunConfig(adapter=AdapterConfig(lora_alpha=8.0, **settings))
    assert list(adapter_problems(run)) == []
    run.adapter.lora_alpha = 9.0
    assert any("lora_alpha" in problem for problem in adapter_problems(run))


def test_a_resumed_run_keeps_the_lora_alpha_that_it_began_with(tmp_path):
    run = RunConfig(run_dir=str(tmp_path), adapter=AdapterConfig(r=16))
    (tmp_path / "config.yaml").write_text("adapter: {r: 16, lora_alpha: 8.0}")
    assert with_own_start(run).adapter.alpha == 32  # nothing was trained yet
    complete(begin(tmp_path, 3), {})
    assert with_own_start(run).adapter.alpha == 8
    run.adapter.lora_alpha = 64.0
    assert with_own_start(run).adapter.alpha == 64
