"""`ChatMLSample`, the one sample type of all sources, and how it is made of a conversation and its media."""

import re
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from types import ModuleType
from typing import Any

from megatron.energon import Sample, edataclass

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import Conversation, decoded, join_texts, limits_of_media, media_path

# How data for other models writes where an image or a video stands. A group is a spelling.
_NUMBERED = r"(<\|?(?i:{0})[_ -]?\d{{1,9}}\|?>)"
FOREIGN = {
    "image": re.compile(
        r"((?:<\|vision_start\|>)?<\|image_pad\|>(?:<\|vision_end\|>)?)|((?:<img>)?<IMG_CONTEXT>(?:</img>)?)"
        r"|((?:<\|begin_of_image\|>)?<\|image\|>(?:<\|end_of_image\|>)?)|(<img>(?:[^<>\n]*</img>)?)"
        r"|(\[IMG\])|(<start_of_image>)|(<image_soft_token>)|(<image_placeholder>)|(<ImageHere>)|(<I(?i:mage)>)"
        r"|(\[(?i:image)\])|(<(?:image|img) ?/>)|" + _NUMBERED.format("image")
    ),
    "video": re.compile(
        r"((?:<\|vision_start\|>)?<\|video_pad\|>(?:<\|vision_end\|>)?)|(<V(?i:ideo)>)|(\[(?i:video)\])|(<vid>)"
        r"|((?:<\|begin_of_video\|>)?<\|video\|>(?:<\|end_of_video\|>)?)|" + _NUMBERED.format("video")
    ),
}
OURS = {"image": re.compile("<image>"), "video": re.compile("<video>")}
# What else looks like one; it is not read, as it may be text
_LIKE = r"(?!<(?:image|video)>)[<\[{{]\|?(?i:{0})(?![a-zA-Z])[^<>\[\]{{}}\n]{{0,200}}[>\]}}]"
_ALIKE = {
    "image": re.compile(
        f"{FOREIGN['image'].pattern}|{_LIKE.format('image|img|picture|photo')}"
        r"|!\[[^\[\]\n]{0,200}\]\([^()\n]{0,500}\)"
    ),
    "video": re.compile(f"{FOREIGN['video'].pattern}|{_LIKE.format('video|vid|clip')}"),
}


def grounding() -> ModuleType:
    """Return the extra for boxes: `objects_of` a record, and `Boxes`, which writes them as a family does.

    It is the one hook for boxes. Samples whose records have no `objects` do not enter the extra.
    """
    return import_module("megatron_vlm.extras.grounding")


@edataclass
class ChatMLSample(Sample):
    """A clean conversation with its media, still encoded: `make_sample` makes it.

    messages   as chat templates take them, with a part for each medium
    tools      as chat templates take them
    limits     by kind, those that the record names for each image and each video
    objects    what the placeholders for boxes in its text stand for, see `grounding`
    rejected   the messages with the other answer of a preference record, whose media are not placed yet, or
               why they cannot be read; only one objective reads it
    sizes      what the sizes of its images are drawn from, if they are
    problem    why the record cannot be trained on, so that the encoder counts it with all other drops
    no_reply   the same of a prompt alone, which the encoder of prompts takes
    columns    the record's other fields, for functions of rewards
    record_id  the record's own, see `record.record_id`
    paths      of its images, as the record names them, None for one without a path
    """

    messages: list[dict] | None = None
    tools: list[dict] | None = None
    imgs: list[bytes] | None = None
    videos: list | None = None
    limits: dict[str, list[dict]] | None = None
    objects: Any = None
    rejected: list[dict] | BadSample | None = None
    sizes: str | None = None
    problem: BadSample | None = None
    no_reply: BadSample | None = None
    columns: dict[str, Any] | None = None
    record_id: str | None = None
    paths: list[str | None] | None = None


def make_sample(
    conversation: Conversation, images: list[bytes], videos: list[bytes | dict], **keys: Any
) -> ChatMLSample:
    """Return the sample of a conversation and its media; `keys` are fields of Energon's `Sample`, and
    the record's id.

    Raises BadSample for media without places, limits and objects that cannot be.
    """
    messages = place_media(conversation.messages, len(images), len(videos))
    limits = limits_of_media(messages, conversation.limits)
    # Boxes are checked where the images and the messages are known
    objects = None
    if conversation.objects is not None:
        source = decoded(conversation.objects or {})
        objects = grounding().objects_of(source, messages, len(images), conversation.rejected is not None)
    return ChatMLSample(
        messages=messages,
        tools=conversation.tools,
        imgs=images or None,
        videos=videos or None,
        limits=limits,
        objects=objects,
        rejected=conversation.rejected,
        no_reply=conversation.no_reply,
        columns=conversation.columns,
        paths=[media_path(image) for image in conversation.media["image"]],
        **keys,
    )


def place_media(messages: list[dict], images: int = 0, videos: int = 0) -> list[dict]:
    """Return the messages with exactly one part per medium.

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
        # Without places of ours, those of another model count, and media without any place go first
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
    # The places of all kinds are made at once, so that images stand before videos
    first_user = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if first_user is None:
        raise BadSample("placeholder_mismatch", f"{len(missing)} media items and no user turn to hold them")
    message = messages[first_user]
    message = message | {"content": [*missing, *message["content"]]}
    return [*messages[:first_user], message, *messages[first_user + 1 :]]


def _with_foreign(message: dict, kind: str, role: str = "user") -> dict:
    """Return the message; one of this role with parts in place of other models' placeholders, or tools'."""
    if message["role"] != role:
        return message
    pieces = (foreign_parts(part, kind, role == "tool") for part in message["content"])
    return message | {"content": join_texts(list(chain.from_iterable(pieces)))}


# -- placeholders of other models


def foreign_placeholders(messages: list[dict], kind: str) -> list[str]:
    """Return placeholders of other models in users' text; none if there are several spellings of them."""
    matches = [match for text in _texts(messages) for match in FOREIGN[kind].finditer(text)]
    return [match[0] for match in matches] if len({match.lastindex for match in matches}) == 1 else []


def spellings(messages: list[dict], kind: str, endings: tuple[str, ...] = ("",)) -> list[str]:
    """The likes of placeholders in users' text, each spelling once, without its numbers and names.

    With `endings`, those that name a file with one of them.
    """
    matches = [match[0] for text in _texts(messages) for match in _ALIKE[kind].finditer(text)]
    matches = [text for text in matches if any(ending in text.lower() for ending in endings)]
    without_numbers = (
        "![](…)" if text[0] == "!" else re.sub(r"\d+|(?<=[^ ] )[^>]+", "…", text) for text in matches
    )
    return list(dict.fromkeys(without_numbers))


def in_tools(messages: list[dict], kind: str) -> int:
    """How many `<image>` or `<video>` stand in the text of tools."""
    return sum(text.count(f"<{kind}>") for text in _texts(messages, "tool"))


def _texts(messages: list[dict], role: str = "user") -> Iterator[str]:
    for message in messages:
        if message["role"] == role:
            yield from (part["text"] for part in message["content"] if part["type"] == "text")


def stand_for(foreign: list[str], count: int) -> bool:
    """Whether these placeholders stand for so many media; numbered ones must be in their order."""
    numbers = [int(digits[0]) for text in foreign if (digits := re.search(r"\d{1,9}(?=\|?>\Z)", text))]
    in_order = numbers == list(range(numbers[0], numbers[0] + count)) if numbers else True
    return len(foreign) == count > 0 and in_order


def foreign_parts(part: dict, kind: str, of_tools: bool) -> Iterator[dict]:
    """A part of a turn with parts in place of the placeholders in its text."""
    read = 0
    spelling = OURS[kind] if of_tools else FOREIGN[kind]
    for match in spelling.finditer(part["text"]) if part["type"] == "text" else ():
        yield from ({"type": "text", "text": part["text"][read : match.start()]}, {"type": kind})
        read = match.end()
    yield part | {"text": part["text"][read:]} if read else part
