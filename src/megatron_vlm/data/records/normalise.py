"""A record in any layout → its conversation as shards store it, and its media, named or read.

A record has turns under one of `fields.TURNS`, or in one of these layouts:

    question, answer            one exchange; also called prompt or instruction (query or input is appended
                                after a newline) and response, completion or output; history: earlier pairs
    caption                     the reply to an image
    texts: [{user, assistant}]  exchanges
    texts: [text or None]       with `images: [image or None]`: an interleaved document, see `_document`

    prompt, chosen, rejected           TRL, and most datasets; without `prompt`, both of the others are whole
                                       conversations; question and instruction are prompts, too;
                                       whole conversations may also stand beside what they begin with
    conversations, chosen, rejected    LLaMA-Factory: the turns of the prompt, and one turn each
    messages, rejected_response        ms-swift: a conversation, and what might have been its last reply
    messages, rejected_messages        ms-swift: two conversations

The prompt and the answers of a preference record are text, a turn, or a list of turns.

Its media stand under `image(s)` and `video(s)`, or parts of its turns name them, as OpenAI and Qwen write
them. An image is {"type": "image_url", "image_url": {"url": PATH}} or {"type": "image", "image": PATH}, a
video the same with its word, or {"type": "video", "video": [PATHS OF FRAMES], "fps": 2}. A part that names
none stands for the next medium of its record.

An image is a path, encoded bytes, or Hugging Face's `{"path": ..., "bytes": ...}`. A video is a file in one
of these forms, a list of images, or `{"frames": [images]}` with such a list and `fps` or `timestamps` (see
`data.media.videos`). One that is an object may have limits of its own, see `conversation.limits`.
"""

import re
from pathlib import Path
from typing import Any

from megatron_vlm.data.accounts.bad_sample import BadSample
from megatron_vlm.data.conversation.chatml import (
    PART_TYPES,
    audio,
    content_name,
    cook_chatml_sample,
    parsed,
    part_of,
    read_parts,
    role_of,
    split_placeholders,
)
from megatron_vlm.data.conversation.limits import LIMITS, limits_beside, named_limits
from megatron_vlm.data.conversation.turns import DOCUMENT, ROLES, sole
from megatron_vlm.data.media.files import read_media
from megatron_vlm.data.on_disk import fields
from megatron_vlm.data.on_disk.named import in_order
from megatron_vlm.data.on_disk.paths import PICTURES

DOCUMENT_SEPARATOR = "\n\n"  # between texts of a document without an image between them
TIMES = ("fps", "timestamps")  # of a video's frames
# An image that a text names; a name in the tag that is no file's is text about the tag
NAMED_IMAGE = re.compile(rf"<img>([^<>\n]+(?:{'|'.join(map(re.escape, PICTURES))}))</img>", re.IGNORECASE)
BESIDE = (
    "system",
    "tools",
    "functions",
    "objects",
    *(f"{kind}_limits" for kind in LIMITS),
)  # what else is read


def normalise(record: dict) -> tuple[dict, dict[str, list]]:
    """(conversation, media) of a record with the package's names. Nothing after it looks for other names.

    The conversation has turns, under their own name, and where there are any, `rejected_messages`, `system`,
    `tools`, `objects` and the limits of media. Its parts say where media are; the media are, for `image` and
    `video`, what the record names, in order. Raises BadSample for no known turns, and for names that differ.
    """
    media = {kind: _listed(record.get(sole(record, names))) for kind, names in fields.MEDIA.items()}
    name = named_turns(record)
    turns, rejected = chosen_and_rejected(record, name)
    if (heard := next(filter(record.get, fields.AUDIO), None)) and "<audio>" in str(turns):
        raise audio(f"the record, under {heard!r},")
    if isinstance(record.get("texts"), list) and not name:  # None stands where a document has no image
        media["image"] = [image for image in media["image"] if image is not None]
    beside = {key: record[key] for key in BESIDE if record.get(key) is not None}
    in_parts: dict[str, list[tuple[Any, Any]]] = {kind: [] for kind in fields.MEDIA}
    has_images = bool(media["image"])
    conversation = {name or "messages": _without_media(turns, in_parts, has_images)}
    if rejected:
        conversation[fields.REJECTED_TURNS] = _without_media(rejected, {}, has_images)
    for kind, parts in in_parts.items():
        if not in_order(media[kind], parts):
            raise BadSample("bad_conversation", f"its {kind}s and its parts name others, or in another order")
        media[kind] = media[kind] or [medium for medium, _ in parts if medium is not None]
        beside |= limits_beside(kind, media[kind], record)
    return conversation | beside, media


def read_record(record: dict, root: Path | str) -> tuple[dict, list[bytes], list[bytes | dict]]:
    """The conversation, images and videos of a record, as `normalise` finds them; paths are under `root`.

    Raises BadSample as it does, and for a medium that cannot be read.
    """
    conversation, media = normalise(record)
    images = [_file_bytes(image, root) for image in media["image"]]
    return conversation, images, [_video(video, root) for video in media["video"]]


def _listed(media: Any) -> list:
    return media if isinstance(media, list) else [media] if media else []


def _without_media(turns: Any, media: dict[str, list], has_images: bool) -> Any:
    """The turns, whose parts only say where media are; what each of these parts names is added to `media`."""
    turns = parsed(turns) if isinstance(turns, str) and turns.lstrip()[:1] == "[" else turns
    if not isinstance(turns, list):
        return turns
    turns = [_with_media_as_parts(turn, has_images) if isinstance(turn, dict) else turn for turn in turns]
    return [
        turn | {name: [_place(part, media) for part in turn[name]]}
        if isinstance(turn, dict) and isinstance(turn.get(name := content_name(turn)), list)
        else turn
        for turn in turns
    ]


def _with_media_as_parts(turn: dict, has_images: bool) -> dict:
    """The turn, with a part for each medium that it names beside its content, or in `<img>PATH</img>`.

    Raises BadSample if its content has places for another number of media.
    """
    name = content_name(turn)
    content = read_parts(turn.get(name))
    turn = turn if content is turn.get(name) else turn | {name: content}
    if role_of(turn) not in ("user", "tool"):
        return turn
    parts = [part_of(part) for part in content] if isinstance(content, list) else None
    if isinstance(content, str):
        parts = [{"type": "text", "text": content}]
    if parts is None:
        return turn
    # Media under a key of the turn take the places in its text, or stand before it
    for kind, names in fields.MEDIA.items():
        key = sole(turn, names)
        if key is None:
            continue
        items = _listed(turn[key])
        parts = [
            piece for part in parts for piece in (split_placeholders(part) if _is_text(part) else [part])
        ]
        places = [
            index for index, part in enumerate(parts) if isinstance(part, dict) and part == {"type": kind}
        ]
        if places and len(places) != len(items):
            text = f"a turn has {len(items)} {key} and {len(places)} places for them"
            raise BadSample("placeholder_mismatch", text)
        named = [{"type": kind, kind: item} for item in items]
        for index, part in zip(places, named, strict=False):
            parts[index] = part
        parts = parts if places else named + parts
        turn = {other: value for other, value in turn.items() if other not in names} | {name: parts}
    if has_images or not all(map(_is_text, parts)):
        return turn
    # Qwen-VL's first form, where neither the record nor the turn names images in another way
    pieces = [piece for part in parts for piece in _with_paths(part["text"])]
    return turn | {name: pieces} if len(pieces) > len(parts) else turn


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _with_paths(text: str) -> list[dict]:
    pieces = NAMED_IMAGE.split(text)  # text, path, text, path, ..., text
    return [
        {"type": "image", "image": piece} if index % 2 else {"type": "text", "text": piece}
        for index, piece in enumerate(pieces)
    ]


def _place(part: Any, media: dict[str, list]) -> Any:
    """The part without its medium, but with the limits of it."""
    part = part_of(part)
    name = part.get("type") if isinstance(part, dict) else None
    kind = PART_TYPES.get(name) if isinstance(name, str) else None
    if kind not in fields.MEDIA:
        return part
    medium = part.get(sole(part, (f"{kind}_url", kind, "source", "url", "path")))
    if isinstance(medium, dict):  # an address of OpenAI's, or Anthropic's base64
        medium = medium.get("url", medium.get("data", medium))
    if kind == "video" and isinstance(medium, list):
        medium = {"frames": medium} | _times(part)
    media.setdefault(kind, []).append((medium, part.get("index")))
    return {"type": name} | named_limits(kind, part | medium if isinstance(medium, dict) else part)


def _video(video: Any, root: Path | str) -> bytes | dict:
    if isinstance(video, list):
        video = {"frames": video}
    if not isinstance(video, dict) or "frames" not in video:
        return _file_bytes(video, root)
    frames = video["frames"] if isinstance(video["frames"], list) else []
    return {"frames": [_file_bytes(frame, root) for frame in frames]} | _times(video)


def _times(item: dict) -> dict:
    """Return what an item says of the times of its list of frames; `sample_fps` is qwen-vl-utils' `fps`."""
    times = {name: item[name] for name in TIMES if item.get(name) is not None}
    return times or ({"fps": item["sample_fps"]} if item.get("sample_fps") is not None else {})


def _file_bytes(media: Any, root: Path | str) -> bytes:
    if isinstance(media, dict):
        media = media.get("bytes") or media.get("path")
    if isinstance(media, bytes):
        return media
    if not isinstance(media, str):
        raise BadSample("missing_media", f"a medium is a path or encoded bytes, not {type(media).__name__}")
    return read_media(media, root)


# -- turns in any layout


def named_turns(record: dict) -> str | None:
    """The name under which the record has its turns. Raises BadSample for two that differ."""
    for name in ("chosen_images", "rejected_images"):
        if record.get(name):
            raise BadSample("bad_preference", f"{name}: both answers have to be to the same images")
    sole(record, fields.REJECTIONS, "bad_preference")
    alone = record.get("conversation")  # often a text beside the turns; else it may be the turns
    are_turns = isinstance(alone, list) or (isinstance(alone, str) and alone.lstrip().startswith("["))
    return sole(record, fields.TURNS, same=_same_turns) or ("conversation" if are_turns else None)


def chosen_and_rejected(record: dict, name: str | None) -> tuple[Any, Any]:
    """The turns, with the chosen answer if there are two; and the turns with the rejected one, or None.

    `name` is where the record has turns. Raises BadSample if it has none in any layout.
    """
    turns = record[name] if name else None
    prompt = turns if isinstance(turns, list) else None
    chosen, rejected = record.get(fields.CHOSEN), record.get(fields.REJECTED)
    reply = record.get(fields.REJECTED_REPLY)
    if prompt and rejected is None and sole(record, fields.REJECTIONS):
        sole(record, (fields.CHOSEN, name), "bad_preference", same=_same_turns)
    if isinstance(chosen, str | dict | list) and (prompt is None or rejected is not None):
        if not prompt:
            prompt = _turns(_asked(record, "bad_preference") or [], "user")
        turns = _answered(prompt, chosen)
        if rejected is not None:
            return turns, _answered(prompt, rejected)
    turns = turns or _plain_turns(record)
    if reply is not None and isinstance(turns, list):
        return turns, turns[:-1] + _turns(reply, "assistant")
    return turns, record.get(fields.REJECTED_TURNS)


def _same_turns(one: Any, other: Any) -> bool:
    """Whether two lists of turns are one conversation, in two forms."""
    try:
        return cook_chatml_sample(one) == cook_chatml_sample(other)
    except BadSample:
        return False


def _asked(record: dict, reason: str) -> Any:
    """The prompt of a record, and its query after a newline; None if it asks nothing. Raises BadSample."""
    prompt, query = _first(record, fields.PROMPTS, reason), _first(record, fields.QUERIES, reason)
    if prompt is None or not query:
        return prompt
    if not (isinstance(prompt, str) and isinstance(query, str)):
        raise BadSample(reason, "prompt and query are not both text")
    return f"{prompt}\n{query}"


def _answered(prompt: list, answer: Any) -> list:
    """The conversation; an answer that begins with a question is a whole one, and has the prompt in it."""
    turns = _turns(answer, "assistant")
    whole = any(_role(turn) in ("system", "user") for turn in turns[:1])
    whole = whole and any(_role(turn) != "system" for turn in prompt)
    return turns if whole else prompt + turns


def _role(turn: Any) -> str | None:
    return ROLES.get(str(turn.get("role", turn.get("from"))).lower()) if isinstance(turn, dict) else None


def _turns(given: Any, role: str) -> list:
    """Text becomes a turn of `role`; turns stay as they are, for `cook_chatml_sample` to judge."""
    if isinstance(given, str):
        return [{"role": role, "content": given}]
    if isinstance(given, dict):
        return [given]
    if not isinstance(given, list):
        raise BadSample("bad_preference", f"an answer or prompt is {type(given).__name__}, no text or turns")
    return given


# -- records without a list of turns


def _plain_turns(record: dict) -> list[dict]:
    """The turns. Raises BadSample if the record has none in any of these layouts."""
    if isinstance(record.get("texts"), list):
        texts = record["texts"]
        if texts and all(isinstance(text, dict) for text in texts):
            return [turn for text in texts for turn in _exchange(text.get("user"), text.get("assistant"))]
        return _document(texts, record.get("images"))
    if "caption" in record:
        if not any(record.get(name) for name in fields.MEDIA["image"]):
            raise BadSample("missing_media", "a caption without an image")
        return _exchange("", record["caption"])
    prompt, reply = _asked(record, "bad_conversation"), _first(record, fields.REPLIES, "bad_conversation")
    if prompt is None or reply is None:
        why = f"none of {list(fields.TURNS)} among {sorted(map(str, record))}"
        if empty := [name for name in fields.TURNS if name in record]:
            why = f"{empty[0]} is empty"
        raise BadSample("bad_conversation", f"no turns: {why}")
    pairs = record.get("history") or []
    if not (isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)):
        raise BadSample("bad_conversation", "history is not a list of [prompt, response] pairs")
    return [turn for pair in [*pairs, (prompt, reply)] for turn in _exchange(pair[0], pair[1])]


def _first(record: dict, names: tuple[str, ...], reason: str) -> Any:
    empty = next((name for name in names if record.get(name) is not None), None)
    return record.get(sole(record, names, reason) or empty)


def _exchange(prompt: Any, reply: Any) -> list[dict]:
    for name, text in (("prompt", prompt), ("reply", reply)):
        if not isinstance(text, str):
            raise BadSample("bad_conversation", f"the {name} is {type(text).__name__}, not text")
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]


def _document(texts: list, images: Any) -> list[dict]:
    """One turn of role `document`: at each index the image, then the text; None stands for no image or text.

    All text is trained, in the order given, without chat template.
    """
    images = [None] * len(texts) if images is None else images
    if not isinstance(images, list) or len(images) != len(texts):
        count = len(images) if isinstance(images, list) else type(images).__name__
        raise BadSample("bad_conversation", f"a document of {len(texts)} texts and {count} images; give None")
    if not all(isinstance(text, str | None) for text in texts):
        raise BadSample("bad_conversation", "a document's texts are text or None")
    parts: list[dict] = []
    for text, image in zip(texts, images, strict=True):
        if image is not None:
            parts.append({"type": "image"})
        if text:
            after_text = parts and parts[-1]["type"] == "text"
            parts.append({"type": "text", "text": DOCUMENT_SEPARATOR * bool(after_text) + text})
    return [{"role": DOCUMENT, "content": parts}]
