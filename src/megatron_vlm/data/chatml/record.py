"""Read a record of any source: its conversation as chat templates take it, and the media that it names.

`data.on_disk.fields` is the table of names, and docs/data.md has an example of each layout:

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
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.limits import LIMITS, limits_beside
from megatron_vlm.data.chatml.turns import (
    TurnMedia,
    audio,
    decode_json,
    decoded,
    frame_times,
    get_only_alias,
    parse_turns,
    read_tools,
    role_of,
    unread_keys,
)
from megatron_vlm.data.media.files import in_order, read_media
from megatron_vlm.data.on_disk import fields
from megatron_vlm.data.on_disk.paths import PICTURES

DOCUMENT_SEPARATOR = "\n\n"  # between texts of a document without an image between them
LIMITS_FIELDS = {kind: f"{kind}_limits" for kind in LIMITS}  # of what `Conversation.stored` gives
NAMELESS = {"id"}  # nothing is lost if this is not read
# Where an entry of images or videos names its medium, the first one first
ENTRY = ("bytes", "path", "image", "video", "image_url", "video_url", "source", "url", "data")
ENTRY_FACTS = ("type", "media_type", "frames", *fields.TIMES)  # what else it may say
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
        keys = {key for key in self.keys() - skipped if self.peek(key) not in (None, "", [])}
        return self._inside | {("record", str(key)) for key in keys}

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
    """

    messages: list[dict]
    tools: list[dict] | None = None
    media: dict[str, list] = field(default_factory=lambda: {kind: [] for kind in fields.MEDIA})
    limits: dict[str, list[dict]] = field(default_factory=dict)
    objects: Any = None
    rejected: list[dict] | BadSample | None = None
    unread: set[tuple[str, str]] = field(default_factory=set)

    def stored(self) -> dict:
        """Return the record without its media, as shards hold it.

        `parse_record` gives the same again, but not why a rejected answer cannot be read.
        """
        record = {"messages": self.messages, "tools": self.tools, "objects": self.objects}
        record |= {fields.REJECTED_TURNS: [] if isinstance(self.rejected, BadSample) else self.rejected}
        record |= {LIMITS_FIELDS[kind]: limits for kind, limits in self.limits.items()}
        return {name: value for name, value in record.items() if value is not None}


def parse_record(record: Any) -> Conversation:
    """Return the conversation of a record: an object with the package's names, a list of turns, or JSON text.

    The argument is not changed. Raises BadSample if it has no turns in any known layout, for names of one
    field that differ, and for turns that cannot be read.
    """
    try:
        record = without_numpy(decoded(record))
    except RecursionError as error:
        raise BadSample("bad_conversation", "the record is nested too deeply") from error
    if isinstance(record, list):
        record = {"messages": record}
    if not isinstance(record, dict):
        raise BadSample("bad_conversation", f"a record is a JSON object, this is {type(record).__name__}")
    record = Record({k: _decoded_cell(k, value) for k, value in record.items() if not _is_null(value)})
    media = {
        kind: _listed(kind, record.get(get_only_alias(record, names))) for kind, names in fields.MEDIA.items()
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
        if not in_order(media[kind], in_parts):
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
        unread=unread | record.unread(),
    )


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


def _is_null(value: Any) -> bool:
    """Whether the value is None, or what pandas writes into an empty cell."""
    return value is None or (isinstance(value, float) and value != value)


def without_numpy(value: Any) -> Any:
    """Return a record with Python's values in place of numpy values, as pandas reads them from parquet."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {key: without_numpy(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [without_numpy(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _listed(kind: str, media: Any) -> list:
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
    return {*map(str, media)} - {*ENTRY, *ENTRY_FACTS, *limits} | _unread_of(inside)


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
    prompt = record.get(_first_name(record, fields.PROMPTS, reason))
    query = record.get(_first_name(record, fields.QUERIES, reason))
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
        raise BadSample("bad_conversation", f"no turns: {detail}")
    pairs = record.get("history") or []
    if not (isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)):
        raise BadSample("bad_conversation", "history is not a list of [prompt, response] pairs")
    earlier = [turn for pair in pairs for turn in _exchange(pair[0], pair[1])]
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
    if reply is None and texts:
        reply = Counter(texts).most_common(1)[0][0]
    if reply is None and isinstance(record.peek(fields.REWARD), dict):
        record.note_unread(fields.REWARD, record[fields.REWARD], ("ground_truth",))
        reply = record[fields.REWARD].get("ground_truth")
    return json.dumps(reply) if isinstance(reply, int | float) else reply, texts


def _answer(item: Any) -> str | None:
    """Return one of several answers: text, a number, or an object of VQA's annotators with `answer`."""
    item = item.get("answer") if isinstance(item, dict) and "role" not in item else item
    if isinstance(item, str):
        return item
    return json.dumps(item) if isinstance(item, int | float) and not _is_null(item) else None


def _are_turns(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(turn, dict) for turn in value)


def _first_name(record: dict, names: tuple[str, ...], reason: str) -> str | None:
    """Return the first of these names that has a value, or else the first whose value is empty."""
    return get_only_alias(record, names, reason) or next(filter(record.__contains__, names), None)


def _exchange(prompt: Any, reply: Any) -> list[dict]:
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
