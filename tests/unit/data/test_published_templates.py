"""Published chat templates, which TRL has copies of, with content as Transformers' users pass it."""

import copy
import functools
import re
from functools import partial
from unicodedata import normalize

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from PIL import Image
from published_templates import CALLS, CONVERSATIONS, FOLDER, PUBLISHED, REPLY, THINKS, TOOLS, UNTRIED, USER
from samples import templated

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import is_blank, parse_record
from megatron_vlm.data.encode.chat_template import RenderedChat, set_chat_template
from megatron_vlm.data.encode.processing import TextEncoder
from megatron_vlm.generation.generate import reply_text
from tiny.checkpoints import TINY_FAMILIES
from tiny.corpus import default_corpus


@functools.cache
def processor_of(name, template=None):
    processor = TINY_FAMILIES[PUBLISHED[name]].processor(default_corpus(), "{{ messages }}")
    if name == "lfm2_2_5_vl":  # the tiny tokenizer has others
        processor.tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return templated(processor, (FOLDER / f"{template or name}.jinja").read_text())


@functools.cache
def encoder_of(name, template=None):
    return TextEncoder(processor_of(name, template))


def refused(render):
    try:
        return render()
    except (TemplateError, TypeError, ValueError):
        return None


def test_every_published_template_is_tried_or_named_with_the_reason():
    published = {file.name.removesuffix(".jinja") for file in FOLDER.iterdir() if file.suffix == ".jinja"}
    tagged = {f"{name}_training" for name in (*PUBLISHED, *UNTRIED)}
    assert published - tagged == PUBLISHED.keys() | UNTRIED.keys() and all(UNTRIED.values())


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_text_is_that_of_transformers(name, conversation):
    encoder, turns = encoder_of(name), CONVERSATIONS[conversation]
    tools = TOOLS if "call" in conversation else None
    tokenizer = encoder.tokenizer
    expected = refused(
        lambda: tokenizer.apply_chat_template(
            copy.deepcopy(turns), tools=tools, chat_template=encoder.chat.text, tokenize=False
        )
    )
    messages = parse_record(copy.deepcopy(turns)).messages
    if encoder.chat._needs_parts:  # a template that knows lists alone writes nothing for text
        expected = refused(
            lambda: tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=encoder.chat.text, tokenize=False
            )
        )
    if expected is None:
        with pytest.raises(BadSample):
            encoder.chat.render(messages, tools)
        return
    text, spans, _ = encoder.chat.render(messages, tools)
    assert text in (expected, expected + (encoder.chat._next_turn or ""))
    writes_calls = "tool_calls" in encoder.chat.text
    replies = [turn for turn in turns if turn["role"] == "assistant" and (turn["content"] or writes_calls)]
    assert len(spans) == len(replies)
    for (start, stop), reply in zip(spans, replies, strict=True):
        assert reply["content"].strip() in text[start:stop]
        assert USER["content"] not in text[start:stop]


def tokenized(encoder, turns, tools, **options):
    """What Transformers makes of a conversation."""
    return encoder.tokenizer.apply_chat_template(
        copy.deepcopy(turns), tools=tools, chat_template=encoder.chat.text, return_dict=True, **options
    )


def with_pictures(turns, pictures):
    """The turns as users of Transformers pass them to a processor: parts, each image in its own."""
    pictures = iter(pictures)
    filled = copy.deepcopy(turns)
    for part in (part for turn in filled if isinstance(turn["content"], list) for part in turn["content"]):
        part |= {"image": next(pictures)} if part["type"] == "image" else {}
    return filled


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_ids_are_those_of_the_whole_processor(name, conversation):
    """With an image's tokens expanded, and with the pixels that the model gets."""
    encoder, tools = encoder_of(name), TOOLS if "call" in conversation else None
    turns = CONVERSATIONS[conversation]
    pictures = [Image.new("RGB", (64, 48), "red")] * ("image" in conversation)
    messages = parse_record(copy.deepcopy(turns)).messages
    processor = processor_of(name)
    expected = refused(
        lambda: processor.apply_chat_template(
            with_pictures(messages if encoder.chat._needs_parts else turns, pictures),
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    )
    if expected is None:
        pytest.skip("Transformers refuses it")
    prompt = encoder.chat(messages, tools, len(pictures))
    encoded, outputs = encoder(prompt, pictures)
    ids, expected_ids = encoded.input_ids.tolist(), expected["input_ids"][0].tolist()
    next_turn = encoder.tokenizer.encode(encoder.chat._next_turn or "", add_special_tokens=False)
    assert ids in (expected_ids, expected_ids + next_turn)
    assert pictures or encoder.tokenize(prompt).input_ids.tolist() == ids
    for key in expected.keys() & outputs.keys() - {"attention_mask", "token_type_ids", "mm_token_type_ids"}:
        assert torch.equal(torch.as_tensor(outputs[key]), torch.as_tensor(expected[key])), key


# those of TRL whose `{% generation %}` tags mark what it trains
TAGGED = {name: f"{name}_training" for name in PUBLISHED if (FOLDER / f"{name}_training.jinja").is_file()}
TAGGED |= {"lfm2_2_5_vl": "lfm2_2_5_vl"}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TAGGED)
def test_trained_tokens_are_those_of_transformers_mask(name, conversation):
    encoder, tools = encoder_of(name, TAGGED[name]), TOOLS if "call" in conversation else None
    messages = parse_record(copy.deepcopy(CONVERSATIONS[conversation])).messages
    turns = messages if encoder.chat._needs_parts else CONVERSATIONS[conversation]
    mask = refused(lambda: tokenized(encoder, turns, tools, return_assistant_tokens_mask=True))
    if mask is None or (tools and "tool_calls" not in encoder.chat.text):  # an empty reply is not trained
        return
    text, replies, _ = encoder.chat.render(messages, tools)
    encoded = encoder.tokenize(RenderedChat(text, replies, [], [], add_special_tokens=False))
    assert encoded.input_ids.tolist() == mask["input_ids"]
    assert encoded.weights.astype(int).tolist() == mask["assistant_masks"]


REFUSES = {  # the template, and words of the drop
    "Let me add.": [
        ("gemma3", "roles must alternate"),
        ("gemma4", "the answer of a tool stands within"),
        ("llava_next", "Only user and assistant roles"),
    ],
    "": [
        (("gemma3", "llava_next", "smolvlm", "idefics3"), "has a reply without text, such as a call, which"),
    ],
}


@pytest.mark.parametrize("said", REFUSES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_an_answer_of_a_tool_is_never_trained(name, said):
    """Gemma 4's templates write the text of a call after the answer, in the same turn of the model."""
    encoder, answer = encoder_of(name), {"role": "tool", "name": "add", "content": "{'sum': 7.5}"}
    messages = parse_record([USER, CALLS | {"content": said}, answer, REPLY]).messages
    try:
        text, spans, _ = encoder.chat.render(messages, TOOLS)
    except BadSample as bad:
        assert any(name.startswith(families) and words in str(bad) for families, words in REFUSES[said])
        return
    assert not any("7.5" in text[slice(*span)] for span in spans) and len(spans) > 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_reply_before_any_question_is_trained_alone(name):
    """Without the system prompt that a template writes of itself."""
    encoder, turns = encoder_of(name), [REPLY | {"content": "Hi."}, USER, REPLY]
    try:
        text, spans, _ = encoder.chat.render(parse_record(turns).messages)
    except BadSample as bad:
        assert re.match("the conversation begins with a reply, which this template may .*: .+", bad.detail)
        return
    trained = [EMPTY_THINKING.sub("", text[slice(*span)]) for span in spans]
    assert [re.split(r"</?[|\w]+>|\\n", said.strip())[0] for said in trained] == ["Hi.", REPLY["content"]]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_reply_before_another_learns_no_other_end_than_before_a_question(name):
    """GLM's has none there: the marker of the next reply is no end at which a server stops."""
    encoder = encoder_of(name)

    def ends(*turns):
        text, spans, _ = encoder.chat.render(parse_record([*turns]).messages)
        return [text[slice(*span)].partition(REPLY["content"])[2] for span in spans]

    try:
        between, last = ends(USER, REPLY, REPLY)
    except BadSample as bad:
        assert "roles must alternate" in bad.detail
        return
    of_questions = ends(USER, REPLY, USER, REPLY)
    # Gemma 4 goes on in the same turn
    assert last == of_questions[1] and between in ([""] if name == "glm4moe" else ["", of_questions[0]])
    if name == "glm4moe":
        called = ends(USER, CALLS | REPLY, {"role": "tool", "name": "add", "content": "7"}, REPLY)
        assert called[0].endswith("<|observation|>") and last == "<|user|>"


TAKES_EITHER = ["qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "glm4moe"]


@pytest.mark.parametrize("values", [{}, {"enable_thinking": False}, {"enable_thinking": True}], ids=str)
@pytest.mark.parametrize("name", TAKES_EITHER)
def test_thinking_in_the_text_is_trained_as_reasoning_content(name, values):
    """By templates that take it from either; also where the generation prompt has an empty block."""
    family = "glm4v_moe" if name == "glm4moe" else "qwen3_vl"
    processor = TINY_FAMILIES[family].processor(default_corpus(), "{{ messages }}")
    set_chat_template(processor, (FOLDER / f"{name}.jinja").read_text(), values)
    encoder = TextEncoder(processor)
    called = [USER, THINKS | CALLS, {"role": "tool", "name": "add", "content": "7"}]
    for before, after in (([], []), ([], [USER, REPLY]), ([USER, REPLY], []), (called, [])):
        encoded = []
        for text in ("<think>\nThree and four.\n</think>\n\nIt is 7.", None):
            reply = THINKS if text is None else REPLY | {"content": text}
            messages = parse_record(copy.deepcopy([*before, USER, reply, *after])).messages
            encoded.append(encoder.tokenize(encoder.chat(messages, TOOLS, 0)))
        inside, beside = encoded
        assert inside.input_ids.tolist() == beside.input_ids.tolist()
        assert inside.weights.tolist() == beside.weights.tolist() and any(inside.weights)


def split(tokenizer, text):
    """The ids of a text in which control tokens are text."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


@pytest.mark.parametrize("images", [0, 1])
@pytest.mark.parametrize("name", PUBLISHED)
def test_typed_control_tokens_are_the_pieces_of_the_text_as_it_stands(name, images):
    """By a call of the processor and without one; what surrounds them stays as it was."""
    encoder = encoder_of(name)
    tokenizer, control = encoder.tokenizer, encoder.chat.added_control_tokens
    controls = {tokenizer.added_tokens_encoder[token] for token in control}

    if images and name == "glm4moe":
        pytest.skip("a template of texts alone")

    def encoded(text):
        asked = text.replace("<image>", "").replace("<video>", "")  # they are media in a user's text
        content = [*[{"type": "image"}] * images, {"type": "text", "text": asked}]
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": text}]
        prompt = encoder.chat(parse_record(turns).messages, None, images)
        called, _ = encoder(prompt, [Image.new("RGB", (64, 48))] * images)
        if not images:
            read = encoder.tokenize(prompt)
            assert read.input_ids.tolist() == called.input_ids.tolist()
            assert read.weights.tolist() == called.weights.tolist()
        return called

    plain = encoded("8.8")
    for token in control:
        typed = f"a{token}9.99{token}b"
        tricked = encoded(typed)
        ids = tricked.input_ids.tolist()
        assert [i for i in ids if i in controls] == [i for i in plain.input_ids.tolist() if i in controls]
        trained = tokenizer.decode([i for i, w in zip(ids, tricked.weights, strict=True) if w])
        assert typed in trained and not any(character > "\ue000" for character in trained)
        pieces = split(tokenizer, typed)[1:-1]  # the first and the last may join what is around
        assert any(ids[start : start + len(pieces)] == pieces for start in range(len(ids)))


@pytest.mark.parametrize("add", ["special", "plain"])
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "llava_next"])
def test_tokens_of_the_users_own_are_tokens_and_are_trained(name, add):
    processor = TINY_FAMILIES[PUBLISHED[name]].processor(
        default_corpus(), (FOLDER / f"{name}.jinja").read_text()
    )
    if add == "special":
        processor.tokenizer.add_special_tokens({"additional_special_tokens": ["<seg>"]})
    else:
        processor.tokenizer.add_tokens(["<seg>"])
    encoder = TextEncoder(processor)
    turns = [USER, {"role": "assistant", "content": "It is <seg>."}]
    encoded = encoder.tokenize(encoder.chat(parse_record(turns).messages, None, 0))
    seg = processor.tokenizer.convert_tokens_to_ids("<seg>")
    assert encoded.input_ids[encoded.weights > 0].tolist().count(seg) == 1
    assert reply_text(processor, encoded.input_ids[encoded.weights > 0]) == "It is <seg>."
    alone = [USER, {"role": "assistant", "content": "<seg>"}]
    assert encoder.chat.render(parse_record(alone).messages)[1]


CONTROLS = [
    "<|im_end|>",
    "<image>",
    "<|image_pad|>",
    "<end_of_turn>",
    "<turn|>",
    "</s>",
    "[/INST]",
    "<|user|>",
]
PIECES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs", "Co", "Cn"]), min_size=1, max_size=12),
    st.sampled_from(
        [*CONTROLS, "{{ messages }}", "{% endgeneration %}", "assistant", "\n\n", "\t ", "It is 7."]
    ),
)
TEXTS = st.lists(PIECES, min_size=1, max_size=4).map("".join).filter(lambda text: not is_blank(text))
EXCHANGES = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3)
composed = partial(normalize, "NFC")
EMPTY_THINKING = re.compile(r"^\s*(<think>)?\s*</think>\s*")


@given(st.sampled_from(sorted(PUBLISHED)), st.none() | TEXTS, EXCHANGES)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_what_is_trained_of_any_conversation_is_its_replies(name, system, exchanges):
    """Decoded without the end of the turn, and without the empty thinking that a template writes."""
    encoder = encoder_of(name)
    turns = [{"role": "system", "content": system}] if system else []
    for asked, answered in exchanges:
        asked = asked.replace("<image>", "")  # it is an image in a user's text
        turns += [{"role": "user", "content": asked or "a"}, {"role": "assistant", "content": answered}]
    encoded = encoder.tokenize(encoder.chat(parse_record(turns).messages, None, 0))
    controls = {encoder.tokenizer.added_tokens_encoder[token] for token in encoder.chat.added_control_tokens}
    replies, before = [], 0
    for token, weight in zip(encoded.input_ids.tolist(), encoded.weights, strict=True):
        replies += [[]] if weight and not before else []
        if weight and token not in controls:
            replies[-1].append(token)
        before = weight
    texts = [EMPTY_THINKING.sub("", encoder.tokenizer.decode(ids), 1).strip() for ids in replies]
    # Qwen's tokenizers compose characters
    assert [*map(composed, texts)] == [composed(answered.strip()) for _, answered in exchanges]
