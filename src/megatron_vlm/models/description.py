"""The description of a checkpoint: what the package knows of it, from its family and its config.json."""

from abc import ABC, abstractmethod
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatron_vlm.batch import DataNeeds, GenericVisualInputs, count_up
from megatron_vlm.models.layers.fused import Rotary
from megatron_vlm.models.positions import IMAGE, VIDEO
from megatron_vlm.models.weights.rules import Rule, WeightMap


class Description(ABC):
    """One checkpoint, made by `models.families.describe` without building anything.

    A family, the code for one HF `model_type`, is a subclass; class attributes hold for all its checkpoints.
    `hf_config` is Transformers' config of the whole model, `text` and `vision` are its sections. Properties
    are computed when they are read: a look at the weights may still change `hf_config.tie_word_embeddings`.
    """

    model_type: str
    config_values: dict[str, Any] | None = None  # of its config.json, see `limits.checked`
    # limits of keys of config.json besides those of all families, see `family_parts.limits`: of its top
    # level, its text_config, its vision_config, and of the rules in rope_parameters
    top_limits: dict[str, Any] = {}
    text_limits: dict[str, Any] = {}
    vision_limits: dict[str, Any] = {}
    rope_limits: dict[str, Any] = {}
    rope_by_layer = False  # `rope_parameters` has a rule for each type of layer
    by_layer: tuple[str, ...] = ()  # keys of which each type of layer may have its own value
    tower_types: tuple[str, ...] = ()  # model types of towers, if there is a choice
    visual_keys: tuple[str, ...] = ("pixel_values",)
    # HF key prefixes found in the wild -> the hub's own
    renames: tuple[tuple[str, str], ...] = ()
    # freeze group -> prefixes of its parameters in VLMModel
    groups: dict[str, tuple[str, ...]] = {
        "tower": ("vision.vision_tower.",),
        "projector": ("vision.multi_modal_projector.",),
        "language_model": ("language_model.",),
    }
    has_experts = False
    images_or_videos = False  # a sample (in Transformers even a batch) holds either of them
    frames_as_images = False  # the frames of a video are images to the model, and to its tokens
    clip: Any = (
        None  # a method: an image → a clip of more frames, with as many features; if the tower has such
    )
    # how the family writes boxes: a name of `extras.grounding.convention`; None: it publishes no way
    box_format: str | None = None
    # tokens of one image see each other in both directions; "windows": only in layers with a sliding window;
    # "whole": also those that are further apart than a layer's window
    bidirectional_images: bool | str = False
    # ends of names that peft takes for this family's experts and router, wherever they are in the model
    # (0.21, `transformers_weight_conversion._convert_peft_config_moe`)
    peft_experts: tuple[str, ...] = ()

    def __init__(self, hf_config: Any):
        self.hf_config = hf_config
        self.text, self.vision = hf_config.text_config, hf_config.vision_config

    # --- what every family says --------------------------------------------------------------------------

    @property
    @abstractmethod
    def architecture(self) -> dict:
        """The fields of LanguageModelConfig."""

    @property
    @abstractmethod
    def rules(self) -> list[Rule]:
        """Rules for all weights."""

    @abstractmethod
    def rotary(self) -> Rotary: ...

    @abstractmethod
    def vision_modules(self) -> nn.Module:
        """Tower and projector, called as `vision(**visual_inputs.normalized_for_model())`.

        They give the features (M, D) of all images in document order, then of all videos; or (1 + n, M, D),
        where the further n are added to the hidden states after each of the first n layers
        (`deepstack_layers`).
        """

    @abstractmethod
    def blank_image(self, pixels: int) -> dict[str, Tensor]:
        """The tower's arguments for a black image of about that area (0: the smallest)."""

    @abstractmethod
    def visual_tokens(self, visual: GenericVisualInputs) -> list[int]:
        """The number of features of each item, images before videos.

        Raises ValueError for pixels that the tower cannot take; data workers drop such a sample.
        """

    @abstractmethod
    def tower_pairs(self, visual: GenericVisualInputs) -> int:
        """The number of pairs of patches that attend to each other in the tower. It counts all items and
        layers, or one layer if all are alike."""

    # --- what a family may say otherwise -----------------------------------------------------------------

    uses_part = False  # no feature depends on some parts of tower or projector, such as its last layers

    @property
    def carried_keys(self) -> dict[str, str]:
        """Patterns of HF keys -> why they are not imported. Exports have them as the source has."""
        return {}

    def tower_units(self, visual: GenericVisualInputs) -> int:
        """The number of pieces that tower and projector work on, attention apart; here the features."""
        return sum(self.visual_tokens(visual))

    def visual_kinds(self, input_ids: Any) -> Any:
        """For each token of a document whether it stands for text, an image or a video, see `positions`."""
        video = getattr(self.hf_config, "video_token_id", None)
        kinds = (input_ids == self.hf_config.image_token_id) * IMAGE
        return kinds if video is None else kinds + (input_ids == video) * VIDEO

    # (ids (T,), visual inputs) -> positions of a document's tokens; data workers call it
    position_ids = staticmethod(count_up)

    # --- what follows ------------------------------------------------------------------------------------

    @property
    def limits(self) -> dict[str, dict[str, Any]]:
        """The family's own limits of keys of config.json, by part."""
        return {"": self.top_limits, "text_config": self.text_limits, "vision_config": self.vision_limits}

    def build_vision(self) -> nn.Module:
        """`vision_modules`, in which only what features depend on has gradients."""
        vision = self.vision_modules()
        if self.uses_part:
            freeze_what_is_unused(vision, self.blank_image(0))
        return vision

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return bool(self.hf_config.tie_word_embeddings)

    @property
    def data_needs(self) -> DataNeeds:
        return DataNeeds(
            visual_keys=self.visual_keys,
            position_ids=self.position_ids,
            images_or_videos=self.images_or_videos,
            box_format=self.box_format,
            frames_as_images=self.frames_as_images,
            misfit=self.misfit,
            first_items=self.first_items,
        )

    def misfit(self, input_ids_T: Tensor, visual: GenericVisualInputs | None) -> str | None:
        """Why the model cannot take a document; None if it can. Its tower refuses the media, or they have
        other numbers of features than placeholders, as where config.json and the processor are not of one
        model.

        Images and videos are counted apart: a packed row has the features of all images before the videos'.
        """
        tensors = visual.as_model_kwargs() if visual else {}
        for name in ("pixel_values", "pixel_values_videos"):  # the sum is no number if one of them is none
            pixels = tensors.get(name)
            is_float = pixels is not None and pixels.is_floating_point()
            if is_float and not pixels.sum(dtype=torch.float64).isfinite():
                return f"{name} hold numbers that are not finite"
        alike = GenericVisualInputs(**visual.normalized_for_model()) if visual else GenericVisualInputs()
        try:
            counts = self.visual_tokens(alike) if visual else []
        except ValueError as error:
            return str(error)
        kinds_T = self.visual_kinds(input_ids_T)
        images = len(counts) - alike.videos
        for kind, name, features in ((IMAGE, "images", counts[:images]), (VIDEO, "videos", counts[images:])):
            if (placeholders := int((kinds_T == kind).sum())) != sum(features):
                return f"{placeholders} placeholders for {sum(features)} features of its {name}"
        return None

    def first_items(
        self, input_ids_T: Tensor, visual: GenericVisualInputs | None
    ) -> GenericVisualInputs | None:
        """The images and videos, or their pieces, that a document keeps when it is cut to these ids.

        The cut lies behind a whole image, video or piece.
        """
        if visual is None:
            return None
        visual = GenericVisualInputs(**visual.normalized_for_model())
        counts = self.visual_tokens(visual)
        kinds_T = self.visual_kinds(input_ids_T)
        items = visual.items()
        images = len(items) - visual.videos
        kept = []
        for kind, part in ((IMAGE, slice(images)), (VIDEO, slice(images, None))):
            ends = np.cumsum(counts[part])
            kept += items[part][: int(np.searchsorted(ends, (kinds_T == kind).sum(), side="right"))]
        return GenericVisualInputs.cat(kept)

    @property
    def weight_map(self) -> WeightMap:
        return WeightMap(
            model_type=self.model_type,
            rules=self.rules,
            tied=self.tied,
            renames=self.renames,
            carried=self.carried_keys,
            peft_experts=self.peft_experts,
        )


def freeze_what_is_unused(vision: nn.Module, image: dict[str, Tensor]) -> None:
    """Turn off the gradients of what no feature depends on, such as unused last layers.

    They stay as they are, as in Transformers, where they get no gradient, and so do adapters of theirs:
    Megatron would wait for the gradient of each trained parameter. Runs on shapes alone.
    """
    both = _Backward(vision)
    shapes = {
        name: torch.empty_like(tensor, device="meta").requires_grad_(tensor.is_floating_point())
        for name, tensor in chain(both.named_parameters(), both.named_buffers())
    }
    with torch.enable_grad():
        functional_call(both, shapes, (), GenericVisualInputs(**image).to("meta").as_model_kwargs())
    for name, parameter in both.named_parameters():
        if shapes[name].grad is None:
            parameter.requires_grad_(False)
            parameter.unused = True


class _Backward(nn.Module):
    """Both passes in one call, so that layers which run again in the second have the same parameters."""

    def __init__(self, vision: nn.Module):
        super().__init__()
        self.vision = vision

    def forward(self, **inputs: Any) -> None:
        self.vision(**inputs).sum().backward()
