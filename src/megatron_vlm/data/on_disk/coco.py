"""COCO's JSON of boxes (`images`, `annotations`, `categories`) → a record for each image, with `objects`."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

NOTES = "__notes__"  # the field for what is to be said about a record's source
LISTS = ("images", "annotations", "categories")
FIRST = 100  # annotations, one of which has a box
FAR = 1e9  # no number is as far from an image; NaN is not below it either
ID = int | float | str


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
    names = _by_id(categories, "name")
    by_id = _by_id(images, "file_name")
    boxes_of = defaultdict(list)
    left_out = Counter()
    for one in annotations:
        image, category = (
            table.get(one.get(key)) if isinstance(one.get(key), ID) else None
            for table, key in ((by_id, "image_id"), (names, "category_id"))
        )
        box = one.get("bbox")
        if image is None or category is None or not is_box(box):
            left_out["without a box, or an image and a category that no other has the id of"] += 1
        elif one.get("iscrowd"):
            left_out["of crowds (iscrowd)"] += 1
        elif not has_area(box := corners(box, image)):
            left_out["whose box has no area"] += 1
        else:
            boxes_of[image["id"]].append((category["name"], box))
    reasons = [f"{count} annotations {why}" for why, count in left_out.items()]
    reasons += [f"{count} images without boxes"] if (count := len(by_id) - len(boxes_of)) else []
    notes = {NOTES: [f"come from a file of which are left out: {', '.join(reasons)}"]} if reasons else {}
    for key, boxes in boxes_of.items():
        labels, numbers = zip(*boxes, strict=True)
        objects = {"ref": labels, "bbox": numbers} | said_size(by_id[key])
        yield {"id": key, "images": [by_id[key]["file_name"]], "objects": objects} | notes


def _by_id(entries: list[dict], field: str) -> dict[ID, dict]:
    """The entries with a text as `field` by their ids, without those that several have."""
    found = {}
    several = set()
    for entry in entries:
        if isinstance(number := entry.get("id"), ID) and isinstance(entry.get(field), str):
            if found.setdefault(number, entry)[field] != entry[field]:
                several.add(number)
    return {number: entry for number, entry in found.items() if number not in several}


def is_box(numbers: Any) -> bool:
    is_list = isinstance(numbers, list) and len(numbers) == 4
    return is_list and all(isinstance(number, int | float) and abs(number) < FAR for number in numbers)


def has_area(box: list[float]) -> bool:
    return box[0] < box[2] and box[1] < box[3]


def said_size(image: Mapping[str, Any]) -> dict[str, list[int]]:
    """{"size": [width, height]} of an image, if the entry says both."""
    size = [image.get("width"), image.get("height")]
    return {"size": size} if all(type(side) is int for side in size) else {}


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
