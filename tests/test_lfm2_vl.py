"""What is the composed model's alone: any text model, images of any size without padding, images in tiles."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import parity
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoConfig, AutoProcessor

from megatron_vlm.batch import DataNeeds, GenericVisualInputs
from megatron_vlm.config import DataConfig
from megatron_vlm.data.chatml import ChatMLSample
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.data.encode.packed import PackingVLMTaskEncoder
from megatron_vlm.data.media.naflex import without_padding
from megatron_vlm.models.families.lfm2_vl import FAMILY
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

SIZES = [(200, 60), (60, 200), (90, 90), (30, 30), (190, 150)]  # width, height

# ---- text models ------------------------------------------------------------------------------------------

ALTERNATING = ["sliding_attention", "full_attention"] * 2
TEXTS = {
    "llama": {"model_type": "llama", "attention_bias": True, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 5},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5}
    | {"layer_types": ALTERNATING, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "attention_bias": True, "use_sliding_window": True, "sliding_window": 7}
    | {"layer_types": ALTERNATING},
}
LAYOUTS = ("TP2+SP", "PP2", "CP2")
ROWS = ["t", "it", "ititit"]


def measured(checkpoints: dict[str, str], cases: dict[str, str], folder: str) -> list[dict]:
    """Parity of every text model in every layout; its export under the first goes to `folder`."""
    from megatron_vlm.config import ModelConfig, RunConfig
    from megatron_vlm.models import weights
    from megatron_vlm.models.hf import open_source
    from megatron_vlm.models.vlm import build_model
    from megatron_vlm.parallel import setup

    rows = []
    for name, path in checkpoints.items():
        rows += [{"text": name} | row for row in parity.measure(list(LAYOUTS), path, cases[name])]
        layout = parity.LAYOUTS[LAYOUTS[0]][1]
        setup.reset_layout(layout, seed=1)
        source = open_source(path)
        run = RunConfig(parallel=layout, model=ModelConfig(dtype="fp32"))
        chunks = build_model(run, source.family, source.hf_config, setup.device())
        weight_map = source.family.weight_map(source.hf_config)
        weights.import_hf(chunks, path, weight_map)
        weights.export_hf(chunks, f"{folder}/{name}", path, weight_map)
    return rows


@pytest.mark.long
def test_every_text_model_equals_transformers_and_comes_back(tmp_path):
    checkpoints = {
        name: build_tiny_checkpoint("lfm2_vl", tmp_path / name, text=t) for name, t in TEXTS.items()
    }
    references = {}
    for name, path in checkpoints.items():
        case = parity.case_for(path, ROWS)
        assert AutoConfig.from_pretrained(path).tie_word_embeddings == ("lm_head.weight" not in case["grads"])
        references[name] = str(tmp_path / f"{name}.pt")
        torch.save({"rows": case, "packed": parity.packed(case)}, references[name])
    paths = {name: str(path) for name, path in checkpoints.items()}
    rows = run_distributed(2, measured, paths, references, str(tmp_path / "out"), timeout=900)[0]
    assert len(rows) == len(TEXTS) * len(LAYOUTS) * 2
    assert not [row for row in rows if not row["passed"]]
    for name, path in checkpoints.items():
        stored, back = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "out" / name))
        assert stored.keys() == back.keys() and len(stored) > 60
        assert all(torch.equal(stored[key], back[key]) for key in stored), name


# ---- images of any size -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return build_tiny_checkpoint("lfm2_vl", tmp_path_factory.mktemp("tiny") / "lfm2_vl")


def picture(size: tuple[int, int]) -> Image.Image:
    pixels = np.random.default_rng(size).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def sample(sizes: list[tuple[int, int]]) -> ChatMLSample:
    files = []
    for size in sizes:
        file = io.BytesIO()
        picture(size).save(file, "PNG")
        files.append(file.getvalue())
    question = {"role": "user", "content": "<image>" * len(files) + "Which?"}
    turns = [question, {"role": "assistant", "content": "7"}]
    return ChatMLSample(__key__="a", __restore_key__=(), conversation=json.dumps(turns), imgs=files)


@pytest.fixture(scope="module")
def outputs(tiny) -> dict[str, torch.Tensor]:
    """What the processor makes of images of all SIZES, padded to 96 patches each."""
    text = "<image>" * len(SIZES)
    processor = AutoProcessor.from_pretrained(tiny)
    return dict(processor(text=[text], images=list(map(picture, SIZES)), return_tensors="pt"))


@pytest.fixture(scope="module")
def vision(tiny):
    torch.manual_seed(0)
    return FAMILY.build_vision(AutoConfig.from_pretrained(tiny))


def visual_of(outputs: dict[str, torch.Tensor]) -> GenericVisualInputs:
    found = without_padding(outputs)
    return GenericVisualInputs(**{key: found[key] for key in FAMILY.visual_keys})


def test_the_tower_computes_no_padding(outputs, vision):
    """Neither does a batch carry any; the processor's own is a third of all patches here."""
    seen = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0].shape[:2]))
        for layer in vision.vision_tower.encoder.layers
    ]
    visual = visual_of(outputs)
    vision(**visual.as_model_kwargs())
    for hook in hooks:
        hook.remove()
    real, padded = int(outputs["spatial_shapes"].prod(-1).sum()), outputs["pixel_attention_mask"].numel()
    assert seen == [(1, real)] * 2 and len(visual.pixel_values) == real
    assert real < 0.7 * padded


def test_position_embeddings_are_those_of_transformers(outputs, vision):
    embeddings, shapes = vision.vision_tower.embeddings, outputs["spatial_shapes"]
    side = embeddings.position_embedding_size
    table = embeddings.position_embedding.weight.reshape(side, side, -1)
    padded = embeddings.resize_positional_embeddings(table, shapes, outputs["pixel_values"].shape[1])
    expected = padded[outputs["pixel_attention_mask"].bool()]
    assert torch.equal(vision._positions(list(map(tuple, shapes.tolist()))), expected)


def test_features_do_not_depend_on_other_images(outputs, vision):
    visual = visual_of(outputs)
    together = vision(**visual.as_model_kwargs())
    apart = torch.cat([vision(**item.as_model_kwargs()) for item in visual.items()])
    assert len(visual.items()) == len(SIZES) and len(together) == len(apart)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


# ---- images in tiles --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cutting(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiles") / "lfm2_vl"
    return build_tiny_checkpoint("lfm2_vl", folder, image_tokens=8, splitting=True)


def compared(path: str, case: dict) -> dict:
    from megatron_vlm.parallel import setup

    layout = parity.LAYOUTS["1 process"][1]
    setup.init_distributed(layout, seed=1)
    return parity.compare(layout, path, case)


def test_images_in_tiles_equal_transformers(cutting):
    case = parity.case_for(cutting, ["it", "ititit"])
    items = len(case["batch"]["visual_inputs"].items())
    assert items > 4  # images
    found = run_distributed(1, compared, str(cutting), case)[0]
    assert found["passed"], found


def test_samples_with_tiles_are_encoded_by_the_processor_and_not_packed(cutting):
    processor, needs = AutoProcessor.from_pretrained(cutting), DataNeeds(FAMILY.visual_keys)
    data = DataConfig(seq_length=512)
    encoder = HFEncoderVLMTaskEncoder(processor, data, needs)
    assert "do_image_splitting = True" in encoder.documents.why_hf_processor
    encoded = encoder.encode_sample(sample([(200, 190), (30, 30)]))
    tokens = FAMILY.visual_tokens(AutoConfig.from_pretrained(cutting), encoded.visual_inputs)
    assert tokens == [4, 4, 4, 4, 4, 4]  # four tiles, all of the image, the other image
    assert int((encoded.input_ids == processor.image_token_id).sum()) == sum(tokens)
    text = processor.tokenizer.decode(encoded.input_ids)
    assert "<|img_row_2_col_2|>" in text and "<|img_thumbnail|>" in text
    with pytest.raises(ValueError, match="with do_image_splitting images give tokens that their size does"):
        PackingVLMTaskEncoder(processor, data, needs).preencode_sample(sample([(30, 30)]))
