"""Write COCO's JSON of boxes (`images`, `annotations`, `categories`) as conversations, one for each image.

    python examples/convert_coco.py instances_train.json train.jsonl
    megatron-vlm train --train_data_path train.jsonl --media_dir train2017 ...

Each asks for all categories in an image; the answer has all of their boxes. Crowds (`iscrowd`), boxes without
an area and images without boxes are left out, and counted.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# As one cookbook of Qwen3-VL asks for categories
QUESTION = "Locate every instance that belongs to the following categories: {}."


def conversations(content: dict, question: str = QUESTION) -> tuple[list[dict], Counter]:
    """Return a record for each image with boxes, and how many annotations and images are left out, by reason.

    Raises ValueError for an annotation of no image or category, and for two that have one id.
    """
    images = _by_id(content["images"], "images")
    categories = _by_id(content["categories"], "categories")
    boxes_of: dict[Any, list] = defaultdict(list)
    left_out: Counter = Counter()
    for annotation in content["annotations"]:
        keys = annotation["image_id"], annotation["category_id"]
        if keys[0] not in images or keys[1] not in categories:
            raise ValueError(f"annotation {annotation.get('id')} is of no image or category of the file")
        x, y, width, height = annotation.get("bbox") or (0, 0, 0, 0)
        box = at_edges([x, y, x + width, y + height], images[keys[0]])
        if annotation.get("iscrowd"):
            left_out["annotations of crowds (iscrowd)"] += 1
        elif not (box[0] < box[2] and box[1] < box[3]):
            left_out["annotations whose box has no area"] += 1
        else:
            boxes_of[keys[0]].append((categories[keys[1]]["name"], box))
    left_out["images without boxes"] = len(images) - len(boxes_of)
    return [_conversation(images[key], boxes, question) for key, boxes in boxes_of.items()], +left_out


def _by_id(entries: list[dict], name: str) -> dict[Any, dict]:
    found = {entry["id"]: entry for entry in entries}
    if len(found) < len(entries):
        raise ValueError(f"two of the {name} have one id")
    return found


def _conversation(image: dict, boxes: list[tuple[str, list[float]]], question: str) -> dict:
    labels = [label for label, _ in boxes]
    objects = {"ref": labels, "bbox": [box for _, box in boxes]} | size_of(image)
    asked = question.replace("{}", ", ".join(dict.fromkeys(labels)))
    turns = [
        {"role": "user", "content": f"<image>{asked}"},
        {"role": "assistant", "content": "<objects>"},
    ]
    return {"id": image["id"], "messages": turns, "images": [image["file_name"]], "objects": objects}


def size_of(image: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return {"size": [width, height]} of an image, if the entry says both: a file of another is dropped."""
    size = [image.get("width"), image.get("height")]
    return {"size": size} if all(type(side) is int for side in size) else {}


def at_edges(box: list[float], image: Mapping[str, Any]) -> list[float]:
    """Return the box, cut at the image's edge if it ends less than a pixel beyond, as many of COCO do."""
    if not (size := size_of(image).get("size")):
        return box
    inside = [min(max(number, 0), end) for number, end in zip(box, size * 2, strict=True)]
    return inside if max(abs(a - b) for a, b in zip(box, inside, strict=True)) < 1 else box


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--question", default=QUESTION, help="with {} for the categories")
    options = parser.parse_args()
    records, left_out = conversations(json.loads(options.source.read_text()), options.question)
    with options.output.open("x") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    print(f"wrote {len(records)} conversations to {options.output}")
    for reason, count in left_out.items():
        print(f"left out: {count} {reason}")


if __name__ == "__main__":
    main()
