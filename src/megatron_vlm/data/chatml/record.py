"""Read a record of any source: its conversation as chat templates take it, and the media that it names.

`data.on_disk.fields` is the table of names, and docs/how-to/prepare-data.md has an example of each layout:

    turns                        under one of `fields.TURNS`
    question, answer             one exchange, with `history` before it; both may be lists of turns
    caption                      the reply to an image
    text                         without any media: a document
    texts                        exchanges [{user, assistant}], or texts between images, see `_document`
    prompt, chosen, rejected     or both answers as whole conversations, with their prompt
    turns, rejected_response     what might have been the last reply
    turns, rejected_messages     two conversations

Media stand under `image(s)` and `video(s)`, or parts of turns name them. A part that names none stands for
the next medium of its record. A medium is a path, encoded bytes, or an object with one of ENTRY; a video may
also be a list of images, or an object with such `frames` and `fps` or `timestamps`.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from operator import eq
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.media.files import is_base64, local_path, read_media
from megatron_vlm.data.on_disk import fields
from megatron_vlm.data.on_disk.fields import (
    AUDIO_PARTS,
    CALL,
    CALLS,
    CHOSEN,
    CONTENT,
    EXCHANGE,
    FIELDS,
    GROUPS,
    MEDIA,
    MEDIUM,
    PARTS,
    REFERENCES,
    REJECTED,
    REJECTED_TURNS,
    ROLE,
    ROLES,
    TAGS,
    THINKING_KEYS,
    TIMES,
    TRAINED,
    TURNS,
    WEIGHTS,
    WHOLE,
)
from megatron_vlm.data.on_disk.paths import PICTURES
from megatron_vlm.imports import calling, file_digest, load_function
from megatron_vlm.messages import suggestion

SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
# The words of qwen-vl-utils for a part that is an image or a video, and for an entry of `images` or `videos`
LIMITS = {
    "image": SIZES,
    "video": (
        *SIZES,
        *("total_pixels", "video_start", "video_end", "fps", "nframes", "num_frames"),
        *("min_frames", "max_frames", "sample_fps", "raw_fps"),
    ),
}
# Beside the turns these may also be facts about a file, such as the frames per second that it has.
ALSO_FACTS = ("fps", "raw_fps")
MOST = 2**53  # of any limit; NaN is not below it
REAL = ("fps", "sample_fps", "raw_fps", "video_start", "video_end")  # the others are whole numbers
PAIRS = (("min_pixels", "max_pixels"), ("min_frames", "max_frames"), ("video_start", "video_end"))
NO_VALUES = (None, "", [], {})  # Arrow gives a struct of nulls where another row has an object
PLAIN = {str, bytes, int, float, bool, type(None)}  # of JSON's values
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000  # besides 0
BESIDE_TEXT = ("tool_calls", "reasoning_content")  # what else a reply may consist of
MEDIA_KEYS = tuple(name for names in MEDIA.values() for name in names)
TAKEN = {*ROLE, *CONTENT, *WEIGHTS, *MEDIA_KEYS, "function_call"}  # come out under one name
PASSED = {*THINKING_KEYS, *CALLS, REFERENCES, "name", "tool_call_id"}  # go to the template as they are
PLACEHOLDER = re.compile(r"<(image|video)>")
# An image that a text names; a name in the tag that is no file's is text about the tag
NAMED_IMAGE = re.compile(rf"<img>([^<>\n]+(?:{'|'.join(map(re.escape, PICTURES))}))</img>", re.IGNORECASE)
PYTHON_PARTS = re.compile(r"\s*\[\{'type': '(?:(?:in|out)put_)?(?:text|image|video)(?:_url)?'[,}]")
# What nobody sees: whitespace, control characters, soft hyphens, zero-width and direction marks.
INVISIBLE = r"[\s\x00-\x1f\x7f-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]"
BLANK = re.compile(f"{INVISIBLE}*+")
BESIDE_FUNCTION = ("id", "type", "index", "tool_call_id")  # in a call
ARGUMENTS = ("arguments", "parameters")  # the second is Llama's name
CALL_KEYS = {"function", "name", *ARGUMENTS, *BESIDE_FUNCTION}
BLOCKS = {  # of Anthropic's: what is read of each
    "tool_use": ("type", "id", "name", "input"),
    "tool_result": ("type", "tool_use_id", "content"),
    "thinking": ("type", "thinking", "signature"),
}
TAGGED = (*TURNS, CHOSEN, REJECTED, REJECTED_TURNS)
DOCUMENT_SEPARATOR = "\n\n"  # between texts of a document without an image between them
LIMITS_FIELDS = {kind: f"{kind}_limits" for kind in LIMITS}  # of what `Conversation.stored` gives
NAMELESS = {*fields.IDS}  # `record_id` takes the first, and nothing is lost with the others
# Where an entry of images or videos names its medium, the first one first
ENTRY = ("bytes", "path", "image", "video", "image_url", "video_url", "source", "url", "data")
ENTRY_FACTS = ("type", "media_type", "frames")  # what else it may say; of frames also TIMES
FRAMES = tuple(ending for ending in PICTURES if ending not in (".gif", ".webp"))  # which may be clips
SPEAKER = re.compile(r"(?:^|(?:\r?\n){2})(Human|Assistant):")  # of hh-rlhf's conversations in one text
LISTS = ("history", fields.ANSWERS)
# Besides turns, what a cell of a CSV file has as JSON text
JSON_CELLS = (*LISTS, *fields.MEDIA["image"], *fields.MEDIA["video"], *LIMITS["video"])
PYTHON_TURNS = re.compile(r"\[?\{(?=.*'(?:role|from)': ')'(?:role|from|content|value)': ", re.DOTALL)
NO_PROMPT = (
    'no prompt beside the chosen answer, which begins neither with a user turn nor with "Human:"; '
    "data.columns.prompt=NAME names the column of the prompt"
)
NO_CHOSEN = "no chosen answer beside the rejected one; data.columns.chosen=NAME names its column"
PICTURE_NUMBER = re.compile(r"<?image_?\d{1,9}>?")  # a key of MiniCPM-V's object of images


class Record(dict):
    """A record that notes which of its keys are read. `peek` looks at one without reading it."""

    peek = dict.get

    def __init__(self, record: dict) -> None:
        super().__init__(record)
        self._read_keys: set[str] = set()
        self._inside: set[tuple[str, str]] = set()  # keys in values of the record that are not read
        self.no_reply: BadSample | None = None  # why it is a prompt alone, if it is

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def __getitem__(self, key: str) -> Any:
        self._read_keys.add(key)
        return super().__getitem__(key)

    def note_unread(self, place: str, item: dict, read_keys: tuple[str, ...]) -> None:
        """Note the keys of an object in the record that are not among the known ones."""
        self._inside |= {(place, key) for key in unread_keys(item, read_keys)}

    def unread(self) -> set[tuple[str, str]]:
        """Return the keys that were not read and say something."""
        skipped = self._read_keys | NAMELESS
        keys = {key for key in self.keys() - skipped if self.peek(key) not in NO_VALUES}
        return self._inside | {("record", str(key)) for key in keys}

    def columns(self) -> dict[str, Any]:
        """Return the fields beside the conversation and its media, as functions of rewards get them."""
        if isinstance(stored := self.get(fields.COLUMNS), dict):
            return stored
        columns = {str(key): value for key, value in self.items() if key not in fields.NO_COLUMNS}
        return {key: value for key, value in columns.items() if not isinstance(value, bytes)}

    def note_unused(self, keys: tuple[str, ...]) -> None:
        """Note that these keys were looked at, and that nothing in the conversation comes from them."""
        self._read_keys.difference_update(keys)


@dataclass
class Conversation:
    """A record in the one form that everything after it reads.

    messages   role and content of each turn, the content as a list of parts `{"type": "text", "text": ...}`,
               `{"type": "image"}` and `{"type": "video"}`; where no part stands for a medium, `place_media`
               makes one
    tools      as chat templates take them, or None
    media      by kind, what the record names, in order
    limits     by kind, what the record says of each of these media beside the turns; empty if nothing
    objects    what the record has under this name, see `extras.grounding`
    rejected   the messages with the other answer of a preference record, or why they cannot be read, or None
    unread     the keys that nothing reads, each with where it stands: record, turn, part, ...
    columns    the record's fields beside conversation and media: rewards are computed from them
    no_reply   why there is nothing to train on: the record is a prompt alone, or its replies are empty
    """

    messages: list[dict]
    tools: list[dict] | None = None
    media: dict[str, list] = field(default_factory=lambda: {kind: [] for kind in fields.MEDIA})
    limits: dict[str, list[dict]] = field(default_factory=dict)
    objects: Any = None
    rejected: list[dict] | BadSample | None = None
    unread: set[tuple[str, str]] = field(default_factory=set)
    columns: dict[str, Any] = field(default_factory=dict)
    no_reply: BadSample | None = None

    def stored(self) -> dict:
        """Return the record without its media, as shards hold it.

        `parse_record` gives the same again, but not why a rejected answer cannot be read.
        """
        record = {"messages": self.messages, "tools": self.tools, "objects": self.objects}
        record |= {fields.REJECTED_TURNS: [] if isinstance(self.rejected, BadSample) else self.rejected}
        record |= {LIMITS_FIELDS[kind]: limits for kind, limits in self.limits.items()}
        return {name: value for name, value in record.items() if value is not None}


@dataclass
class TurnMedia:
    """Collects what the turns of one record name: media with their `index`, and keys that nobody reads."""

    has_images: bool = False  # beside the turns, so that `<img>` in a text is none
    named: dict[str, list[tuple[Any, Any]]] = field(default_factory=lambda: {kind: [] for kind in MEDIA})
    unread: set[tuple[str, str]] = field(default_factory=set)  # ("turn" or "part", key)


def parse_record(record: Any) -> Conversation:
    """Return the conversation of a record: an object with the package's names, a list of turns, or JSON text.

    The argument is not changed. Raises BadSample if it has no turns in any known layout, for names of one
    field that differ, and for turns that cannot be read.
    """
    try:
        record = without_numpy(decoded(record))
    except RecursionError as error:
        raise BadSample("bad_conversation", "the record is nested too deeply") from error
    record = _as_object(record)
    empty = [str(key) for key, value in record.items() if _is_null(value)]
    record = Record({k: _decoded_cell(k, value) for k, value in record.items() if not _is_null(value)})
    media = {
        kind: listed(kind, record.get(get_only_alias(record, names))) for kind, names in fields.MEDIA.items()
    }
    unread = {(kind, key) for kind, entries in media.items() for key in _unread_of(entries, LIMITS[kind])}
    name = _turns_name(record)
    turns, rejected = _chosen_and_rejected(record, name)
    for label in fields.LABELS:
        if isinstance(record.peek(label), bool) and not record[label]:
            raise BadSample("no_trained_tokens", f"{label} is false: its answer is not to be learned")
    if (audio_key := next(filter(record.peek, fields.AUDIO), None)) and "<audio>" in str(turns):
        raise audio(f"the record, under {audio_key!r},")
    if not name and isinstance(record.peek("texts"), list):  # None stands where a document has no image
        media["image"] = [image for image in media["image"] if image is not None]

    system = record.get("system")
    has_images = bool(media["image"])
    in_turns = TurnMedia(has_images, unread=unread)
    messages = parse_turns(turns, system, in_turns)
    limits = {}
    for kind, in_parts in in_turns.named.items():
        may_be_in_text = kind == "image" and media[kind] and not in_parts
        in_text = [(name, None) for name in _names_in_text(messages)] if may_be_in_text else []
        are_places = len(in_text) == len(media[kind])
        if not in_order(media[kind], in_text if are_places else in_parts):
            raise BadSample("bad_conversation", f"its {kind}s and its parts name others, or in another order")
        media[kind] = media[kind] or [medium for medium, _ in in_parts if medium is not None]
        beside = limits_beside(kind, media[kind], record) or record.get(LIMITS_FIELDS[kind])
        if beside is not None:
            limits[kind] = beside
            unread |= {(LIMITS_FIELDS[kind], key) for key in _unread_of(beside, LIMITS[kind])}
    tools_name = get_only_alias(record, fields.TOOLS)
    if rejected is not None:
        rejected = _parse_rejected(rejected, system, TurnMedia(has_images, unread=unread), media)
    return Conversation(
        messages=messages,
        tools=read_tools(tools_name, record[tools_name]) if tools_name else None,
        media=media,
        limits=limits,
        objects=record.get("objects"),
        rejected=rejected,
        columns={key: None for key in empty if key not in fields.NO_COLUMNS} | record.columns(),
        unread=unread | record.unread(),
        no_reply=record.no_reply or without_reply(messages),
    )


def _as_object(record: Any) -> dict:
    if isinstance(record, list):
        return {"messages": record}
    if not isinstance(record, dict):
        raise BadSample("bad_conversation", f"a record is a JSON object, this is {type(record).__name__}")
    return record


def in_order(media: list, parts: list[tuple[Any, Any]]) -> bool:
    """Whether a record and its parts can name the same media in one order; the parts say a medium or None,
    and an index or None."""
    numbers = [number for _, number in parts if number is not None]
    names = ({_file_name(item), _file_name(part)} for item, (part, _) in zip(media, parts, strict=False))
    return not media or (numbers == sorted({*numbers}) and all(len(pair - {None}) < 2 for pair in names))


def _names_in_text(messages: list[dict]) -> list[str]:
    """Return the files in `<img>a.jpg</img>` of users' text, where `place_media` puts as many images."""
    texts = [p["text"] for m in messages if m["role"] == "user" for p in m["content"] if p["type"] == "text"]
    return [name for text in texts for name in NAMED_IMAGE.findall(text)]


def media_path(medium: Any) -> str | None:
    """The path or address of a medium in a record, if it has one."""
    path = medium.get("path") if isinstance(medium, dict) else medium
    is_path = isinstance(path, str) and not (path.startswith("data:") or "::" in path or is_base64(path))
    return path if is_path else None


def _file_name(medium: Any) -> str | None:
    path = media_path(medium)
    return None if path is None else PurePosixPath(local_path(path).replace("\\", "/")).name


def record_id(record: Any) -> str | None:
    """The id that a record, or a sample that was prepared from it, has of its own."""
    record = record if isinstance(record, dict) else {}
    stored = record.get(fields.COLUMNS)
    columns = record | stored if isinstance(stored, dict) else record
    ids = [columns[name] for name in fields.IDS if isinstance(columns.get(name), str | int)]
    return str(ids[0]) if ids else None


def load_media(conversation: Conversation, root: Path | str) -> tuple[list[bytes], list[bytes | dict]]:
    """Return the images and videos that a conversation names; paths are under `root`.

    Raises BadSample for a medium that cannot be read.
    """
    images = [_file_bytes(image, root) for image in conversation.media["image"]]
    return images, [_video(video, root) for video in conversation.media["video"]]


def _decoded_cell(name: str, value: Any) -> Any:
    """Return what a field has as JSON text in a cell of a CSV file; any other value as it is.

    Raises BadSample for Python's text of a list of turns, which pandas writes into a cell.
    """
    if not isinstance(value, str) or name not in (*fields.MAY_BE_TURNS, *JSON_CELLS):
        return value
    content = decode_json(value)
    text = value.strip()
    is_python = PYTHON_TURNS.match(text) or (name in LISTS and text[:1] == "[")
    if content is value and is_python and text[-1] in "]}":
        detail = f"{name} is a list as Python prints it, not JSON; write the column with json.dumps"
        raise BadSample("bad_conversation", detail)
    if name in JSON_CELLS:
        return content
    turns = [content] if isinstance(content, dict) else content
    return turns if _are_turns(turns) and any(map(role_of, turns)) else value


def as_text(value: Any) -> Any:
    """Return a number or a boolean as its JSON text, anything else, and NaN, as it is."""
    return json.dumps(value) if isinstance(value, int | float) and not _is_null(value) else value


def _is_null(value: Any) -> bool:
    """Whether the value is None, or what pandas writes into an empty cell."""
    return value is None or (isinstance(value, float) and value != value)


def without_numpy(value: Any) -> Any:
    """Return a record with Python's values in place of numpy values, as pandas reads them from parquet."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, dict):
        return {key: without_numpy(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [without_numpy(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def listed(kind: str, media: Any) -> list:
    """Return the media of a field: one, a list, or an object of numbered images."""
    if isinstance(media, dict) and media and all(map(PICTURE_NUMBER.fullmatch, media)):
        media = [media[name] for name in sorted(media, key=lambda name: int(re.sub(r"\D", "", name)))]
    media = media if isinstance(media, list) else [media] if media else []
    if kind == "video" and len(media) > 1 and all(map(_is_frame, media)):
        return [media]
    return media


def _is_frame(item: Any) -> bool:
    return isinstance(item, str) and item.lower().endswith(FRAMES)


def _unread_of(media: Any, limits: tuple[str, ...] = ()) -> set[str]:
    """Return the keys of entries of images or videos, and of what is in them, that are not read."""
    if isinstance(media, list):
        entries = [item for item in media if not isinstance(item, str)]
        return {key for entry in entries for key in _unread_of(entry, limits)}
    if not isinstance(media, dict):
        return set()
    inside = [media[key] for key in (*ENTRY, "frames") if isinstance(media.get(key), dict | list)]
    times = TIMES if any(isinstance(item, list) for item in inside) else ()
    return unread_keys(media, {*ENTRY, *ENTRY_FACTS, *times, *limits}) | _unread_of(inside)


def _named(media: Any) -> Any:
    """Return the path, bytes or frames of an entry of images or videos."""
    while isinstance(media, dict) and "frames" not in media:
        name = next((name for name in ENTRY if media.get(name)), None)
        if name is None:
            keys, present = ", ".join(ENTRY), ", ".join(map(str, media))
            raise BadSample("missing_media", f"a medium has none of {keys}; it has {present or 'nothing'}")
        frames = media[name]
        media = {"frames": frames} | frame_times(media) if isinstance(frames, list) else frames
    return media


def _video(video: Any, root: Path | str) -> bytes | dict:
    video = {"frames": video} if isinstance(video, list) else _named(video)
    if not isinstance(video, dict):
        return _file_bytes(video, root)
    frames = video["frames"] if isinstance(video["frames"], list) else []
    return {"frames": [_file_bytes(frame, root) for frame in frames]} | frame_times(video)


def _file_bytes(media: Any, root: Path | str) -> bytes:
    media = _named(media)
    if isinstance(media, bytes):
        return media
    if not isinstance(media, str):
        raise BadSample("missing_media", f"a medium is a path or encoded bytes, not {type(media).__name__}")
    return read_media(media, root)


# -- turns


def _parse_rejected(
    turns: Any, system: Any, in_turns: TurnMedia, media: dict[str, list]
) -> list[dict] | BadSample:
    """Return the rejected messages, or why they cannot be read, which matters to preferences alone."""
    try:
        messages = parse_turns(turns, system, in_turns)
    except BadSample as bad:
        return bad
    if all(in_order(media[kind], part_media) for kind, part_media in in_turns.named.items()):
        return messages
    return BadSample("bad_preference", "both answers have to be to the same images and videos")


def _turns_name(record: Record) -> str | None:
    """Return the name under which the record has its turns. Raises BadSample for two that differ."""
    for name in ("chosen_images", "rejected_images"):
        if record.get(name):
            raise BadSample("bad_preference", f"{name}: both answers have to be to the same images")
    get_only_alias(dict(record), fields.REJECTIONS, "bad_preference")
    are_turns = isinstance(record.peek("conversation"), list)  # often it is a text beside the turns
    name = get_only_alias(record, fields.TURNS, same=_same_turns)
    return name or ("conversation" if are_turns else None)


def _chosen_and_rejected(record: Record, name: str | None) -> tuple[Any, Any]:
    """Return the turns, with the chosen answer if there are two, and those with the rejected one, or None.

    `name` is where the record has turns. Raises BadSample if it has none in any layout.
    """
    # Turns beside a chosen answer are its prompt, unless they already are the whole chosen conversation
    turns = record[name] if name else None
    prompt = turns if isinstance(turns, list) else None
    chosen, rejected = record.peek(fields.CHOSEN), record.peek(fields.REJECTED)
    if prompt and rejected is None and any(map(record.peek, fields.REJECTIONS)):
        get_only_alias(record, (fields.CHOSEN, name), "bad_preference", same=_same_turns)
    if isinstance(chosen, str | dict | list) and (prompt is None or rejected is not None):
        if turns and prompt is None:
            raise BadSample("bad_conversation", f"{name} is {type(turns).__name__}, not a list of turns")
        if not prompt:
            prompt = _turns(_prompt_of(record, "bad_preference") or [], "user")
        prompt = _without_reply(prompt, record[fields.CHOSEN])
        turns = _answered(prompt, chosen)
        if not prompt and not any(role_of(turn) == "user" for turn in turns):
            raise BadSample("bad_preference", NO_PROMPT)
        if prompt and turns[: len(prompt)] != prompt and not _same_turns(turns[: len(prompt)], prompt):
            record.note_unused((*fields.PROMPTS, *fields.QUERIES))
        if rejected is not None:
            return turns, _answered(prompt, record[fields.REJECTED])
    if not turns and rejected is not None and chosen is None and _reply(record)[0] is None:
        raise BadSample("bad_preference", NO_CHOSEN)
    # Else the record is a conversation, and a rejected answer stands in place of its last reply
    turns = turns or _plain_turns(record)
    for key in (fields.REJECTED, fields.REJECTED_REPLY):
        if isinstance(record.peek(key), str | dict | list) and isinstance(turns, list):
            return turns, _answered(turns[:-1], record[key])
    return turns, record.get(fields.REJECTED_TURNS)


def _without_reply(prompt: list, chosen: Any) -> list:
    """Return the prompt without the chosen answer, where a dataset repeats it there."""
    answer = _turns(chosen, "assistant")
    if _is_whole(answer) or not prompt or role_of(prompt[-1]) != "assistant":
        return prompt
    if _same_turns(prompt[-len(answer) :], answer):
        return prompt[: -len(answer)]
    raise BadSample("bad_preference", "the prompt ends with a reply that is not the chosen one; leave it out")


def _same_turns(turns: Any, other_turns: Any) -> bool:
    """Whether two lists of turns are one conversation, in two forms."""
    try:
        return parse_turns(turns) == parse_turns(other_turns)
    except BadSample:
        return False


def _prompt_of(record: Record, reason: str) -> Any:
    """Return the prompt of a record, and its query after a newline; None if it asks nothing."""
    prompt = as_text(record.get(_first_name(record, fields.PROMPTS, reason)))
    query = as_text(record.get(_first_name(record, fields.QUERIES, reason)))
    if not query:
        return query if prompt is None else prompt
    if not prompt:
        return query
    if not (isinstance(prompt, str) and isinstance(query, str)):
        raise BadSample(reason, "prompt and query are not both text")
    return f"{prompt}\n{query}"


def _answered(prompt: list, answer: Any) -> list:
    """Return the conversation; an answer that begins with a question is whole, with the prompt in it."""
    turns = _turns(answer, "assistant")
    has_prompt = any(role_of(turn) != "system" for turn in prompt)
    return turns if _is_whole(turns) and has_prompt else prompt + turns


def _is_whole(turns: list) -> bool:
    """Whether the turns of an answer are a conversation, with its prompt."""
    return any(role_of(turn) in ("system", "user") for turn in turns[:1])


def _turns(answer: Any, role: str) -> list:
    """Return text as a turn of `role`; turns as they are, for `parse_turns` to judge."""
    if isinstance(answer, list) and answer and all(isinstance(text, str) for text in answer):
        raise BadSample("bad_preference", "an answer or prompt is a list of texts; write turns, or one text")
    if isinstance(answer, str):
        return _transcript(answer) or [{"role": role, "content": answer}]
    if isinstance(answer, dict):
        return [answer]
    if not isinstance(answer, list):
        raise BadSample("bad_preference", f"an answer or prompt is {type(answer).__name__}, no text or turns")
    return answer


def _transcript(text: str) -> list[dict]:
    """Return the turns of a text that begins with "Human:"; none for any other. The last one may be open."""
    if not text.lstrip().startswith("Human:"):
        return []
    _, *parts = SPEAKER.split(text.strip())
    roles = [{"Human": "user", "Assistant": "assistant"}[speaker] for speaker in parts[::2]]
    turns = [{"role": role, "content": words.strip()} for role, words in zip(roles, parts[1::2], strict=True)]
    return turns if turns[-1]["content"] else turns[:-1]


# -- records without a list of turns


def _plain_turns(record: Record) -> list[dict]:
    """Return the turns. Raises BadSample if the record has none in any of these layouts."""
    if isinstance(record.peek("texts"), list):
        texts = record["texts"]
        if texts and all(isinstance(text, dict) for text in texts):
            for text in texts:
                record.note_unread("text", text, ("user", "assistant"))
            return [turn for text in texts for turn in _exchange(text.get("user"), text.get("assistant"))]
        return _document(texts, record.get("images"))
    has_prompt = not record.keys().isdisjoint((*fields.PROMPTS, *fields.QUERIES))
    has_reply = not record.keys().isdisjoint((*fields.REPLIES, fields.REWARD))
    if "caption" in record and not (has_prompt and has_reply):
        if not any(map(record.peek, fields.MEDIA["image"])):
            raise BadSample("missing_media", "a caption without an image")
        return _exchange("", record["caption"])
    if isinstance(record.peek("text"), str) and not has_prompt and not has_reply:
        if any(record.peek(name) for names in fields.MEDIA.values() for name in names):
            raise BadSample("bad_conversation", "text beside media; name it caption, or give turns")
        return _document([record["text"]], None)
    return _exchanges(record)


def _exchanges(record: Record) -> list[dict]:
    """Return the turns of a question, its answer, and a history before them."""
    prompt = _prompt_of(record, "bad_conversation")
    reply, references = _reply(record)
    if prompt is None or reply is None:
        lacks = "" if prompt is None else "a question without an answer, and "
        names = f"none of {list(fields.TURNS)} among {sorted(map(str, record))}"
        detail = f"{lacks}{names}; data.columns can name them"
        if empty := [name for name in fields.TURNS if name in record]:
            detail = f"{empty[0]} is empty"
        record.no_reply = BadSample("bad_conversation", f"no turns: {detail}")
    if prompt is None:
        raise record.no_reply
    # the earlier turns, and then this exchange
    pairs = record.get("history") or []
    if not (isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)):
        raise BadSample("bad_conversation", "history is not a list of [prompt, response] pairs")
    earlier = [turn for pair in pairs for turn in _exchange(pair[0], pair[1])]
    if reply is None:
        return earlier + _turns(prompt, "user")
    if isinstance(prompt, str) and isinstance(reply, str) and prompt.rstrip().endswith("Assistant:"):
        if transcript := _transcript(prompt):
            prompt, reply = transcript, reply.strip()
    if _are_turns(prompt) or _are_turns(reply):
        turns = earlier + _completed(_turns(prompt, "user"), _turns(reply, "assistant"))
    else:
        turns = earlier + _exchange(prompt, reply)
    if references:
        turns[-1] = turns[-1] | {fields.REFERENCES: references}
    return turns


def _completed(prompt: list, answer: list) -> list:
    """Return the turns of a prompt and of its answer. As in TRL, replies in the prompt are not trained.

    One that names a weight has this weight. Raises BadSample if one reply follows another.
    """
    roles = [role_of(turn) for turn in (*prompt[-1:], *answer[:1])]
    if roles == ["assistant", "assistant"]:
        raise BadSample(
            "bad_conversation",
            "the prompt ends with a reply, and the answer is another; make one turn of them",
        )
    untrained = [
        turn | {"loss": False}
        if role_of(turn) in ("assistant", fields.CALL)
        and all(turn.get(key) is None for key in fields.WEIGHTS)
        else turn
        for turn in prompt
    ]
    return untrained + answer


def _reply(record: Record) -> tuple[Any, list[str]]:
    """Return the answer of a record (text, turns, or None), and all right answers if it lists several.

    The most frequent one of `answers` is the reply, unless another key says it.
    """
    listed = record.peek(fields.ANSWERS)
    texts = [_answer(item) for item in listed] if isinstance(listed, list) else []
    if not texts or None in texts:
        name = _first_name(record, fields.REPLIES, "bad_conversation")
        texts = []
    else:
        name = _first_name(record, fields.REPLIES[:-1], "bad_conversation")
        record.get(fields.ANSWERS)
    reply = None if name is None else record[name]
    if reply in NO_VALUES and texts:
        reply = Counter(texts).most_common(1)[0][0]
    if reply in NO_VALUES and isinstance(record.peek(fields.REWARD), dict):
        record.note_unread(fields.REWARD, record[fields.REWARD], ("ground_truth",))
        reply = record[fields.REWARD].get("ground_truth")
    return as_text(reply), texts


def _answer(item: Any) -> str | None:
    """Return one of several answers: text, a number, or an object of VQA's annotators with `answer`."""
    item = as_text(item.get("answer") if isinstance(item, dict) and "role" not in item else item)
    return item if isinstance(item, str) else None


def _are_turns(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(turn, dict) for turn in value)


def _first_name(record: dict, names: tuple[str, ...], reason: str) -> str | None:
    """Return the first of these names that has a value, or else the first whose value is empty."""
    return get_only_alias(record, names, reason) or next(filter(record.__contains__, names), None)


def _exchange(prompt: Any, reply: Any) -> list[dict]:
    prompt, reply = as_text(prompt), as_text(reply)
    for name, text in (("prompt", prompt), ("reply", reply)):
        if not isinstance(text, str):
            raise BadSample("bad_conversation", f"the {name} is {type(text).__name__}, not text")
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]


def _document(texts: list, images: Any) -> list[dict]:
    """Return one turn of role `document`: at each index the image, then the text, where there is one.

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
    return [{"role": fields.DOCUMENT, "content": parts}]


# -- names of a source


@dataclass(frozen=True)
class Columns:
    """Called with a record as it is stored: the record with the package's names.

    names     ours → the source's, such as {"conversations": "chat", "images": "pictures"}; if a column of one
              kind (turns, images, ...) is mapped, other columns of that kind are ignored
    tags      how turns are written, by LLaMA-Factory's names (`role_tag`, `content_tag`, `user_tag`, ...)
    parser    FILE.py:NAME of a user's function that gives the record in their place; None: there is none

    Raises ValueError for a name that does not exist here.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    parser: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """Identify the reading of records; of a user's file by its text."""
        return f"{self!r} {self.parser} {file_digest(self.parser)}" if self.parser else repr(self)

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in FIELDS:
                raise ValueError(f"data.columns: {name} is no column that is read{suggestion(name, FIELDS)}")
        tag_names = ("role_tag", "content_tag", *TAGS)
        for name in self.tags:
            if name not in tag_names:
                raise ValueError(f"tags: {name} is no tag{suggestion(name, tag_names)}")

    def __call__(self, record: Any) -> dict:
        """The record, also of JSON text. Raises BadSample if it is neither an object nor a list of turns."""
        record = decoded(record)
        if self.parser:
            return _as_object(of_users_code("data.parser", self.parser, record))
        record = _as_object(record)
        record = self._renamed(record) if self.names else record
        tagged = [name for name in TAGGED if record.get(name)] if self.tags else ()
        return record | {name: self._tagged(record[name]) for name in tagged}

    def of_arrow(self, row: dict) -> dict:
        """The record of a row of `datasets`, without the keys that hold None: Arrow gives every struct all
        keys of its column. Raises BadSample."""
        return self(row if self.parser else _without_nulls(row))

    def check(self, present: list[str], place: str) -> None:
        """Raises ValueError if a mapped column is not among those `present`."""
        for field_name, column in self.names.items():
            if column not in present:
                raise ValueError(
                    f"data.columns: {place} has no column {column} to read as {field_name}"
                    + suggestion(column, sorted(present))
                )

    def _renamed(self, record: dict) -> dict:
        hidden = {name for group in GROUPS if not self.names.keys().isdisjoint(group) for name in group}
        hidden.update(self.names.values())
        if not self.names.keys().isdisjoint(WHOLE):
            hidden.update(EXCHANGE)
        elif not self.names.keys().isdisjoint(EXCHANGE):
            hidden.update(WHOLE)
        mapped = {field_name: record[column] for field_name, column in self.names.items() if column in record}
        return {name: value for name, value in record.items() if name not in hidden} | mapped

    def _tagged(self, turns: Any) -> Any:
        """Turns, or one turn, with role and content; anything else as it is."""
        if isinstance(turns, list):
            return [self._tagged(turn) for turn in turns]
        role_tag, content_tag = self.tags.get("role_tag", "from"), self.tags.get("content_tag", "value")
        if not (isinstance(turns, dict) and role_tag in turns and content_tag in turns):
            return turns
        roles = {self.tags[tag]: role for tag, role in TAGS.items() if tag in self.tags}
        other_keys = {name: value for name, value in turns.items() if name not in (role_tag, content_tag)}
        name = turns[role_tag]
        role = roles.get(name, name) if isinstance(name, str) else name
        return other_keys | {"role": role, "content": turns[content_tag]}


def of_users_code(setting: str, name: str, value: Any) -> Any:
    """Return what the user's function gives for a record, or for the parts of a sample.

    Raises BadSample if that is None or no record, and ConfigError, which ends the run, if the function fails.
    """
    place = f"{setting}: {name}"
    function = load_function(place, name)
    with calling(place, name):
        result = function(value)
    if result is None:
        raise BadSample("left_out", f"{setting} returned None")
    if not isinstance(result, dict | list):
        raise BadSample("bad_conversation", f"{setting} returned {type(result).__name__}, not a record")
    return result


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


# -- turns


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
    return {str(key) for key, value in item.items() if key not in read_keys and value not in NO_VALUES}


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
    content = _content_of(turn, place)
    message = {key: value for key, value in turn.items() if key not in TAKEN}
    if turn.keys().isdisjoint(CONTENT):
        message.pop("text", None)
    media.unread |= {("turn", key) for key in unread_keys(message, PASSED)}
    if (weight := named_weight(turn, number)) is not None:
        message["loss"] = weight
    if role not in (*TRAINED, CALL):  # these have an effect in a reply alone
        media.unread.update(("turn", key) for key in (*WEIGHTS, REFERENCES) if turn.get(key))
    key = None if turn.keys().isdisjoint(THINKING_KEYS) else get_only_alias(turn, THINKING_KEYS, place=place)
    if key is not None:
        if not isinstance(turn[key], str):
            raise BadSample("bad_conversation", f"{place}{key} is {type(turn[key]).__name__}, not text")
        message = {name: value for name, value in message.items() if name not in THINKING_KEYS}
        message["reasoning_content"] = turn[key]
    if role == CALL:
        calls = read_call_turn(content, place, media.unread)
        return message | {"role": "assistant", "content": [], "tool_calls": calls}
    if (calls := read_calls(turn, place, media.unread)) is not None:
        message["tool_calls"] = calls
    if calls and role != "assistant":
        raise BadSample("bad_conversation", f"{place}tool calls in a turn of role {role}")
    if role in ("user", "assistant") and isinstance(content, str) and PYTHON_PARTS.match(content):
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


def _content_of(turn: dict, place: str) -> Any:
    """Return the content of a turn, under `text` if nothing else is one. A number becomes its JSON text."""
    if turn.keys().isdisjoint(CONTENT):
        return as_text(turn.get("text"))
    name = get_only_alias(turn, CONTENT, place=place, same=_no_content)
    if name == "value" and "role" in turn:  # there, a number may be a critic's
        return turn[name]
    return as_text(turn.get(name))


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
    if _is_null(content):
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise BadSample("bad_conversation", f"turn {number} has content {type(content).__name__}")
    parts = map(as_text, content)
    return [_with_type({"type": "text", "text": part} if isinstance(part, str) else part) for part in parts]


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
    names = [name for name in PARTS if part.get(name) not in (None, [], {})]
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
        types = [part.get("type") if isinstance(part, dict) else None for part in parts]
        places = [index for index, name in enumerate(types) if PARTS.get(str(name)) == kind]
        if any(parts[index] != {"type": kind} for index in places):
            raise BadSample("bad_conversation", f"a turn has {key}, and its parts name others; leave one out")
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
    text = as_text(part.get("text")) if kind == "text" else ""
    if kind is None or not isinstance(text, str):
        keys = ", ".join(PARTS)
        raise BadSample("bad_conversation", f"turn {number} has a part that is no {keys}, or has no text")
    if kind == "text":
        media.unread |= {("part", key) for key in unread_keys(part, ("type", "text"))}
        return {"type": "text", "text": text}
    names = (f"{kind}_url", kind, *MEDIUM)
    medium = part.get(get_only_alias(part, names))
    index = part.get("index")
    if isinstance(medium, int):
        medium, index = None, medium
    if not isinstance(index, int | None):
        raise BadSample("bad_conversation", f"turn {number} has a part of index {index!r}, not a number")
    keys = {"type", "index", *names, *LIMITS[kind], *(TIMES if isinstance(medium, list | dict) else ())}
    limited = part
    if isinstance(medium, dict):  # an address of OpenAI's, or Anthropic's base64
        limited = part | medium
        keys |= {"media_type", "data", "bytes", "frames"}
        medium = medium.get("url", medium.get("data", medium))
    media.unread |= {("part", key) for key in unread_keys(limited, keys)}
    if kind == "video" and isinstance(medium, list):
        medium = {"frames": medium} | frame_times(part)
    media.named[kind].append((medium, index))
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


def without_reply(messages: list[dict]) -> BadSample | None:
    """Return why there is nothing to learn in these messages; None if there is."""
    replies = [message for message in messages if is_trained(message)]
    if any(map(has_content, replies)):
        return None
    detail = f"{len(replies)} replies, all without content" if replies else "no reply to train on"
    return BadSample("no_trained_tokens", f"{detail}; roles are {[m['role'] for m in messages]}")


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

    A function alone, as in OpenAI's older `functions`, comes out in the form of a tool. Raises BadSample.
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
        if "function" not in tool and isinstance(tool.get("name"), str):
            names = {"input_schema": "parameters"}  # Anthropic's
            function = {names.get(key, key): value for key, value in tool.items() if key != "type"}
            tools[number] = {"type": "function", "function": function}
    return tools or None


def read_calls(turn: dict, place: str, unread: set[tuple[str, str]]) -> list[dict] | None:
    """Return the `tool_calls` of a turn, or its `function_call` as such; None if it has neither.

    Raises BadSample for two that differ.
    """
    newer, older = (turn.get(key) for key in CALLS)
    calls = read_call_turn(newer, place, unread) if newer else newer
    if not older:
        return calls
    older = read_call_turn(older, place, unread)
    if calls and calls != older:
        raise BadSample("bad_conversation", f"{place}tool_calls and function_call differ; leave one out")
    return older


def read_call_turn(content: Any, place: str, unread: set[tuple[str, str]]) -> list[dict]:
    """Return a call, a list of calls, or JSON text of either, as OpenAI writes them. Raises BadSample."""
    calls = decode_json(content)
    calls = calls if isinstance(calls, list) else [calls]
    return [_read_call(decode_json(call), place, unread) for call in calls]


def _read_call(call: Any, place: str, unread: set[tuple[str, str]]) -> dict:
    """Return a call with an object for arguments that are JSON text of one: templates would quote the text.

    Keys that they do not write are added to `unread`.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        detail = f"{place}a call is no JSON object, or has no name; write name and arguments"
        raise BadSample("bad_conversation", detail)
    unread |= {("tool call", str(key)) for key in {*call, *function} - CALL_KEYS}
    if "function" not in call:
        function = {key: value for key, value in call.items() if key not in BESIDE_FUNCTION}
        call = {key: call[key] for key in BESIDE_FUNCTION if key in call} | {"type": "function"}
    value = function.get(get_only_alias(function, ARGUMENTS, place=place))
    arguments = decode_json({} if value is None else value)  # of a call without any
    if isinstance(arguments, str) and arguments.lstrip()[:1] in ("{", '"'):
        detail = f"the arguments of a call begin like an object and are no JSON: {arguments[:80]!r}"
        raise BadSample("bad_conversation", detail)
    function = {key: item for key, item in function.items() if key != "parameters"}
    return call | {"function": function | {"arguments": arguments if isinstance(arguments, dict) else value}}


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


def unique_keys(pairs: list[tuple[str, Any]]) -> dict:
    """Return a JSON object. Raises ValueError for a key that stands twice: Python would take the last."""
    item = dict(pairs)
    if len(item) < len(pairs):
        key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {key!r} stands twice in an object; leave one out")
    return item


def decoded(record: Any) -> Any:
    """Return the object of JSON text; anything else as it is. Raises BadSample."""
    if not isinstance(record, str | bytes):
        return record
    try:
        return json.loads(record, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:  # bad JSON, other text than UTF-8, nested beyond reason
        raise BadSample("bad_json", str(error)) from error


def decode_json(value: Any) -> Any:
    """Return what JSON text of an object or a list holds; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


# -- limits of single images and videos


def limits_of(kind: str, item: Mapping[str, Any]) -> dict[str, float]:
    """Return the LIMITS that an image or a video names, `num_frames` under the name `nframes`.

    Raises:
        BadSample: one is no positive number, or no whole one where something is counted; or two contradict.
    """
    limits = {name: _number(item[name]) for name in LIMITS[kind] if item.get(name) is not None}
    for name, value in limits.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST
        minimum = 0 if name == "video_start" else math.ulp(0)
        if not number or value < minimum or (name not in REAL and value != int(value)):
            expected = "number" if name in REAL else "whole number"
            raise BadSample("bad_conversation", f"{kind} has {name} {value!r}, not a positive {expected}")
    for low, high in PAIRS:
        if limits.get(low, 0) > limits.get(high, math.inf):
            detail = f"{kind} has {low} {limits[low]} over {high} {limits[high]}"
            raise BadSample("bad_conversation", detail)
    if ("resized_height" in limits) != ("resized_width" in limits):
        raise BadSample("bad_conversation", f"{kind} has one of resized_height and resized_width; give both")
    nframes = limits.pop("num_frames", None)
    if nframes is not None and limits.setdefault("nframes", nframes) != nframes:
        raise BadSample("bad_conversation", f"{kind} has nframes and num_frames, which differ")
    if "nframes" in limits and "fps" in limits:
        raise BadSample("bad_conversation", f"{kind} has fps and nframes; leave one out")
    return {name: value if name in REAL else int(value) for name, value in limits.items()}


def _number(value: Any) -> Any:
    """Return the number in a cell of a CSV file; anything else as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def named_limits(kind: str, item: Any) -> dict:
    """The limits in an entry of a record's images or videos. The `fps` of a list of frames is no limit."""
    if not isinstance(item, dict):
        return {}
    names = [name for name in LIMITS[kind] if name != "fps" or "frames" not in item]
    return {name: item[name] for name in names if item.get(name) is not None}


def limits_beside(kind: str, media: list, record: Mapping[str, Any]) -> list[dict] | None:
    """Return the limits of each medium that a record, or its entry there, names; None if there are none.

    What stands in the record itself is for all its images or videos; a list has one for each.
    """
    names = [name for name in LIMITS[kind] if media and name in record and name not in ALSO_FACTS]
    record = {name: record[name] for name in names if record[name] is not None}
    limits = []
    for number, item in enumerate(media):
        of_all = dict(record)
        for name, value in of_all.items():
            if isinstance(value, list):
                if len(value) != len(media):
                    detail = f"{name} has {len(value)} values for {len(media)} {kind}s"
                    raise BadSample("bad_conversation", detail)
                of_all[name] = value[number]
        limits.append(of_all | named_limits(kind, item))
    return limits if any(limits) else None


def limits_of_media(messages: list[dict], named_beside: Mapping[str, Any]) -> dict[str, list[dict]]:
    """Return the limits of each image and each video of a conversation, in order: what its parts name, and
    what `limits_beside` found beside its turns. Raises BadSample."""
    limits = {}
    for kind in LIMITS:
        parts = [part for message in messages for part in message["content"] if part["type"] == kind]
        beside = named_beside.get(kind) or [{}] * len(parts)
        if not isinstance(beside, list) or [type(item) for item in beside] != [dict] * len(parts):
            raise BadSample("bad_conversation", f"{kind}_limits is no list of an object for each {kind}")
        limits[kind] = [limits_of(kind, item | part) for part, item in zip(parts, beside, strict=True)]
    return limits
