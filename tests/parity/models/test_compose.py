"""A composed checkpoint: stock Transformers opens it, its tensors are the sources', no token has moved."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from samples import sample_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    CLIPImageProcessor,
    GenerationConfig,
    Lfm2VlConfig,
    LlavaOnevisionImageProcessor,
    SiglipImageProcessor,
)

from megatron_vlm.config import ConfigError, DataConfig
from megatron_vlm.data.chatml.record import Columns, parse_record
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.data.encode.processing import TextEncoder
from megatron_vlm.extras.compose import composing
from megatron_vlm.extras.compose.classes import COMPOSED, composed_config, part_config
from megatron_vlm.extras.compose.command import compose as command
from megatron_vlm.extras.compose.sources import (
    Choices,
    Component,
    named_tokens,
    open_language_model,
    open_tower,
)
from megatron_vlm.extras.compose.tokens import RoleToken
from megatron_vlm.models.families import describe
from megatron_vlm.recipes.published import CONFIGS
from tiny.checkpoints import build_tiny_checkpoint
from tiny.corpus import default_corpus
from tiny.parts import build_language_model, build_tower, llama3_tokenizer, plain_tokenizer

# (tower, language model): every class, both halves of a tower and one alone, every text model, tied and not
PAIRS = [
    ("siglip2", "llama"),
    ("siglip2_vision_model", "qwen3"),
    ("clip", "qwen2"),
    ("siglip_vision_model", "llama"),
    ("pixtral", "mistral"),
]
# in `make test` a tower for images of any size, and one for images of one size
TRIED = [pytest.param(pair, marks=[] if pair in (PAIRS[0], PAIRS[2]) else pytest.mark.long) for pair in PAIRS]
CLASSES = {"siglip2": "Lfm2Vl", "clip": "Llava", "siglip": "Llava", "pixtral": "Mistral3"}
TIED = {"qwen3"}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A function that gives the folder of a tiny tower or language model, built once."""
    root = tmp_path_factory.mktemp("parts")

    def part(name: str) -> Path:
        if not (root / name).exists():
            if name in ("llama", "mistral", "qwen2", "qwen3"):
                build_language_model(name, root / name, tied=name in TIED)
            else:
                build_tower(name, root / name)
        return root / name

    return part


def planned(tower: Path, language: Path, *named: str, **options) -> composing.ComposePlan:
    native = "siglip2" in json.loads((tower / "config.json").read_text())["model_type"]
    choices = Choices(4, 24, projector_width=64) if native else Choices()
    return composing.plan(
        open_tower(str(tower)), open_language_model(str(language)), named_tokens(named), choices, **options
    )


def ids(plan: composing.ComposePlan) -> dict[str, tuple[str, int, str]]:
    return {each.role: (each.token, each.id, each.how) for each in plan.tokens}


@pytest.fixture(scope="module", params=TRIED, ids="+".join)
def composed(request, parts, tmp_path_factory):
    """(the composed folder, its tower's, its language model's)."""
    tower, language = map(parts, request.param)
    output = tmp_path_factory.mktemp("composed") / "start"
    composing.write(planned(tower, language), output)
    return output, tower, language


@pytest.fixture(scope="module")
def model(composed):
    found, info = AutoModelForImageTextToText.from_pretrained(composed[0], output_loading_info=True)
    assert {name: list(keys) for name, keys in info.items() if keys} == {}
    return found.eval()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {key: opened.get_tensor(key) for key in opened.keys()}
    return found


# ---- Transformers opens it --------------------------------------------------------------------------------


def test_stock_transformers_opens_it_with_every_key_and_no_other(composed, model):
    output, tower, _ = composed
    assert type(model).__name__ == f"{CLASSES[tower.name.partition('_')[0]]}ForConditionalGeneration"
    config = json.loads((output / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    assert "auto_map" not in config and not list(output.glob("*.py"))


def test_every_tensor_of_tower_and_text_is_its_sources(composed):
    output, tower, language = composed
    sources = {}
    for key, tensor in tensors(tower).items():
        sources["tower " + key.removeprefix("vision_model.")] = tensor
    for key, tensor in tensors(language).items():
        sources["text " + key] = tensor
    equal = {"tower": 0, "text": 0}
    for key, tensor in tensors(output).items():
        if "multi_modal_projector" in key:
            continue
        name = key.removeprefix("model.").removeprefix("language_model.")
        if name.startswith("vision_tower."):
            source = sources["tower " + name.removeprefix("vision_tower.")]
        else:
            key = name.removeprefix("model.")
            source = sources["text " + ("" if name.startswith("lm_head") else "model.") + key]
            tensor = tensor[: len(source)]  # rows of added tokens follow
        assert tensor.dtype == source.dtype and torch.equal(tensor, source), key
        equal["tower" if name.startswith("vision_tower.") else "text"] += 1
    assert equal["text"] == len(tensors(language)) and equal["tower"] >= 20


def test_on_text_alone_it_says_what_the_language_model_says(composed, model):
    language = AutoModelForCausalLM.from_pretrained(composed[2]).eval()
    words = AutoTokenizer.from_pretrained(composed[2])("The cat sits on the sofa.", return_tensors="pt")
    with torch.inference_mode():
        mine, theirs = model(input_ids=words.input_ids).logits, language(input_ids=words.input_ids).logits
    torch.testing.assert_close(mine[..., : theirs.shape[-1]], theirs, rtol=0, atol=0)


def test_images_become_features_and_both_find_the_replies(composed, model):
    processor = AutoProcessor.from_pretrained(composed[0])
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "Answer with one word."}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "two apples"}]},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "nothing"}]},
    ]
    images = [Image.new("RGB", (70, 40), "red"), Image.new("RGB", (40, 90), "blue")]
    encoder = TextEncoder(processor)
    text, _ = encoder(encoder.chat(turns, None, 2), images)
    prompt = encoder.chat(turns, None, 2).text
    inputs = processor(text=[prompt], images=[images], return_tensors="pt", add_special_tokens=False)
    assert text.input_ids.tolist() == inputs["input_ids"][0].tolist()
    end = GenerationConfig.from_pretrained(composed[0]).eos_token_id[-1]
    replies = text.input_ids[text.weights > 0]
    said = processor.tokenizer.decode(replies)
    assert said == "two apples{0}nothing{0}".format(processor.tokenizer.convert_ids_to_tokens(end))
    asked = processor.tokenizer.apply_chat_template(  # Transformers' own mask, without images
        [{"role": "user", "content": "b"}, {"role": "assistant", "content": "nothing"}],
        chat_template=processor.chat_template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    nothing = processor.tokenizer.encode("nothing", add_special_tokens=False)
    assert sum(asked["assistant_masks"]) == len(nothing) + 1
    with torch.inference_mode():
        logits = model(**inputs).logits
    image = model.config.image_token_id
    assert logits.shape[1] == len(text.input_ids) and (text.input_ids == image).sum() >= 6
    assert logits.isfinite().all()


# ---- documents of texts and images ------------------------------------------------------------------------

# texts, and (width, height) of images
DOCUMENTS = {
    "in turn": ["A cat.", (200, 60), "A dog.", (30, 30), "A table."],
    "images in a row": [(60, 200), (90, 90), (190, 150), "Three.", (7, 280)],
    "texts in a row, and none at the end": ["One.", "Two.", (33, 470), (300, 8)],
    "texts alone": ["One.", "Two."],
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_keep_the_order_of_texts_and_images(composed, name):
    """Part by part; and as a whole what the stock processor makes of the text. A later image is lighter."""
    processor, hf_config = (kind.from_pretrained(composed[0]) for kind in (AutoProcessor, AutoConfig))
    parts = DOCUMENTS[name]
    sizes = [part for part in parts if not isinstance(part, str)]
    images = [Image.new("RGB", size, (60 * number,) * 3) for number, size in enumerate(sizes, start=1)]
    left = iter(images)
    texts = [part if isinstance(part, str) else None for part in parts]
    record = {"texts": texts, "images": [None if text else next(left) for text in texts]}
    found = parse_record(Columns()(record)).stored()
    files = [png(image) for image in images]
    sample = sample_of(found, files, key="a")
    description = describe(hf_config)
    data = DataConfig(seq_length=512)
    encoded = HFEncoderVLMTaskEncoder(processor, data, description.data_needs).encode_sample(sample)

    text = "".join(part if isinstance(part, str) else processor.image_token for part in parts)
    text = (text + processor.tokenizer.eos_token).replace("One.Two.", "One.\n\nTwo.")
    options = {"images": [images]} if images else {}
    whole = processor(text=[text], add_special_tokens=True, return_tensors="pt", **options)
    assert encoded.input_ids.tolist() == whole["input_ids"][0].tolist()
    given = {"add_special_tokens": False, "return_tensors": "pt"}
    alone = [processor(text=[processor.image_token], images=[[image]], **given) for image in images]
    of_images = {token for one in alone for token in one["input_ids"][0].tolist()}
    texts = [token for token in encoded.input_ids.tolist()[1:] if token not in of_images]
    assert encoded.labels[encoded.labels != -100].tolist() == texts

    visual = encoded.visual_inputs
    if not images:
        assert visual is None
        return
    light = [item.pixel_values.float().amax() for item in visual.items()]
    assert len(light) == len(images) and light == sorted(set(light))
    counts = [int((one["input_ids"] == hf_config.image_token_id).sum()) for one in alone]
    assert description.visual_tokens(visual) == counts


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


# ---- out of whole models, in several types ----------------------------------------------------------------

# model type of a whole model -> how some of its files spell the tower's keys, where their names begin
WHOLE = {
    "lfm2_vl": (r"^model\.vision_tower\.", "model.vision_tower.vision_model."),
    "llava": (r"^vision_tower\.", "model.vision_tower."),
    "mistral3": (r"^vision_tower\.", "model.vision_tower."),
}


@pytest.mark.parametrize("model_type", WHOLE)
def test_a_tower_is_taken_out_of_a_whole_model(parts, tmp_path, model_type):
    """However its files spell the keys, and however many files there are."""
    whole = build_tiny_checkpoint(model_type, tmp_path / "whole")
    stored = tensors(whole)
    pattern, spelled = WHOLE[model_type]
    other = changed_copy(whole, tmp_path / "other")
    respelled = {re.sub(pattern, spelled, key): tensor for key, tensor in stored.items()}
    assert respelled.keys() != stored.keys()
    in_two_files(respelled, other)
    written = []
    for folder in (whole, other):
        plan = composing.plan(
            open_tower(str(folder)), open_language_model(str(parts("mistral"))), {}, Choices()
        )
        composing.write(plan, tmp_path / f"{folder.name} start")
        written.append(tensors(tmp_path / f"{folder.name} start"))
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(written[0][key], written[1][key]) for key in written[0])
    of_tower = [key for key in stored if "vision_tower" in key]
    assert len(of_tower) >= 20 and all(torch.equal(written[0][key], stored[key]) for key in of_tower)


def in_two_files(stored: dict[str, torch.Tensor], folder: Path) -> None:
    """In place of the folder's one file."""
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    weight_map = {key: names[number % 2] for number, key in enumerate(sorted(stored))}
    for name in names:
        save_file({key: stored[key] for key in stored if weight_map[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_each_half_keeps_its_own_types(parts, tmp_path):
    """fp16 in the tower, bf16 in the language model, whose norms are fp32."""
    folders = {}
    for name in ("clip", "llama"):
        folders[name] = changed_copy(parts(name), tmp_path / name)
        narrow = torch.float16 if name == "clip" else torch.bfloat16
        kept = {key: "norm" in key and name == "llama" for key in tensors(folders[name])}
        changed = {
            key: tensor if kept[key] else tensor.to(narrow) for key, tensor in tensors(parts(name)).items()
        }
        save_file(changed, folders[name] / "model.safetensors")
    composing.write(planned(folders["clip"], folders["llama"]), tmp_path / "start")
    written = tensors(tmp_path / "start")
    text, tower = tensors(folders["llama"]), tensors(folders["clip"])
    name = "model.layers.0.input_layernorm.weight"
    assert torch.equal(written[f"language_model.{name}"], text[name]) and text[name].dtype == torch.float32
    assert written["language_model.model.embed_tokens.weight"].dtype == torch.bfloat16
    name = "encoder.layers.0.mlp.fc1.weight"
    assert written[f"vision_tower.{name}"].dtype == torch.float16
    assert torch.equal(written[f"vision_tower.{name}"], tower[f"vision_model.{name}"])
    config = json.loads((tmp_path / "start/config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == config["vision_config"]["dtype"] == "bfloat16"


# ---- special tokens ---------------------------------------------------------------------------------------


def test_no_token_of_the_tokenizer_moves(composed):
    output, _, language = composed
    before, after = (AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (language, output))
    assert before.items() <= after.items()
    assert len(set(after.values())) == len(after)
    text = "The cat sits on 12 sofas.\n\n  Which? <|eot_id|><|im_end|>"
    assert [AutoTokenizer.from_pretrained(folder).encode(text) for folder in (output, language)].count(
        AutoTokenizer.from_pretrained(language).encode(text)
    ) == 2


def test_reserved_tokens_that_the_user_names_keep_their_ids(parts, tmp_path):
    roles = ("image", "image_start", "image_end")
    names = [f"{role}=<|reserved_special_token_{number}|>" for number, role in enumerate(roles)]
    plan = planned(parts("siglip2"), parts("llama"), *names)
    assert [ids(plan)[role][1:] for role in roles] == [
        (2, "named"),
        (7, "named"),
        (8, "named"),
    ]
    assert plan.model.config.text_config.vocab_size == plan.rows_before  # nothing grows
    composing.write(plan, tmp_path / "start")
    processor = AutoProcessor.from_pretrained(tmp_path / "start")
    images = [[Image.new("RGB", (28, 28))]]
    made = processor(text=["<|reserved_special_token_0|>"], images=images, return_tensors="pt")
    assert made["input_ids"][0].tolist() == [7, 2, 2, 2, 2, 8]
    assert json.loads((tmp_path / "start/config.json").read_text())["image_token_id"] == 2


def language_model(folder: Path, tokenizer, **changes) -> Path:
    return build_language_model("llama", folder, tokenizer=tokenizer, **changes)


def test_spare_rows_are_used_before_the_embedding_grows(parts, tmp_path):
    """As in Qwen, whose embedding has more rows than its tokenizer has tokens."""
    spare = language_model(tmp_path / "spare", llama3_tokenizer(default_corpus()), vocab_size=474)
    composing.write(planned(parts("siglip2"), spare), tmp_path / "start")
    name = "model.language_model.embed_tokens.weight"
    assert torch.equal(tensors(tmp_path / "start")[name], tensors(spare)["model.embed_tokens.weight"])


@pytest.mark.parametrize(("multiple", "rows"), [(None, 512), (100, 500)], ids=lambda value: str(value))
def test_rows_are_a_multiple_and_never_fewer(parts, multiple, rows):
    plan = planned(parts("siglip2"), parts("llama"), vocab_multiple=multiple)
    assert plan.rows_before == 471 and plan.model.config.text_config.vocab_size == rows


def test_new_rows_are_the_mean_of_the_present_ones(parts, tmp_path):
    composing.write(planned(parts("siglip2"), parts("llama")), tmp_path / "start")
    after, before = tensors(tmp_path / "start"), tensors(parts("llama"))
    for mine, theirs in (
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ):
        expected = before[theirs].mean(0).expand(41, -1)
        torch.testing.assert_close(after[mine][471:], expected, rtol=0, atol=1e-7)  # 2e-9 measured


def test_new_rows_are_drawn_with_a_seed(parts, tmp_path):
    found = []
    for number, seed in enumerate((1, 1, 2)):
        plan = planned(parts("siglip2"), parts("llama"), new_rows="normal", seed=seed, vocab_multiple=4096)
        composing.write(plan, tmp_path / str(number))
        found.append(tensors(tmp_path / str(number)))
    first, again, other = found
    assert all(torch.equal(first[key], again[key]) for key in first)
    key = "model.language_model.embed_tokens.weight"
    assert not torch.equal(first[key], other[key])
    before, new = first[key][:471], first[key][471:]
    assert (new.std(0) / before.std(0) - 1).abs().max() < 0.1  # 3625 rows: 0.04 measured
    assert ((new.mean(0) - before.mean(0)) / before.std(0)).abs().max() < 0.1
    assert not torch.equal(first["lm_head.weight"][471:], new)


def test_the_projector_starts_by_its_rule(parts, tmp_path):
    composing.write(planned(parts("siglip2"), parts("llama"), seed=3), tmp_path / "start")
    found = {
        key.rpartition("projector.")[2]: tensor
        for key, tensor in tensors(tmp_path / "start").items()
        if "projector" in key
    }
    assert set(found["layer_norm.weight"].tolist()) == {1} and set(found["layer_norm.bias"].tolist()) == {0}
    assert set(found["linear_1.bias"].tolist()) == set(found["linear_2.bias"].tolist()) == {0}
    scale = tensors(parts("llama"))["model.embed_tokens.weight"].square().mean().sqrt()
    assert abs(found["linear_1.weight"].std() * 192**0.5 - 1) < 0.03
    assert abs(found["linear_2.weight"].std() * 64**0.5 / scale - 1) < 0.03


def test_dry_run_prints_the_tokens_and_writes_nothing(parts, tmp_path, capsys):
    command(tmp_path / "out", str(parts("siglip2")), str(parts("llama")), dry_run=True)
    said = capsys.readouterr().out
    row = ["image", "stands for a piece of an image", "<image>", "471", "added", "new"]
    assert row in [re.split("  +", line) for line in said.splitlines()]
    assert "3 tokens are added; embedding and output layer: 471 → 512 rows" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["siglip2_llama31_8b", "siglip2_qwen3_4b"])
def test_recipes_are_for_what_compose_writes(name, tmp_path):
    """Of the published models; the tokens of Llama are reserved ones."""
    published = json.loads((CONFIGS / f"{name}.json").read_text())
    tower, language = (Component(tmp_path, published[half]) for half in ("vision_config", "text_config"))
    image = RoleToken("image", "", published["image_token_id"], "found")
    vision, text = part_config(tower), part_config(language)
    text.tie_word_embeddings = published["text_config"]["tie_word_embeddings"]
    keys, _ = COMPOSED["lfm2_vl"].keys(vision, {"image": image}, Choices())
    found = composed_config("lfm2_vl", vision, text, keys, published["dtype"])
    found.architectures = published["architectures"]
    for half in ("vision_config", "text_config"):
        published[half]["dtype"] = published["dtype"]
    assert found.to_diff_dict() == Lfm2VlConfig.from_dict(published).to_diff_dict()


# ---- what is refused --------------------------------------------------------------------------------------

REFUSED = {
    "a": "is a piece of ordinary text",
    "a cat": "is a word, which texts would then lose",
    "<|begin_of_text|>": "is the tokenizer's bos_token already",
    "<|image_start|>": "is part of <|image_start|>, the token of image_start",
}


@pytest.mark.parametrize("token", REFUSED)
def test_tokens_that_cannot_have_their_role_are_refused(parts, token):
    words = f"special token of role image: {token} {REFUSED[token]}; give another, one that the tokenizer"
    with pytest.raises(ConfigError, match=re.escape(words)):
        planned(parts("siglip2"), parts("llama"), f"image={token}")


def test_a_pad_token_that_ends_turns_is_refused(parts, tmp_path):
    padded = plain_tokenizer(default_corpus())
    padded.pad_token = padded.eos_token
    language_model(tmp_path / "padded", padded)
    with pytest.raises(ConfigError, match="role pad: </s> is also the end of a turn"):
        planned(parts("siglip2"), tmp_path / "padded")
    assert ids(planned(parts("siglip2"), tmp_path / "padded", "pad=<|pad|>"))["pad"][1:] == (461, "added")


def changed_copy(folder: Path, output: Path, **config) -> Path:
    output.mkdir()
    for file in folder.iterdir():
        (output / file.name).write_bytes(file.read_bytes())
    known = json.loads((output / "config.json").read_text())
    (output / "config.json").write_text(json.dumps(known | config))
    return output


# a change of config.json -> what torch says of the weights then
MISFITS = {
    "num_hidden_layers": (3, r"Missing key.*model\.language_model\.layers\.2\."),
    "num_attention_heads": (2, r"size mismatch for model\.language_model\.layers\.0\.self_attn"),
    "vocab_size": (480, r"size mismatch for model\.language_model\.embed_tokens\.weight"),
}


@pytest.mark.parametrize("key", MISFITS)
def test_weights_that_are_not_the_configs_are_refused(parts, tmp_path, key):
    value, words = MISFITS[key]
    language = changed_copy(parts("llama"), tmp_path / "language", **{key: value})
    with pytest.raises(ConfigError, match=rf"{words}.*; put config\.json and weights of the same model"):
        planned(parts("siglip2"), language)


def test_tensors_that_the_config_does_not_ask_for_are_refused(parts, tmp_path):
    vision = json.loads((parts("siglip2") / "config.json").read_text())["vision_config"]
    fewer = {"vision_config": vision | {"num_hidden_layers": 1}}
    tower = changed_copy(parts("siglip2"), tmp_path / "tower", **fewer)
    with pytest.raises(ConfigError, match=r"Unexpected key.*model\.vision_tower\.encoder\.layers\.1\."):
        planned(tower, parts("llama"))


SQUARE = {"height": 56, "width": 56}
# an image processor, and whether it makes images of the tower's one size
OF_OTHER_SIZES = {
    "tiles": LlavaOnevisionImageProcessor(size=SQUARE, image_grid_pinpoints=[[56, 56], [56, 112]]),
    "not cropped": CLIPImageProcessor(size={"shortest_edge": 56}, do_center_crop=False),
}


def with_images(tower: Path, output: Path, images) -> Path:
    """A copy of the tower with another image processor."""
    folder = changed_copy(tower, output)
    for file in folder.glob("*processor*"):
        file.unlink()
    images.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", OF_OTHER_SIZES)
def test_a_processor_that_makes_other_images_than_the_tower_takes_is_refused(parts, tmp_path, name):
    tower = with_images(parts("siglip"), tmp_path / "tower", OF_OTHER_SIZES[name])
    made = r"its \w+ makes \(.*\) of an image of \d+ x \d+ pixels, and .* takes \(1, 3, 56, 56\); put the"
    with pytest.raises(ConfigError, match=made):
        planned(tower, parts("llama"))


@pytest.mark.parametrize(("tower", "language"), [("siglip2", "llama"), ("pixtral", "mistral")])
def test_the_tower_gets_the_pixels_that_it_was_trained_on(parts, tmp_path, tower, language):
    colours = {"image_mean": (0.4,) * 3, "image_std": (0.3,) * 3, "rescale_factor": 1 / 127.5, "resample": 3}
    folder = with_images(parts(tower), tmp_path / "tower", SiglipImageProcessor(size=SQUARE, **colours))
    composing.write(planned(folder, parts(language)), tmp_path / "start")
    found = AutoProcessor.from_pretrained(tmp_path / "start").image_processor
    for key, value in colours.items():
        assert getattr(found, key) == pytest.approx(value)


def test_an_output_layer_that_differs_is_its_own_whatever_the_config_says(parts, tmp_path):
    plan = planned(
        parts("siglip2"), changed_copy(parts("llama"), tmp_path / "tied", tie_word_embeddings=True)
    )
    assert not plan.model.config.tie_word_embeddings and "lm_head.weight" in plan.tensors


# ---- whole or not at all ----------------------------------------------------------------------------------


def test_what_is_killed_leaves_nothing_that_looks_whole(parts, tmp_path):
    """Before the processor is written, when the weights are."""
    plan = planned(parts("siglip2"), parts("llama"))
    child = os.fork()
    if child == 0:
        type(plan.processor).save_pretrained = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
        composing.write(plan, tmp_path / "start")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()  # nobody else's name
    assert fnmatch(left.name, ".start.*.partial") and (left / "model.safetensors").is_file()


# ---- in little memory -------------------------------------------------------------------------------------


def memory(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) * 1024


@pytest.mark.long
def test_only_rows_that_grow_are_copied_into_memory(parts, tmp_path):
    """The rest stays pages of the files, which the system may drop at any time."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16}
    tokenizer = llama3_tokenizer(default_corpus())
    large = language_model(tmp_path / "large", tokenizer, num_attention_heads=8, **sizes)
    before = memory("RssAnon")
    plan = planned(parts("siglip2"), large)
    assert plan.nbytes > 7e8 and memory("RssAnon") - before < plan.nbytes / 20
