"""Shards that others prepared: the parts of their samples as records, by the type that a dataset.yaml names.

Energon opens every dataset as crude shards here, so that nothing in a dataset.yaml runs. What it says of a
sample becomes a `SampleRule`, which travels with the sample (Energon's subflavors); `record_of` reads the
parts by it. The user may name code of theirs instead: `data.cooker` or `data.sample_loader`.
"""

import io
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from string import ascii_uppercase
from typing import Any

from megatron.energon.errors import SampleException
from megatron.energon.flavors.webdataset.field_access import field_access, split_field_access
from PIL import Image

from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import Columns, decoded, of_users_code, unique_keys
from megatron_vlm.data.media.files import image_file
from megatron_vlm.data.on_disk.paths import PICTURES

RULE = "rule"  # the subflavor that holds a `SampleRule`
TEXTS = ("txt", "text", "transcript")  # the parts that Energon decodes as text, as numbers, as JSON
NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")
DOCUMENTS = ("json", "jsn")
DAMAGED_PICKLE_ERRORS = (  # what the pickle module's documentation and its opcodes raise
    *(pickle.UnpicklingError, EOFError, ValueError, LookupError, AttributeError, TypeError),
    *(ArithmeticError, MemoryError),
)
KEYS = {"__module__", "__class__", "sample_type", "field_map", "sample_loader", "part_filter", "subflavors"}
# of a dataset.yaml, for Energon's decoder, which is not used: media are decoded here
DECODING = {
    *("auto_decode", "image_decode", "ignore_decoder_errors", "av_decode", "video_decode_audio"),
    *("guess_content", "decoder"),
}
LETTER_ASKED = "Answer with the option's letter from the given choices directly."


@dataclass(frozen=True)
class SampleRule:
    """How the parts of a sample become a record.

    sample_type    a key of `RECORDS`, such as VQASample; "" for a part `json` with a record, and its media
    fields         of the sample type: where each is, as in a dataset.yaml's field_map
    columns        of a record: where each is, as in `data.columns`, in parts or in the part `json`
    sample_loader  FILE.py:NAME of the user's that gives the fields of the sample type
    cooker         FILE.py:NAME of the user's that gives the record
    """

    sample_type: str = ""
    fields: dict[str, str] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    sample_loader: str | None = None
    cooker: str | None = None

    @classmethod
    def of(cls, description: Mapping[str, Any], data: DataConfig) -> "SampleRule":
        """The rule of a dataset.yaml, with what the settings say in its place.

        Raises ValueError if neither says how its samples are read.
        """
        if data.cooker:
            return cls(cooker=data.cooker)
        if data.columns:
            Columns(data.columns)  # which refuses names that do not exist
            return cls(columns=dict(data.columns))
        if unknown := sorted(set(description) - KEYS - DECODING):
            raise ValueError(f"sets {unknown}, and what is read is {', '.join(sorted(KEYS))}")
        sample_type = description.get("sample_type") or description
        if "__module__" in sample_type and "__class__" not in sample_type:
            raise ValueError("names a module and no class")
        kind = str(sample_type.get("__class__") or "CrudeSample").replace("Webdataset", "Sample")
        fields = description.get("field_map") or {}
        code = description.get("sample_loader") or description.get("part_filter")
        if kind not in ("CrudeSample", *RECORDS):
            kinds = ", ".join(RECORDS)
            raise ValueError(f"its samples are of the type {kind}, and those read are {kinds}")
        if kind != "CrudeSample" and data.sample_loader:
            return cls(kind, sample_loader=data.sample_loader)
        if isinstance(code, str):
            raise ValueError(f"its samples are made by {code}, code that is not run")
        if kind not in ("CrudeSample", "ChatMLSample") and not fields:
            raise ValueError(f"it has no field_map for {kind}")
        return cls("" if kind == "CrudeSample" else kind, {str(key): str(at) for key, at in fields.items()})

    def stored(self) -> dict[str, Any]:
        """The rule as a subflavor; empty for shards that need none."""
        return {} if self == SampleRule() else {RULE: asdict(self)}


OWN_CODE = (
    "look at it, and name it as data.sample_loader=FILE.py:NAME, or give data.cooker=FILE.py:NAME of your own"
)


def record_of(parts: Mapping[str, Any], rule: SampleRule) -> dict:
    """The record of a sample's `parts`, with encoded media in it or names of parts.

    Raises BadSample for parts that the rule does not fit, and ConfigError for what fails in the user's code.
    """
    values = {name: _decoded(name, part) for name, part in parts.items() if not name.startswith("__")}
    if rule.cooker:
        return of_users_code("data.cooker", rule.cooker, values)
    if rule.sample_type and rule.sample_loader:
        fields = of_users_code("data.sample_loader", rule.sample_loader, values)
        return RECORDS[rule.sample_type](fields, values)
    if rule.sample_type:
        places = rule.fields.items()
        return RECORDS[rule.sample_type]({name: _at(values, place) for name, place in places}, values)
    document = next((decoded(values[name]) for name in DOCUMENTS if name in values), {})
    document = document if isinstance(document, dict) else {"messages": document}
    mapped = {name: _at(document | values, place) for name, place in rule.columns.items()}
    mapped_names = set(rule.columns.values())
    return Columns()({name: value for name, value in document.items() if name not in mapped_names} | mapped)


def media_of(entry: Any, parts: Mapping[str, Any]) -> Any:
    """The medium that a record names: the file in that part, or what the record holds itself."""
    if isinstance(entry, Image.Image):
        return image_file(entry)
    if isinstance(entry, dict) and "bytes" in entry:  # beside the name of its part
        return entry["bytes"]
    if isinstance(entry, str):
        if entry not in parts:
            raise BadSample("missing_media", f"the record names {entry}, which its shard does not hold")
        return parts[entry]
    return entry


def _decoded(name: str, part: Any) -> Any:
    """A part as Energon's decoder gives it, but media and pickles as they lie in the shard."""
    kind = name.rpartition(".")[2].lower()
    if not isinstance(part, bytes) or kind not in (*TEXTS, *NUMBERS, *DOCUMENTS):
        return part
    try:
        text = part.decode()
        if kind in DOCUMENTS:
            return json.loads(text, object_pairs_hook=unique_keys)
        return int(text) if kind in NUMBERS else text
    except ValueError as error:
        raise BadSample("bad_json", f"part {name}: {error}") from error


def _at(values: Mapping[str, Any], place: str) -> Any:
    try:
        return field_access(values, split_field_access(place))
    except (SampleException, LookupError, ValueError) as error:
        parts = ", ".join(sorted(values))
        raise BadSample("bad_conversation", f"no {place} among its parts {parts}") from error


class PlainUnpickler(pickle.Unpickler):
    """Builds bytes, text, numbers, lists, tuples, dicts and sets; refuses any class or function."""

    def find_class(self, module: str, name: str) -> Any:
        raise BadSample("unsafe_pickle", f"the pickle asks for {module}.{name}")


def pickled_media(name: str, part: bytes | None) -> list:
    """Return the list of media that a part is, in plain data alone. Raises BadSample."""
    if part is None:
        return []
    try:
        media = PlainUnpickler(io.BytesIO(part)).load()
    except DAMAGED_PICKLE_ERRORS as error:
        raise BadSample("unsafe_pickle", f"part {name}: {type(error).__name__}: {error}") from error
    is_list = isinstance(media, list | tuple | None)
    if not is_list or (name != "videos" and not all(isinstance(image, bytes) for image in media or ())):
        raise BadSample("unsafe_pickle", f"part {name} is not a list of encoded files")
    return list(media or [])


# -- the sample types of Energon


def _vqa(fields: dict, medium: str) -> dict:
    answers = fields.get("answers")
    answers = answers if isinstance(answers, list) else [answers]
    weights = fields.get("answer_weights")
    if isinstance(weights, list) and len(weights) == len(answers):
        answers = [max(zip(weights, answers, strict=True), key=lambda pair: pair[0])[1]]
    return {f"{medium}s": [fields[medium]], "question": fields.get("context"), "answers": answers}


def _multiple_choice(fields: dict, values: dict) -> dict:
    choices = fields.get("choices") or []
    options = [f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False)]
    question = "\n".join([str(fields.get("context")), *options, LETTER_ASKED])
    right = int(fields.get("correct_choice_idx") or 0)
    if not 0 <= right < len(options):
        raise BadSample("bad_conversation", f"correct_choice_idx {right} of {len(choices)} choices")
    return {"images": [fields["image"]], "question": question, "answer": ascii_uppercase[right]}


def _interleaved(fields: dict, values: dict) -> dict:
    """Texts and images in turn; an image is the name of a part, or its file."""
    texts, images = [], []
    for item in fields["sequence"]:
        is_image = not isinstance(item, str) or (item in values and item.lower().endswith(PICTURES))
        texts.append(None if is_image else item)
        images.append(item if is_image else None)
    return {"texts": texts, "images": images}


def _chatml(fields: dict, values: dict) -> dict:
    """The conversation, and lists of media that are pickled in Bridge's and Megatron-LM's shards."""
    conversation = decoded(fields.get("conversation", values.get("json")))
    document = conversation if isinstance(conversation, dict) else {"messages": conversation}
    for ours, part, name in (("images", "jpgs", "imgs"), ("videos", "videos", "videos")):
        media = fields.get(name, values.get(part))
        document[ours] = pickled_media(name, media) if isinstance(media, bytes) else media or []
    return document


# (its fields, all parts) -> a record of docs/reference/records.md
RECORDS: dict[str, Callable[[dict, dict], dict]] = {
    "VQASample": lambda fields, _: _vqa(fields, "image"),
    "VidQASample": lambda fields, _: _vqa(fields, "video"),
    "MultiChoiceVQASample": _multiple_choice,
    "CaptioningSample": lambda fields, _: {"images": [fields["image"]], "caption": fields.get("caption")},
    "OCRSample": lambda fields, _: {"images": [fields["image"]], "caption": fields.get("text")},
    "InterleavedSample": _interleaved,
    "TextSample": lambda fields, _: {"text": fields.get("text")},
    "ChatMLSample": _chatml,
}
