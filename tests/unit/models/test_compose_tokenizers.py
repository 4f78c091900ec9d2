"""Tokenizers of every kind: a composed model makes the same ids of texts, or compose refuses it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerFast

from megatron_vlm.extras.compose import composing
from megatron_vlm.extras.compose.sources import Choices, named_tokens, open_language_model, open_tower
from tiny import qwen, tokenizers
from tiny.byte_level import byte_level_bpe
from tiny.corpus import default_corpus
from tiny.parts import build_language_model, build_tower, llama3_tokenizer, plain_tokenizer

TEXTS = ["The cat sits on 12 sofas.", " leading", "trailing ", "a\n\n  b\t c", "Ünïcödé 漢字 🙂", "", "  "]
TEXTS += [
    "x</s>y <s>z",
    "<unk>",
    "[INST] hi [/INST]",
    "<0x41>",
    "▁x",
    "<|im_start|>user\nx<|im_end|>",
    "A" * 40,
]
# (how the tokenizer is written, the language model); None: as it is
STYLES = {
    "llama 2, legacy": (lambda folder: tokenizers.llama2(folder, legacy=True, add_bos_token=True), "llama"),
    "llama 2": (lambda folder: tokenizers.llama2(folder, legacy=False), "llama"),
    "llama 2, no bos": (lambda folder: tokenizers.llama2(folder, add_bos_token=False), "llama"),
    "mistral 7B": (lambda folder: tokenizers.llama2(folder, legacy=True), "mistral"),
    "mistral, tekken.json": (tokenizers.tekken, "mistral"),
    "qwen3": (lambda folder: None, "qwen3"),
    "cut and padded": (lambda folder: cut_and_padded(folder), "llama"),
}


def cut_and_padded(folder: Path) -> None:
    """tokenizer.json says to cut texts to six tokens and to pad them to ten, as trainers leave it."""
    file = folder / "tokenizer.json"
    bpe = Tokenizer.from_file(str(file))
    bpe.enable_truncation(6)
    bpe.enable_padding(length=10, pad_id=3, pad_token="<|finetune_right_pad_id|>")
    bpe.save(str(file))


@pytest.fixture(scope="module")
def towers(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("towers")
    return {name: build_tower(name, root / name) for name in ("siglip2", "clip")}


def planned(tower: Path, language: Path, *named: str, **options) -> composing.ComposePlan:
    choices = Choices(4, 24, projector_width=64) if tower.name == "siglip2" else Choices()
    return composing.plan(
        open_tower(str(tower)), open_language_model(str(language)), named_tokens(named), choices, **options
    )


def with_tokens(folder: Path, *tokens: AddedToken) -> Path:
    """A Llama whose tokenizer has these besides."""
    tokenizer = plain_tokenizer(default_corpus())
    tokenizer.add_tokens(list(tokens))
    return build_language_model("llama", folder, tokenizer=tokenizer)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("tower", ["siglip2", "clip"])  # their classes of models prefer other tokenizers
def test_a_text_has_the_ids_that_it_had(towers, tmp_path, tower, style):
    write, language = STYLES[style]
    folder = build_language_model(language, tmp_path / "language", vocab_size=560)
    write(folder)
    composing.write(planned(towers[tower], folder), tmp_path / "start")
    before, processor = (
        AutoTokenizer.from_pretrained(folder),
        AutoProcessor.from_pretrained(tmp_path / "start"),
    )
    after = processor.tokenizer
    assert before.get_vocab().items() <= after.get_vocab().items()
    assert before.padding_side == after.padding_side
    for text in TEXTS:
        for special in (True, False):
            ids = [each.encode(text, add_special_tokens=special) for each in (before, after)]
            assert ids[0] == ids[1], (text, special)
    long = processor.tokenizer("The cat sits on the sofa. " * 4)["input_ids"]
    assert len(long) > 10 and after.pad_token_id not in long


def test_a_conversation_begins_as_the_tokenizer_begins_texts(towers, tmp_path):
    """SmolLM2's beginning of text is what begins a turn; a plain tokenizer has one that it never writes."""
    turns = [{"role": "user", "content": "a"}]
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    smol = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(default_corpus(), qwen.PIECES, 400, specials),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    expected = {"smol": "<|im_start|>user\na<|im_end|>\n", "plain": "user:\na</s>\n"}
    expected["llama3"] = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
    made = {"smol": smol, "plain": plain_tokenizer(default_corpus())}
    made["llama3"] = llama3_tokenizer(default_corpus())
    for name, tokenizer in made.items():
        plan = planned(towers["siglip2"], build_language_model("llama", tmp_path / name, tokenizer=tokenizer))
        written = plan.tokenizer.apply_chat_template(
            turns, chat_template=plan.processor.chat_template, tokenize=False
        )
        assert written == expected[name]


def test_brackets_that_only_its_own_template_writes_are_its_style(towers, tmp_path):
    """Llama 2's and Mistral 7B's, which are no tokens; with the spaces that stand beside them."""
    folder = build_language_model("llama", tmp_path / "language", vocab_size=560)
    tokenizers.llama2(folder, chat_template="{{ bos_token + '[INST] ' + messages[0].content + ' [/INST]' }}")
    plan = planned(towers["siglip2"], folder)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    written = plan.tokenizer.apply_chat_template(
        turns, chat_template=plan.processor.chat_template, tokenize=False
    )
    assert written == "<s>[INST] a [/INST] b</s>"


@pytest.mark.parametrize("flags", [{"special": False, "normalized": True}, {"single_word": True}], ids=str)
def test_a_present_token_becomes_special_and_is_found_within_words(towers, tmp_path, flags):
    language = with_tokens(tmp_path / "language", AddedToken("<image>", **({"special": True} | flags)))
    plan = planned(towers["siglip2"], language)
    composing.write(plan, tmp_path / "start")
    tokenizer = AutoProcessor.from_pretrained(tmp_path / "start").tokenizer
    [image] = [each for each in plan.tokens if each.role == "image"]
    assert (image.id, image.how) == (458, "found") and 458 in tokenizer.all_special_ids
    assert tokenizer.encode("a<image><image>b", add_special_tokens=False).count(458) == 2
