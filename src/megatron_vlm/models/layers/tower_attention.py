"""Attention of vision towers: images, frames or windows as segments of one call, without loop or mask.

Transformers' towers call one function for all images of a batch, and hand it their bounds, only if the name
of the implementation says "flash"; else they loop over images, or make a mask of all pairs of patches.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, PreTrainedModel

from megatron_vlm.models.layers.attention import Attend
from megatron_vlm.models.layers.attention_kernels import KERNELS, Segments
from megatron_vlm.models.layers.attention_plan import View

NAME = "flash_segments"
kernels: dict[tuple[int, int], str] = {}  # chosen on this GPU for heads of these numbers and channels
_views: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of bounds: made once for all layers


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor | None = None,
    host_bounds: Tensor | None = None,
    **_,
) -> tuple[Tensor, None]:
    """Transformers' attention function: (1, H, P, K) each → (1, P, H, K) and no weights.

    The bounds of the segments (n + 1,) are on the host: `host_bounds` if a tower makes its own on the device,
    `attention_mask` if its layers hand on nothing else.
    """
    bounds = next(bound for bound in (host_bounds, cu_seq_lens_q, attention_mask) if bound is not None)
    if bounds not in _views:
        _views[bounds] = view_of(np.diff(bounds.numpy()), query.device)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    on_gpu = kernels.get((q.shape[1], q.shape[2]), "flash")
    kernel = KERNELS["documents" if q.device.type == "cpu" else on_gpu]
    return Attend.apply(q, k, v, _views[bounds], kernel, scaling)[None], None


def view_of(lengths: np.ndarray, device: torch.device) -> View:
    """Segments of these lengths; inside each, all see all."""
    return View(Segments(lengths, lengths, None, None, device), None, np.empty(0, np.int64))


def use_segments(tower: PreTrainedModel) -> PreTrainedModel:
    """The tower, built with "sdpa", with `attend` as its attention."""
    AttentionInterface.register(NAME, attend)
    tower.config._attn_implementation = NAME
    return tower


def uses_segments(tower: PreTrainedModel) -> bool:
    return tower.config._attn_implementation == NAME


def use_sdpa(vision: nn.Module) -> None:
    """Takes `use_segments` back for every tower in `vision`."""
    for part in vision.modules():
        if isinstance(part, PreTrainedModel) and uses_segments(part):
            part.config._attn_implementation = "sdpa"


def heads(vision: nn.Module) -> set[tuple[int, int]]:
    """(heads, channels of a head) of the towers in `vision` that use `attend`."""
    return {
        (getattr(part, "num_heads", None) or part.config.num_attention_heads, part.head_dim)
        for part in vision.modules()
        if hasattr(part, "head_dim") and part.config._attn_implementation == NAME
    }
