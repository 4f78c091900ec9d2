"""What a family is: everything the package needs to know about one HF model type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron_vlm.batch import DataNeeds, GenericVisualInputs, PositionIds, count_up
from megatron_vlm.models.family_parts import towers
from megatron_vlm.models.family_parts.keys import Sections
from megatron_vlm.models.layers.rotary import Rotary
from megatron_vlm.models.positions import Kinds, kinds_by_token
from megatron_vlm.models.weights import Rule, WeightMap


@dataclass(frozen=True)
class Family:
    """One HF `model_type`. Every function takes the HF config (`PretrainedConfig`) of the whole model.

    `build_vision(hf_config)` returns a module called as `vision(**visual_inputs.normalized_for_model())`. It
    gives visual features (M, D), those of images in document order before those of videos; or (1 + n, M, D),
    where the further n are added to the hidden states after each of the first n layers (`deepstack_layers`).
    `blank_image(hf_config, pixels)` gives its arguments for a black image of about that area (0: smallest).
    `visual_tokens(hf_config, visual_inputs)` gives the number of features of each item, images before videos.
    It raises ValueError for pixels that the tower cannot take; data workers drop such a sample.
    `tower_pairs(hf_config, visual_inputs)` gives the number of pairs of patches that see each other in the
    tower's attention, over all items and layers, or over one layer if all are alike.
    """

    model_type: str
    sections: Sections  # of config.json: its top level, text_config, vision_config
    visual_keys: tuple[str, ...]
    architecture: Callable[[Any], dict]  # fields of LanguageModelConfig
    rotary: Callable[[Any], Rotary]
    build_vision: Callable[[Any], nn.Module]
    blank_image: Callable[[Any, int], dict[str, Tensor]]
    visual_tokens: Callable[[Any, GenericVisualInputs], list[int]]
    tower_pairs: Callable[[Any, GenericVisualInputs], int]
    weights: Callable[[Any], list[Rule]]
    # HF key prefixes found in the wild -> the hub's own
    renames: tuple[tuple[str, str], ...] = ()
    # pattern -> why it is not imported
    ignored_keys: Callable[[Any], dict[str, str]] = lambda hf_config: {}
    # freeze group -> prefixes of its parameters in VLMModel
    groups: dict[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "tower": ("vision.vision_tower.",),
            "projector": ("vision.multi_modal_projector.",),
            "language_model": ("language_model.",),
        }
    )
    has_experts: bool = False
    # a sample (in Transformers even a batch) holds either images or videos
    images_or_videos: bool = False
    # the frames of a video are images to the model, and to its tokens
    frames_as_images: bool = False
    # tokens of one image see each other in both directions; "windows": only in layers with a sliding window
    bidirectional_images: bool | str = False
    # gives the function that data workers call on every document
    position_ids: Callable[[Any], PositionIds] = lambda hf_config: count_up
    # gives the function that makes the visual keys of a processor's outputs which have another form
    of_processor: Callable[[Any], Callable[[Mapping[str, Any]], Mapping[str, Any]]] = lambda hf_config: dict
    # what the work of tower and projector grows with, but for attention; None: the number of features
    tower_units: Callable[[Any, GenericVisualInputs], int] | None = None
    # gives the function (token ids of a document) -> which stand for image features, which for video features
    visual_kinds: Callable[[Any], Kinds] = kinds_by_token
    # config.json (parsed) -> the same in a form that all supported versions of Transformers read
    portable_config: Callable[[dict], dict] = lambda config: config
    # ends of names that peft takes for this family's experts and router, wherever they are in the model
    # (0.21, `transformers_weight_conversion._convert_peft_config_moe`)
    peft_experts: tuple[str, ...] = ()

    def data_needs(self, hf_config: Any) -> DataNeeds:
        misfit = partial(towers.misfit, self.visual_kinds(hf_config), partial(self.visual_tokens, hf_config))
        of_videos = self.images_or_videos, self.of_processor(hf_config), self.frames_as_images
        return DataNeeds(self.visual_keys, self.position_ids(hf_config), *of_videos, misfit)

    def weight_map(self, hf_config: Any) -> WeightMap:
        return WeightMap(
            self.model_type,
            self.weights(hf_config),
            bool(hf_config.tie_word_embeddings),
            self.renames,
            self.ignored_keys(hf_config),
            self.portable_config,
            self.peft_experts,
        )
