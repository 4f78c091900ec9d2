"""Every published model size as a recipe, and for every family the recipe of its demo.

Full fine-tuning in bf16 with fp32 gradients and Adam; docs/reference/recipes.md has the
memory arithmetic behind the layouts. A new size is a line of `SIZES`.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vlm.config import RunConfig
from megatron_vlm.overrides import apply_overrides, as_settings, merged
from megatron_vlm.supported import SUPPORTED, read_config

CONFIGS = Path(__file__).parent / "configs"  # config.json of each published size, under the recipe's name
DEMO = "_tiny_digits"  # the end of a demo recipe's name
# layouts that several sizes share, as arguments
TOWER_AGAIN = "recompute=full recompute_layers=0"
TP8_PP4 = f"tp=8 pp=4 {TOWER_AGAIN}"
TP4_PP2 = f"tp=4 pp=2 {TOWER_AGAIN}"
PP16_EP16 = "pp=16 ep=16 recompute=full"


@dataclass(frozen=True)
class Recipe:
    """A function with keyword arguments that returns the whole configuration of a run."""

    name: str
    summary: str  # a sentence
    defaults: dict[str, Any]  # its own, beside those of `RunConfig`
    gpus: int = 1  # the fewest of 80 GB that its layout fits
    roomy: str = ""  # arguments that make it quicker on as many GPUs of 141 GB
    adapter_lr: float | None = None  # the learning rate of runs with adapters; None: the same

    @property
    def model_type(self) -> str:
        """The model type of the checkpoints that it is for."""
        if self.name.endswith(DEMO):
            return self.name.removesuffix(DEMO)
        return read_config(CONFIGS / f"{self.name}.json")["model_type"]

    def __call__(self, **changes: Any) -> RunConfig:
        """The defaults of `RunConfig`, replaced by the recipe's, replaced by the caller's `changes`.

        `changes` are arguments of recipes, and settings by their dotted keys. A run without `run_dir` gets
        `runs/<name>`. A run with adapters has their learning rate, unless the caller sets one. A warm-up that
        the caller did not set takes at most a tenth of the steps. Raises ConfigError on an unknown argument
        or a value of the wrong type; text from a command line is converted.
        """
        chosen = as_settings(changes)
        settings = merged(as_settings(self.defaults), chosen)
        if settings.get("data.packing") == "stream" and not {"train.steps", "train.epochs"} & chosen.keys():
            settings = merged(settings, {"train.steps": RunConfig().train.steps})  # it has no countable epoch
        settings.setdefault("run_dir", f"runs/{settings.get('name', RunConfig.name)}")
        config = apply_overrides(RunConfig(), settings)
        if self.adapter_lr and config.adapter.used and "optimizer.lr" not in chosen:
            config.optimizer.lr = self.adapter_lr
        if not {"optimizer.warmup_steps", "optimizer.warmup_ratio"} & chosen.keys():
            steps, warmup = config.train.steps, config.optimizer.warmup_steps
            config.optimizer.warmup_steps = None if steps is None else min(warmup or 0, steps // 10)
        return config


@dataclass(frozen=True)
class Rates:
    """Learning rates of the whole model and of adapters, and the weight decay."""

    lr: float = 1e-5
    adapter_lr: float = 1e-4
    weight_decay: float = 0.0


# Our choice where a family has no source below: the defaults of ms-swift (megatron_args.py), which
# LLaMA-Factory's examples of Qwen2.5-VL and Qwen3-VL have, too; and Transformers' weight decay.
USUAL = Rates()
# The weight decay is that in Qwen's qwen-vl-finetune/README.md, which suggests rates of 2e-7 to 1e-6. The
# rates are LLaMA-Factory's; Megatron-Bridge's recipes have 5e-6 to 5e-5, and 1e-4 for adapters.
QWEN = Rates(weight_decay=0.01)
# OpenGVLab/InternVL, shell/internvl3.0/2nd_finetune: of 8B and 14B, with a frozen tower; 1B has 1e-5. That
# Qianfan-OCR, which has InternVL's architecture, takes them is our choice.
INTERNVL = Rates(lr=2e-5, weight_decay=0.05)
# openbmb/MiniCPM-V, finetune/finetune_ds.sh; the rate of adapters is our choice
MINICPMV = Rates(lr=1e-6, weight_decay=0.1)
RATES = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), QWEN),
    **dict.fromkeys(("internvl", "qianfan_ocr"), INTERNVL),
    **dict.fromkeys(("minicpmv4_6", "minicpmv4_7"), MINICPMV),
    "llava": Rates(lr=2e-5, adapter_lr=2e-4),  # haotian-liu/LLaVA, scripts/v1_5
    "llava_onevision": Rates(lr=1e-5),  # LLaVA-NeXT, scripts/train/finetune_ov.sh; adapters: our choice
    "mistral3": Rates(lr=5e-6, adapter_lr=2e-4),  # Megatron-Bridge's recipes of Ministral 3
    "glm4v_moe": Rates(lr=5e-6, adapter_lr=1e-4),  # Megatron-Bridge's recipes of GLM-4.5V
    "gemma3": Rates(adapter_lr=2e-4),  # Megatron-Bridge's recipes; the whole model's: our choice
}


# What all sizes of a family set. Qwen, GLM and Kimi make more tokens of an image the more pixels it has;
# these are limits of 1,280 tokens. LLaVA-OneVision makes up to 7,371 of an image in tiles.
OF_FAMILY: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "glm4v_moe", "kimi_k25"), {"max_pixels": 1280 * 28**2}),
    "glm4v": {"max_pixels": 1280 * 28**2, "tp": 2, "pp": 2},  # its attention has two key/value heads
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), {"max_pixels": 1280 * 32**2}),
    "llava_onevision": {"seq_length": 8192},
}


# (family, organisation on the hub) → its sizes: name, title, fewest GPUs of 80 GB, checkpoint, layout,
# and what is quicker on 141 GB, as on a command line; "": nothing is recomputed there; None: it is the same
SIZES: dict[tuple[str, str], list[tuple[str, str, int, str, str, str | None]]] = {
    ("gemma3", "google"): [
        ("gemma3_vl_4b", "Gemma3 4B", 2, "gemma-3-4b-it", "tp=2", "tp=1"),
        ("gemma3_vl_12b", "Gemma3 12B", 8, "gemma-3-12b-it", "tp=4", "tp=2"),
        ("gemma3_vl_27b", "Gemma3 27B", 8, "gemma-3-27b-it", "tp=8 recompute=full recompute_layers=10", ""),
    ],
    # Layers with heads of 512 channels, for which there is no kernel, take longer: see `attention_kernels`.
    ("gemma4", "google"): [  # of E2B, tp does not divide its one key/value head
        ("gemma4_e2b", "Gemma 4 E2B", 2, "gemma-4-E2B-it", "recompute=full recompute_layers=2", ""),
        ("gemma4_e4b", "Gemma 4 E4B", 2, "gemma-4-E4B-it", "tp=2 recompute=full", ""),
        ("gemma4_31b", "Gemma 4 31B, dense", 16, "gemma-4-31B-it", TP4_PP2, ""),
        ("gemma4_26b_a4b", "Gemma 4 26B with 128 experts", 16, "gemma-4-26B-A4B-it", "tp=2 pp=2 ep=8", ""),
    ],
    ("gemma4_unified", "google"): [  # tp does not divide its one key/value head of full attention
        ("gemma4_12b", "Gemma 4 12B", 8, "gemma-4-12B-it", "pp=2 recompute=full recompute_layers=19", ""),
    ],
    ("mistral3", "mistralai"): [
        ("ministral3_3b", "Ministral3 3B", 2, "Ministral-3-3B-Instruct-2512", "", ""),
        ("ministral3_8b", "Ministral3 8B", 4, "Ministral-3-8B-Instruct-2512", "tp=2", "tp=1"),
        ("ministral3_14b", "Ministral3 14B", 8, "Ministral-3-14B-Instruct-2512", "tp=4", ""),
        (
            "mistral_small_3_24b",
            "Mistral Small 3.2 24B",
            8,
            "Mistral-Small-3.2-24B-Instruct-2506",
            "tp=8",
            "",
        ),
        (
            "mistral_small_4_119b",
            "Mistral Small 4 119B with 128 experts",
            64,
            "Mistral-Small-4-119B-2603",
            "tp=2 pp=4 ep=16",
            "",
        ),
    ],
    ("kimi_k25", "."): [  # in bf16, which has to be made of the hub's packed integers
        (
            "kimi_k25_1t_a32b",
            "Kimi K2.5 and K2.6, 1,027B with 384 experts",
            512,
            "Kimi-K2.6-BF16",
            "tp=8 pp=8 ep=32",
            "",
        ),
    ],
    ("lighton_ocr", "."): [  # saved by Transformers: on the hub its config.json says mistral3
        ("lightonocr_1b", "LightOnOCR 1B", 1, "LightOnOCR-2-1B", "", ""),
    ],
    ("lfm2_vl", "."): [
        ("siglip2_llama31_8b", "SigLIP2 So400m and Llama 3.1 8B", 4, "siglip2_llama31_8b", "tp=2", "tp=1"),
        ("siglip2_qwen3_4b", "SigLIP2 So400m and Qwen3 4B", 4, "siglip2_qwen3_4b", "", ""),
    ],
    ("glm4v", "zai-org"): [
        ("glm_41v_9b", "GLM-4.1V-Thinking 9B", 8, "GLM-4.1V-9B-Thinking", "", ""),
        ("glm_46v_flash", "GLM-4.6V-Flash, 9B", 8, "GLM-4.6V-Flash", "", ""),
    ],
    ("llava", "llava-hf"): [
        ("llava15_7b", "LLaVA 1.5 7B", 4, "llava-1.5-7b-hf", "tp=2", "tp=1"),
        ("llava15_13b", "LLaVA 1.5 13B", 4, "llava-1.5-13b-hf", "tp=4", ""),
    ],
    ("llava_onevision", "llava-hf"): [
        ("llava_onevision_05b", "LLaVA-OneVision 0.5B", 1, "llava-onevision-qwen2-0.5b-ov-hf", "", ""),
        ("llava_onevision_7b", "LLaVA-OneVision 7B", 8, "llava-onevision-qwen2-7b-ov-hf", "tp=2", "tp=1"),
        ("llava_onevision_72b", "LLaVA-OneVision 72B", 32, "llava-onevision-qwen2-72b-ov-hf", TP8_PP4, ""),
    ],
    ("internvl", "OpenGVLab"): [
        ("internvl35_1b", "InternVL3.5 1B", 1, "InternVL3_5-1B-HF", "lr=1e-5", ""),
        ("internvl35_4b", "InternVL3.5 4B", 4, "InternVL3_5-4B-HF", "", ""),
        ("internvl35_8b", "InternVL3.5 8B", 4, "InternVL3_5-8B-HF", "tp=2", "tp=1"),
        ("internvl35_14b", "InternVL3.5 14B", 8, "InternVL3_5-14B-HF", "tp=4", ""),
    ],
    ("qianfan_ocr", "baidu"): [
        ("qianfan_ocr_4b", "Qianfan-OCR 4B", 4, "Qianfan-OCR", "", ""),
    ],
    ("smolvlm", "HuggingFaceTB"): [
        ("smolvlm2_256m", "SmolVLM2 256M", 1, "SmolVLM2-256M-Video-Instruct", "", ""),
        ("smolvlm2_500m", "SmolVLM2 500M", 1, "SmolVLM2-500M-Video-Instruct", "", ""),
        ("smolvlm2_2b", "SmolVLM2 2.2B", 1, "SmolVLM2-2.2B-Instruct", "", ""),
    ],
    ("glm4v_moe", "zai-org"): [
        ("glm_45v", "GLM-4.5V, 106B with 128 experts", 64, "GLM-4.5V", "tp=4 pp=4 ep=8", ""),
    ],
    ("qwen2_vl", "Qwen"): [
        ("qwen2_vl_2b", "Qwen2-VL 2B", 1, "Qwen2-VL-2B-Instruct", "", ""),
        ("qwen2_vl_7b", "Qwen2-VL 7B", 4, "Qwen2-VL-7B-Instruct", "tp=2", "tp=1"),
        ("qwen2_vl_72b", "Qwen2-VL 72B", 32, "Qwen2-VL-72B-Instruct", TP8_PP4, ""),
    ],
    ("qwen2_5_vl", "Qwen"): [
        ("qwen25_vl_3b", "Qwen2.5-VL 3B", 4, "Qwen2.5-VL-3B-Instruct", "", ""),
        ("qwen25_vl_7b", "Qwen2.5-VL 7B", 8, "Qwen2.5-VL-7B-Instruct", "tp=2", "tp=1"),
        ("qwen25_vl_32b", "Qwen2.5-VL 32B", 16, "Qwen2.5-VL-32B-Instruct", "tp=8 pp=2", ""),
        ("qwen25_vl_72b", "Qwen2.5-VL 72B", 32, "Qwen2.5-VL-72B-Instruct", TP8_PP4, ""),
    ],
    ("qwen3_vl", "Qwen"): [
        ("qwen3_vl_2b", "Qwen3-VL 2B", 1, "Qwen3-VL-2B-Instruct", "", ""),
        ("qwen3_vl_4b", "Qwen3-VL 4B", 4, "Qwen3-VL-4B-Instruct", "", ""),
        ("qwen3_vl_8b", "Qwen3-VL 8B", 4, "Qwen3-VL-8B-Instruct", "tp=2", "tp=1"),
        (
            "qwen3_vl_32b",
            "Qwen3-VL 32B",
            8,
            "Qwen3-VL-32B-Instruct",
            "tp=4 pp=2 vpp=2 offload=true",
            "offload=false",
        ),
    ],
    ("qwen3_vl_moe", "Qwen"): [
        (
            "qwen3_vl_30b_a3b",
            "Qwen3-VL 30B with 128 experts",
            16,
            "Qwen3-VL-30B-A3B-Instruct",
            "pp=2 ep=8",
            "",
        ),
        (
            "qwen3_vl_235b_a22b",
            "Qwen3-VL 235B with 128 experts",
            128,
            "Qwen3-VL-235B-A22B-Instruct",
            "tp=4 pp=8 ep=16 lr=5e-6",  # the rate of Megatron-Bridge's recipe
            None,
        ),
    ],
    ("minicpmv4_6", "openbmb"): [("minicpmv46_1b", "MiniCPM-V 4.6, 1.3B", 1, "MiniCPM-V-4.6", "", "")],
    ("minicpmv4_7", "openbmb"): [("minicpmv47_1b", "MiniCPM-V 4.7, 1.3B", 1, "MiniCPM-V-4.7-1B", "", "")],
    ("qwen3_5", "Qwen"): [
        ("qwen35_08b", "Qwen3.5 0.8B", 1, "Qwen3.5-0.8B", "", ""),
        ("qwen35_2b", "Qwen3.5 2B", 1, "Qwen3.5-2B", "", ""),
        ("qwen35_4b", "Qwen3.5 4B", 4, "Qwen3.5-4B", "", ""),
        ("qwen35_9b", "Qwen3.5 9B", 8, "Qwen3.5-9B", "tp=2", "tp=1"),
        ("qwen35_27b", "Qwen3.5 27B", 8, "Qwen3.5-27B", "tp=4 offload=true", "offload=false"),
    ],
    ("qwen3_5_moe", "Qwen"): [
        (
            "qwen35_35b_a3b",
            "Qwen3.5 35B with 256 experts",
            8,
            "Qwen3.5-35B-A3B",
            "pp=2 ep=4 offload=true",
            "",
        ),
        (
            "qwen35_122b_a10b",
            "Qwen3.5 122B with 256 experts",
            64,
            "Qwen3.5-122B-A10B",
            "tp=2 pp=4 ep=8 offload=true",
            "offload=false",
        ),
        ("qwen35_397b_a17b", "Qwen3.5 397B with 512 experts", 256, "Qwen3.5-397B-A17B", PP16_EP16, None),
    ],
}

TP2 = {"tp": 2, "micro_batch_size": 32}  # two processes share every layer
EP2 = {"ep": 2, "micro_batch_size": 16}  # two processes share the experts and the data
OF_PARTS = ("mistral4", "gemma4_e2b")  # demos of a family's other text models
DEMOS: dict[str, dict[str, Any]] = {  # the others: TP2
    "gemma4": {**EP2, "seq_length": 256},  # its processor makes at least 64 tokens of a digit
    # as many tokens as for Gemma 4, and twice the steps, as there is no tower that learns to see
    "gemma4_unified": {**TP2, "seq_length": 256, "steps": 1000},
    "gemma4_e2b": {**TP2, "seq_length": 256, "steps": 1000},  # at 500, its loss still falls
    "glm4v_moe": {**EP2, "lr": 1e-3},  # at 2e-3 it learns more slowly
    "qwen3_vl_moe": EP2,
}


def _demo(family: str) -> Recipe:
    """A run of `make demo`: a tiny model learns to read digits on two processor cores."""
    name = "demo" if family == next(iter(SUPPORTED)) else f"demo-{family}"
    defaults = {
        "name": name,
        "run_dir": f"runs/{name}/run",
        "hf_path": f"runs/{name}/start",
        "train_data_path": f"runs/{name}/dataset",
        "dtype": "fp32",
        "seq_length": 128,
        "num_workers": 1,
        "lr": 2e-3,
        "min_lr": 1e-5,
        "warmup_steps": 20,
        "steps": 500,
        "global_batch_size": 32,
        "eval_every": 100,
    }
    summary = f"A tiny model that learns to read digits, for `make demo FAMILY={family}`."
    return Recipe(family + DEMO, summary, defaults | DEMOS.get(family, TP2))


def _published() -> Iterator[Recipe]:
    for (family, organisation), sizes in SIZES.items():
        for name, title, gpus, checkpoint, layout, roomy in sizes:
            defaults = OF_FAMILY.get(family, {}) | {"name": name, "hf_path": f"{organisation}/{checkpoint}"}
            rates = RATES.get(family, USUAL)
            defaults |= {"lr": rates.lr, "optimizer.weight_decay": rates.weight_decay}
            # one epoch, as in the scripts of LLaVA, LLaVA-OneVision and InternVL
            defaults |= {"epochs": 1, "warmup_steps": 50, "global_batch_size": 64, "save_every": 500}
            defaults |= dict(argument.split("=") for argument in layout.split())
            if roomy == "" and defaults.get("recompute") == "full":
                roomy = "recompute=none"
            if "tp" in defaults:
                defaults["tp_comm_overlap"] = True
            cards = f"{gpus} GPU{'s' * (gpus > 1)} of 80 GB and up" + f" (of 141 GB: {roomy})" * bool(roomy)
            yield Recipe(name, f"{title}, for {cards}.", defaults, gpus, roomy or "", rates.adapter_lr)


RECIPES = {one.name: one for one in (*_published(), *map(_demo, (*SUPPORTED, *OF_PARTS)))}


def shipped_config(hf_path: str) -> Path | None:
    """The package's own copy of config.json, of a checkpoint that a recipe names and that is not here."""
    from huggingface_hub import try_to_load_from_cache

    names = [recipe.name for recipe in RECIPES.values() if recipe.defaults.get("hf_path") == hf_path]
    if not names or Path(hf_path).exists():
        return None
    with suppress(ValueError):  # "./NAME" is no name of the hub
        if isinstance(try_to_load_from_cache(hf_path, "config.json"), str):
            return None
    return CONFIGS / f"{names[0]}.json"
