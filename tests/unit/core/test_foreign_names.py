"""Names of other tools: which are accepted, and what the message about the others says."""

import logging
from dataclasses import fields

import pytest

from megatron_vlm import overrides
from megatron_vlm.config import ConfigError, setting_types
from megatron_vlm.overrides import foreign_names, from_yaml
from megatron_vlm.recipes import RECIPES, compose, load_recipe
from megatron_vlm.recipes.published import RATES, USUAL

EXACT = {name: setting for name, (setting, _, difference) in foreign_names().items() if not difference}
# Megatron-Bridge's own, beside the settings of Megatron-LM that it takes over
OF_BRIDGE = {"freeze_vision_model", "freeze_vision_projection", "freeze_language_model", "peft"}
OF_BRIDGE |= {"target_modules"}


def message(*settings: str) -> str:
    with pytest.raises(ConfigError) as raised:
        compose("gemma3_vl_4b", settings=settings)
    return str(raised.value)


def test_every_name_leads_to_a_setting_or_says_why_none():
    for name, (setting, _, difference) in foreign_names().items():
        known = setting is None or any(f"{setting}.".startswith(f"{key}.") for key in setting_types())
        assert known and (setting or difference), name


def test_names_are_those_of_the_installed_libraries():
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig
    from megatron.training import config as megatron_config
    from peft import LoraConfig
    from transformers import TrainingArguments
    from trl import DPOConfig, GRPOConfig, ModelConfig, ScriptArguments, SFTConfig

    of_hf = (TrainingArguments, SFTConfig, DPOConfig, GRPOConfig, ModelConfig, ScriptArguments, LoraConfig)
    of_megatron = [OptimizerConfig, TransformerConfig]
    of_megatron += [kind for name, kind in vars(megatron_config).items() if name.endswith("Config")]
    names = {
        "hf": {field.name for kind in of_hf for field in fields(kind)} | {"reward_funcs"},
        "bridge": {field.name for kind in of_megatron for field in fields(kind)} | OF_BRIDGE,
    }
    for tool, known in names.items():
        assert [name for name, row in foreign_names().items() if tool in row[1] and name not in known] == []


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_name_sets_ours_in_every_place(name):
    for value in ("2", "0.5", "[1]", "linear", "true"):  # one of them fits the type
        try:
            expected = compose("gemma3_vl_4b", settings=[f"{EXACT[name]}={value}"])
            break
        except ConfigError:
            pass
    assert compose("gemma3_vl_4b", settings=[f"{name}={value}"]) == expected
    assert compose("gemma3_vl_4b", settings=[f"trainer.{name}={value}"]) == expected
    assert load_recipe("gemma3_vl_4b")(**{name: value}) == expected


def test_a_name_is_said_once(caplog):
    overrides._log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for recipe in RECIPES.values():
            recipe()
        for _ in range(2):
            compose("gemma3_vl_4b", settings=["others.adam_eps=1e-7"])
    assert [record.message for record in caplog.records] == ["others.adam_eps is optimizer.eps here"]


def test_a_file_takes_them_and_the_command_line_replaces_them(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "recipe: gemma3_vl_4b\nargs: {learning_rate: 1e-4, max_steps: 7}\noverrides: {max_grad_norm: 2}"
    )
    assert compose(file=file).optimizer.clip_grad == 2
    assert (compose(file=file).optimizer.lr, compose(file=file).optimizer.warmup_steps) == (1e-4, 0)
    assert compose(file=file, settings=["lr=3e-4", "num_train_epochs=2"]).train.steps is None
    assert from_yaml("optimizer: {learning_rate: 0.1}").optimizer.lr == 0.1


def test_two_names_with_two_values_are_refused():
    assert message("learning_rate=1", "lr=2") == (
        "learning_rate=1 and lr=2 both set optimizer.lr; give one of them."
    )
    assert message("max_grad_norm=1", "optimizer.clip_grad=2").endswith(
        "both set optimizer.clip_grad; give one of them."
    )
    assert compose("gemma3_vl_4b", settings=["learning_rate=1", "lr=1"]).optimizer.lr == 1


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("save_steps=5", "here it is train.save_every: a number of steps, or epoch"),
        ("eval_steps=5", "here it is train.eval_every: steps between validations"),
        ("per_device_train_batch_size=2", "here it is train.micro_batch_size: "),
        ("gradient_accumulation_steps=2", "here it is train.global_batch_size: "),
        ("lora_rank=8", "here it is adapter.r: "),
        ("adapter.lora_r=8", "here it is adapter.r: "),
        ("data.cutoff_len=8", "here it is data.seq_length: "),
        ("packing=true", "here it is data.packing: none, stream or global"),
        ("train.resume_from_checkpoint=x", "here it is run_dir: the same command goes on"),
        ("deepspeed=x.json", "no such setting: the optimizer's state is spread"),
        ("peft=lora", "adapter.r=16 trains LoRA of that rank"),
        ("optimizer.lr_scheduler=cosine", "did you mean optimizer.lr_scheduler_type?"),
        ("train_itters=3", "did you mean train.steps?"),
        ("log_every=3", "did you mean logging.log_every?"),
        ("quite_unknown=3", "`megatron-vlm train --dry-run` with a recipe or a model prints every setting."),
    ],
)
def test_another_meaning_is_refused_with_our_name_and_the_difference(setting, says):
    text = message(setting)
    assert says in text and len(text) < 300, text


def test_recipes_have_the_rates_of_their_family_and_of_adapters():
    for name, recipe in RECIPES.items():
        if name.endswith("_tiny_digits"):
            continue
        rates = RATES.get(recipe.model_type, USUAL)
        config = compose(name, settings=["adapter.r=8"])
        assert (config.optimizer.lr, config.optimizer.weight_decay) == (rates.adapter_lr, rates.weight_decay)
        assert compose(name, settings=["adapter.r=8", "learning_rate=1"]).optimizer.lr == 1
    whole = {
        name: load_recipe(name)().optimizer for name in ("llava15_7b", "internvl35_1b", "qwen3_vl_235b_a22b")
    }
    assert [optimizer.lr for optimizer in whole.values()] == [2e-5, 1e-5, 5e-6]
    assert load_recipe("llava15_7b")(**{"adapter.r": 8}).optimizer.lr == 2e-4
