"""Conversations: the one sample type of all sources, and the many ways people write them down."""

import json
import re
from itertools import chain
from typing import Any

from megatron.energon import Sample, edataclass

from megatron_vlm.data.accounts.bad_sample import BadSample
from megatron_vlm.data.conversation.limits import limits_of_media, named_limits
from megatron_vlm.data.conversation.objects import NO_WORDS, Objects, read_objects, with_objects
from megatron_vlm.data.conversation.tools import join_calls, read_call_turn, read_calls, read_tools
from megatron_vlm.data.conversation.turns import CALL, ROLES, TRAINED, WEIGHTS, is_trained, named_weight, sole
from megatron_vlm.data.on_disk.fields import MEDIA, REJECTED_TURNS, TURNS
from megatron_vlm.data.on_disk.placeholders import foreign_parts, foreign_placeholders, in_tools, stand_for

WRAPPERS = (*TURNS, "conversation")
PART_TYPES = {"text": "text", "image": "image", "image_url": "image", "video": "video", "video_url": "video"}
AUDIO_TYPES = ("audio", "audio_url", "input_audio")
PLACEHOLDER = re.compile(r"<(image|video)>")
# What nobody sees: whitespace, control characters, soft hyphens, zero-width and direction marks.
INVISIBLE = r"[\s\x00-\x1f\x7f-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]"
BLANK = re.compile(f"{INVISIBLE}*+")
READ_KEYS = ("role", "from", "content", "value", *WEIGHTS)  # of a turn, which come out under one name
BESIDE_TEXT = ("tool_calls", "reasoning_content")  # what else a reply may consist of


@edataclass
class ChatMLSample(Sample):
    """A clean conversation with its media, still encoded: `clean_sample` makes it.

    `messages` and `tools` are as chat templates take them, with a part for each medium; `limits` are those
    that the record names for each image and each video, and `objects` what the placeholders for boxes in its
    text stand for. `rejected` is the conversation with the other answer of a preference record; only one
    objective reads it, and cleans it then. `sizes` is what the sizes of its images are drawn from, if they
    are. If the record cannot be trained on, `problem` says why, so that the encoder counts it with all other
    drops.
    """

    messages: list[dict] | None = None
    tools: list[dict] | None = None
    imgs: list[bytes] | None = None
    videos: list | None = None
    limits: dict[str, list[dict]] | None = None
    objects: Objects | None = None
    rejected: dict | None = None
    sizes: str | None = None
    problem: BadSample | None = None


def clean_sample(
    conversation: str | dict | list, imgs: list[bytes], videos: list, **keys: Any
) -> ChatMLSample:
    """The sample of a normalised record; nothing after it looks at the conversation as it was written.

    Raises BadSample as `clean`, `read_objects` and `with_objects`.
    """
    messages, tools, limits = clean(conversation, len(imgs), len(videos))
    objects = rejected = None
    if isinstance(conversation, dict) and REJECTED_TURNS in conversation:
        rejected = {"system": conversation.get("system"), "messages": conversation[REJECTED_TURNS]}
    if isinstance(conversation, dict) and (written := conversation.get("objects")) is not None:
        objects = read_objects(parsed(written or {}), len(imgs))
        filled = with_objects(messages, objects, NO_WORDS, some=rejected is not None)
        if not objects.shapes and filled == messages and rejected is None:
            objects = None  # there is nothing to write
    return ChatMLSample(
        messages=messages,
        tools=tools,
        imgs=imgs or None,
        videos=videos or None,
        limits=limits,
        objects=objects,
        rejected=rejected,
        **keys,
    )


def clean(
    conversation: str | dict | list, images: int = 0, videos: int = 0
) -> tuple[list[dict], list[dict] | None, dict[str, list[dict]]]:
    """(messages, tools, limits of each medium) of a conversation that is trained on.

    Raises BadSample as `cook_chatml_sample`, `place_media` and `limits_of_media`, and BadSample
    `no_trained_tokens` when no trained reply has content.
    """
    conversation = parsed(conversation)
    messages, tools = cook_chatml_sample(conversation)
    messages = place_media(messages, images, videos)
    limits = limits_of_media(messages, conversation)
    replies = [message for message in messages if is_trained(message)]
    if not any(map(has_content, replies)):
        why = f"{len(replies)} replies, all without content" if replies else "no reply to train on"
        raise BadSample("no_trained_tokens", f"{why}; roles are {[m['role'] for m in messages]}")
    return messages, tools, limits


def cook_chatml_sample(conversation: str | dict | list) -> tuple[list[dict], list[dict] | None]:
    """`(messages, tools)` in the form that Hugging Face chat templates take.

    Accepts JSON or the object itself: a list of turns, bare or under `conversations`, `messages` or
    `conversation`, optionally with `system` and `tools` beside it; turns as role/content or from/value, with
    the aliases in ROLES; content as text or as an OpenAI list of parts.

    Content comes out as a list of parts `{"type": "text", "text": ...}`, `{"type": "image"}` and
    `{"type": "video"}`. `<image>` and `<video>` in the text of a user turn become parts, unless the turn is a
    list that already names its media. Adjacent texts are joined as they stand. A turn's weight in the loss is
    a number under `loss`, its calls are under `tool_calls`; its other keys (`name`, ...) pass through. A
    turn of calls alone joins the reply before it. A system turn without
    content is left out; any other empty turn gets one empty text, as templates may look at its first part.
    The argument is not changed.

    Raises BadSample.
    """
    turns, system, tools = _unwrap(parsed(conversation))
    messages = [_message(turn, index) for index, turn in enumerate(turns)]
    messages = join_calls(messages, [role_of(turn) == CALL for turn in turns])
    messages = [message for message in messages if message["role"] != "system" or has_content(message)]
    if not messages:
        raise BadSample("bad_conversation", f"{len(turns)} system turns without content, and no others")
    if system and not is_blank(system):
        turn = {"role": "system", "content": [{"type": "text", "text": system}]}
        if messages[0]["role"] != "system":
            messages.insert(0, turn)
        elif messages[0]["content"] != turn["content"]:
            raise BadSample("bad_conversation", "system and the system turn differ; leave one out")
    return messages, tools


def has_content(message: dict) -> bool:
    """Whether a turn says anything: visible text, tool calls or reasoning; or media, if it is not trained.

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


def place_media(messages: list[dict], images: int = 0, videos: int = 0) -> list[dict]:
    """The messages with exactly one part per media item.

    If users' text holds the placeholder of another model exactly as often as there are media, it is theirs;
    so are placeholders in the text of tools, if all are as many. Many datasets hold images and no placeholder
    at all: these go before the first user's text. Raises BadSample `placeholder_mismatch` in any other case.
    """
    missing: list[dict] = []
    for kind, count in (("image", images), ("video", videos)):
        placeholders = sum(part["type"] == kind for message in messages for part in message["content"])
        if placeholders < count == placeholders + in_tools(messages, kind):
            messages = [_with_foreign(message, kind, "tool") for message in messages]
            placeholders = count
        foreign = foreign_placeholders(messages, kind) if count != placeholders else []
        if placeholders == 0 and stand_for(foreign, count):
            messages = [_with_foreign(message, kind) for message in messages]
        elif placeholders == 0:
            missing += [{"type": kind}] * count
        elif placeholders != count:
            besides = f", and {len(foreign)} {foreign[0]}, which is text beside them" if foreign else ""
            raise BadSample(
                "placeholder_mismatch", f"{placeholders} placeholders for {count} {kind}s{besides}"
            )
    if not missing:
        return messages
    first_user = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if first_user is None:
        raise BadSample("placeholder_mismatch", f"{len(missing)} media items and no user turn to hold them")
    turn = messages[first_user]
    turn = turn | {"content": [*missing, *turn["content"]]}
    return [*messages[:first_user], turn, *messages[first_user + 1 :]]


def _with_foreign(message: dict, kind: str, role: str = "user") -> dict:
    """The turn; one of this role with parts in place of the placeholders of other models, or of tools."""
    if message["role"] != role:
        return message
    pieces = (foreign_parts(part, kind, role == "tool") for part in message["content"])
    return message | {"content": _join_texts(list(chain.from_iterable(pieces)))}


def parsed(conversation: str | bytes | dict | list) -> Any:
    """The object of a conversation in JSON. Raises BadSample."""
    if not isinstance(conversation, str | bytes):
        return conversation
    try:
        return json.loads(conversation)
    except (ValueError, RecursionError) as error:
        raise BadSample("bad_json", str(error)) from error


def _unwrap(record: Any) -> tuple[list, str | None, list[dict] | None]:
    system = tools = None
    if isinstance(record, dict):
        system, tools = record.get("system"), read_tools(record)
        record = parsed(record.get(sole(record, WRAPPERS)))
    if not isinstance(record, list) or not record:
        raise BadSample("bad_conversation", f"no list of turns, bare or under one of {', '.join(WRAPPERS)}")
    if isinstance(system, list):
        system = "".join(_text(part) for part in system)
    if not isinstance(system, str | None):
        raise BadSample("bad_conversation", f"system is {type(system).__name__}, not text")
    return record, system, tools


def _text(part: Any) -> str:
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise BadSample("bad_conversation", "system has a part that is no text")
    return text


def _message(turn: Any, index: int) -> dict:
    if not isinstance(turn, dict):
        raise BadSample("bad_conversation", f"turn {index} is {type(turn).__name__}, not an object")
    place = f"turn {index}: "
    sole(turn, ("role", "from"), place=place, same=_same_role)
    role = role_of(turn)
    name = turn.get("role") or turn.get("from")
    if role is None:
        shown = name if isinstance(name, str) else type(name).__name__
        raise BadSample("bad_conversation", f"turn {index} has role {shown}; known are {', '.join(ROLES)}")
    content = turn.get(sole(turn, ("content", "value"), place=place, same=_no_content))
    others = {key: value for key, value in turn.items() if key not in READ_KEYS}
    if (weight := named_weight(turn, index)) is not None:
        others["loss"] = weight
    # Media that nobody took from the turn have no place in it
    if key := next((key for names in MEDIA.values() for key in names if turn.get(key)), None):
        raise BadSample("bad_conversation", f"{place}its {key} are not read; name them beside the turns")
    if role == CALL:
        return others | {"role": "assistant", "content": [], "tool_calls": read_call_turn(content, place)}
    older = others.pop("function_call", None)
    if (calls := read_calls(turn, place)) is not None or older:
        others["tool_calls"] = calls
    parts = _parts(content, role, index)
    if not parts and not any(others.get(key) for key in BESIDE_TEXT):  # templates ask for text beside these
        parts = [{"type": "text", "text": ""}]
    return others | {"role": role, "content": parts}


def role_of(turn: dict) -> str | None:
    """Return the role of a turn as it is written; None if it has none that is known."""
    name = turn.get("role") or turn.get("from")
    return ROLES.get(name.lower()) if isinstance(name, str) else None


def _same_role(role: Any, sender: Any) -> bool:
    """Also if `from` is no role, but someone's name."""
    sender = ROLES.get(str(sender).lower())
    return sender is None or sender == ROLES.get(str(role).lower())


def _no_content(content: Any, value: Any) -> bool:
    """Whether `value` is something else, such as a critic's."""
    return not isinstance(value, str | list)


def content_name(turn: dict) -> str:
    """Return the name under which a turn has its content."""
    return sole(turn, ("content", "value"), same=_no_content) or "content"


def read_parts(content: Any) -> Any:
    """Return the parts of a content that is JSON text of parts; any other content as it is."""
    if not (isinstance(content, str) and content.lstrip().startswith("[")):
        return content
    try:
        parts = json.loads(content)
    except (ValueError, RecursionError):
        return content
    are_parts = isinstance(parts, list) and all(
        isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in PART_TYPES
        for part in parts
    )
    return parts if are_parts and parts else content


def part_of(part: Any) -> Any:
    """Return the part with its type, if the name of its only text or medium is all that says it."""
    if not isinstance(part, dict) or part.get("type") is not None:
        return part
    names = [name for name in PART_TYPES if part.get(name) is not None]
    return part | {"type": names[0]} if len(names) == 1 else part


def _parts(content: Any, role: str, index: int) -> list[dict]:
    content = read_parts(content)
    parts = [_part(part, index) for part in content] if isinstance(content, list) else []
    if isinstance(content, str):
        parts = [{"type": "text", "text": content}]
    elif content is not None and not isinstance(content, list):
        raise BadSample("bad_conversation", f"turn {index} has content {type(content).__name__}")
    names_media = any(part["type"] != "text" for part in parts)
    if names_media and role == "assistant":
        raise BadSample("bad_conversation", f"turn {index}: an assistant turn cannot hold media")
    if role == "user" and not names_media:
        parts = [piece for part in parts for piece in split_placeholders(part)]
    return _join_texts(parts)


def _part(part: Any, index: int) -> dict:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    part = part_of(part)
    name = part.get("type") if isinstance(part, dict) else None
    if name in AUDIO_TYPES:
        raise audio(f"turn {index}")
    kind = PART_TYPES.get(name) if isinstance(name, str) else None
    if kind is None or (kind == "text" and not isinstance(part.get("text"), str)):
        known = ", ".join(PART_TYPES)
        raise BadSample("bad_conversation", f"turn {index} has a part that is no {known}, or has no text")
    if kind == "text":
        return {"type": "text", "text": part["text"]}
    return {"type": kind} | named_limits(kind, part)


def audio(place: str) -> BadSample:
    """Says that a sample has audio there."""
    return BadSample(
        "bad_conversation",
        f"{place} has audio, which no model is trained on; leave the record out, or write it as text",
    )


def split_placeholders(part: dict) -> list[dict]:
    """Return the parts of a text, with one for each `<image>` and `<video>` in it."""
    pieces = PLACEHOLDER.split(part["text"])  # text, kind, text, kind, ..., text
    return [
        {"type": piece} if position % 2 else {"type": "text", "text": piece}
        for position, piece in enumerate(pieces)
    ]


def _join_texts(parts: list[dict]) -> list[dict]:
    """Joins adjacent texts here, so that they cannot meet in the template and spell a control token."""
    joined: list[dict] = []
    for part in parts:
        if part["type"] == "text" and joined and joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": joined[-1]["text"] + part["text"]}
        else:
            joined.append(part)
    return [part for part in joined if part["type"] != "text" or part["text"]]
