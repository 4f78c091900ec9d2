"""Which Hugging Face checkpoints can be trained, by their config.json; without torch or Transformers.

config.json is read first, as plain data. A checkpoint that cannot be trained is refused before its weights,
processors or own code are looked at, and before anything else is fetched.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_vlm import stores
from megatron_vlm.config import ConfigError
from megatron_vlm.files import read_text, refuse_odd
from megatron_vlm.inputs import explain_file, odd_fields
from megatron_vlm.messages import suggestion
from megatron_vlm.stores import fetched

CONFIG_FILE = "config.json"
ADAPTER_FILE = "adapter_config.json"
GENERATION_FILE = "generation_config.json"
WEIGHT_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PARTS = ("text_config", "vision_config")
SIZES = ("hidden_size", "num_attention_heads", "patch_size", "image_size", "mm_tokens_per_image")
MOST_LAYERS = 10_000  # for each, Transformers' configs make an entry of a list
HELD = {"model_type": str | None, "architectures": list[str] | None, **dict.fromkeys(PARTS, dict | None)}
FETCHED = ["*.safetensors", "*.json", "*.jinja", "*.model"]  # files to fetch from the hub or a store


@dataclass(frozen=True)
class Supported:
    """The names in config.json that make a family; `text_types` if it can hold several language models.
    A text_config without model_type is of `default_text`."""

    architecture: str  # the class of Transformers that config.json names
    text_types: tuple[str, ...] = ()
    default_text: str | None = None
    other_texts: dict[str, str] = field(default_factory=dict)  # model_type -> why it is not supported
    other_names: tuple[str, ...] = ()  # of the same class, in code that Transformers took over
    other_classes: dict[str, str] = field(default_factory=dict)  # architecture -> what to do with it
    since: str = ""  # the first Transformers whose code of it serves, if older ones are allowed


_LIGHTON = (
    "; Transformers has it as lighton_ocr: load the checkpoint by LightOnOcrForConditionalGeneration and "
    "LightOnOcrProcessor, save both into a folder and give that"
)
_CONVOLUTIONS = ", as most layers of LFM2 are short convolutions, which are not implemented here"
_QWEN3_5 = ("qwen3_5_text",)
SUPPORTED = {  # by HF model_type, which is also the name of the file in models/families
    "gemma3": Supported("Gemma3ForConditionalGeneration"),
    "gemma4": Supported("Gemma4ForConditionalGeneration"),
    "gemma4_unified": Supported("Gemma4UnifiedForConditionalGeneration"),
    "mistral3": Supported(
        "Mistral3ForConditionalGeneration",
        ("ministral3", "mistral", "mistral4"),
        "mistral",
        other_classes={"LightOnOCRForConditionalGeneration": _LIGHTON},
    ),
    "lighton_ocr": Supported("LightOnOcrForConditionalGeneration", ("qwen3",), "qwen3"),
    "lfm2_vl": Supported(
        "Lfm2VlForConditionalGeneration",
        ("llama", "mistral", "qwen2", "qwen3"),
        "lfm2",
        dict.fromkeys(("lfm2", "lfm2_moe"), _CONVOLUTIONS),
    ),
    "glm4v": Supported("Glm4vForConditionalGeneration"),
    "glm46v": Supported("Glm46VForConditionalGeneration"),
    "glmga": Supported("Glm46VForConditionalGeneration"),
    "llava": Supported("LlavaForConditionalGeneration", ("llama", "mistral", "qwen2", "qwen3"), "llama"),
    "llava_onevision": Supported("LlavaOnevisionForConditionalGeneration", ("qwen2",), "qwen2"),
    "internvl": Supported("InternVLForConditionalGeneration", ("qwen2", "qwen3"), "qwen2"),
    "qianfan_ocr": Supported("QianfanOCRForConditionalGeneration", ("qwen3",), "qwen3"),
    # the tower of older versions waits for the device, and up to 5.20 rounds places in bf16
    "smolvlm": Supported("SmolVLMForConditionalGeneration", ("llama",), "llama", since="5.23"),
    "glm4v_moe": Supported("Glm4vMoeForConditionalGeneration"),
    "qwen2_vl": Supported("Qwen2VLForConditionalGeneration"),
    "qwen2_5_vl": Supported("Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": Supported("Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": Supported("Qwen3VLMoeForConditionalGeneration"),
    "qwen3_5_moe": Supported("Qwen3_5MoeForConditionalGeneration"),
    # the image processor of older versions merges by 16 whatever `downsample_mode` says
    "minicpmv4_6": Supported("MiniCPMV4_6ForConditionalGeneration", _QWEN3_5, _QWEN3_5[0], since="5.21"),
    "minicpmv4_7": Supported("MiniCPMV4_7ForConditionalGeneration", _QWEN3_5, _QWEN3_5[0], since="5.21"),
    "kimi_k25": Supported(
        "Kimi_K25ForConditionalGeneration",
        ("deepseek_v3", "kimi_k2"),
        "deepseek_v3",
        other_names=("KimiK25ForConditionalGeneration",),
    ),
    "qwen3_5": Supported("Qwen3_5ForConditionalGeneration"),
}
_FP8 = "fp8"  # the only quant_method that import reads, see `models.weights.files`
# the keys of Transformers, of older llm-compressor, of MLX
QUANTISED = ("quantization_config", "compression_config", "quantization")
_WHAT_IS = "`megatron-vlm recipes` lists what is"
_OWN_CODE = ", and code of the checkpoint's own (auto_map) is never run"


def read_config(path: str | Path) -> dict[str, Any]:
    """The config.json, unchanged, of a checkpoint that can be trained. Raises ConfigError with the reason if
    it says that it cannot.

    `path` is a folder, a config.json, or a hub name, from which only config.json is fetched. Raises
    FileNotFoundError if there is none.
    """
    config = any_config(path)
    problem = _problem(config)
    if not problem and config_file(path).with_name(ADAPTER_FILE).exists():
        problem = f"Transformers would add the adapter of {ADAPTER_FILE} to the weights; merge or move it."
    if problem:
        raise ConfigError(f"checkpoint {path}: {problem}")
    return config


def any_config(path: str | Path) -> dict[str, Any]:
    """The config.json of any checkpoint. Raises ConfigError unless it is a JSON object with parts."""
    file = config_file(path)
    place = f"checkpoint {path}"
    try:
        config = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        explanation = explain_file(file) or f"not JSON ({error}); download it again"
        raise ConfigError(f"{place}: {CONFIG_FILE} is {explanation}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{place}: {CONFIG_FILE} is not a JSON object; download it again.")
    parts = [config, *(part for name in PARTS if isinstance(part := config.get(name), dict))]
    for problem in chain.from_iterable(odd_fields(part, HELD, SIZES) for part in parts):
        raise ConfigError(f"{place}: {CONFIG_FILE}: {problem}; correct it or download it again.")
    layers = [part.get(key) for part in parts for key in ("num_hidden_layers", "depth")]
    if too_many := [number for number in layers if isinstance(number, int) and number > MOST_LAYERS]:
        raise ConfigError(f"{place}: {CONFIG_FILE} has {too_many[0]} layers, over {MOST_LAYERS}; correct it.")
    return config


def missing_weights(folder: Path) -> str | None:
    """Return the message about a folder without weights; None if it has some, or an index of them."""
    if any((folder / name).is_file() for name in (WEIGHT_FILE, INDEX_FILE)):
        return None
    return (
        f"{folder} has neither {WEIGHT_FILE} nor {INDEX_FILE}; complete the download, and save pickled "
        "weights as safetensors."
    )


def config_file(path: str | Path) -> Path:
    """The config.json of a folder; of a store or a hub name, fetched from there; or `path` itself."""
    if Path(path).is_file():
        return Path(path)
    if stores.is_store(path) or Path(path).is_dir():
        folder = fetched(path, (CONFIG_FILE, ADAPTER_FILE)) if stores.is_store(path) else Path(path)
        refuse_odd(folder, links=True)  # Transformers would wait for a pipe
        file = folder / CONFIG_FILE
        if not file.is_file():
            raise FileNotFoundError(
                f"checkpoint {path}: no {CONFIG_FILE} in this folder; give the folder of a "
                "Hugging Face checkpoint."
            )
        return file
    from huggingface_hub import hf_hub_download

    return Path(_fetched(path, partial(hf_hub_download, filename=CONFIG_FILE)))


def resolve(path: str | Path, check: Callable[[str | Path], Any] = read_config) -> Path:
    """The folder of a checkpoint; one in a store, and a name that is not a folder, from the hub, is fetched.

    Of those, config.json is checked first: raises as `check` before anything else is fetched.
    """
    if Path(path).is_dir():
        return Path(path)
    check(path)
    if stores.is_store(path):
        return fetched(path, FETCHED)
    from huggingface_hub import snapshot_download

    ignored = "consolidated*"  # Mistral's repositories hold the weights twice
    return Path(_fetched(path, partial(snapshot_download, allow_patterns=FETCHED, ignore_patterns=ignored)))


def _fetched(path: str | Path, fetch: Callable[..., str]) -> str:
    """Fetch a hub name. Raise FileNotFoundError with the reason of huggingface_hub."""
    if Path(path).is_absolute() or str(path).startswith((".", "~")):
        raise FileNotFoundError(f"checkpoint {path}: no such folder")
    try:
        return fetch(str(path))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise FileNotFoundError(
            f"checkpoint {path}: no such folder, and not to be had from the hub ({reason}); where "
            f"the hub can be reached, `hf download {path} --local-dir FOLDER` fetches it."
        ) from error


def _problem(config: dict[str, Any]) -> str | None:
    """Why a checkpoint with this config.json cannot be trained; None if it can."""
    model_type = config.get("model_type")
    if model_type is None:
        return f"{CONFIG_FILE} has no model_type; give the folder of a Hugging Face checkpoint."
    if model_type not in SUPPORTED:
        return unsupported(model_type, config)
    # the whole model: its version of Transformers and its class
    supported = SUPPORTED[model_type]
    if older := too_old(model_type):
        return older
    architectures = config.get("architectures") or [supported.architecture]
    if not {supported.architecture, *supported.other_names} & {*architectures}:
        own_code = _OWN_CODE if config.get("auto_map") else ""
        remedies = [remedy for name, remedy in supported.other_classes.items() if name in architectures]
        return (
            f"architectures {architectures} of model type {model_type!r} are not "
            f"supported{own_code}{remedies[0] if remedies else f'; supported is {supported.architecture}'}."
        )
    # its language model, which may be one of several, and its weights
    text = config.get("text_config") or {}
    text_type = text.get("model_type", supported.default_text)
    if supported.text_types and text_type not in supported.text_types:
        return (
            f"text model type {text_type!r} of a {model_type} checkpoint is not supported"
            f"{supported.other_texts.get(text_type, '')}; supported: {', '.join(supported.text_types)}."
        )
    return _quantised(config) or _quantised(text)


def too_old(model_type: str) -> str | None:
    """The message that the installed Transformers is too old for this family; None if it is not."""
    since = SUPPORTED[model_type].since
    installed = version("transformers")
    if not since or _major_minor(installed) >= _major_minor(since):
        return None
    return (
        f"model type {model_type!r} needs Transformers {since}, and {installed} is installed; "
        f"pip install 'transformers>={since}'."
    )


def _major_minor(release: str) -> list[int]:
    return [int(number) for number in release.split(".")[:2]]


def unsupported(model_type: Any, config: dict[str, Any] | None = None) -> str:
    """The message that a model type is not supported, and near ones; `config` is config.json, if read."""
    own_code = _OWN_CODE if config and config.get("auto_map") else ""
    start = f"model type {model_type!r}"
    if config is not None and not any(key.endswith(("vision_config", "thinker_config")) for key in config):
        return f"{start} (without a vision tower) is not supported{own_code}; {_WHAT_IS}."
    return f"{start} is not supported{own_code}{suggestion(str(model_type), SUPPORTED, _WHAT_IS)}"


def _quantised(config: dict[str, Any]) -> str | None:
    key = next((key for key in QUANTISED if config.get(key) is not None), None)
    settings = config.get(key) if key else None
    if settings is None or (isinstance(settings, dict) and settings.get("quant_method") == _FP8):
        return None
    settings_of_method = settings if isinstance(settings, dict) else {}
    method = settings_of_method.get("quant_method") or settings_of_method.get("quant_algo")
    if method is None and (settings_of_method.get("load_in_4bit") or settings_of_method.get("load_in_8bit")):
        method = "bitsandbytes"
    method_name = f"quant_method {method!r}" if method else "without a quant_method"
    return (
        f"its weights are quantised ({key}: {method_name}), which cannot be trained; take the checkpoint in "
        f"bf16 that it was made from, or one in FP8 with quant_method {_FP8!r}."
    )
