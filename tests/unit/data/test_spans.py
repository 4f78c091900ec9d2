import numpy as np
import pytest
from parity import OF_DATA
from PIL import Image
from samples import templated
from transformers import AutoProcessor, Gemma3Processor

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import parse_record
from megatron_vlm.data.chatml.sample import place_media
from megatron_vlm.data.encode.chat_template import RenderedChat
from megatron_vlm.data.encode.processing import TextEncoder, on_tokens
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint, without_generation_tags
from tiny.corpus import default_corpus
from tiny.gemma3 import TEMPLATE

TEMPLATES = {"tagged": TEMPLATE, "untagged": without_generation_tags(TEMPLATE)}


@pytest.fixture(params=TEMPLATES)
def spans(request, processor):
    return TextEncoder(templated(processor, TEMPLATES[request.param]))


@pytest.fixture(scope="module", params=[True, False], ids=["tags", "no tags"])
def tags(request):
    return request.param


@pytest.fixture(scope="module", params=OF_DATA)
def family_spans(request, tags):
    """Of every family, with and without marked replies."""
    parts = TINY_FAMILIES[request.param]
    template = parts.template if tags else without_generation_tags(parts.template)
    return TextEncoder(parts.processor(default_corpus(), template))


def picture(index):
    return Image.new("RGB", (30 + 20 * index, 50), (80 * index, 0, 0))


def processed(spans, messages, images=0):
    prompt = spans.chat(messages, None, images)
    return spans(prompt, [picture(index) for index in range(images)])


def encode(spans, *turns, images=0):
    messages = parse_record([{"role": role, "content": text} for role, text in turns]).messages
    return processed(spans, place_media(messages, images), images)[0]


def replies(spans, encoded):
    """The text of every run of tokens in the mask."""
    runs, previous = [], False
    for token, trained in zip(encoded.input_ids.tolist(), (encoded.weights > 0).tolist(), strict=True):
        if trained:
            runs = runs if previous else [*runs, []]
            runs[-1].append(token)
        previous = trained
    return [spans.tokenizer.decode(run) for run in runs]


END = "<end_of_turn>"


@pytest.mark.parametrize("images", [0, 1, 3])
@pytest.mark.parametrize("turns", [1, 3])
def test_the_mask_is_every_reply_with_its_end_of_turn(spans, turns, images):
    conversation = [("system", "Be brief.")]
    for turn in range(turns):
        question = "<image>" * (images if turn == 0 else 0) + f"Question {turn}?"
        conversation += [("user", question), ("assistant", f"The answer is {turn}.")]
    encoded = encode(spans, *conversation, images=images)
    assert replies(spans, encoded) == [f"The answer is {turn}.{END}" for turn in range(turns)]
    assert len(encoded.images) == images


@pytest.mark.parametrize("nothing", ["", " \n ", "\u200b"], ids=ascii)
def test_an_empty_reply_among_others_is_not_trained_nor_its_end(family_spans, nothing):
    """Whatever the template writes around it; a template's own words within replies are no content."""
    full = [("user", "One?"), ("assistant", "1"), ("user", "Two?"), ("assistant", "2")]
    expected = replies(family_spans, encode(family_spans, *full))
    assert len(expected) == 2 and all(str(n) in text for n, text in zip((1, 2), expected, strict=True))
    empty = [("user", "None?"), ("assistant", nothing)]
    for turns in (empty + full, full[:2] + empty + full[2:], full + empty):
        assert replies(family_spans, encode(family_spans, *turns)) == expected
    assert replies(family_spans, encode(family_spans, *empty)) == []


def test_the_tokens_of_a_reply_have_the_weight_that_its_turn_says(family_spans):
    turns = [("user", "the cat"), ("assistant", "a dog"), ("user", "a chart"), ("assistant", "the cat")] * 2
    said = [{"role": role, "content": text} for role, text in turns]
    plain = processed(family_spans, parse_record(said).messages)[0]
    weights = [{"weight": 0.3}, {"loss": 0}, {"loss": 2.5, "weight": 2.5}, {"loss": None}]
    for turn, weight in zip(said[1::2], weights, strict=True):
        turn |= weight
    messages = parse_record(said).messages
    encoded = processed(family_spans, messages)[0]
    replied = plain.weights > 0
    found = np.split(encoded.weights[replied], np.flatnonzero(_begins(replied))[1:])
    assert [set(reply.tolist()) for reply in found] == [{np.float32(w)} for w in (0.3, 0, 2.5, 1)]
    assert not encoded.weights[~replied].any()
    read = family_spans.tokenize(family_spans.chat(messages, None, 0))
    assert np.array_equal(read.weights, encoded.weights)


def _begins(mask):
    """Among the tokens of replies, those that begin one."""
    return np.diff(mask, prepend=False)[mask]


def test_reserved_characters_in_a_record_cannot_move_the_mask(spans):
    noise = "".join(map(chr, [0x10FF00, 0x10FF01, 0x10FF02, 0x10FF03, 0xF0000, 0xF0001]))
    clean = encode(spans, ("user", "<image>a b"), ("assistant", "c d"), images=1)
    noisy = encode(spans, ("user", f"<image>a{noise} b{noise}"), ("assistant", f"c{noise} d"), images=1)
    for field in ("input_ids", "weights"):
        assert np.array_equal(getattr(noisy, field), getattr(clean, field))


class CountingProcessor(Gemma3Processor):
    calls = 0

    def __call__(self, *args, **kwargs):
        type(self).calls += 1
        return super().__call__(*args, **kwargs)


def test_the_processor_is_called_once(tiny_gemma3):
    spans = TextEncoder(CountingProcessor.from_pretrained(tiny_gemma3))
    turns = [("user", "<image><image>?"), ("assistant", "x"), ("user", "y"), ("assistant", "z")]
    encode(spans, *turns, images=2)
    assert CountingProcessor.calls == 1


def test_a_template_that_forgets_an_image_is_noticed(processor):
    spans = TextEncoder(templated(processor, TEMPLATE.replace("<start_of_image>", "")))
    with pytest.raises(BadSample, match="placeholder_mismatch: the chat template wrote 0 of 1 images"):
        encode(spans, ("user", "<image>a"), ("assistant", "b"), images=1)


@pytest.fixture(scope="module")
def glm_processor(tmp_path_factory):
    return AutoProcessor.from_pretrained(build_tiny_checkpoint("glm4v_moe", tmp_path_factory.mktemp("glm")))


@pytest.mark.parametrize("change", [str, without_generation_tags], ids=["tagged", "untagged"])
def test_a_reply_that_only_the_next_turn_ends_is_trained_to_end(glm_processor, change):
    spans = TextEncoder(templated(glm_processor, change(glm_processor.chat_template)))
    two_in_a_row = [("assistant", "2"), ("assistant", "3")]
    encoded = encode(spans, ("user", "One?"), ("assistant", "1"), ("user", "Two?"), *two_in_a_row)
    assert [reply.split("</think>")[1].strip() for reply in replies(spans, encoded)] == [
        "1<|user|>",
        "2",
        "3<|user|>",
    ]
    assert (
        spans.tokenizer.decode(encoded.input_ids).count("<|user|>") == 3
    )  # two questions', and the added one


def test_one_marker_of_all_turns_ends_a_reply(glm_processor):
    template = glm_processor.chat_template.replace("<|assistant|>", "<|user|>")
    spans = TextEncoder(templated(glm_processor, template))
    encoded = encode(spans, ("user", "One?"), ("assistant", "1"), ("user", "Two?"), ("assistant", "2"))
    ends = [reply.split("</think>")[1].strip() for reply in replies(spans, encoded)]
    assert ends == ["1<|user|>", "2<|user|>"]


def test_tokens_on_the_edge_of_a_reply_are_of_it_and_empty_ones_are_not():
    offsets = [(0, 0), (0, 2), (2, 4), (4, 4), (4, 6), (6, 9), (6, 9), (9, 10)]
    prompt = RenderedChat("0123456789", [(3, 5), (6, 7)], [(1, 4)], [(6, 10)])
    mask, images, videos = on_tokens(prompt, offsets)
    assert mask.tolist() == [False, False, True, False, True, True, True, False]
    assert (images, videos) == ([(2, 3)], [(5, 8)])
