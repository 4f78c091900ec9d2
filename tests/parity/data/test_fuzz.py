"""Whatever records hold: each is trained on or dropped for a reason, once; the good ones as if alone."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.energon import WorkerConfig, get_loader, get_val_dataset
from megatron.energon.errors import SkipSample
from pairs import pairwise
from PIL import Image
from prepared_shards import add_part
from samples import sample_of

from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.drops import REASONS
from megatron_vlm.data.chatml.record import is_blank, parse_record
from megatron_vlm.data.encode.chat_template import RESERVED as MARKS
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.load.energon import EnergonProvider, _raise_with_key
from megatron_vlm.data.load.hf import HFProvider
from megatron_vlm.data.load.lengths import MEASURED_AT_ONCE
from megatron_vlm.data.load.workers import close_loader
from megatron_vlm.data.prepare import META, _write_index

# ---- records of any kind, good and bad


TRAINED = "trained"
SEED = 0
MARKER = Path("/tmp") / "never_written_by_a_record"
TYPED = [
    "<image>",
    "<video>",
    "<start_of_turn>model\nhi<end_of_turn>",
    "<bos><eos><pad>",
    "<image_soft_token>",
]
VALUES = [None, True, 0, -1.5, 10**40, float("nan"), "", "text", [], [None], [[]], {}, {"a": 1}, [1, "a"]]


@dataclass
class Wild:
    """`turns` is any JSON value, or the bytes of what should be one."""

    kind: str
    turns: Any
    images: list[bytes] = field(default_factory=list)
    expected: str | None = None
    parts: dict[str, bytes] = field(default_factory=dict)  # of an Energon record, beside json and images
    paths: list[str] = field(default_factory=list)  # of a row, in the place of images


def wild_records() -> list[Wild]:
    """At least 300 broken records, shuffled, and a good one for every three of them."""
    rng = random.Random(SEED)
    broken = [*_images(rng), *_conversations(rng), *_placeholders(), *_texts(rng)]
    records = broken + [good(number) for number in range(len(broken) // 3)]
    rng.shuffle(records)
    return records


def good(number: int) -> Wild:
    images = number % 3
    turns = _turns("<image>" * images + f"Question {number}?", f"number {number}")
    return Wild("good", turns, [picture(number + i) for i in range(images)], TRAINED)


def picture(number: int = 0, size: tuple[int, int] = (24, 16), format: str = "JPEG", mode="RGB") -> bytes:
    image = Image.effect_noise(size, 50 + number % 50).convert("RGB").convert(mode)
    return _saved(image, format)


def _saved(image: Image.Image, format: str, **how: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **how)
    return buffer.getvalue()


def _turns(question: Any, answer: Any) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


# -- images


def _images(rng: random.Random) -> Iterator[Wild]:
    def one(kind: str, data: bytes, expected: str | None) -> Wild:
        return Wild(kind, _turns("<image>What?", "this"), [data], expected)

    for format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        whole = picture(format=format, size=(40, 30))
        yield one(f"half a {format}", whole[: len(whole) // 2], None if format in ("GIF",) else "image_*")
        yield one(f"beginning of a {format}", whole[:12], "image_*")
        for _ in range(8):
            cut = rng.randrange(1, len(whole))
            yield one(f"{format} cut at {cut}", whole[:cut], None)
            changed = bytearray(whole)
            for _ in range(rng.choice([1, 5, 50])):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            yield one(f"{format} with changed bytes", bytes(changed), None)
    yield one("no bytes", b"", None)  # a row without bytes has no image
    yield one("text as an image", b"<html>not found</html>", "image_undecodable")
    yield one("SVG", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image_undecodable")
    yield one("EPS", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", "image_undecodable")
    yield one("noise", rng.randbytes(3000), "image_undecodable")
    for side in (20_000, 60_000, 2**31 - 1):
        yield one(f"PNG bomb of {side}", _png_header(side, side), "image_*")
    yield one("PNG text bomb", _png_text_bomb(), None)
    yield one("1 x 5000", _saved(Image.new("RGB", (1, 5000)), "PNG"), None)  # its processor decides
    yield one("5000 x 1", _saved(Image.new("L", (5000, 1)), "JPEG"), None)
    yield one("1 x 1", _saved(Image.new("RGB", (1, 1)), "PNG"), TRAINED)
    yield one("3 x 2", _saved(Image.new("RGB", (3, 2)), "JPEG"), TRAINED)
    for mode, format in [("P", "PNG"), ("P", "GIF"), ("1", "PNG"), ("L", "JPEG"), ("LA", "PNG")]:
        yield one(f"{mode} {format}", picture(format=format, mode=mode), TRAINED)
    for mode, format in [
        ("CMYK", "JPEG"),
        ("CMYK", "TIFF"),
        ("RGBA", "PNG"),
        ("RGBA", "WEBP"),
        ("I;16", "PNG"),
    ]:
        image = Image.new(mode, (20, 20), 300 if mode == "I;16" else None)
        yield one(f"{mode} {format}", _saved(image, format), TRAINED)
    for value, expected in [(np.nan, "image_undecodable"), (np.inf, "image_undecodable"), (0.5, TRAINED)]:
        pixels = np.full((9, 9), value, np.float32)
        yield one(f"float TIFF of {value}", _saved(Image.fromarray(pixels), "TIFF"), expected)
    frames = [Image.new("P", (20, 20), n) for n in range(3)]
    yield one("animation", _saved(frames[0], "GIF", save_all=True, append_images=frames[1:]), TRAINED)
    for orientation in (0, 6, 9, 65535):
        exif = Image.Exif()
        exif[0x0112] = orientation
        yield one(
            f"orientation {orientation}", _saved(Image.new("RGB", (30, 20)), "JPEG", exif=exif), TRAINED
        )
    yield one(
        "bad EXIF", picture()[:20] + b"\xff\xe1\x00\x10Exif\0\0MM\0*\xff\xff\xff\xff" + picture()[20:], None
    )


def _png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _png_header(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _png_chunk(*chunk) for chunk in [(b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")]
    )


def _png_text_bomb() -> bytes:
    whole = picture(format="PNG")
    text = _png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(50_000_000)))
    return whole[:33] + text + whole[33:]


# -- conversations


def _conversations(rng: random.Random) -> Iterator[Wild]:
    for value in VALUES:
        yield Wild(f"record is {value!r}", value, expected="bad_conversation")
        yield Wild(f"turn is {value!r}", [value, *_turns("a", "b")], expected="bad_conversation")
        yield Wild(f"question is {value!r}", _turns(value, "b"), expected=None)
        yield Wild(f"answer is {value!r}", _turns("a", value), expected=None)
        yield Wild(
            f"role is {value!r}",
            [{"role": value, "content": "a"}, *_turns("a", "b")],
            expected="bad_conversation",
        )
        yield Wild(f"part is {value!r}", _turns([value], "b"), expected=None)
        yield Wild(f"text is {value!r}", _turns([{"type": "text", "text": value}], "b"), expected=None)
        yield Wild(f"type is {value!r}", _turns([{"type": value, "text": "a"}], "b"), expected=None)
        yield Wild(f"system is {value!r}", {"system": value, "messages": _turns("a", "b")}, expected=None)
        yield Wild(f"tools is {value!r}", {"tools": value, "messages": _turns("a", "b")}, expected=None)
        yield Wild(f"tool is {value!r}", {"tools": [value], "messages": _turns("a", "b")}, expected=None)
        calls = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": value}]
        yield Wild(f"tool_calls is {value!r}", calls, expected=None)
    for text in [
        b"",
        b"{",
        b"[1, 2",
        b"\xff\xfe{",
        b"\x80abc",
        b"nul",
        b'{"messages": }',
        b"\0",
        b"[" * 100_000,
    ]:
        yield Wild(f"bytes {text[:8]!r}", text, expected="bad_*")
    yield Wild("deep", b'{"a":' * 5_000 + b"1" + b"}" * 5_000, expected="bad_*")
    yield Wild("huge number", b'[{"role": "user", "content": ' + b"9" * 5_000 + b"}]", expected="bad_*")
    for nothing in ("", " ", "\n", "\u200b\t", None, [], [""], [{"type": "text", "text": " "}]):
        alone, system = _turns("a", nothing), {"role": "system", "content": nothing}
        yield Wild(f"empty reply {nothing!r}", alone, expected="no_trained_tokens")
        yield Wild(f"two empty replies {nothing!r}", alone * 2, expected="no_trained_tokens")
        yield Wild(f"empty reply {nothing!r} before another", alone + _turns("a", "b"), expected=TRAINED)
        yield Wild(f"empty reply {nothing!r} after another", _turns("a", "b") + alone, expected=TRAINED)
        yield Wild(f"empty system {nothing!r}", [system, *_turns("a", "b")], expected=TRAINED)
        yield Wild(f"empty question {nothing!r}", _turns(nothing, "b"), expected=TRAINED)
        document = [{"role": "document", "content": nothing}]
        yield Wild(f"empty document {nothing!r}", document, expected="no_trained_tokens")
    yield Wild("empty system alone", [{"role": "system", "content": ""}], expected="bad_conversation")
    image = [{"role": "document", "content": [{"type": "image"}]}]
    yield Wild("document of an image", image, [picture()], "no_trained_tokens")
    call = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "a", "arguments": {}}]},
    ]
    yield Wild("tool call that the template leaves out", call, expected="no_trained_tokens")
    yield Wild("no reply", [{"role": "user", "content": "a"}], expected="no_trained_tokens")
    yield Wild("reply alone", [{"role": "assistant", "content": "a"}], expected=None)
    yield Wild(
        "two users", [{"role": "user", "content": "a"}] * 2 + _turns("a", "b"), expected="template_error"
    )
    yield Wild("many turns", _turns("a", "b") * 200, expected="over_length")
    whole = json.dumps(_turns("<image>What?", "this")).encode()
    for _ in range(30):
        changed = bytearray(whole)
        for _ in range(rng.choice([1, 3])):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        yield Wild("changed JSON", bytes(changed), [picture()], None)


def _placeholders() -> Iterator[Wild]:
    for written in range(4):
        for held in range(4):
            right = written == held or written == 0
            turns = _turns("<image>" * written + "a", "b")
            images = [picture(n) for n in range(held)]
            yield Wild(f"{written} of {held}", turns, images, TRAINED if right else "placeholder_mismatch")
    typed = [{"type": "image"}, {"type": "text", "text": "what does <image> mean?"}]
    yield Wild("typed beside a part", _turns(typed, "b"), [picture()], TRAINED)
    yield Wild("typed by the assistant", _turns("a", "see <image>"), [], TRAINED)
    yield Wild("image by the assistant", _turns("a", [{"type": "image"}]), [picture()], "bad_conversation")
    yield Wild("a video that is not there", _turns("<video>a", "b"), [], "placeholder_mismatch")
    yield Wild(
        "images and no user", [{"role": "assistant", "content": "a"}], [picture()], "placeholder_mismatch"
    )


def _texts(rng: random.Random) -> Iterator[Wild]:
    yield Wild("10 MB question", _turns("word " * 2_000_000, "b"), expected="over_length")
    yield Wild("1 MB word", _turns("a", "x" * 1_000_000), expected="over_length")
    yield Wild(
        "lone surrogate",
        rb'[{"role":"user","content":"\ud800"},{"role":"assistant","content":"b"}]',
        expected="bad_*",
    )
    yield Wild(
        "lone surrogate in a reply",
        rb'[{"role":"user","content":"a"},{"role":"assistant","content":"\udfff"}]',
        expected="bad_*",
    )
    for character in map(chr, [*range(0, 32), 0x7F, 0x85, 0x200B, 0x202E, 0x2028, 0xFEFF, 0xFFFE, 0xFFFF]):
        yield Wild(
            f"character {ord(character):x}", _turns(f"a{character}b", f"{character}c"), expected=TRAINED
        )
    for character in map(chr, [0xF0000, 0xF0001, *range(0x10FF00, 0x10FF05)]):
        yield Wild(
            f"mark {ord(character):x}",
            _turns(f"<image>{character}", f"{character}c{character}"),
            [picture()],
            TRAINED,
        )
    for text in TYPED:
        yield Wild(f"typed {text}", _turns([{"type": "text", "text": text}], text), expected=None)
        yield Wild(
            f"typed {text} with an image",
            _turns([{"type": "image"}, {"type": "text", "text": text}], text),
            [picture()],
            None,
        )
    for _ in range(10):
        text = "".join(map(chr, rng.choices(range(1, 0xD800), k=40)))
        yield Wild("random text", _turns(text, text), expected=TRAINED)
    yield Wild("template code", _turns("{{ 1/0 }}{% raise %}{{ cycler.__init__ }}", "b"), expected=TRAINED)


# -- what only one source can hold


class _Touch:
    def __reduce__(self):
        return (MARKER.touch, ())


def energon_only() -> list[Wild]:
    turns = _turns("<image>a", "b")
    old = {"jpgs": pickle.dumps([picture()])}
    return [
        Wild("pickle of images", turns, [], TRAINED, old),
        Wild("pickle that runs code", turns, [], "unsafe_pickle", {"jpgs": pickle.dumps([_Touch()])}),
        Wild("videos that run code", turns, [], "unsafe_pickle", {"videos": pickle.dumps(_Touch())}),
        Wild(
            "os.system",
            turns,
            [],
            "unsafe_pickle",
            {"jpgs": b"cos\nsystem\n(S'touch %s'\ntR." % str(MARKER).encode()},
        ),
        Wild("half a pickle", turns, [], "unsafe_pickle", {"jpgs": old["jpgs"][:50]}),
        Wild("pickled text", turns, [], "unsafe_pickle", {"jpgs": pickle.dumps("image")}),
        Wild("pickled numbers", turns, [], "unsafe_pickle", {"jpgs": pickle.dumps([1, 2])}),
        Wild("pickle of no type", turns, [], None, {"videos": pickle.dumps(5)}),
        Wild("pickle of a videos dict", turns, [], None, {"videos": pickle.dumps({"a": b"b"})}),
        Wild("pickle beside", turns, [picture()], TRAINED, {"pickle": pickle.dumps(_Touch())}),
        Wild("torch file beside", turns, [picture()], TRAINED, {"pth": pickle.dumps(_Touch())}),
        Wild("named and not there", {"messages": turns, "images": ["img000.jpg"]}, [], "missing_media"),
        Wild("not named", {"messages": _turns("a", "b"), "images": []}, [picture()], "missing_media"),
        *(Wild(f"images are {v!r}", {"messages": turns, "images": v}, [picture()], None) for v in VALUES),
        Wild("named twice", {"messages": turns, "images": ["img000.jpg"] * 2}, [picture()], None),
        Wild("named as json", {"messages": turns, "images": ["json"]}, [picture()], "missing_media"),
        Wild("video", _turns("<video>a", "b"), [], "video_unsupported", {"mp4": b"video"}),
        Wild("no json", b"", [picture()], "bad_conversation"),
    ]


def write_energon(folder: Path, records: list[Wild]) -> Path:
    """Two shards; the key of a record is its number."""
    folder.mkdir(parents=True)
    half = len(records) // 2
    shards = {"val-0.tar": range(half), "val-1.tar": range(half, len(records))}
    for name, numbers in shards.items():
        with tarfile.open(folder / name, "w") as tar:
            for number in numbers:
                for part, content in _parts(records[number]).items():
                    add_part(tar, f"{number:06d}.{part}", content)
    _write_index(folder, folder / META, {"val": list(shards)})
    return folder


def _parts(record: Wild) -> dict[str, bytes]:
    json_part = record.turns if isinstance(record.turns, bytes) else json.dumps(record.turns).encode()
    parts = {} if record.kind == "no json" else {"json": json_part}
    images = {f"img{index:03d}.jpg": image for index, image in enumerate(record.images)}
    return parts | images | record.parts


def hf_only(folder: Path) -> list[Wild]:
    """Rows that name files; `folder` is what `write_hf` will be given."""
    outside = folder.parent / "outside.png"
    outside.write_bytes(picture(format="PNG"))
    folder.mkdir(parents=True)
    (folder / "inside.jpg").write_bytes(picture())
    (folder / "link.png").symlink_to(outside)
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "up").symlink_to("..")
    os.mkfifo(folder / "pipe.jpg")
    (folder / "to_pipe.jpg").symlink_to("pipe.jpg")
    paths = {"inside.jpg": TRAINED, "./up/../inside.jpg": None, "": None}
    names = [
        "missing.jpg",
        "../outside.png",
        "link.png",
        "loop.png",
        "up/outside.png",
        str(outside),
        ".",
        "a\0b",
        "pipe.jpg",
        "to_pipe.jpg",
        "pipe.jpg/a.lmdb::b",
    ]
    names += ["x" * 5000, "../" * 50 + "etc/passwd", "/etc/passwd", "/dev/zero", "http://localhost/a.png"]
    paths |= dict.fromkeys(names, "missing_media")
    turns = _turns("<image>a", "b")
    return [
        Wild(f"path {path[:20]!r}", turns, [], expected, paths=[path]) for path, expected in paths.items()
    ]


def write_hf(folder: Path, records: list[Wild]) -> Path:
    """A `datasets` folder; the key of a record is its number. Conversations are JSON text."""
    kept = [record for record in records if is_text(record.turns)]
    images = [
        [{"path": None, "bytes": data} for data in r.images] + [{"path": p, "bytes": None} for p in r.paths]
        for r in kept
    ]
    texts = [r.turns.decode() if isinstance(r.turns, bytes) else json.dumps(r.turns) for r in kept]
    file = {"path": datasets.Value("string"), "bytes": datasets.Value("binary")}  # as Image is stored
    features = datasets.Features({"conversations": datasets.Value("string"), "images": datasets.List(file)})
    rows = datasets.Dataset.from_dict({"conversations": texts, "images": images}, features=features)
    folder.mkdir(parents=True, exist_ok=True)
    rows.save_to_disk(folder / "rows")
    for file in (folder / "rows").iterdir():  # beside the images that rows name
        file.rename(folder / file.name)
    (folder / "rows").rmdir()
    return folder


def is_text(turns: Any) -> bool:
    """What Arrow can hold."""
    try:
        return not isinstance(turns, bytes) or turns.decode() is not None
    except UnicodeDecodeError:
        return False


# ---- the tests


SEQ_LENGTH = 256
ALONE = {"micro_batch_size": 1, "rank": 0, "world_size": 1}


def make_encoder(processor, packed: bool, max_pixels: int = 10_000):
    kind = PackingVLMTaskEncoder if packed else HFEncoderVLMTaskEncoder
    return kind(processor, DataConfig(seq_length=SEQ_LENGTH, max_pixels=max_pixels))


def energon_batches(path, encoder, packed: bool, rows: int, rank=0, world_size=1, num_workers=0):
    if not packed:
        provider = EnergonProvider(DataConfig(train_data_path=str(path), num_workers=0, max_drop_share=1.0))
        yield from provider.valid_loader(encoder, **ALONE)
        return
    workers = WorkerConfig(
        rank=rank, world_size=world_size, num_workers=num_workers, global_error_handler=_raise_with_key
    )
    options = {"worker_config": workers, "batch_size": 1, "packing_buffer_size": 50}
    loader = get_loader(get_val_dataset(path, split_part="val", task_encoder=encoder, **options))
    loader.pin_memory = False
    yield from loader
    close_loader(loader)


def hf_batches(path, encoder, packed: bool, rows: int, rank=0, world_size=1, num_workers=0):
    """One epoch, packed in one buffer."""
    provider = HFProvider(
        DataConfig(
            train_data_path=str(path),
            valid_data_path=str(path),
            num_workers=num_workers,
            max_drop_share=1.0,
            packing="stream" if packed else "none",
            packing_buffer_size=len(range(rank, rows, world_size)),
        )
    )
    if not packed:
        yield from provider.valid_loader(encoder, **ALONE)
        return
    place = {"rank": rank, "world_size": world_size}
    loader = provider.train_loader(encoder, seed=0, micro_batch_size=1, **place)
    while loader.state_dict()["place"][:2] == [0, 0]:  # where the buffer began
        yield next(loader)
    loader.close()


BATCHES = {"energon": energon_batches, "hf": hf_batches}
WRITE = {"energon": write_energon, "hf": write_hf}


def documents(batch: dict) -> dict[str, tuple]:
    """By key: ids, labels, positions and pixels of each document."""
    (keys,), numbers, found = batch["__key__"], batch["attention_mask"][0], {}
    images, image_token = 0, 16  # tokens of an image of the tiny Gemma3
    for number, key in enumerate(keys, start=1):
        inside = numbers == number
        parts = [batch[name][0][inside].tolist() for name in ("input_ids", "labels", "position_ids")]
        count = Counter(parts[0])[IMAGE_ID] // image_token
        pixels = batch["visual_inputs"].pixel_values[images : images + count] if count else torch.zeros(0)
        images += count
        assert key not in found
        found[key] = (*parts, pixels)
    return found


def epoch(source: str, path, encoder, packed: bool, rows: int) -> tuple[dict[int, tuple], Counter, dict]:
    """(documents by record, how often each record was trained, reasons by record)."""
    trained, times = {}, Counter()
    for batch in BATCHES[source](path, encoder, packed, rows):
        for key, document in documents(batch).items() if batch["__key__"] != [[]] else ():
            trained[int(key)] = document
            times[int(key)] += 1
    dropped: dict[int, list[str]] = {}
    for drop in encoder.drops.examples():
        dropped.setdefault(int(drop["key"]), []).append(drop["reason"])
    return trained, times, dropped


IMAGE_ID = None


@pytest.fixture(scope="module")
def written(processor, tmp_path_factory) -> dict[str, tuple]:
    """By source: (folder, records as numbered there, folder of the good ones alone, which these are)."""
    global IMAGE_ID
    IMAGE_ID = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    folder = tmp_path_factory.mktemp("wild")
    out = {}
    for source in ("energon", "hf"):
        path = folder / source / "all"
        (folder / source).mkdir()
        if source == "energon":
            records = wild_records() + energon_only()
        else:
            records = [r for r in wild_records() if is_text(r.turns)] + hf_only(path)
            # rows are measured so many at a time: none of the next epoch, which would count its drops again
            records += [good(n) for n in range(-len(records) % MEASURED_AT_ONCE)]
        numbers = [n for n, record in enumerate(records) if record.kind == "good"]
        alone = WRITE[source](folder / source / "good", [records[n] for n in numbers])
        out[source] = WRITE[source](path, records), records, alone, numbers
    return out


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each.values, marks=each.marks) for each in pairwise(["energon", "hf"], [False, True])
    ],
    ids=str,
)
def result(request, written, processor):
    source, packed = request.param
    path, records, alone, numbers = written[source]
    encoder = make_encoder(processor, packed)
    found = epoch(source, path, encoder, packed, len(records))
    expected, *_ = epoch(source, alone, make_encoder(processor, packed), packed, len(numbers))
    return records, numbers, found, expected, encoder.drops.summary()


def test_every_record_is_trained_or_dropped_and_once(result):
    records, numbers, (_, times, dropped), _, summary = result
    assert len(records) - len(numbers) >= 300 and len({record.kind for record in records}) > 200
    assert not MARKER.exists()  # no record ran code
    assert sorted([*times, *dropped]) == list(range(len(records)))
    assert set(times.values()) == {1} and {len(reasons) for reasons in dropped.values()} == {1}
    assert summary["encoded"] == len(times) and summary["dropped"] == len(dropped)
    assert {reason for reasons in dropped.values() for reason in reasons} <= set(REASONS)


def fits(record: Wild, outcome: str) -> bool:
    expected = record.expected or "*"
    return outcome == expected or (expected.endswith("*") and outcome.startswith(expected[:-1]))


def test_each_ends_as_it_should(result):
    records, _, (trained, _, dropped), _, _ = result
    outcomes = [TRAINED if n in trained else dropped[n][0] for n in range(len(records))]
    wrong = [(r.kind, r.expected, o) for r, o in zip(records, outcomes, strict=True) if not fits(r, o)]
    assert not wrong


def test_good_records_train_as_if_alone(result):
    _, numbers, (trained, *_), alone, _ = result
    assert len(alone) == len(numbers) > 100
    for place, number in enumerate(numbers):
        assert trained[number][:3] == alone[place][:3]
        assert torch.equal(trained[number][3], alone[place][3])


# -- any JSON

WORDS = [
    "user",
    "human",
    "assistant",
    "gpt",
    "system",
    "tool",
    "text",
    "image",
    "video",
    "<image>",
    "hello\n",
]
WORDS += ["<end_of_turn>\n<start_of_turn>model\nx", "<start_of_image>", "<bos>", " a <image> b ", "\u2581"]
NAMES = ["role", "from", "content", "value", "type", "text", "messages", "conversations", "system", "tools"]
TEXTS = st.sampled_from(WORDS) | st.text(max_size=20)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | TEXTS, inner, max_size=4)
    ),
    max_leaves=12,
)
PARTS = st.lists(
    TEXTS
    | st.fixed_dictionaries({"type": st.sampled_from(["text", "image", "video"])}, optional={"text": TEXTS})
    | ANYTHING,
    max_size=3,
)
CONTENT = TEXTS | PARTS | ANYTHING
EXTRA = {"optional": {"tool_calls": ANYTHING, "name": ANYTHING, "reasoning_content": TEXTS | ANYTHING}}
ASKED = st.fixed_dictionaries({"role": st.just("user"), "content": CONTENT}, **EXTRA)
ANSWERED = st.fixed_dictionaries({"from": st.just("gpt"), "value": TEXTS | CONTENT}, **EXTRA)
TALK = st.lists(st.tuples(ASKED, ANSWERED), min_size=1, max_size=3).map(
    lambda t: [m for pair in t for m in pair]
)
RECORD = st.fixed_dictionaries({"messages": TALK}, optional={"system": CONTENT, "tools": ANYTHING})
CONVERSATIONS = TALK | RECORD | ANYTHING | st.lists(ASKED | ANSWERED | ANYTHING, max_size=5)
MANY = settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def any_encoder(processor):
    encoder = make_encoder(processor, packed=False)
    yield encoder
    counts = encoder.drops.summary()
    assert counts["encoded"] >= 25 and counts["dropped"] >= 25, counts  # the property was tried on both


def said(messages: list[dict]) -> str:
    """What the tiny template writes of replies."""
    turns = [message["content"] for message in messages if message["role"] == "assistant"]
    texts = ["".join(p["text"].strip() for p in parts) for parts in turns]
    return "".join(text + "<end_of_turn>" for text in texts if not is_blank(MARKS.sub("", text)))


def letters(text: str) -> str:
    """Without what separates the pieces of a control token that a record typed, and spaces."""
    return "".join(text.replace("\u2581", " ").split())


@MANY
@given(conversation=CONVERSATIONS, images=st.integers(0, 2))
def test_any_json_trains_exactly_its_replies_or_is_dropped(any_encoder, conversation, images):
    text, imgs = json.dumps(conversation), [good(2).images[i] for i in range(images)]
    before = any_encoder.drops.summary()["dropped"]
    sample = sample_of(text, imgs, key="any")
    try:
        encoded = any_encoder.encode_sample(sample)
    except SkipSample:
        assert any_encoder.drops.summary()["dropped"] == before + 1
        return
    trained = encoded.labels[encoded.labels >= 0]
    messages = parse_record(text).messages
    assert letters(any_encoder.processor.tokenizer.decode(trained)) == letters(said(messages))
