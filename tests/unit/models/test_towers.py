"""Devices and the host: what runs where, which rank sees which image, and nobody waits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from pairs import first_soon
from parity import OF_DATA
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

import rehearse_waits
from device_waits import waiting_on_shapes
from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.config import ParallelConfig, RunConfig
from megatron_vlm.data.image_processors import get_image_spec
from megatron_vlm.data.image_processors.base import OneSize
from megatron_vlm.models.families import describe
from megatron_vlm.models.families.llava_onevision import packed
from megatron_vlm.models.families.mistral3 import pixtral_states
from megatron_vlm.models.family_parts.towers import _linear_of_patches
from megatron_vlm.models.hf import load_processor
from megatron_vlm.models.layers import tower_attention
from megatron_vlm.models.layers.attention_kernels import KERNELS
from megatron_vlm.models.opened import build_model
from megatron_vlm.models.vlm import balanced_shares, recompute_layers
from megatron_vlm.parallel import setup
from megatron_vlm.recipes.published import CONFIGS, SIZES
from megatron_vlm.supported import too_old
from tiny.checkpoints import build_tiny_checkpoint

# the first size of each family
REAL = {family: sizes[0][0] for (family, _), sizes in SIZES.items() if not too_old(family)}


LAYERS = 4  # of towers of real sizes: the further ones only repeat them
OF_LAYERS = {"deepstack_visual_indexes": [0, 1, 2], "fullatt_block_indexes": [1, 3]}  # what names some


@pytest.fixture(scope="module", params=first_soon(REAL, 4))
def description(request):
    hf_config = AutoConfig.from_pretrained(CONFIGS / f"{REAL[request.param]}.json")
    vision = hf_config.vision_config
    named = {"depth" if hasattr(vision, "depth") else "num_hidden_layers": LAYERS} | OF_LAYERS
    for name, value in named.items():
        if getattr(vision, name, None):
            setattr(vision, name, value)
    if hasattr(hf_config, "insert_layer_id"):  # of MiniCPM-V's merger
        hf_config.insert_layer_id = 1
    return describe(hf_config)


def test_towers_put_everything_on_their_device_but_what_the_host_reads(description):
    """In a rehearsal, an operation on tensors of two devices raises as on a GPU."""
    image = GenericVisualInputs(**description.blank_image(64**2))
    two = GenericVisualInputs.cat([image, image]).to("meta")
    with waiting_on_shapes(rehearse_waits.run_of(ParallelConfig(), 1), description, 1, 0):
        with torch.device("meta"):
            vision = description.build_vision()
        features = vision(**two.as_model_kwargs())
    assert features.device.type == "meta"
    assert features.shape[-2] == sum(description.visual_tokens(two))


def test_a_frozen_tower_is_not_run_again(description):
    """Its features need no gradient, so nothing is kept for a backward pass, also with recomputation."""
    with torch.device("meta"):
        vision = description.build_vision().requires_grad_(False).train()
    recompute_layers(vision)
    image = GenericVisualInputs(**description.blank_image(64**2)).to("meta")
    assert not vision(**image.as_model_kwargs()).requires_grad


class Convolutions(TorchDispatchMode):
    """Counts those whose stride is their kernel, and others."""

    def __init__(self):
        super().__init__()
        self.of_patches = self.others = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket is torch.ops.aten.convolution:
            _, weight, _, stride = args[:4]
            self.of_patches += list(weight.shape[2:]) == list(stride)
            self.others += list(weight.shape[2:]) != list(stride)
        return func(*args, **(kwargs or {}))


PATCH_LINEARS = ("lfm2_vl", "gemma4", "gemma4_unified")  # Transformers has linears there


def test_towers_cut_patches_by_linears(description):
    """None of their convolutions runs, which would be slow in bf16; they keep the weights."""
    with torch.device("meta"):
        vision = description.build_vision()
    convolutions = [m for m in vision.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)]
    assert bool(convolutions) != (description.model_type in PATCH_LINEARS)
    image = GenericVisualInputs(**description.blank_image(64**2)).to("meta")
    with Convolutions() as counted:
        vision(**image.as_model_kwargs())
    assert (counted.of_patches, counted.others) == (0, 0)
    for module in convolutions:  # which would have run
        del module.forward
    with Convolutions() as counted:
        vision(**image.as_model_kwargs())
    assert counted.of_patches == len(convolutions)


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4)), (5, 3, 2, 4, 4)),
        (nn.Conv2d(3, 8, 4, 4, bias=False), (2, 3, 18, 13)),  # the rest of an image is left out
        (nn.Conv2d(3, 8, (2, 4), (2, 4), padding="valid"), (2, 3, 8, 8)),
    ],
)
def test_a_linear_of_patches_is_the_convolution(convolution, shape):
    pixels = torch.randn(shape, requires_grad=True)
    trained = [pixels, *convolution.parameters()]
    both = [convolution(pixels), _linear_of_patches(convolution, pixels)]
    gradient = torch.randn_like(both[0])
    theirs, ours = ([output, *torch.autograd.grad(output, trained, gradient)] for output in both)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


def test_images_are_spread_evenly_and_each_once():
    assert balanced_shares([9, 1, 1, 4, 4], 2) == [[0, 2], [1, 3, 4]]
    assert balanced_shares([5], 2) == [[0], []]


def test_items_are_the_inverse_of_cat():
    visual = GenericVisualInputs(
        pixel_values=torch.arange(10.0)[:, None],
        image_grid_thw=torch.tensor([[1, 2, 3], [1, 2, 2]]),
        pixel_values_videos=torch.arange(8.0)[:, None],
        video_grid_thw=torch.tensor([[2, 2, 2]]),
        second_per_grid_ts=torch.tensor([0.5]),
    )
    items = visual.items()
    assert [len(item.as_model_kwargs()) for item in items] == [2, 2, 3]
    assert items[1].pixel_values.flatten().tolist() == [6, 7, 8, 9]
    joined = GenericVisualInputs.cat(items).as_model_kwargs()
    assert joined.keys() == visual.as_model_kwargs().keys()
    assert all(value.equal(getattr(visual, name)) for name, value in joined.items())


def features_and_gradients(vision: torch.nn.Module, visual: GenericVisualInputs) -> list[torch.Tensor]:
    vision.zero_grad()
    features = vision(**visual.as_model_kwargs())
    features.square().sum().backward()
    return [features.detach(), *(p.grad for p in vision.parameters() if p.grad is not None)]


WITHOUT_ATTENTION = ("gemma4_unified",)
ATTENDING = [family for family in OF_DATA if family.values[0] not in WITHOUT_ATTENTION]


@pytest.mark.parametrize("name", ATTENDING)
def test_towers_attend_to_all_images_in_one_call_as_transformers_to_each_in_one(name, tmp_path, monkeypatch):
    """To the bit; but where Transformers masks all pairs of patches, or where all of the tower runs for each
    image, sums have other parts."""
    hf_config = AutoConfig.from_pretrained(build_tiny_checkpoint(name, tmp_path))
    description, calls = describe(hf_config), []
    one_size = isinstance(
        get_image_spec(load_processor(tmp_path)), OneSize
    )  # a batch, which needs no segments
    torch.manual_seed(0)
    vision = description.build_vision()
    blank = [GenericVisualInputs(**description.blank_image(side**2)) for side in (28, 84, 56)]
    visual = GenericVisualInputs.cat(blank).map(lambda t: torch.randn_like(t) if t.is_floating_point() else t)
    forward = tower_attention.KERNELS["documents"].forward
    monkeypatch.setitem(
        tower_attention.KERNELS,
        "documents",
        KERNELS["documents"]._replace(forward=lambda *x: calls.append(x[3]) or forward(*x)),
    )
    ours = features_and_gradients(vision, visual)
    layers = len(calls)
    sizes = hf_config.vision_config
    assert layers == (0 if one_size else getattr(sizes, "depth", None) or sizes.num_hidden_layers)
    assert all(len(segments.query_lengths) >= 3 for segments in calls)
    assert len(set(map(id, calls))) <= 2  # whole images, and the windows of Qwen2.5-VL
    tower_attention.use_sdpa(vision)
    theirs = features_and_gradients(vision, visual)
    assert len(calls) == layers and len(ours) == len(theirs) > 5
    for mine, expected in zip(ours, theirs, strict=True):
        if name in ("mistral3", "lighton_ocr", "lfm2_vl", "gemma4"):
            torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)
        else:
            assert torch.equal(mine, expected)


def test_pixtrals_states_are_those_of_transformers_own_forward(tmp_path):
    """To the bit, with the same attention: only where places and bounds are made differs."""
    hf_config = AutoConfig.from_pretrained(build_tiny_checkpoint("mistral3", tmp_path))
    vision = describe(hf_config).build_vision()
    tower, sizes = vision.vision_tower, torch.tensor([[28, 56], [56, 28], [84, 84]])
    pixels, bounds = torch.randn(3, 3, 84, 84), torch.tensor([0, 8, 16, 52]) * (14 // tower.patch_size) ** 2
    assert bounds[-1] == (sizes // tower.patch_size).prod(-1).sum()
    whole = tower(pixels, image_sizes=sizes.tolist(), output_hidden_states=True, host_bounds=bounds)
    assert len(whole.hidden_states) == hf_config.vision_config.num_hidden_layers + 1
    for layer, expected in enumerate(whole.hidden_states):
        assert torch.equal(pixtral_states(tower, pixels, sizes, layer), expected)


@pytest.mark.parametrize("most", [1, 9])
def test_tiles_are_laid_out_as_transformers_lays_them_out(most, tmp_path):
    """To the bit, of images with padding below, beside or without, and of those with too many features."""
    hf_config = AutoConfig.from_pretrained(build_tiny_checkpoint("llava_onevision", tmp_path, most_a_side=3))
    hf_config.vision_aspect_ratio = f"anyres_max_{most}"
    description, found = describe(hf_config), []
    side, sizes = description.patches_a_side, [[60, 20], [20, 60], [28, 28], [70, 80], [10, 10]]
    counts = [description.tiles_of(size, alone=size[0] > 10) for size in sizes]
    assert counts[-1] == 1 and max(counts) > 4
    torch.manual_seed(0)
    tiles = [torch.randn(count, side**2, 8, requires_grad=True) for count in counts]
    newline = torch.randn(8, requires_grad=True)
    for make in (
        lambda: packed(hf_config, tiles, torch.tensor(sizes), newline),
        lambda: LlavaOnevisionModel.pack_image_features(
            SimpleNamespace(config=hf_config), tiles, sizes, newline, hf_config.vision_aspect_ratio
        )[0],
    ):
        features = make()
        gradients = torch.autograd.grad(sum(each.square().sum() for each in features), [*tiles, newline])
        found.append([*features, *gradients])
    assert len(found[0]) == len(found[1]) and all(map(torch.equal, *found))


@pytest.mark.parametrize("name", OF_DATA)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_forward_and_backward_never_wait_for_the_device(name, recompute, tmp_path):
    """Nothing can be read from a meta tensor: whatever the host asked of the device would raise."""
    hf_config = AutoConfig.from_pretrained(build_tiny_checkpoint(name, tmp_path))
    description, run = describe(hf_config), RunConfig()
    run.model.recompute = recompute
    visual = GenericVisualInputs(**description.blank_image(64**2)).to("meta")
    tokens = sum(description.visual_tokens(visual)) + 8
    with setup.pretend_rank(run.parallel, 1):
        with torch.device("meta"):
            (model,) = build_model(run, description, torch.device("meta"))
        axes = (3,) if model.language_model.rotary.axes is not None else ()
        ids_BS = torch.full((1, tokens), hf_config.image_token_id)
        ids_BS[:, -8:] = 0
        batch = {
            "input_ids": ids_BS,
            "labels": torch.zeros(1, tokens, dtype=torch.long),
            "loss_mask": torch.ones(1, tokens),
            "position_ids": torch.zeros(*axes, 1, tokens, dtype=torch.long),
            "attention_mask": torch.ones(1, tokens, dtype=torch.int32),
            "visual_inputs": visual,
        }
        windows = {None, *model.config.layer_windows}
        model(model.layout(batch).stream(0, tokens, windows, torch.device("meta"))).sum().backward()
    without = {name for name, param in model.named_parameters() if param.grad is None}
    assert without == {name for name, param in model.named_parameters() if not param.requires_grad}
    assert not without or name in ("llava", "llava_onevision"), "they look at states before the last norm"
    assert len(without) < 20
