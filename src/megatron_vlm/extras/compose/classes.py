"""The classes of Transformers that hold a tower and a language model: their configs and processors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image
from transformers import (
    CONFIG_MAPPING,
    AutoImageProcessor,
    LlavaProcessor,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedConfig,
    ProcessorMixin,
)
from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from megatron_vlm.config import ConfigError
from megatron_vlm.data.image_processors.grid import refuse_narrow
from megatron_vlm.extras.compose.sources import Choices, Component
from megatron_vlm.extras.compose.tokens import RoleToken
from megatron_vlm.inputs import attribute_errors_to
from megatron_vlm.models.hf import as_hf_config

MERGED = 2  # patches along each side of a visual token, where a projector merges them
FEATURE_LAYER = -2  # the layer before the last, as in LLaVA 1.5
# what an image processor does to the values of pixels, which the tower was trained on
COLOURS = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "resample")
# what a config.json says about itself and not about the model
_ABOUT = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "auto_map")


@dataclass(frozen=True)
class Composed:
    """A class that holds both."""

    roles: Mapping[str, str]  # its special tokens by role, as they are spelled where the tokenizer has none
    processor: type[ProcessorMixin]
    # (vision config, its tokens by role, choices) → its own keys of config.json, its processor's own settings
    keys: Callable[[Any, Mapping[str, RoleToken], Choices], tuple[dict[str, Any], dict[str, Any]]]
    images: Callable[[Component, Any, Choices], Any]  # (tower, vision config, choices) → its image processor


def composed_config(
    model_type: str, vision: PreTrainedConfig, text: PreTrainedConfig, keys: Mapping[str, Any], dtype: str
) -> PreTrainedConfig:
    """Return the config of the whole, whose parts all run in `dtype`; `keys` belong to the whole."""
    if vision.model_type.startswith("siglip"):  # older Transformers only know the attribute if it is set
        vision.vision_use_head = False
    vision.dtype = text.dtype = dtype
    return CONFIG_MAPPING[model_type](
        vision_config=vision,
        text_config=text,
        tie_word_embeddings=text.tie_word_embeddings,
        dtype=dtype,
        **keys,
    )


def part_config(part: Component) -> PreTrainedConfig:
    """The config of a tower or of a language model, without what it says about its own files."""
    return as_hf_config({key: value for key, value in part.config.items() if key not in _ABOUT}, part.folder)


@attribute_errors_to("tower.folder")
def _own_images(tower: Component) -> Any:
    """The tower's image processor."""
    return AutoImageProcessor.from_pretrained(tower.folder, trust_remote_code=False)


def _colours(tower: Component) -> dict[str, Any]:
    """The values of COLOURS in the tower's image processor."""
    images = _own_images(tower)
    return {key: value for key in COLOURS if (value := getattr(images, key, None)) is not None}


def _lfm2_vl_images(tower: Component, vision: Any, choices: Choices) -> Any:
    refuse_narrow(choices.min_image_tokens, choices.max_image_tokens)
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
    tower_shape = (1, vision.num_channels, side, side)
    for size in ((side, side), (3 * side, side), (side // 2 + 1, 2 * side)):
        image_shape = tuple(images(Image.new("RGB", size), return_tensors="pt")["pixel_values"].shape)
        if image_shape != tower_shape:
            raise ConfigError(
                f"--tower {tower.folder}: its {type(images).__name__} makes {image_shape} of an image of "
                f"{size[0]} x {size[1]} pixels, and by its config.json the tower takes {tower_shape}; put "
                "the processor of that very tower into its folder, without tiles."
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
COMPOSED = {  # by model type
    "lfm2_vl": Composed(
        {"image": "<image>", "image_start": "<|image_start|>", "image_end": "<|image_end|>", **_ENDS},
        Lfm2VlProcessor,
        _lfm2_vl_keys,
        _lfm2_vl_images,
    ),
    "llava": Composed(
        {"image": "<image>", **_ENDS},
        LlavaProcessor,
        _llava_keys,
        _llava_images,
    ),
    "mistral3": Composed(
        {"image": "[IMG]", "row_break": "[IMG_BREAK]", "image_end": "[IMG_END]", **_ENDS},
        PixtralProcessor,
        _mistral3_keys,
        _mistral3_images,
    ),
}
