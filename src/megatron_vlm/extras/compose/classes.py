"""The classes of Transformers that hold a tower and a language model: their configs, processors and names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from transformers import (
    CONFIG_MAPPING,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    LlavaProcessor,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedConfig,
    ProcessorMixin,
)
from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from megatron_vlm.config import ConfigError
from megatron_vlm.extras.compose.sources import IMAGE_TOKENS, Component
from megatron_vlm.extras.compose.tokens import RoleToken
from megatron_vlm.messages import reading
from megatron_vlm.models.hf import as_hf_config

MERGED = 2  # patches along each side of a visual token, where a projector merges them
PROJECTOR_WIDTH = 2560  # of the published LFM2-VL
FEATURE_LAYER = -2  # the layer before the last, as in LLaVA 1.5
# what an image processor does to the values of pixels, which the tower was trained on
COLOURS = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "resample")
# what a config.json says about itself and not about the model
_ABOUT = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "auto_map")


@dataclass(frozen=True)
class Choices:
    """The choices about images and the projector that a class leaves to the user."""

    min_image_tokens: int = IMAGE_TOKENS[0]
    max_image_tokens: int = IMAGE_TOKENS[1]
    projector_width: int = PROJECTOR_WIDTH


@dataclass(frozen=True)
class Composed:
    """A class that holds both."""

    architecture: str
    roles: Mapping[str, str]  # its special tokens by role, as they are spelled where the tokenizer has none
    processor: type[ProcessorMixin]
    # (vision config, its tokens by role, choices) → its own keys of config.json, its processor's own settings
    keys: Callable[[Any, Mapping[str, RoleToken], Choices], tuple[dict[str, Any], dict[str, Any]]]
    images: Callable[[Component, Any, Choices], Any]  # (tower, vision config, choices) → its image processor
    hub_names: tuple[tuple[str, str], ...] = ()  # patterns in names of parameters → as files spell them


def composed_config(
    model_type: str,
    tower: Component,
    language: Component,
    changes: Mapping[str, Any],
    keys: Mapping[str, Any],
    dtype: str,
) -> PreTrainedConfig:
    """The config of the whole, whose parts all run in `dtype`; `changes` belong to the text config, `keys` to
    the whole."""
    vision = part_config(tower)
    text = part_config(language)
    if hasattr(vision, "vision_use_head"):
        vision.vision_use_head = False
    for key, value in changes.items():
        setattr(text, key, value)
    vision.dtype = text.dtype = dtype
    return CONFIG_MAPPING[model_type](
        vision_config=vision,
        text_config=text,
        tie_word_embeddings=text.tie_word_embeddings,
        dtype=dtype,
        architectures=[COMPOSED[model_type].architecture],
        **keys,
    )


def part_config(part: Component) -> PreTrainedConfig:
    """The config of a tower or of a language model, without what it says about its own files."""
    return as_hf_config({key: value for key, value in part.config.items() if key not in _ABOUT}, part.folder)


@reading("tower.folder")
def _own_images(tower: Component) -> Any:
    """The tower's image processor."""
    return AutoImageProcessor.from_pretrained(tower.folder, trust_remote_code=False)


def _colours(tower: Component) -> dict[str, Any]:
    """The values of COLOURS in the tower's image processor."""
    images = _own_images(tower)
    return {key: value for key in COLOURS if (value := getattr(images, key, None)) is not None}


def _lfm2_vl_images(tower: Component, vision: Any, choices: Choices) -> Any:
    return Lfm2VlImageProcessor(
        do_image_splitting=False,
        use_thumbnail=False,
        min_image_tokens=choices.min_image_tokens,
        max_image_tokens=choices.max_image_tokens,
        encoder_patch_size=vision.patch_size,
        downsample_factor=MERGED,
        **_colours(tower),
    )


def _llava_images(tower: Component, vision: Any, choices: Choices) -> Any:
    """The tower's own. Raises ConfigError unless it makes one image of the tower's size of any image."""
    images = _own_images(tower)
    side = vision.image_size
    wanted = (1, vision.num_channels, side, side)
    for size in ((side, side), (3 * side, side), (side // 2 + 1, 2 * side)):
        made = tuple(images(Image.new("RGB", size), return_tensors="pt")["pixel_values"].shape)
        if made != wanted:
            raise ConfigError(
                f"--tower {tower.folder}: its {type(images).__name__} makes {made} of an image of "
                f"{size[0]} x {size[1]} pixels, and by its config.json the tower takes {wanted}; put the "
                "processor of that very tower into its folder, without tiles."
            )
    return images


def _mistral3_images(tower: Component, vision: Any, choices: Choices) -> Any:
    return PixtralImageProcessor(
        size={"longest_edge": vision.image_size},
        patch_size={"height": vision.patch_size, "width": vision.patch_size},
        **_colours(tower),
    )


def _lfm2_vl_keys(vision: Any, tokens: Mapping[str, RoleToken], choices: Choices) -> tuple[dict, dict]:
    config = {
        "image_token_id": tokens["image"].id,
        "downsample_factor": MERGED,
        "projector_hidden_size": choices.projector_width,
    }
    return config, {}


def _llava_keys(vision: Any, tokens: Mapping[str, RoleToken], choices: Choices) -> tuple[dict, dict]:
    has_class_token = vision.model_type == "clip_vision_model"
    # "default" leaves out the first feature of an image, the class token
    strategy = {"vision_feature_select_strategy": "default" if has_class_token else "full"}
    config = {
        "image_token_index": tokens["image"].id,
        "image_seq_length": (vision.image_size // vision.patch_size) ** 2,
        "vision_feature_layer": FEATURE_LAYER,
    }
    settings = {
        "patch_size": vision.patch_size,
        "num_additional_image_tokens": int(has_class_token),
        "image_token": tokens["image"].token,
    }
    return config | strategy, settings | strategy


def _mistral3_keys(vision: Any, tokens: Mapping[str, RoleToken], choices: Choices) -> tuple[dict, dict]:
    config = {"image_token_index": tokens["image"].id, "spatial_merge_size": MERGED}
    settings = {
        "patch_size": vision.patch_size,
        "spatial_merge_size": MERGED,
        "image_token": tokens["image"].token,
        "image_break_token": tokens["row_break"].token,
        "image_end_token": tokens["image_end"].token,
    }
    return config, settings


_ENDS = {"pad": "<|pad|>", "end_of_turn": "<|end_of_turn|>"}
_HUB_NAMES = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.", ""),
)
COMPOSED = {  # by model type
    "lfm2_vl": Composed(
        "Lfm2VlForConditionalGeneration",
        {"image": "<image>", "image_start": "<|image_start|>", "image_end": "<|image_end|>", **_ENDS},
        Lfm2VlProcessor,
        _lfm2_vl_keys,
        _lfm2_vl_images,
    ),
    "llava": Composed(
        "LlavaForConditionalGeneration",
        {"image": "<image>", **_ENDS},
        LlavaProcessor,
        _llava_keys,
        _llava_images,
        _HUB_NAMES,
    ),
    "mistral3": Composed(
        "Mistral3ForConditionalGeneration",
        {"image": "[IMG]", "row_break": "[IMG_BREAK]", "image_end": "[IMG_END]", **_ENDS},
        PixtralProcessor,
        _mistral3_keys,
        _mistral3_images,
        _HUB_NAMES,
    ),
}


def expected_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """The parameters and buffers of the whole model by name, without making it."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
    return {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
