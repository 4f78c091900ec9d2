"""Read turns as people write them: messages as chat templates take them, and the media that they name.

Tools, and calls of them, are brought to the form of chat templates, too.
"""

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import Any

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.limits import LIMITS, named_limits
from megatron_vlm.data.on_disk.fields import (
    AUDIO_PARTS,
    CALL,
    CALLS,
    CONTENT,
    MEDIA,
    MEDIUM,
    PARTS,
    REFERENCES,
    ROLE,
    ROLES,
    THINKING_KEYS,
    TIMES,
    TRAINED,
    TURNS,
    WEIGHTS,
)
from megatron_vlm.data.on_disk.paths import PICTURES

NO_VALUES = (None, "", [])
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000  # besides 0
BESIDE_TEXT = ("tool_calls", "reasoning_content")  # what else a reply may consist of
MEDIA_KEYS = tuple(name for names in MEDIA.values() for name in names)
TAKEN = {*ROLE, *CONTENT, *WEIGHTS, *MEDIA_KEYS, "function_call"}  # come out under one name
PASSED = {*THINKING_KEYS, *CALLS, REFERENCES, "name", "tool_call_id"}  # go to the template as they are
PLACEHOLDER = re.compile(r"<(image|video)>")
# An image that a text names; a name in the tag that is no file's is text about the tag
NAMED_IMAGE = re.compile(rf"<img>([^<>\n]+(?:{'|'.join(map(re.escape, PICTURES))}))</img>", re.IGNORECASE)
PYTHON_PARTS = re.compile(r"\[\{'type': '(?:(?:in|out)put_)?(?:text|image|video)(?:_url)?'[,}]")
# What nobody sees: whitespace, control characters, soft hyphens, zero-width and direction marks.
INVISIBLE = r"[\s\x00-\x1f\x7f-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]"
BLANK = re.compile(f"{INVISIBLE}*+")
CALL_KEYS = {"id", "type", "index", "function", "name", "arguments", "parameters", "tool_call_id"}
BLOCKS = {  # of Anthropic's: what is read of each
    "tool_use": ("type", "id", "name", "input"),
    "tool_result": ("type", "tool_use_id", "content"),
    "thinking": ("type", "thinking", "signature"),
}


@dataclass
class TurnMedia:
    """Collects what the turns of one record name: media with their `index`, and keys that nobody reads."""

    has_images: bool = False  # beside the turns, so that `<img>` in a text is none
    named: dict[str, list[tuple[Any, Any]]] = field(default_factory=lambda: {kind: [] for kind in MEDIA})
    unread: set[tuple[str, str]] = field(default_factory=set)  # ("turn" or "part", key)


def get_only_alias(
    record: Mapping[str, Any],
    names: Sequence[str],
    reason: str = "bad_conversation",
    place: str = "",
    same: Callable[[Any, Any], bool] = eq,
) -> str | None:
    """Return the first of the names of one field that has a value; None, "" and [] are no values.

    Raises BadSample if another has a value that is not the `same`: nothing says which is meant. An item and a
    list of it are the same.
    """
    present = [name for name in names if name in record and record.get(name) not in NO_VALUES]
    if not present:
        return None
    first = present[0]
    for other in present[1:]:
        value, again = record[first], record[other]
        if value not in (again, [again]) and again != [value] and not same(value, again):
            text = f"{first} and {other} are two names of one field, and differ; leave one out"
            raise BadSample(reason, place + text)
    return first


def unread_keys(item: Mapping[str, Any], read_keys: Container[str]) -> set[str]:
    """Return the keys of an object that are not among the known ones and have a value."""
    empty = {key for key, value in item.items() if isinstance(value, str | list | None) and not value}
    return {str(key) for key in item.keys() - empty if key not in read_keys}


def parse_turns(turns: Any, system: Any = None, media: TurnMedia | None = None) -> list[dict]:
    """Return the messages of a list of turns, or JSON text of it, and of a system prompt beside it.

    A turn of calls alone joins the reply before it. A system turn without content is left out. Raises
    BadSample.
    """
    turns = decoded(turns)
    if not isinstance(turns, list) or not turns:
        raise BadSample("bad_conversation", f"no list of turns under one of {', '.join(TURNS)}")
    media = media or TurnMedia()
    prompt = parse_turn({"role": "system", "content": system}, 0, media) if system else None
    turns = expand_blocks(turns, media.unread)
    messages = [parse_turn(turn, number, media) for number, turn in enumerate(turns)]
    messages = join_calls(messages, [role_of(turn) == CALL for turn in turns])
    messages = [message for message in messages if message["role"] != "system" or has_content(message)]
    if not messages:
        raise BadSample("bad_conversation", f"{len(turns)} system turns without content, and no others")
    if prompt and has_content(prompt):
        if messages[0]["role"] != "system":
            messages.insert(0, prompt)
        elif messages[0]["content"] != prompt["content"]:
            raise BadSample("bad_conversation", "system and the system turn differ; leave one out")
    return messages


def parse_turn(turn: Any, number: int, media: TurnMedia) -> dict:
    """Return the turn as a message: its content as a list of text, image and video parts.

    `<image>` and `<video>` in the text of a user turn become parts, unless the turn is a list that already
    names its media. Its weight in the loss is a number under `loss`, its calls are under `tool_calls`; its
    other keys (`name`, ...) pass through. An empty turn gets one empty text, as templates may look at its
    first part. Raises BadSample.
    """
    if not isinstance(turn, dict):
        raise BadSample("bad_conversation", f"turn {number} is {type(turn).__name__}, not an object")
    place = f"turn {number}: "
    get_only_alias(turn, ROLE, place=place, same=_same_role)
    role = role_of(turn)
    if role is None:
        name = turn.get("role") or turn.get("from")
        label = name if isinstance(name, str) else type(name).__name__
        raise BadSample("bad_conversation", f"turn {number} has role {label}; known are {', '.join(ROLES)}")
    content = turn.get(get_only_alias(turn, CONTENT, place=place, same=_no_content))
    message = {key: value for key, value in turn.items() if key not in TAKEN}
    if turn.keys().isdisjoint(CONTENT):
        content = message.pop("text", None)
    media.unread |= {("turn", key) for key in unread_keys(message, PASSED)}
    if (weight := named_weight(turn, number)) is not None:
        message["loss"] = weight
    if role == CALL:
        calls = read_call_turn(content, place, media.unread)
        return message | {"role": "assistant", "content": [], "tool_calls": calls}
    if (calls := read_calls(turn, place, media.unread)) is not None:
        message["tool_calls"] = calls
    if role in ("user", "assistant") and isinstance(content, str) and PYTHON_PARTS.match(content.strip()):
        raise BadSample("bad_conversation", f"{place}content is a list as Python prints it; write it as JSON")

    # Media of the turn itself, or paths in its text, become parts first; then every part is read
    parts = _raw_parts(content, number, role)
    if role in ("user", "tool"):
        parts = _with_media_of_turn(turn, parts)
        if not media.has_images and all(map(_is_text, parts)):
            parts = [piece for part in parts for piece in _split(part, NAMED_IMAGE)]
    elif key := next((key for key in MEDIA_KEYS if turn.get(key)), None):
        raise BadSample("bad_conversation", f"{place}its {key} are not read; name them beside the turns")
    parts = [_part(part, number, media) for part in parts]
    names_media = any(part["type"] != "text" for part in parts)
    if names_media and role == "assistant":
        raise BadSample("bad_conversation", f"turn {number}: an assistant turn cannot hold media")
    if role == "user" and not names_media:
        parts = [piece for part in parts for piece in _split(part, PLACEHOLDER)]
    parts = join_texts(parts)
    if not parts and not any(message.get(key) for key in BESIDE_TEXT):
        parts = [{"type": "text", "text": ""}]
    return message | {"role": role, "content": parts}


def role_of(turn: Any) -> str | None:
    """Return the role of a turn as it is written; None without a known role."""
    name = (turn.get("role") or turn.get("from")) if isinstance(turn, dict) else None
    return ROLES.get(name.lower()) if isinstance(name, str) else None


def _same_role(role: Any, sender: Any) -> bool:
    """Also if `from` is no role, but someone's name."""
    sender = ROLES.get(str(sender).lower())
    return sender is None or sender == ROLES.get(str(role).lower())


def _no_content(content: Any, value: Any) -> bool:
    """Whether `value` is something else, such as a critic's."""
    return not isinstance(value, str | list)


def named_weight(turn: dict, number: int) -> float | None:
    """Return the weight in the loss that a turn names, as `loss` or as OpenAI's `weight`; true is 1.

    Raises BadSample for a wrong one, and for two that differ.
    """
    weight_keys = {key: turn[key] for key in WEIGHTS if turn.get(key) is not None}
    for key, value in weight_keys.items():
        if not (isinstance(value, int | float) and (value == 0 or LEAST_WEIGHT <= value <= MOST_WEIGHT)):
            expected = f"true, false or a number from {LEAST_WEIGHT} to {MOST_WEIGHT}"
            raise BadSample("bad_conversation", f"turn {number} has {key} {value!r}, not {expected}")
    weights = set(map(float, weight_keys.values()))
    if len(weights) > 1:
        raise BadSample("bad_conversation", f"turn {number} has {' and '.join(WEIGHTS)}, which differ")
    return weights.pop() if weights else None


# -- parts


def _raw_parts(content: Any, number: int, role: str) -> list[Any]:
    """Return the parts of a content: text, a list of parts, or JSON text of such a list."""
    content = _decoded_parts(content, role)
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise BadSample("bad_conversation", f"turn {number} has content {type(content).__name__}")
    return [_with_type({"type": "text", "text": part} if isinstance(part, str) else part) for part in content]


def _decoded_parts(content: Any, role: str) -> Any:
    """Return the parts of a content that is JSON text of parts; any other content as it is.

    A reply may be such JSON itself, so a reply's parts have nothing but their text.
    """
    if not isinstance(content, str):
        return content
    parts = decode_json(content)
    are_parts = isinstance(parts, list) and all(
        isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in PARTS
        for part in parts
    )
    is_reply = role == "assistant" and are_parts and any(part.keys() != {"type", "text"} for part in parts)
    return parts if are_parts and parts and not is_reply else content


def _with_type(part: Any) -> Any:
    """Return the part with its type, if the name of its only text or medium is all that says it."""
    if not isinstance(part, dict) or part.get("type") is not None:
        return part
    names = [name for name in PARTS if part.get(name) is not None]
    return part | {"type": names[0]} if len(names) == 1 else part


def _with_media_of_turn(turn: dict, parts: list[Any]) -> list[Any]:
    """Return the parts, with one for each medium under a key of the turn.

    They take the places in its text, or stand before it. Raises BadSample for another number of places.
    """
    for kind, names in MEDIA.items():
        key = get_only_alias(turn, names)
        if key is None:
            continue
        items = turn[key] if isinstance(turn[key], list) else [turn[key]]
        parts = [
            piece for part in parts for piece in (_split(part, PLACEHOLDER) if _is_text(part) else [part])
        ]
        places = [index for index, part in enumerate(parts) if part == {"type": kind}]
        if places and len(places) != len(items):
            text = f"a turn has {len(items)} {key} and {len(places)} places for them"
            raise BadSample("placeholder_mismatch", text)
        media_parts = [{"type": kind, kind: item} for item in items]
        for index, part in zip(places, media_parts, strict=False):
            parts[index] = part
        parts = parts if places else media_parts + parts
    return parts


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _split(part: dict, pattern: re.Pattern[str]) -> list[dict]:
    """Return a text with parts in place of PLACEHOLDER or NAMED_IMAGE in it."""
    pieces = pattern.split(part["text"])  # text, kind or path, text, ..., text
    if len(pieces) == 1:
        return [part]
    parts = [{"type": "text", "text": piece} for piece in pieces]
    for index in range(1, len(pieces), 2):
        image = {"type": "image", "image": pieces[index]}
        parts[index] = {"type": pieces[index]} if pattern is PLACEHOLDER else image
    return parts


def _part(part: Any, number: int, media: TurnMedia) -> dict:
    """Return a text, or the place of a medium with its limits; the medium is added to `media`."""
    name = part.get("type") if isinstance(part, dict) else None
    if name in AUDIO_PARTS:
        raise audio(f"turn {number}")
    kind = PARTS.get(name) if isinstance(name, str) else None
    if kind is None or (kind == "text" and not isinstance(part.get("text"), str)):
        keys = ", ".join(PARTS)
        raise BadSample("bad_conversation", f"turn {number} has a part that is no {keys}, or has no text")
    if kind == "text":
        media.unread |= {("part", key) for key in unread_keys(part, ("type", "text"))}
        return {"type": "text", "text": part["text"]}
    names = (f"{kind}_url", kind, *MEDIUM)
    medium = part.get(get_only_alias(part, names))
    keys = {"type", "index", *names, *LIMITS[kind], *TIMES}
    limited = part
    if isinstance(medium, dict):  # an address of OpenAI's, or Anthropic's base64
        limited = part | medium
        keys |= {"media_type", "data", "bytes", "frames"}
        medium = medium.get("url", medium.get("data", medium))
    media.unread |= {("part", key) for key in unread_keys(limited, keys)}
    if kind == "video" and isinstance(medium, list):
        medium = {"frames": medium} | frame_times(part)
    media.named[kind].append((medium, part.get("index")))
    return {"type": kind} | named_limits(kind, limited | medium if isinstance(medium, dict) else limited)


def frame_times(item: dict) -> dict:
    """Return what an item says of the times of its list of frames; `sample_fps` is qwen-vl-utils' `fps`."""
    times = {name: item[name] for name in TIMES if item.get(name) is not None}
    return times or ({"fps": item["sample_fps"]} if item.get("sample_fps") is not None else {})


def audio(place: str) -> BadSample:
    """Return what says that a sample has audio there."""
    return BadSample(
        "bad_conversation",
        f"{place} has audio, which no model is trained on; leave the record out, or write it as text",
    )


def join_texts(parts: list[dict]) -> list[dict]:
    """Join adjacent texts here, so that they cannot meet in the template and spell a control token."""
    joined: list[dict] = []
    for part in parts:
        if part["type"] == "text" and joined and joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": joined[-1]["text"] + part["text"]}
        else:
            joined.append(part)
    return [part for part in joined if part["type"] != "text" or part["text"]]


# -- what a message says


def is_trained(message: dict) -> bool:
    """Whether a message is a reply to train on."""
    return message["role"] in TRAINED and message.get("loss", 1) > 0


def has_content(message: dict) -> bool:
    """Whether a message says anything: visible text, tool calls or reasoning; or media, if it is not trained.

    A reply without content is not trained: neither what the template writes for it nor its end of turn.
    """
    if any(part["type"] != "text" for part in message["content"]) and message["role"] not in TRAINED:
        return True
    if any(not is_blank(part["text"]) for part in message["content"] if part["type"] == "text"):
        return True
    beside = (message.get(key) for key in BESIDE_TEXT)
    return any(not is_blank(value) if isinstance(value, str) else bool(value) for value in beside)


def is_blank(text: str) -> bool:
    """Whether the text holds nothing visible."""
    return BLANK.match(text).end() == len(text)


# -- tools and calls


def read_tools(name: str, tools: Any) -> list[dict] | None:
    """Return the tools that a record has under a name: objects, JSON text of them, or a list of JSON texts.

    `functions` are OpenAI's older `tools`, and come out in the form of these. Raises BadSample.
    """
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise BadSample("bad_json", f"{name}: {error}") from error
    tools = [decode_json(tool) for tool in (tools if isinstance(tools, list) else [tools] if tools else [])]
    if not all(isinstance(tool, dict) for tool in tools):
        raise BadSample("bad_conversation", f"{name} is not a list of objects")
    for number, tool in enumerate(tools):
        if "input_schema" in tool:  # Anthropic's
            function = {key: value for key, value in tool.items() if key not in ("input_schema", "type")}
            tools[number] = {"type": "function", "function": function | {"parameters": tool["input_schema"]}}
        elif name == "functions" and "function" not in tool:
            tools[number] = {"type": "function", "function": tool}
    return tools or None


def read_call_turn(content: Any, place: str, unread: set[tuple[str, str]]) -> list[dict]:
    """Return the calls of a turn whose text is one call, or a list of them, as OpenAI writes them.

    Raises BadSample.
    """
    return [_wrap(call) for call in _checked_calls(content, place, unread)]


def _checked_calls(content: Any, place: str, unread: set[tuple[str, str]]) -> list[dict]:
    """Return calls as they are written, but with objects for arguments that are JSON text of an object.

    Templates would write that text in quotes. Keys that they do not write are added to `unread`.
    """
    calls = decode_json(content)
    calls = [decode_json(call) for call in (calls if isinstance(calls, list) else [calls])]
    for call in calls:
        if not (isinstance(call, dict) and isinstance(call.get("function", call), dict)):
            raise BadSample("bad_conversation", f"{place}a call is no JSON object; write name and arguments")
        if not isinstance(call.get("function", call).get("name"), str):
            raise BadSample("bad_conversation", f"{place}a call has no name; write name and arguments")
        keys = {*call, *call.get("function", ())}
        unread |= {("tool call", str(key)) for key in keys - CALL_KEYS}
    return [_with_arguments(call) for call in calls]


def _wrap(call: dict) -> dict:
    return call if "function" in call else {"type": "function", "function": call}


def read_calls(turn: dict, place: str, unread: set[tuple[str, str]]) -> list[dict] | None:
    """Return the `tool_calls` of a turn, or its `function_call` as such; None if it has neither.

    Raises BadSample for two that differ.
    """
    newer, older = decode_json(turn.get("tool_calls")), turn.get("function_call")
    if newer and not (isinstance(newer, list) and all(isinstance(call, dict) for call in newer)):
        raise BadSample("bad_conversation", f"{place}tool_calls is no list of objects")
    calls = _checked_calls(newer, place, unread) if newer else newer
    if not older:
        return calls
    older = read_call_turn(older, place, unread)
    if calls and list(map(_wrap, calls)) != older:
        raise BadSample("bad_conversation", f"{place}tool_calls and function_call differ; leave one out")
    return older


def expand_blocks(turns: list, unread: set[tuple[str, str]]) -> list:
    """Return the turns with Anthropic's blocks as OpenAI writes them.

    `tool_use` becomes a call of its turn, `thinking` its reasoning, and `tool_result` a tool turn before it.
    """
    expanded: list = []
    names: dict[Any, Any] = {}  # of the tools that were called, by the id of the call
    block_types = tuple(BLOCKS)
    for turn in turns:
        content = turn.get("content") if isinstance(turn, dict) else None
        parts = content if isinstance(content, list) else []
        blocks = [part for part in parts if isinstance(part, dict) and part.get("type") in block_types]
        if not blocks:
            expanded.append(turn)
            continue
        other_parts = [part for part in parts if part not in blocks]
        calls, thoughts = [], []
        for block in blocks:
            kind = block["type"]
            unread |= {("part", str(key)) for key in block if key not in BLOCKS[kind]}
            if kind == "tool_use":
                names[str(block.get("id"))] = block.get("name")
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            elif kind == "thinking":
                thoughts.append(block.get("thinking"))
            else:
                called = block.get("tool_use_id")
                result = {"role": "tool", "tool_call_id": called, "content": block.get("content")}
                expanded.append(result | ({"name": names[str(called)]} if str(called) in names else {}))
        if calls or thoughts or other_parts:
            beside = {"tool_calls": calls} if calls else {}
            beside |= {"reasoning_content": "\n".join(map(str, thoughts))} if thoughts else {}
            expanded.append(turn | {"content": other_parts} | beside)
        else:
            unread |= {("turn", str(key)) for key in turn if key not in ("role", "content")}
    return expanded


def join_calls(messages: list[dict], are_calls: list[bool]) -> list[dict]:
    """Return the messages; a turn of calls joins the reply before it. Raises BadSample for other weights."""
    joined: list[dict] = []
    for index, (message, is_call) in enumerate(zip(messages, are_calls, strict=True)):
        if not (is_call and joined and joined[-1]["role"] == "assistant"):
            joined.append(message)
            continue
        reply = joined[-1]
        for key in message.keys() & reply.keys() - {"role", "content", "tool_calls"}:
            if message[key] != reply[key]:
                text = (
                    f"its {key} {message[key]!r} differs from {reply[key]!r} of the reply that it is part of"
                )
                raise BadSample("bad_conversation", f"turn {index}: {text}")
        calls = [*(reply.get("tool_calls") or []), *message["tool_calls"]]
        content = reply["content"] if any(part["text"] for part in reply["content"]) else []
        joined[-1] = message | reply | {"content": content, "tool_calls": calls}
    return joined


def _with_arguments(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, dict) else None
    arguments = decode_json(function.get("arguments")) if isinstance(function, dict) else None
    arguments = {} if arguments == "" else arguments  # of a call without any
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        detail = f"the arguments of a call begin like an object and are no JSON: {arguments[:80]!r}"
        raise BadSample("bad_conversation", detail)
    if not isinstance(arguments, dict):
        return call
    function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else function


def decoded(record: Any) -> Any:
    """Return the object of JSON text; anything else as it is. Raises BadSample."""
    if not isinstance(record, str | bytes):
        return record
    try:
        return json.loads(record)
    except (ValueError, RecursionError) as error:
        raise BadSample("bad_json", str(error)) from error


def decode_json(value: Any) -> Any:
    """Return what JSON text of an object or a list holds; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
