"""COCO's JSON of boxes (`images`, `annotations`, `categories`) → a record for each image, with `objects`."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

NOTES = "__notes__"  # the field for what is to be said about a record's source
LISTS = ("images", "annotations", "categories")
FIRST = 100  # annotations, one of which has a box


def coco_records(text: str) -> Iterator[dict] | None:
    """A record for each image with boxes; None for what is not COCO's. Time is linear in the annotations."""
    if not all(f'"{name}"' in text for name in (*LISTS, "bbox")):
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):  # who reads it value by value says what is wrong
        return None
    lists = [content.get(name) for name in LISTS] if isinstance(content, dict) else [None]
    if not all(isinstance(each, list) and each and all(isinstance(e, dict) for e in each) for each in lists):
        return None
    images, annotations, categories = lists
    has_boxes = any("bbox" in one for one in annotations[:FIRST])
    return _records(images, annotations, categories) if has_boxes else None


def _records(images: list[dict], annotations: list[dict], categories: list[dict]) -> Iterator[dict]:
    names = {category.get("id"): str(category.get("name")) for category in categories}
    by_id = {image.get("id"): image for image in images if isinstance(image.get("file_name"), str)}
    boxes_of = defaultdict(list)
    left_out = Counter()
    for one in annotations:
        image = by_id.get(one.get("image_id"))
        name = names.get(one.get("category_id"))
        box = one.get("bbox")
        if image is None or name is None or not is_box(box):
            left_out["without an image, a category or a box"] += 1
        elif one.get("iscrowd"):
            left_out["of crowds (iscrowd)"] += 1
        elif min(box[2:]) <= 0:
            left_out["whose box has no area"] += 1
        else:
            boxes_of[image["id"]].append((name, corners(box, image)))
    reasons = [f"{count} annotations {why}" for why, count in left_out.items()]
    reasons += [f"{count} images without boxes"] if (count := len(by_id) - len(boxes_of)) else []
    notes = {NOTES: [f"come from a file of which are left out: {', '.join(reasons)}"]} if reasons else {}
    for key, boxes in boxes_of.items():
        labels, numbers = zip(*boxes, strict=True)
        objects = {"ref": labels, "bbox": numbers}
        yield {"id": key, "images": [by_id[key]["file_name"]], "objects": objects} | notes


def is_box(numbers: Any) -> bool:
    is_list = isinstance(numbers, list) and len(numbers) == 4
    return is_list and all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)


def corners(box: list[float], image: Mapping[str, Any]) -> list[float]:
    """[x, y, width, height] as [x1, y1, x2, y2]."""
    x, y, width, height = box
    return at_edges([x, y, x + width, y + height], image)


def at_edges(box: list[float], image: Mapping[str, Any]) -> list[float]:
    """The box; one that ends less than a pixel beyond its image, as many of COCO do, ends at the edge."""
    ends = [image.get("width"), image.get("height")] * 2
    if not all(isinstance(end, int) and end > 0 for end in ends):
        return box
    inside = [min(max(number, 0), end) for number, end in zip(box, ends, strict=True)]
    return inside if max(abs(one - other) for one, other in zip(box, inside, strict=True)) < 1 else box
