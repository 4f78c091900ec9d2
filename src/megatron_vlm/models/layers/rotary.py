"""Rotary embeddings: tables from the Hugging Face config's own rule, on any device, and what they turn."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_vlm.models.layers.kernels.fused import of_channels


def inverse_frequencies(
    text_config: Any, layer_type: str | None = None, part_of_head: bool = False
) -> tuple[Tensor, float]:
    """(inverse frequencies (R/2,), factor on cos and sin) of `text_config.rope_parameters`, fp32 on CPU.

    The scaled rules (linear, YaRN, ...) are Transformers' own functions, so they round as Transformers does.
    They read `partial_rotary_factor`; the default rule reads it only with `part_of_head`.
    """
    rule = text_config.rope_parameters[layer_type] if layer_type else text_config.rope_parameters
    with torch.device("cpu"):  # real numbers also while the model is built on the meta device
        if rule["rope_type"] != "default":
            by_layer = {"layer_type": layer_type} if layer_type else {}
            return ROPE_INIT_FUNCTIONS[rule["rope_type"]](text_config, torch.device("cpu"), **by_layer)
        head_dim = getattr(text_config, "head_dim", None)
        head_dim = head_dim or text_config.hidden_size // text_config.num_attention_heads
        width = int(head_dim * rule.get("partial_rotary_factor", 1.0)) if part_of_head else head_dim
        return 1.0 / rule["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float) / width), 1.0


def mrope_axes(sections: list[int], interleaved: bool, frequencies: int) -> Tensor:
    """(R/2,) int64: the position axis (time, height, width) that turns each frequency.

    `sections`, the config's `mrope_section`, says how many frequencies each axis has: in chunks, one axis
    after another, or interleaved: time, height, width, time, ... until height and width are done, then time.
    """
    axes = [section % 3 for section, count in enumerate(sections) for _ in range(count)]
    if interleaved:
        axes = [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(frequencies)]
    return torch.tensor(axes, device="cpu")


class Rotary(nn.Module):
    """cos and sin for every rule a model uses: `forward(position_ids)` -> (rules, T, 2, S, B, 1, R/2) fp32.

    Most models have one rule; Gemma3 has two, for its local and its global layers; a rule of narrower heads
    is padded. Positions are (B, S), or (3, B, S) with `axes` from `mrope_axes`. T is 1 if queries and keys
    use the same table. With `query_scale`, a function of the position ids, T is 2: a scaled table for
    queries, then one for keys. Scaling commutes with rotation, so the scaled table scales the queries.
    """

    def __init__(
        self,
        rules: list[tuple[Tensor, float]],
        axes: Tensor | None = None,
        query_scale: Callable[[Tensor], Tensor] | None = None,
    ):
        super().__init__()
        self.register_buffer(
            "inv_freq",
            pad_sequence([frequencies for frequencies, _ in rules], batch_first=True),
            persistent=False,
        )
        self.widths = [len(frequencies) for frequencies, _ in rules]
        self.register_buffer("factors", torch.tensor([factor for _, factor in rules]), persistent=False)
        assert axes is None or len(axes) == self.inv_freq.shape[1], "an axis for every frequency"
        self.register_buffer("axes", axes, persistent=False)
        self.query_scale = query_scale

    def forward(self, position_ids: Tensor) -> Tensor:
        if self.axes is None:
            position_SBR = position_ids.t()[..., None]
        else:
            position_SBR = position_ids.permute(2, 1, 0)[..., self.axes]
        angles = (position_SBR.float() * self.inv_freq[:, None, None, :])[:, :, :, None, :]
        factor = self.factors.view(-1, 1, 1, 1, 1)
        table = torch.stack((angles.cos() * factor, angles.sin() * factor), dim=1)[:, None]
        if self.query_scale is None:
            return table
        scale_SB11 = self.query_scale(position_ids.t())[..., None, None]
        return torch.cat((table * scale_SB11, table), dim=1)

    def turns(self, position_ids: Tensor, config: TransformerConfig) -> list[list[list[Tensor]]]:
        """The tables of `rotate` for queries and for keys, which may be one, by rule."""
        return [
            [of_channels(*table[..., :width], config.rotary_interleaved) for table in of_rule]
            for of_rule, width in zip(self(position_ids).to(config.params_dtype), self.widths, strict=True)
        ]

    def query_scales(self, position_ids: Tensor, config: TransformerConfig) -> Tensor | None:
        """The factors (S, B, 1, 1) of `query_scale`, for channels of queries that no table turns."""
        if self.query_scale is None:
            return None
        return self.query_scale(position_ids.t())[..., None, None].to(config.params_dtype)
