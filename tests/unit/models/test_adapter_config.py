"""A stranger's adapter_config.json is read as peft reads it, or refused by file and key, whatever it says."""

import json

import pytest

from megatron_vlm.adapter_settings import READ, WITHOUT_EFFECT, with_peft_settings
from megatron_vlm.config import AdapterConfig, ConfigError

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
        wanted = getattr(AdapterConfig(), key) if value in (None, "", [], {}) else value
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
