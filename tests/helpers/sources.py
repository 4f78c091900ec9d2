"""Small sources on disk for the data tests: every image has its own colour, every reply its own number."""

import io
import json
from pathlib import Path

import datasets
from PIL import Image


def image_bytes(number: int, format: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (24, 16), (number * 7 % 256, number * 13 % 256, 90)).save(buffer, format)
    return buffer.getvalue()


def record(number: int) -> dict:
    """Every third record has two images, every fifth none."""
    images = 0 if number % 5 == 4 else 2 if number % 3 == 0 else 1
    question = "<image>" * images + "\nWhich number?"
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": f"number {number}"}]
    return {"images": [f"images/{number}-{i}.jpg" for i in range(images)], "conversations": turns}


def write_sharegpt(folder: Path, count: int, name: str = "data.jsonl", first: int = 0) -> Path:
    """A JSONL of `count` records and the images they name."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    records = [record(number) for number in range(first, first + count)]
    for item in records:
        for path in item["images"]:
            number, index = Path(path).stem.split("-")
            (folder / path).write_bytes(image_bytes(int(number) + 50 * int(index)))
    (folder / name).write_text("".join(json.dumps(item) + "\n" for item in records))
    return folder / name


def write_hf_folder(folder: Path, source: Path) -> Path:
    """The records of a JSONL file as a `datasets` folder with encoded images."""
    records = [json.loads(line) for line in source.read_text().splitlines()]
    columns = {
        "conversations": [item["conversations"] for item in records],
        "images": [
            [{"path": None, "bytes": (source.parent / path).read_bytes()} for path in item["images"]]
            for item in records
        ],
    }
    turn = {"from": datasets.Value("string"), "value": datasets.Value("string")}
    features = datasets.Features(
        {"conversations": datasets.List(turn), "images": datasets.List(datasets.Image(decode=False))}
    )
    rows = datasets.Dataset.from_dict(columns, features=features)
    rows.cast_column("images", datasets.List(datasets.Image())).save_to_disk(folder)
    return folder


def image(size, format="PNG", **options):
    out = io.BytesIO()
    Image.new("RGB", size, (10, 200, 30)).save(out, format, **options)
    return out.getvalue()
