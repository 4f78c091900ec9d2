"""Write records in the manner of RefCOCO as conversations that ask for the box of each expression.

    python examples/convert_refcoco.py refcoco.jsonl train.jsonl --boxes xywh

A record has a `bbox`, an image file and expressions. Boxes are [x, y, width, height] in some files,
and [x1, y1, x2, y2] in others: `--boxes` says which. The source is any file of JSON that the package reads.
"""

import argparse
import json
from pathlib import Path

from convert_coco import at_edges, size_of

from megatron_vlm.data.records.opening import open_table

IMAGES = ("images", "image", "image_path", "img_path", "file_name", "img_fn")
EXPRESSIONS = ("sentences", "sentence", "sents", "sent", "expressions", "expression", "phrase")
# As evaluations of LLaVA and InternVL ask
QUESTION = "Please provide the bounding box coordinate of the region this sentence describes: {}"


def conversation(record: dict, boxes: str, question: str = QUESTION) -> dict:
    """Return the record as a conversation. Raises KeyError for one without box, image or expression.

    Args:
        record: Has one of IMAGES, one of EXPRESSIONS, `bbox`, and perhaps `width`, `height` and `bbox_type`.
        boxes: "xywh", or "xyxy" for corners.
        question: With {} for the expression.
    """
    image = next((record[name] for name in IMAGES if record.get(name)), None)
    items = expressions(record)
    if image is None or not items:
        raise KeyError(f"a record has none of {', '.join(EXPRESSIONS if image else IMAGES)}")
    texts = [item["sent"] if isinstance(item, dict) else item for item in items]  # objects in REFER's files
    box = list(record["bbox"])
    if boxes == "xywh":
        box = [box[0], box[1], box[0] + box[2], box[1] + box[3]]
    is_real = record.get("bbox_type") in (None, "real")
    size = size_of(record) if is_real else {"bbox_type": record["bbox_type"]}
    turns = []
    for number, text in enumerate(texts):
        asked = "<image>" * (number == 0) + question.replace("{}", text)
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": "<bbox>"}]
    objects = {"bbox": [at_edges(box, record) if is_real else box] * len(texts)} | size
    return {"messages": turns, "images": image if isinstance(image, list) else [image], "objects": objects}


def expressions(record: dict) -> list:
    """Return the expressions of a record: texts, or objects in REFER's files; none if it has none."""
    values = next((record[name] for name in EXPRESSIONS if record.get(name)), [])
    return values if isinstance(values, list) else [values]


def unread_keys(record: dict) -> set[str]:
    """Return the keys of a record's expressions that `conversation` does not read."""
    return {key for item in expressions(record) if isinstance(item, dict) for key in item} - {"sent"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--boxes", required=True, choices=["xywh", "xyxy"])
    parser.add_argument("--question", default=QUESTION, help="with {} for the expression")
    options = parser.parse_args()
    table = open_table(options.source)
    unread: set[str] = set()
    with options.output.open("x") as file:
        for row in range(len(table)):
            record, _ = table.record(row)
            unread |= unread_keys(record)
            file.write(json.dumps(conversation(record, options.boxes, options.question)) + "\n")
    print(f"wrote {len(table)} conversations to {options.output}")
    if unread:
        print(f"not read in their expressions: {', '.join(sorted(unread))}")


if __name__ == "__main__":
    main()
