"""Towers with our rotary embeddings, norms and gates compute what Transformers' own do, and keep less."""

from __future__ import annotations

import pickle
import shutil
from copy import deepcopy
from functools import partial

import pytest
import torch
from pairs import first_soon
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.models.description import Description
from megatron_vlm.models.families import describe
from megatron_vlm.models.family_parts.towers import hf_tower
from megatron_vlm.models.layers import fused_towers
from megatron_vlm.models.layers.fused import Fused, compiled_on
from megatron_vlm.models.layers.fused_towers import gate_rows_backward
from megatron_vlm.models.layers.kernel_checks import tower_disagreement
from tiny.checkpoints import TINY_FAMILIES, perturbed
from tiny.corpus import default_corpus

OURS = (fused_towers._norm, fused_towers._gated_mlp, fused_towers._quick_gelu, fused_towers._rotary_attention)
PIXTRAL = {"PixtralRMSNorm", "PixtralMLP", "PixtralAttention"}
GLM = {"Glm4vRMSNorm", "Glm4VisionMlp", "Glm4vVisionAttention"}
REPLACED = {  # the classes with functions of ours; in the towers of other families nothing is to gain
    "gemma4": {"Gemma4VisionMLP"},
    "mistral3": PIXTRAL,
    "lighton_ocr": PIXTRAL,
    "glm4v": GLM,
    "glm46v": GLM,
    "glmga": GLM,
    "glm4v_moe": {"Glm4vMoeRMSNorm", "Glm4vMoeisionMlp", "Glm4vMoeVisionAttention"},
    "llava": {"QuickGELUActivation"},
    "qwen2_vl": {"VisionAttention", "QuickGELUActivation"},
    "qwen2_5_vl": {"Qwen2_5_VLRMSNorm", "Qwen2_5_VLMLP", "Qwen2_5_VLVisionAttention"},
    "qwen3_vl": {"Qwen3VLVisionAttention"},
    "qwen3_vl_moe": {"Qwen3VLMoeVisionAttention"},
    "qwen3_5": {"Qwen3_5VisionAttention"},
    "qwen3_5_moe": {"Qwen3_5MoeVisionAttention"},
    "kimi_k25": {"Kimi_K25VisionAttention"},
}


def own_modules(vision: nn.Module) -> list[nn.Module]:
    """The modules that call functions of ours."""
    forwards = ((m, vars(m).get("forward")) for m in vision.modules())
    return [m for m, forward in forwards if getattr(forward, "func", None) in OURS]


def as_transformers(vision: nn.Module, but_for: tuple = ()) -> nn.Module:
    """A copy in which modules are as Transformers wrote them, but for these functions of ours."""
    copy = deepcopy(vision)
    for module in own_modules(copy):
        if module.forward.func not in but_for:
            del module.forward
    return copy


def described(family: str) -> Description:
    parts = TINY_FAMILIES[family]
    return describe(parts.config(parts.processor(default_corpus(), parts.template), {}, {}))


FIRST = ("qwen2_5_vl", "mistral3", "qwen2_vl", "kimi_k25")  # each kind of function and layout
FAMILIES = [*FIRST, *(family for family in TINY_FAMILIES if family not in FIRST)]


@pytest.fixture(scope="module", params=first_soon(FAMILIES, len(FIRST)))
def description(request):
    return described(request.param)


def two_images(description: Description, dtype: torch.dtype) -> GenericVisualInputs:
    torch.manual_seed(1)
    image = {
        key: torch.randn_like(value, dtype=dtype) if value.is_floating_point() else value
        for key, value in description.blank_image(64**2).items()
    }
    return GenericVisualInputs.cat([GenericVisualInputs(**image)] * 2)


def results(vision: nn.Module, images: GenericVisualInputs) -> dict[str, torch.Tensor]:
    """Features and gradients of all weights."""
    features = vision(**images.as_model_kwargs())
    features = features[0] if isinstance(features, tuple) else features
    torch.manual_seed(2)
    features.backward(torch.randn(features.shape).to(features.dtype))
    gradients = {name: weight.grad for name, weight in vision.named_parameters() if weight.grad is not None}
    return {"features": features.detach(), **gradients}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_towers_compute_what_transformers_own_do(description, dtype):
    vision = perturbed(description.build_vision, 0).to(dtype)
    images = two_images(description, dtype)
    expected = results(as_transformers(vision), images)
    # the norm's gradient is another formula, so all but norms first
    found = results(as_transformers(vision, but_for=tuple(set(OURS) - {fused_towers._norm})), images)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    found = results(vision, images)
    assert torch.equal(found["features"], expected["features"])
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 3e-2}[dtype]
    for name, gradient in found.items():
        largest = expected[name].abs().max()
        assert (gradient - expected[name]).abs().max() <= tolerance * largest, name


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_modules_of_known_code_are_replaced(family):
    description = described(family)
    with torch.device("meta"):
        vision = description.build_vision()
    assert {type(module).__name__ for module in own_modules(vision)} == REPLACED.get(family, set())


def test_a_copy_and_a_pickled_tower_have_weights_apart(description):
    vision = description.build_vision()
    modules = own_modules(vision)
    pickled = pickle.loads(pickle.dumps(modules))  # noqa: S301
    for copies in (own_modules(deepcopy(vision)), pickled):
        for module, copy in zip(modules, copies, strict=True):
            assert copy.forward.func is module.forward.func and copy.forward.args == (copy,)


def test_transformers_own_model_in_the_process_stays(description):
    vision = perturbed(description.build_vision, 0)
    vision(**two_images(description, torch.float32).as_model_kwargs())
    reference = AutoModelForImageTextToText.from_config(description.hf_config)
    assert own_modules(reference) == []
    assert {type(m) for m in reference.modules()} >= {type(m) for m in own_modules(vision)}
    for module in own_modules(vision):
        names = type(module).forward.__globals__
        for name in {"apply_rotary_pos_emb", "apply_rotary_pos_emb_vision"}.intersection(names):
            assert names[name].__module__ == type(module).__module__


def bytes_kept(vision: nn.Module, images: GenericVisualInputs) -> int:
    """Bytes for the backward pass besides weights."""
    kept = {}
    weights = {weight.untyped_storage()._cdata for weight in vision.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage  # the storage, so that no other one gets its number
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        vision(**images.as_model_kwargs())
    return sum(storage.nbytes() for storage in kept.values())


def test_norms_and_gates_keep_less(description):
    vision = description.build_vision().to(torch.bfloat16)
    images = two_images(description, torch.bfloat16)
    before, after = bytes_kept(as_transformers(vision), images), bytes_kept(vision, images)
    has_more_than_rotary = {m.forward.func for m in own_modules(vision)} - {fused_towers._rotary_attention}
    assert after < 0.96 * before if has_more_than_rotary else after == before


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
@pytest.mark.parametrize("family", FIRST[:3])
def test_compiled_for_a_cpu_they_agree(family):
    vision = described(family).build_vision()
    with torch.compiler.set_stance("default"), compiled_on("cpu"):
        assert tower_disagreement(vision, torch.device("cpu"), torch.float32) is None


def test_the_check_before_a_run_names_what_differs(monkeypatch):
    def wrong(*args):
        of_gate, of_up = gate_rows_backward.written(*args)
        return of_gate, of_up * 1.1

    compiled = {gate_rows_backward: wrong}
    vision = described("qwen2_5_vl").build_vision()
    check = partial(tower_disagreement, vision, torch.device("cpu"), torch.bfloat16)
    with compiled_on("cpu"):
        monkeypatch.setattr(Fused, "compiled", property(lambda function: function.written))
        assert check() is None
        monkeypatch.setattr(
            Fused, "compiled", property(lambda function: compiled.get(function, function.written))
        )
        assert "gate of a tower of 509 tokens, compiled, differs by" in check()


# towers of no family: their rotary functions have the names, and another code or several rows
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("kind", ["dinov3_vit", "mlcd_vision_model"])
def test_another_towers_rotary_function_stays(kind):
    torch.manual_seed(0)
    tower = hf_tower(CONFIG_MAPPING[kind](**SIZES, image_size=32, patch_size=8)).eval()  # DINOv3 jitters
    tower.apply(lambda m: nn.init.normal_(m.weight, std=0.5) if isinstance(m, nn.Linear) else None)
    pixels = torch.randn(2, 3, 32, 32)
    assert torch.equal(tower(pixels)[0], as_transformers(tower)(pixels)[0])
    assert tower_disagreement(tower, torch.device("cpu"), torch.float32) is None
