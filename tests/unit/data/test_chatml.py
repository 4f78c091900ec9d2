import json

import pytest
from samples import clean

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import is_trained, parse_record
from megatron_vlm.data.chatml.sample import place_media
from megatron_vlm.data.encode.encoder import last_reply_alone


def text(value):
    return {"type": "text", "text": value}


IMAGE, VIDEO = {"type": "image"}, {"type": "video"}
EXPECTED = [
    {"role": "user", "content": [IMAGE, text("\nWhat?")]},
    {"role": "assistant", "content": [text("A cat.")]},
]
SHAREGPT = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]
OPENAI = [
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}, text("\nWhat?")]},
    {"role": "assistant", "content": "A cat."},
]


@pytest.mark.parametrize("turns", [SHAREGPT, OPENAI], ids=["sharegpt", "openai"])
@pytest.mark.parametrize("wrapper", [None, "conversations", "messages", "conversation"])
@pytest.mark.parametrize("encode", [json.dumps, lambda record: record], ids=["json", "object"])
def test_every_layout_gives_the_same_messages(turns, wrapper, encode):
    record = {wrapper: turns} if wrapper else turns
    assert parse_record(encode(record)).messages == EXPECTED


@pytest.mark.parametrize("content", [4, 0, 4.5, True, False])
@pytest.mark.parametrize("write", [lambda content: content, lambda c: [c], lambda c: [{"text": c}, ""]])
@pytest.mark.parametrize(("role", "key"), [("role", "content"), ("from", "value"), ("role", "text")])
def test_a_number_as_content_is_its_json_text(content, write, role, key):
    turns = [{role: name, key: write(content)} for name in ("system", "user", "assistant", "tool")]
    expected = [text(json.dumps(content))]
    assert [message["content"] for message in parse_record(turns).messages] == [expected] * 4


@pytest.mark.parametrize("content", [{"content": None, "value": 0.5}, {"value": 0.5}])
def test_a_critics_value_is_no_content(content):
    with pytest.raises(BadSample, match="turn 0 has"):
        parse_record([{"role": "assistant"} | content])


def test_nan_as_content_is_none():
    assert parse_record([{"role": "user", "content": float("nan")}]).messages[0]["content"] == [text("")]


def test_the_argument_is_not_changed():
    record = {"conversations": SHAREGPT, "system": "Be brief."}
    before = json.dumps(record)
    place_media(parse_record(record).messages, images=1)
    assert json.dumps(record) == before


CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "cat"}}}
CALLED = {"name": "look", "arguments": {"at": "cat"}}


@pytest.mark.parametrize(
    "names",
    [
        ("developer", "Human", "tool_call", "tool_response", "AI"),
        ("SYSTEM", "user", "function_call", "function_response", "bot"),
        ("System", "USER", "Function_Call", "observation", "GPT"),
        ("system", "human", "tool_call", "ipython", "Assistant"),
        ("system", "human", "tool_call", "environment", "model"),
    ],
)
def test_roles_of_other_frameworks(names):
    system, user, call, tool, reply = names
    turns = [
        {"from": system, "value": "Be brief."},
        {"from": user, "value": "What?"},
        {"from": call, "value": json.dumps(CALLED)},
        {"from": tool, "value": "black"},
        {"from": reply, "value": "A cat."},
    ]
    messages = parse_record(turns).messages
    assert messages == [
        {"role": "system", "content": [text("Be brief.")]},
        {"role": "user", "content": [text("What?")]},
        {"role": "assistant", "content": [], "tool_calls": [CALL]},
        {"role": "tool", "content": [text("black")]},
        {"role": "assistant", "content": [text("A cat.")]},
    ]


@pytest.mark.parametrize(
    "written",
    [
        {"function_call": CALLED},
        {"function_call": CALLED | {"arguments": json.dumps(CALLED["arguments"])}},
        {"tool_calls": [CALL | {"function": CALLED | {"arguments": json.dumps(CALLED["arguments"])}}]},
        {"tool_calls": json.dumps([CALL])},
        {"tool_calls": [CALL], "function_call": None},
        {"tool_calls": [CALLED]},
        {"tool_calls": CALL},
        {"tool_calls": [{"name": CALLED["name"], "parameters": CALLED["arguments"]}]},
    ],
)
def test_calls_as_openai_writes_them(written):
    messages = parse_record([{"role": "assistant", "content": None} | written]).messages
    assert messages == [{"role": "assistant", "content": [], "tool_calls": [CALL]}]


@pytest.mark.parametrize("nothing", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": {}}])
def test_a_call_without_arguments_has_an_empty_object(nothing):
    [message] = parse_record([{"role": "assistant", "tool_calls": [{"name": "look"} | nothing]}]).messages
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "look", "arguments": {}}}]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name(name):
    conversation = parse_record([{"role": "assistant", "content": None, name: "Two."}])
    assert conversation.messages[0]["reasoning_content"] == "Two." and conversation.no_reply is None
    assert conversation.messages[0].keys() == {"role", "content", "reasoning_content"}


@pytest.mark.parametrize("name", ["tools", "functions"])
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("write", [list, json.dumps, lambda tools: [*map(json.dumps, tools)]])
def test_tools_in_any_form(name, bare, write):
    tool = {"type": "function", "function": {"name": "look"}}
    record = {"messages": SHAREGPT, name: write([tool["function"] if bare else tool])}
    conversation = parse_record(record | {"image": "a.png", "system": "Be brief."})
    system = {"role": "system", "content": [text("Be brief.")]}
    assert (conversation.messages, conversation.tools) == ([system, *EXPECTED], [tool])
    assert parse_record(conversation.stored()).stored() == conversation.stored()


def test_placeholders_become_parts_in_their_place():
    messages = parse_record([{"role": "user", "content": "a <image><video> b"}]).messages
    assert messages[0]["content"] == [text("a "), IMAGE, VIDEO, text(" b")]


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": "an <image> tag"},
        {"role": "user", "content": [IMAGE, text("an <image> tag")]},
    ],
    ids=["assistant", "user turn that names its media"],
)
def test_placeholder_text_elsewhere_stays_text(turn):
    messages = parse_record([turn]).messages
    assert messages[0]["content"][-1] == text("an <image> tag")


@pytest.mark.parametrize(
    "record, reason",
    [
        ("[{", "bad_json"),
        ("", "bad_json"),
        ({"texts": "hello"}, "bad_conversation"),
        (["hello"], "bad_conversation"),
        ([{"role": 3, "content": "x"}], "bad_conversation"),
        ([{"role": "user", "content": [{"type": ["image"]}]}], "bad_conversation"),
        ([{"role": "assistant", "content": [IMAGE]}], "bad_conversation"),
        ({"messages": SHAREGPT, "tools": ["look"]}, "bad_conversation"),
        ([{"role": "tool_call", "content": '{"name": 3}'}], "bad_conversation"),
        ('{"question": "Q", "answer": "no", "answer": "yes"}', "bad_json"),
        ('[{"role": "user", "content": "Q", "content": "R"}]', "bad_json"),
        ([{"role": "user", "content": "Q", "tool_calls": [CALL]}], "bad_conversation"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": '"{}"'}]}], "bad_conversation"),
        ([{"role": "assistant", "content": "A", "thinking": ["a", "b"]}], "bad_conversation"),
        (
            [{"role": "user", "content": [IMAGE | {"image": "a.png"}], "images": ["b.png"]}],
            "bad_conversation",
        ),
        *(
            (
                {"messages": [{"role": "user", "content": parts}], "images": ["a.png", "b.png"]},
                "bad_conversation",
            )
            for parts in (
                [IMAGE | {"image": "b.png"}, IMAGE | {"image": "a.png"}],
                [IMAGE | {"index": 1}, IMAGE | {"index": 0}],
                [IMAGE | {"index": 0}, IMAGE | {"index": 0}],
                [IMAGE | {"index": "0"}, IMAGE | {"index": "1"}],
                [IMAGE | {"image": 1}, IMAGE | {"image": 0}],
                "<img>b.png</img> or <img>a.png</img>?",
            )
        ),
    ],
)
def test_what_cannot_be_read_says_why(record, reason):
    with pytest.raises(BadSample) as bad:
        parse_record(record)
    assert bad.value.reason == reason


REPLY = {"role": "assistant", "content": "A cat."}


@pytest.mark.parametrize(
    "turn",
    [
        {"content": "\nWhat?", "images": ["a.png"]},
        {"content": "<image>\nWhat?", "image": "a.png"},
        {"content": [text("\nWhat?")], "images": ["a.png"]},
        {"content": json.dumps([{"type": "image", "image": "a.png"}, text("\nWhat?")])},
        {"content": "<img>a.png</img>\nWhat?"},
        {"content": [text("<img>a.png</img>\nWhat?")]},
        {"content": [{"image": "a.png"}, {"text": "\nWhat?"}]},
        {"content": None, "value": [{"type": "image", "image": "a.png"}, text("\nWhat?")]},
        {
            "content": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "a.png"}},
                text("\nWhat?"),
            ]
        },
    ],
)
def test_media_that_a_turn_names(turn):
    turn = {"role": "user"} | turn
    before = json.dumps(turn)
    read = parse_record({"messages": [turn, REPLY]})
    conversation, media = read.stored(), read.media
    assert media == {"image": ["a.png"], "video": []}
    assert clean(conversation, images=1)[0] == EXPECTED
    assert json.dumps(turn) == before


def test_audio_is_refused_with_what_to_do():
    turn = {"role": "user", "content": "<audio>What do you hear?"}
    reply = {"role": "assistant", "content": "A dog."}
    for kind in ("audio", "audio_url", "input_audio"):
        with pytest.raises(BadSample, match="turn 0 has audio.*; leave the record out, or write it"):
            parse_record([turn | {"content": [{"type": kind}, text("What?")]}, reply])
    with pytest.raises(BadSample, match="the record, under 'audios', has audio.*; leave the record out"):
        parse_record({"messages": [turn, reply], "audios": ["dog.wav"]})
    # text about a tag, and audio that no turn asks for
    assert parse_record([turn, reply]).messages[0]["content"] == [text("<audio>What do you hear?")]
    assert len(parse_record({"messages": [reply], "audios": ["dog.wav"]}).messages) == 1


def test_where_images_stand():
    """Before the first user's text without placeholders; in the text of tools if they are as many."""
    messages = parse_record({"messages": [{"role": "user", "content": "What?"}], "system": "s"}).messages
    assert place_media(messages, images=2)[1]["content"] == [IMAGE, IMAGE, text("What?")]
    turns = [("user", "<image>q"), ("assistant", "a"), ("tool", "seen: <image>"), ("assistant", "b")]
    messages = parse_record([{"role": role, "content": said} for role, said in turns]).messages
    assert place_media(messages, images=2)[2]["content"] == [text("seen: "), IMAGE]
    assert place_media(messages, images=1)[2]["content"] == [text("seen: <image>")]
    for images in (0, 2):
        with pytest.raises(BadSample, match=f"placeholder_mismatch: 1 placeholders for {images} images"):
            place_media(parse_record(SHAREGPT).messages, images=images)


NOTHING = ["", " \n\t", "\u200b\ufeff", None, [], [""], [text("")], [text(" "), text("\n")]]


@pytest.mark.parametrize("nothing", NOTHING, ids=repr)
def test_a_reply_without_content_is_no_reply(nothing):
    empty = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": nothing}]
    with pytest.raises(BadSample, match="no_trained_tokens: 2 replies, all without content"):
        clean(empty * 2)
    with pytest.raises(BadSample, match="no_trained_tokens"):
        clean([{"role": "document", "content": nothing}])
    assert len(clean(empty + SHAREGPT, images=1)[0]) == 4


def test_replies_that_say_so_are_not_trained():
    untrained = [SHAREGPT[0], SHAREGPT[1] | {"loss": False}]
    with pytest.raises(BadSample, match="no_trained_tokens: no reply to train on"):
        clean(untrained, images=1)
    for nonsense in (-0.5, 0.0001, 1e9, float("nan"), "no", "0.5", [0]):
        with pytest.raises(
            BadSample, match="turn 1 has weight .*, not true, false or a number from 0.001 to 1000"
        ):
            clean([SHAREGPT[0], SHAREGPT[1] | {"weight": nonsense}], images=1)
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant") * 3]
    turns[5]["loss"] = 0
    turns[1]["train"] = False  # axolotl's name
    messages, _, _ = clean(turns)
    assert [number for number, message in enumerate(messages) if is_trained(message)] == [3]
    messages[1]["loss"] = 1
    assert [n for n, message in enumerate(last_reply_alone(messages)) if is_trained(message)] == [3]


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
@pytest.mark.parametrize("nothing", ["", None, [], [text("")]], ids=repr)
def test_templates_find_a_first_part_in_an_empty_turn(role, nothing):
    assert parse_record([{"role": role, "content": nothing}]).messages[0]["content"] == [text("")]


def test_blocks_of_anthropic_are_calls_reasoning_and_tool_turns():
    thought = {"type": "thinking", "thinking": "A look."}
    called = {"type": "tool_use", "id": "t", "name": "look", "input": {"at": "cat"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("black")], "is_error": False}
    tool = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}
    read = parse_record(
        {
            "messages": [
                {"role": "user", "content": "What?"},
                {"role": "assistant", "content": [thought, text("I look."), called]},
                {"role": "user", "content": [result, text("And?")]},
                REPLY,
            ],
            "tools": [tool],
        }
    )
    assert read.messages[1:] == [
        {
            "role": "assistant",
            "content": [text("I look.")],
            "reasoning_content": "A look.",
            "tool_calls": [CALL | {"id": "t"}],
        },
        {"role": "tool", "name": "look", "tool_call_id": "t", "content": [text("black")]},
        {"role": "user", "content": [text("And?")]},
        {"role": "assistant", "content": [text("A cat.")]},
    ]
    function = {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
    assert read.tools == [{"type": "function", "function": function}]
    assert read.unread == {("part", "is_error")}


@pytest.mark.parametrize(
    "name", ["prompt", "completion", "messages", "answers", "history", "content", "arguments"]
)
def test_a_list_as_python_prints_it_is_refused(name):
    record = {"prompt": "What?", "completion": "A cat."}
    turns, parts = [SHAREGPT[1]], [text("A cat.")]
    calls = [{"function": {"name": "look", "arguments": "{'at': 'cat'}"}}]
    record |= {
        "content": {"messages": [{"role": "user", "content": str(parts)}, REPLY]},
        "arguments": {"messages": [{"role": "assistant", "content": "", "tool_calls": calls}]},
        "answers": {"answers": "['a cat', 'cat']"},
        "history": {"history": "[('Hi', 'Hello')]"},
    }.get(name, {name: str(turns)})
    with pytest.raises(BadSample, match=f"{name} (is a list as Python prints it|of a call .* are no JSON)"):
        parse_record(record)


def test_replies_in_a_prompt_of_turns_are_not_trained():
    prompt = [{"role": role, "content": "a"} for role in ("user", "assistant", "user", "assistant", "user")]
    prompt[3]["weight"] = 1
    messages = parse_record({"prompt": prompt, "completion": [REPLY]}).messages
    assert [number for number, message in enumerate(messages) if is_trained(message)] == [3, 5]
    with pytest.raises(BadSample, match="the prompt ends with a reply, and the answer is another"):
        parse_record({"prompt": prompt[:4], "completion": [REPLY]})


@pytest.mark.parametrize("key", ["label", "kto_tag"])
def test_an_answer_that_is_not_to_be_learned_is_a_drop(key):
    """As TRL and LLaMA-Factory mark records for KTO."""
    record = {"prompt": "What?", "completion": "A dog."}
    assert parse_record(record | {key: True}).unread == set()
    with pytest.raises(BadSample, match=f"no_trained_tokens: {key} is false"):
        parse_record(record | {key: False})
