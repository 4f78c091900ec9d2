"""Brings the ways in which people lay out a record to one: turns under `conversations` or `messages`, media
under `image(s)` and `video(s)`.

Instead of turns, a record may have:

    question, answer            one exchange; also called prompt or instruction (query or input is appended
                                after a newline) and response, completion or output; history: earlier pairs
    caption                     the reply to an image
    texts: [{user, assistant}]  exchanges
    texts: [text or None]       with `images: [image or None]`: an interleaved document, see `_document`

or what a preference record has, see `data.records.preferences`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_vlm.data.chatml import BadSample
from megatron_vlm.data.records.preferences import PAIR_COLUMNS, REJECTED_TURNS, with_pair
from megatron_vlm.data.turns import DOCUMENT, sole
from megatron_vlm.messages import suggestion

TURNS = ("conversations", "messages")
PROMPTS, QUERIES = ("question", "prompt", "instruction"), ("query", "input")
REPLIES = ("answer", "response", "completion", "output")
PLAIN = ("texts", "caption", "history", *PROMPTS, *QUERIES, *REPLIES)
IMAGES, VIDEOS = ("images", "image"), ("videos", "video")
GROUPS = (TURNS + PLAIN, IMAGES, VIDEOS, ("system",), ("tools",), *PAIR_COLUMNS)
COLUMNS = tuple(name for group in GROUPS for name in group)
TAGS = {  # as a tag names it -> the role
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "assistant",
    "system_tag": "system",
}
DOCUMENT_SEPARATOR = "\n\n"  # between texts of a document without an image between them


@dataclass(frozen=True)
class RecordLayout:
    """Record as stored → record with the package's column names.

    columns   ours → the source's, such as {"conversations": "chat", "images": "pictures"}; if a column of one
              kind (turns, images, ...) is mapped, other columns of that kind are ignored
    tags      how turns are written, by LLaMA-Factory's names (`role_tag`, `content_tag`, `user_tag`, ...)

    Raises ValueError for a name that does not exist here.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.columns:
            if name not in COLUMNS:
                raise ValueError(f"data.columns: {name} is no column that is read{suggestion(name, COLUMNS)}")
        known = ("role_tag", "content_tag", *TAGS)
        for name in self.tags:
            if name not in known:
                raise ValueError(f"tags: {name} is no tag{suggestion(name, known)}")

    def __call__(self, record: Any) -> dict:
        """The record. Raises BadSample if it has no turns in any known layout."""
        if isinstance(record, list):
            record = {"messages": record}
        if not isinstance(record, dict):
            raise BadSample("bad_conversation", f"a record is a JSON object, this is {type(record).__name__}")
        record = self._renamed(record) if self.columns else record
        for names in (IMAGES, VIDEOS):
            sole(record, names)
        record = with_pair(record, TURNS, PROMPTS, QUERIES)
        turns = next((name for name in TURNS if record.get(name)), None)
        if turns is None:
            record = record | {"messages": _plain_turns(record)} | _media(record)
            return with_pair(record, TURNS, PROMPTS, QUERIES)
        tagged = [name for name in (turns, REJECTED_TURNS) if record.get(name)] if self.tags else ()
        return record | {name: self._tagged(record[name]) for name in tagged}

    def check_columns(self, present: list[str], place: str) -> None:
        """Raises ValueError if a mapped column is not among those `present`."""
        for ours, theirs in self.columns.items():
            if theirs not in present:
                raise ValueError(
                    f"data.columns: {place} has no column {theirs} to read as {ours}"
                    + suggestion(theirs, sorted(present))
                )

    def _renamed(self, record: dict) -> dict:
        hidden = {name for group in GROUPS if not self.columns.keys().isdisjoint(group) for name in group}
        hidden.update(self.columns.values())
        mapped = {ours: record[theirs] for ours, theirs in self.columns.items() if theirs in record}
        return {name: value for name, value in record.items() if name not in hidden} | mapped

    def _tagged(self, turns: Any) -> Any:
        if not isinstance(turns, list):
            return turns
        role_tag, content_tag = self.tags.get("role_tag", "from"), self.tags.get("content_tag", "value")
        roles = {self.tags[tag]: role for tag, role in TAGS.items() if tag in self.tags}

        def tagged(turn: Any) -> Any:
            if not (isinstance(turn, dict) and role_tag in turn and content_tag in turn):
                return turn  # `cook_chatml_sample` will judge it
            others = {name: value for name, value in turn.items() if name not in (role_tag, content_tag)}
            name = turn[role_tag]
            role = roles.get(name, name) if isinstance(name, str) else name
            return others | {"role": role, "content": turn[content_tag]}

        return [tagged(turn) for turn in turns]


def _plain_turns(record: dict) -> list[dict]:
    if isinstance(record.get("texts"), list):
        texts = record["texts"]
        if texts and all(isinstance(text, dict) for text in texts):
            return [turn for text in texts for turn in _exchange(text.get("user"), text.get("assistant"))]
        return _document(texts, record.get("images"))
    if "caption" in record:
        if not any(record.get(name) for name in IMAGES):
            raise BadSample("missing_media", "a caption without an image")
        return _exchange("", record["caption"])
    prompt, query, reply = (_first(record, names) for names in (PROMPTS, QUERIES, REPLIES))
    if prompt is None or reply is None:
        raise BadSample(
            "bad_conversation", f"no turns: none of {list(TURNS)} among {sorted(map(str, record))}"
        )
    if query:
        if not (isinstance(prompt, str) and isinstance(query, str)):
            raise BadSample("bad_conversation", "prompt and query are not both text")
        prompt = f"{prompt}\n{query}"
    pairs = record.get("history") or []
    if not (isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)):
        raise BadSample("bad_conversation", "history is not a list of [prompt, response] pairs")
    return [turn for pair in [*pairs, (prompt, reply)] for turn in _exchange(*pair)]


def _first(record: dict, names: tuple[str, ...]) -> Any:
    empty = next((name for name in names if record.get(name) is not None), None)
    return record.get(sole(record, names) or empty)


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


def _media(record: dict) -> dict:
    """The images of an interleaved document without the None entries; empty for other records."""
    if isinstance(record.get("texts"), list) and isinstance(record.get("images"), list):
        return {"images": [image for image in record["images"] if image is not None]}
    return {}
