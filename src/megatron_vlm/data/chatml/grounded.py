"""Records with boxes and without turns → conversations that ask for the boxes.

A record of `on_disk.coco` asks for all that is in its image. One in the manner of RefCOCO has a `bbox`, what
is said of it, and an image; it asks for each expression.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_vlm.data.accounts.bad_sample import BadSample
from megatron_vlm.data.on_disk.coco import NOTES, at_edges, corners, is_box, said_size
from megatron_vlm.data.on_disk.descriptions import damaged
from megatron_vlm.data.on_disk.fields import BOXES, EXPRESSIONS, PLAIN, PROMPTS, REPLIES, TURNS

IMAGES = ("images", "image", "image_path", "img_path", "file_name", "img_fn")
# As evaluations of several families ask for an expression, and as one cookbook asks for categories
ONE = "Please provide the bounding box coordinate of the region this sentence describes: {}"
ALL = "Locate every instance that belongs to the following categories: {}."
FEW = 10  # boxes, whose numbers do not tell in which form they are
SURE = 0.9
UNLIKELY = 0.75  # shares of boxes that can be corners
SHARES = "give its records bbox_type: norm1"
REMEDY = "say so with data.columns.bbox_xyxy=bbox or data.columns.bbox_xywh=bbox"


def asking(record: dict, question: str | None, has_corners: bool | None) -> dict:
    """A record with boxes and without turns as a conversation; any other as it is.

    question      what is asked, with {} for what is sought; None: ONE for expressions, ALL for categories
    has_corners   whether `bbox` is [x1, y1, x2, y2], and not [x, y, width, height]; None: nobody looked

    Raises BadSample if that is not known.
    """
    if any(name in record for name in (*TURNS, "conversation")) or _is_exchange(record):
        return record
    if (labels := _labels(record)) is not None:
        asked = (question or ALL).replace("{}", ", ".join(dict.fromkeys(labels)))
        return record | {"messages": _exchange(f"<image>{asked}", "<objects>")}
    expressions = _expressions(record)
    name = _box_name(record)
    image_name = next((name for name in IMAGES if record.get(name)), None)
    if not expressions or name is None or image_name is None or record.get("objects"):
        return record
    if name != BOXES[0]:
        has_corners = name == "bbox_xyxy"
    elif has_corners is None:
        raise BadSample("bad_conversation", f"nothing says what a bbox is; {REMEDY}")
    unit = record.get("bbox_type") or "real"
    box = (at_edges if has_corners else corners)(record[name], record if unit == "real" else {})
    asked = [(question or ONE).replace("{}", expression) for expression in expressions]
    turns = [
        turn
        for number, text in enumerate(asked)
        for turn in _exchange("<image>" * (not number) + text, "<bbox>")
    ]
    form = "[x1, y1, x2, y2]" if has_corners else "[x, y, width, height]"
    size = said_size(record) if unit == "real" else {"bbox_type": unit}
    image = record[image_name]
    expression_name = next(name for name in EXPRESSIONS if record.get(name))
    asked_with = {image_name, expression_name, name, "images", "image", "width", "height", "bbox_type"}
    return {key: value for key, value in record.items() if key not in asked_with} | {
        "messages": turns,
        "images": image if isinstance(image, list) else [image],
        "objects": {"bbox": [box] * len(expressions)} | size,
        NOTES: [f"have a bbox that is read as {form}"],
    }


def _is_exchange(record: Mapping[str, Any]) -> bool:
    """Whether the record has a question and an answer in text, so that its box is something else."""
    return all(any(isinstance(record.get(name), str) for name in names) for names in (PROMPTS, REPLIES))


def corners_in(records: Iterable[Mapping[str, Any]], place: Any) -> bool | None:
    """Whether the `bbox` of a source is [x1, y1, x2, y2], by its first records; None if none has one to read.

    Few boxes that are [x, y, width, height] are wider than their distance from the left edge and also higher
    than that from the top. Raises ValueError that names the `place` if the boxes do not tell.
    """
    boxed = [*_boxed(records)]
    if not boxed:
        return None
    boxes = [record[BOXES[0]] for record in boxed]
    if max(map(max, boxes)) <= 1 and not any(record.get("bbox_type") for record in boxed):
        raise damaged(place, "a bbox seems to be of shares of width and height", SHARES)
    share = sum(x1 < x2 and y1 < y2 for x1, y1, x2, y2 in boxes) / len(boxes)
    if UNLIKELY < share and (share < SURE or len(boxes) < FEW):
        raise damaged(place, "a bbox may be [x1, y1, x2, y2] or [x, y, width, height]", REMEDY)
    return share > UNLIKELY


def _boxed(records: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for record in records:
        if (
            _box_name(record) == BOXES[0]
            and _expressions(record)
            and not any(name in record for name in (*TURNS, "conversation"))
        ):
            yield record


def _box_name(record: Mapping[str, Any]) -> str | None:
    return next((name for name in BOXES if is_box(record.get(name))), None)


def _labels(record: dict) -> list[str] | None:
    """The names of all that is in an image of COCO's; None for any other record."""
    objects = record.get("objects")
    if not isinstance(objects, dict) or any(name in record for name in PLAIN):
        return None
    labels = objects.get("ref")
    is_list = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    return labels if is_list and labels else None


def _expressions(record: Mapping[str, Any]) -> list[str]:
    """The expressions for a record's box. In REFER's files each is an object with `sent`."""
    value = next((record[name] for name in EXPRESSIONS if record.get(name)), [])
    items = value if isinstance(value, list) else [value]
    expressions = [item.get("sent") if isinstance(item, dict) else item for item in items]
    return expressions if all(isinstance(text, str) for text in expressions) else []


def _exchange(question: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
