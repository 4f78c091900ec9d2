"""Files are known by their first bytes; they are written by the libraries that write them, where one does."""

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import zipfile

import av
import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from places import ROOT
from safetensors.numpy import save

from megatron_vlm.signatures import SIGNATURES, what_file, what_is

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
TABLE = pa.table({"question": ["what?"], "answer": ["that"]})


def image(format: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, format)
    return buffer.getvalue()


def film(format: str, codec: str, audio: bool = False) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=format) as container:
        stream = container.add_stream(codec, rate=16000 if audio else 8)
        if audio:
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1600), np.int16), format="s16", layout="mono")
            frame.sample_rate = 16000
        else:
            stream.width = stream.height = 32
            stream.pix_fmt = "yuv420p"
            frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8))
        container.mux([*stream.encode(frame), *stream.encode()])
    return buffer.getvalue()


def arrow(new: object) -> bytes:
    sink = pa.BufferOutputStream()
    with new(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)
    return sink.getvalue().to_pybytes()


def written(write: object, *arguments: object) -> bytes:
    buffer = io.BytesIO()
    write(buffer, *arguments)
    return buffer.getvalue()


def archive(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, "{}")
    return buffer.getvalue()


def tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        file.addfile(tarfile.TarInfo("rows.jsonl"))
    return buffer.getvalue()


def boxes(brands: bytes) -> bytes:
    return (
        (16 + len(brands) - 4).to_bytes(4) + b"ftyp" + brands[:4] + bytes(4) + brands[4:] + bytes(range(99))
    )


TEXT = '{"question": "où?", "answer": "là, au café"}\n'
FILES = {
    "lfs": [POINTER],
    "page": [
        *(b"\n<!DOCTYPE html><html>", b"<HTML>"),
        *(b"<?xml version='1.0'?><Error><Code>AccessDenied</Code>", b"<Error><Code>NoSuchKey</Code></Error>"),
    ],
    "refusal": [
        *(b"404: Not Found", b"Entry not found", b"Access denied.\n", b"502 Bad Gateway\r\n", b"Not Found"),
        *(b"Access to model a/b is restricted.", b"curl: (22) The requested URL returned error: 404"),
    ],
    "printed": [
        *(str(value).encode() for value in (b"\xff\xd8'", [{"question": "q"}], ["a.png", "b.png"], {"a": 1})),
        *(repr(value).encode() for value in (Image.new("RGB", (8, 8)), torch.zeros(2), np.zeros((2, 2)))),
    ],
    "svg": [b"<svg xmlns=''>", b"<?xml version='1.0'?>\n<svg>"],
    "heic": [boxes(b"heic" + b"mif1heic"), boxes(b"mif1" + b"mif1heic")],
    "avif": [image("AVIF")],
    "jp2": [image("JPEG2000")],
    "jxl": [b"\0\0\0\x0cJXL \r\n\x87\n"],
    "dicom": [bytes(128) + b"DICM\2\0"],
    "png": [image("PNG")],
    "jpeg": [image("JPEG")],
    "gif": [image("GIF")],
    "webp": [image("WEBP")],
    "tiff": [image("TIFF")],
    "pdf": [image("PDF")],
    "mp4": [film("mp4", "mpeg4"), film("mov", "mpeg4")],
    "avi": [film("avi", "mpeg4")],
    "mkv": [film("matroska", "mpeg4")],
    "mp3": [film("mp3", "mp3", audio=True), b"\xff\xfb\x90\x00" + bytes(99)],
    "wav": [film("wav", "pcm_s16le", audio=True)],
    "parquet": [written(lambda sink: pa.parquet.write_table(TABLE, sink))],
    "arrow": [arrow(pa.ipc.new_file), arrow(pa.ipc.new_stream)],
    "gzip": [gzip.compress(TEXT.encode())],
    "zstd": [pa.compress(TEXT.encode(), "zstd", asbytes=True)],
    "bz2": [bz2.compress(TEXT.encode())],
    "xz": [lzma.compress(TEXT.encode())],
    "zip": [archive("rows.jsonl")],
    "office": [archive("[Content_Types].xml"), b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99)],
    "lz4": [pa.compress(TEXT.encode(), "lz4", asbytes=True)],
    "snappy": [b"\xff\x06\0\0sNaPpY"],
    "compress": [b"\x1f\x9d\x90a"],
    "orc": [written(lambda sink: pa.orc.write_table(TABLE, sink))],
    "avro": [b"Obj\1\4\x14avro.codec\x08null"],
    "hdf5": [b"\x89HDF\r\n\x1a\n\0\0"],
    "feather": [b"FEA1\0\0"],
    "tar": [tar()],
    "7z": [b"7z\xbc\xaf\x27\x1c\0\4"],
    "pickle": [
        *(pickle.dumps([1], protocol) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)),
        written(lambda sink: torch.save({"a": torch.zeros(2)}, sink)),
    ],
    "safetensors": [save({"a": np.zeros(2)})],
    "gguf": [b"GGUF\3\0\0\0"],
    "empty": [b""],
    "zeros": [bytes(4096)],
    "utf-16": [TEXT.encode("utf-16"), b"\xfe\xff" + TEXT.encode("utf-16-be")],
    "text": [
        *(TEXT.encode("latin-1"), "“où?” – là, au café, dit-il.".encode("cp1252") * 200),
        *("你好，世界。".encode("gb18030"), "Что здесь?".encode("cp1251"), "何ですか".encode("shift_jis")),
    ],
    "binary": [bytes(range(1, 200)), b"\1\2\3"],
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_known_by_its_first_bytes(name, tmp_path):
    for number, content in enumerate(FILES[name]):
        (tmp_path / f"{number}.bin").write_bytes(content)
        known = what_file(tmp_path / f"{number}.bin")
        assert known is not None and known.name == name, (number, content[:40], known)
        assert "; " in str(known)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "ORCID,answer\n1,2\n",
            "ID3,answer\n",
            "404,what\n",
            "{{'<s>'}}",
            "[[1]]",
            "not found, she said. Why?",
        ),
        TEXT,
        "[\n  {}\n]",
        "a,b\r1,2\r",
        "﻿{}",
        "a\tb\n",
        "plain words",
        "你好，世界。" * 900,
        "x" + "é" * 4000,
    ],
)
def test_text_in_utf_8_is_no_signature(text):
    for cut in (len(text.encode()), 4096, 4095, 4094):
        assert what_is(text.encode()[:cut]) is None


def test_sources_of_this_package_are_text():
    for file in (ROOT / "src").rglob("*.py"):
        assert not file.stat().st_size or what_file(file) is None, file


def test_no_signature_hides_another():
    for magic, known in SIGNATURES.items():
        content = magic.replace(b".", b"\1") + bytes(range(64))
        assert what_is(content) == known or known.name == "zip", magic
