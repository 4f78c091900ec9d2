"""What cannot be trained is refused by config.json alone, in our words; no code of a checkpoint ever runs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from programs import OLDEST

from megatron_vlm.config import ConfigError
from megatron_vlm.supported import SUPPORTED, config_file, read_config, resolve

QWEN = {"model_type": "qwen2_5_vl", "vision_config": {}}
EVIL = "import pathlib\npathlib.Path(__file__).with_name('was_run').touch()\nclass C: ...\n"
REFUSED = {  # config.json -> the message, after "checkpoint PATH: "
    "sibling": ({"model_type": "qwen2_5_omni", "thinker_config": {}}, "model type 'qwen2_5_omni' is not"),
    "text only": (
        {"model_type": "gemma3_text"},
        "model type 'gemma3_text' (without a vision tower) is not supported; `megatron-vlm recipes` lists "
        "what is.",
    ),
    "own code": (
        {"model_type": "internvl_chat", "vision_config": {}, "auto_map": {"AutoConfig": "evil.C"}},
        "model type 'internvl_chat' is not supported, and code of the checkpoint's own (auto_map) is never "
        "run; did you mean internvl?",
    ),
    "class that another family has": (
        {"model_type": "mistral3", "architectures": ["LightOnOCRForConditionalGeneration"]},
        "architectures ['LightOnOCRForConditionalGeneration'] of model type 'mistral3' are not supported; "
        "Transformers has it as lighton_ocr: load the checkpoint by LightOnOcrForConditionalGeneration and "
        "LightOnOcrProcessor, save both into a folder and give that.",
    ),
    "other head": (
        QWEN | {"architectures": ["Qwen2_5_VLModel"]},
        "architectures ['Qwen2_5_VLModel'] of model",
    ),
    "no model type": ({"dim": 4096}, "config.json has no model_type; give the folder of a Hugging Face"),
    "odd model type": ({"model_type": ["gemma3"]}, "model_type is ['gemma3'], expected str | None; correct"),
    "terminal": (
        {"model_type": "\x1b[2J"},
        r"model type '\x1b[2J' (without a vision tower) is not supported",
    ),
    "text model": (
        {"model_type": "mistral3", "text_config": {"model_type": "gpt2"}},
        "text model type 'gpt2' of a mistral3 checkpoint is not supported; supported: ministral3, mistral, "
        "mistral4.",
    ),
    "text model with convolutions": (
        {"model_type": "lfm2_vl", "text_config": {"model_type": "lfm2"}},
        "text model type 'lfm2' of a lfm2_vl checkpoint is not supported, as most layers of LFM2 are short "
        "convolutions, which are not implemented here; supported: llama, mistral, qwen2, qwen3.",
    ),
    "awq": (
        QWEN | {"quantization_config": {"quant_method": "awq", "bits": 4}},
        "its weights are quantised (quantization_config: quant_method 'awq'), which cannot be trained; take "
        "the checkpoint in bf16 that it was made from, or one in FP8 with quant_method 'fp8'.",
    ),
    "bitsandbytes": (QWEN | {"quantization_config": {"load_in_4bit": True}}, "quant_method 'bitsandbytes'"),
    "in text_config": (QWEN | {"text_config": {"quantization_config": {"quant_method": "gptq"}}}, "'gptq'"),
    "no object": ([1, 2], "config.json is not a JSON object; download it again."),
}


def saved(folder: Path, config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (folder / "evil.py").write_text(EVIL)
    return folder


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_config_json_alone(tmp_path, kind):
    config, message = REFUSED[kind]
    with pytest.raises(ConfigError) as refused:
        read_config(saved(tmp_path, config))
    text = str(refused.value)
    assert text.startswith(f"checkpoint {tmp_path}: ") and message in text and "\n" not in text


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [("gemma3", "mm_tokens_per_image", None), ("qwen3_5", "text_config.linear_num_key_heads", 0)],
)
def test_a_value_with_which_nothing_can_be_counted_is_refused_by_its_key(family, key, value):
    from transformers import CONFIG_MAPPING

    from megatron_vlm.models.families import describe

    config = CONFIG_MAPPING[family]()
    part = config.text_config if "." in key else config
    setattr(part, key.rpartition(".")[2], value)
    with pytest.raises(ValueError, match=rf"\n  {key} is (null|0); supported"):
        describe(config)


@pytest.mark.parametrize("how", [None, {"quant_method": "fp8", "weight_block_size": [128, 128]}])
def test_fp8_that_import_reads_and_no_quantisation_pass(tmp_path, how):
    assert read_config(saved(tmp_path, QWEN | {"quantization_config": how}))["model_type"] == "qwen2_5_vl"


@pytest.mark.parametrize("family", [name for name, each in SUPPORTED.items() if each.text_types])
def test_a_text_model_without_its_type_is_the_one_that_transformers_takes(tmp_path, family):
    from transformers import AutoConfig

    folder, known = saved(tmp_path, {"model_type": family, "text_config": {}}), SUPPORTED[family]
    assert AutoConfig.from_pretrained(folder).text_config.model_type == known.default_text
    if known.default_text in known.text_types:
        assert read_config(folder)["model_type"] == family


def test_refusing_needs_neither_torch_nor_transformers(tmp_path):
    code = (
        "import sys; from megatron_vlm.supported import read_config; read_config(sys.argv[1])\n"
        "sys.exit(any(heavy in sys.modules for heavy in ('torch', 'transformers', 'numpy', 'megatron.core')))"
    )
    assert subprocess.run([sys.executable, "-c", code, saved(tmp_path, QWEN)]).returncode == 0


# ---- the commands -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "train"])
def test_commands_refuse_and_never_ask_or_run(tmp_path, command):
    """Somebody answers "yes" to whatever is asked; nothing is."""
    path = saved(tmp_path / "model", REFUSED["own code"][0])
    settings = ["--recipe", "qwen25_vl_3b", f"hf_path={path}", f"run_dir={tmp_path / 'run'}", "tp=1", "pp=1"]
    (tmp_path / "data.jsonl").write_text("{}")
    settings += [f"train_data_path={tmp_path / 'data.jsonl'}", "dataset_type=hf"]
    call = [sys.executable, "-m", "megatron_vlm.cli", command, *settings]
    done = subprocess.run(call, input="y\n" * 9, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1].replace("model.hf_path: ", "")
    assert last == f"megatron-vlm: checkpoint {path}: {REFUSED['own code'][1]}"
    assert "custom code" not in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert not (path / "was_run").exists()


def calls(tree: ast.AST):
    """(class, method, names of keywords) of every call `X.from_…(…)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
            yield name, node.func.attr, {k.arg: ast.unparse(k.value) for k in node.keywords}


def test_every_auto_class_is_told_never_to_trust_remote_code():
    files = [file for part in ("src", "tools", "examples") for file in (ROOT / part).rglob("*.py")]
    found = [
        (file.name, name, keywords.get("trust_remote_code"))
        for file in files
        for name, method, keywords in calls(ast.parse(file.read_text()))
        if name.startswith("Auto") and method in ("from_pretrained", "from_config")
    ]
    assert len(found) >= 6
    assert [call for call in found if call[2] != "False"] == []


# ---- the hub ----------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache as `huggingface_hub` lays it out, which it reads while it is offline."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def add(name: str, config: dict, *others: str) -> Path:
        repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = saved(repository / "snapshots" / ("0" * 40), config)
        for other in others:
            (snapshot / other).write_text("{}")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0" * 40)
        return snapshot

    return add


def test_a_name_of_the_hub_is_read_and_refused_by_its_config_json(hub):
    snapshot = hub("me/qwen", QWEN, "tokenizer.json")
    assert config_file("me/qwen") == snapshot / "config.json" and resolve("me/qwen") == snapshot
    hub("me/other", REFUSED["sibling"][0])
    for look in (read_config, resolve):
        with pytest.raises(
            ConfigError, match=r"^checkpoint me/other: model type 'qwen2_5_omni' is not supported"
        ):
            look("me/other")


def test_of_a_refused_name_only_config_json_is_asked_for(hub, monkeypatch):
    hub("me/other", REFUSED["awq"][0])

    def everything(*args, **kwargs):
        raise AssertionError("the whole repository was asked for")

    monkeypatch.setattr("huggingface_hub.snapshot_download", everything)
    with pytest.raises(ConfigError, match="quant_method 'awq'"):
        resolve("me/other")


@pytest.mark.skipif(not OLDEST.is_dir(), reason=f"no {OLDEST}; `make test-oldest` fetches it")
def test_a_family_that_the_installed_transformers_lacks_is_named_with_the_remedy(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "minicpmv4_7"}')
    program = "import sys; from megatron_vlm.supported import read_config; read_config(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(OLDEST), *sys.path])},
    )
    last = done.stderr.splitlines()[-1]
    assert "model type 'minicpmv4_7' needs Transformers 5.21, and 5.1" in last
    assert last.endswith("is installed; pip install 'transformers>=5.21'.")


@pytest.mark.parametrize(
    ("model_type", "change"),
    [("glm4v_moe", {"routed_scaling_factor": 0.0}), ("qwen3_vl", {"num_hidden_layers": 0})],
)
def test_numbers_that_megatron_takes_for_no_number_are_refused(model_type, change):
    from transformers import CONFIG_MAPPING

    from megatron_vlm.models.families import describe

    config = CONFIG_MAPPING[model_type].from_dict({"model_type": model_type, "text_config": change})
    [(key, value)] = change.items()
    with pytest.raises(ValueError, match=f"text_config.{key} is {value}; supported: "):
        describe(config)
