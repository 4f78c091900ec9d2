"""How data for other models writes where an image or a video stands."""

import re
from collections.abc import Iterator

# A group is a spelling.
_NUMBERED = r"(<\|?{0}[_ -]?\d+\|?>)"
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


def foreign_placeholders(messages: list[dict], kind: str) -> list[str]:
    """Placeholders of other models in users' text; none if there are several spellings of them."""
    texts = (
        part["text"]
        for message in messages
        if message["role"] == "user"
        for part in message["content"]
        if part["type"] == "text"
    )
    matches = [match for text in texts for match in FOREIGN[kind].finditer(text)]
    return [match[0] for match in matches] if len({match.lastindex for match in matches}) == 1 else []


def stand_for(foreign: list[str], count: int) -> bool:
    """Whether these placeholders stand for so many media; numbered ones must be in their order."""
    numbers = [int(digits[0]) for each in foreign if (digits := re.search(r"\d+(?=\|?>\Z)", each))]
    in_order = numbers == list(range(numbers[0], numbers[0] + count)) if numbers else True
    return len(foreign) == count > 0 and in_order


def foreign_parts(part: dict, kind: str) -> Iterator[dict]:
    """A part of a turn with parts in place of the placeholders in its text."""
    read = 0
    for match in FOREIGN[kind].finditer(part["text"]) if part["type"] == "text" else ():
        yield from ({"type": "text", "text": part["text"][read : match.start()]}, {"type": kind})
        read = match.end()
    yield part | {"text": part["text"][read:]} if read else part
