import pytest

from megatron_vlm.config import MOST, ConfigError, RunConfig, derived, setting_types
from megatron_vlm.overrides import apply_overrides, from_yaml, json_schema, to_yaml
from megatron_vlm.recipes import compose
from megatron_vlm.validate import validate

GIVEN = ["run_dir=/runs/x", "model.hf_path=org/model", "data.train_data_path=/data/x"]


def config(*overrides: str) -> RunConfig:
    return apply_overrides(RunConfig(), [*GIVEN, *overrides])


def problem(*overrides: str, world_size: int | None = None) -> str:
    with pytest.raises(ConfigError) as raised:
        validate(config(*overrides), world_size)
    return str(raised.value)


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("train.steps=10", lambda c: c.train.steps, 10),
        ("optimizer.lr=3e-4", lambda c: c.optimizer.lr, 3e-4),
        ("parallel.sp=false", lambda c: c.parallel.sp, False),
        ("parallel.sp=null", lambda c: c.parallel.sp, None),
        ("data.max_pixels=null", lambda c: c.data.max_pixels, None),
        ("model.freeze=tower,projector", lambda c: c.model.freeze, ["tower", "projector"]),
        ("model.freeze=[tower]", lambda c: c.model.freeze, ["tower"]),
        ("model.freeze=", lambda c: c.model.freeze, []),
        ("name=010", lambda c: c.name, "010"),
        ("data.train_data_path=/a: b=c", lambda c: c.data.train_data_path, "/a: b=c"),
    ],
)
def test_override_takes_the_type_of_its_setting(override, read, value):
    assert read(config(override)) == value


def test_overrides_leave_the_original_alone():
    original = config()
    changed = apply_overrides(original, ["train.steps=7", "model.freeze=tower"])
    assert (original.train.steps, original.model.freeze) == (1000, [])
    assert (changed.train.steps, changed.model.freeze) == (7, ["tower"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.step=3", "train.step: no such setting; did you mean train.steps?"),
        ("trian.steps=3", "trian.steps: no such setting; did you mean train.steps?"),
        ("train.seed=null", "train.seed: 'null': Input should be a valid integer, unable to parse string as"),
        ("train.save_every=x", "train.save_every: 'x': Input should be a valid integer, unable to parse"),
        ("model.freeze=[tower", "model.freeze: while parsing a flow sequence"),
        ("train.steps", "train.steps: expected key.path=value, as train.steps=100."),
    ],
)
def test_bad_override_names_the_place_and_the_remedy(override, message):
    with pytest.raises(ConfigError) as raised:
        config(override)
    assert str(raised.value).startswith(message)


def test_yaml_round_trip_keeps_everything():
    original = config("optimizer.lr=1e-05", "parallel.sp=true", "model.freeze=tower", "name=010")
    assert from_yaml(to_yaml(original)) == original


def test_a_layout_that_does_not_divide_the_processes_says_what_would():
    message = problem("parallel.tp=2", "parallel.pp=3", world_size=16)
    assert message == (
        "parallel: tp 2 · pp 3 · cp 1 = 6 does not divide 16 processes; change one size or start 12 or 18."
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.vpp=2"], "parallel: vpp 2 divides pipeline stages, but pp is 1; raise pp or use vpp 1."),
        (["parallel.tp=0"], "parallel.tp: '0': Input should be greater than or equal to 1."),
        (["model.dtype=fp16"], "model.dtype: 'fp16': Input should be 'bf16' or 'fp32'."),
        (["run_dir=???"], "run_dir: not set; pass --run-dir or run_dir=…"),
        (["train.steps=5", "optimizer.warmup_steps=5"], "optimizer.warmup_steps: 5 is not within the run's"),
        (["optimizer.lr=inf"], "optimizer.lr: 'inf': Input should be a finite number."),
        (["data.max_drop_share=5"], "data.max_drop_share: '5': Input should be less than or equal to 1."),
    ],
)
def test_what_cannot_run_is_refused_before_any_model(overrides, message):
    assert problem(*overrides, world_size=4).startswith(message)


def test_global_batch_must_divide_over_micro_batches_and_ranks():
    message = problem("train.global_batch_size=10", "train.micro_batch_size=2", world_size=4)
    assert message == (
        "train.global_batch_size: 10 is not divisible by micro_batch_size 2 × 4 data-parallel ranks = 8; "
        "use 8 or 16."
    )


def test_derived_numbers():
    numbers = derived(config("parallel.tp=2", "train.micro_batch_size=2", "data.seq_length=100"), 8)
    assert numbers == {
        "processes": 8,
        "data_parallel": 4,
        "sequence_parallel": True,
        "micro_batches_per_step": 4,
        "most_tokens_per_micro_batch": 200,
        "most_tokens_per_step": 3200,
        "rows_over_all_steps": 32000,
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.freeze=[[tower]]", r"model.freeze: \['tower'\]: Input should be 'tower'"),
        ("data.columns={a: {b: 1}}", r"data.columns: a: \{'b': 1\}: Input should be a valid string"),
        ("train.steps=true", "train.steps: 'true': Input should be a valid integer"),
        ("data.train_data_path=~nobody-here/a", "train_data_path: ~nobody-here/a: there is no such user"),
    ],
)
def test_a_value_of_another_shape_does_not_fit(override, message):
    with pytest.raises(ConfigError, match=message):
        apply_overrides(RunConfig(), [override])


def test_the_home_folder_is_found_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    paths = {"run_dir": "~/run", "model.hf_path": "~/ck", "data.train_data_path": ["~/a", "b/~"]}
    config = apply_overrides(RunConfig(), paths)
    assert (config.run_dir, config.model.hf_path) == ("/home/me/run", "/home/me/ck")
    assert config.data.train_data_path == ["/home/me/a", "b/~"]
    assert from_yaml("data: {media_dir: ~/m, valid_data_path: ~/v}").data.valid_data_path == "/home/me/v"


BOMB = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]" for n in range(10))
BOMB_IN_A_LINE = (
    "[" + ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]" for n in range(10)) + "]"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a {b: *a}", "aliases are not read; write it out"),
        (f"data: {{train_data_path: '{BOMB_IN_A_LINE}'}}", "train_data_path: aliases are not read"),
        ("data: {columns: {images: '${oc.env:HOME}'}}", "columns: .*images.*is not filled in"),
        ("a: " + "[" * 2000, "nested too deeply; write settings as `key: value` lines"),
        ("recipe: null", "recipe is None, expected str"),
        ("recipe: gemma3_vl_4b\nargs: {1: 2}", "1: no such setting"),
    ],
)
def test_a_file_of_odd_shape_is_refused(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        compose(file=tmp_path / "run.yaml")


def test_a_switch_in_yaml_is_no_number():
    with pytest.raises(ConfigError, match=r"^train.steps: True: true and false are no numbers"):
        from_yaml("train: {steps: yes}")
    kwargs = config("data.chat_template_kwargs={a: 1, b: 1.5, c: true, d: text}").data.chat_template_kwargs
    assert kwargs == {"a": 1, "b": 1.5, "c": True, "d": "text"}
    assert config("data.chat_template_kwargs.a=false").data.chat_template_kwargs == {"a": False}


def test_the_json_schema_has_every_setting_with_its_rule():
    schema = json_schema()
    groups = {name: schema["$defs"][f"{name.title()}Config"]["properties"] for name in ("train", "parallel")}
    assert groups["parallel"]["tp"] == {
        "default": 1,
        "maximum": MOST,
        "minimum": 1,
        "title": "Tp",
        "type": "integer",
    }
    assert len(groups["train"]) == len([key for key in setting_types() if key.startswith("train.")])
