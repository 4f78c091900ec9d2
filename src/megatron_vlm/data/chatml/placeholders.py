"""How data for other models writes where an image or a video stands."""

import re
from collections.abc import Iterator

# A group is a spelling.
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


def foreign_placeholders(messages: list[dict], kind: str) -> list[str]:
    """Placeholders of other models in users' text; none if there are several spellings of them."""
    matches = [match for text in _texts(messages) for match in FOREIGN[kind].finditer(text)]
    return [match[0] for match in matches] if len({match.lastindex for match in matches}) == 1 else []


def spellings(messages: list[dict], kind: str) -> list[str]:
    """The likes of placeholders in users' text, each spelling once, without its numbers and names."""
    matches = [match[0] for text in _texts(messages) for match in _ALIKE[kind].finditer(text)]
    without_numbers = (
        "![](…)" if each[0] == "!" else re.sub(r"\d+|(?<=[^ ] )[^>]+", "…", each) for each in matches
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
    numbers = [int(digits[0]) for each in foreign if (digits := re.search(r"\d{1,9}(?=\|?>\Z)", each))]
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
