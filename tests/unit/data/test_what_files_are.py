"""What a file of rows or media is decides how it is read, not what it is called."""

import base64
import bz2
import csv
import gzip
import io
import json
import lzma
import zipfile
from pathlib import Path

import datasets
import pandas as pd
import pyarrow as pa
import pytest
from samples import clean, read_record
from sources import image_bytes, record, write_sharegpt

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import Columns, parse_record
from megatron_vlm.data.load.start_notes import first_notes, sample_sources
from megatron_vlm.data.media.files import read_media
from megatron_vlm.data.records import hub
from megatron_vlm.data.records.opening import open_table
from megatron_vlm.data.records.streams import StreamedRows

RECORDS = [record(number) for number in range(7)]
PLAIN = [{"question": f"où, {n}?\n<image>", "answer": '"là"', "image": f"images/{n}-0.jpg"} for n in range(4)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in RECORDS)


def zipped(text: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("inside/rows.txt", text)
    return buffer.getvalue()


def zipped_by_macos(text: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("rows.jsonl", text)
        for name in ("__MACOSX/._rows.jsonl", "._rows.jsonl", ".DS_Store"):
            archive.writestr(name, b"\0\5\x16\7")
    return buffer.getvalue()


def table(delimiter: str, newline: str = "\r\n") -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(PLAIN[0]), delimiter=delimiter, lineterminator=newline)
    writer.writeheader()
    writer.writerows(PLAIN)
    return text.getvalue()


def parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(pa.Table.from_pylist(PLAIN), sink)
    return sink.getvalue().to_pybytes()


UTF_8 = LINES.encode()
FORMS = {
    "lines": UTF_8,
    "windows' line ends": UTF_8.replace(b"\n", b"\r\n"),
    "byte order mark": b"\xef\xbb\xbf" + UTF_8,
    "array": json.dumps(RECORDS).encode(),
    "pretty array": b"\n" + json.dumps(RECORDS, indent=2).encode(),
    "an array of lines": b"[\n" + b",\n".join(UTF_8.splitlines()) + b"\n]",
    "commas first": b"[" + b"\n,".join(UTF_8.splitlines()) + b"]\n",
    "data": json.dumps({"version": 1, "data": RECORDS}).encode(),
    "a list under a key": json.dumps({"info": {"by": "me"}, "annotations": RECORDS}, indent=1).encode(),
    "gzip": gzip.compress(UTF_8),
    "zstd": pa.compress(UTF_8, "zstd", asbytes=True),
    "bz2": bz2.compress(UTF_8),
    "xz": lzma.compress(UTF_8),
    "zip": zipped(UTF_8),
    "zip of macOS": zipped_by_macos(UTF_8),
}
TABLES = {
    "csv": table(",").encode(),
    "tsv": table("\t").encode(),
    "semicolons": table(";").encode("utf-8-sig"),
    "bars": table("|").encode(),
    "csv with old line ends": table(",", "\r").encode(),
    "parquet": parquet(),
    "zip of parquet": zipped(parquet()),
    "csv with an index of pandas": pd.DataFrame(PLAIN).to_csv().encode(),
}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows"])
@pytest.mark.parametrize("form", FORMS)
def test_records_are_read_from_any_form_under_any_name(tmp_path, form, name):
    write_sharegpt(tmp_path, len(RECORDS))
    (tmp_path / name).write_bytes(FORMS[form])
    rows = open_table(tmp_path / name)
    assert [rows.record(index) for index in range(len(rows))] == [(row, tmp_path) for row in RECORDS]
    assert rows.origin(0)[0] == str(tmp_path / name)
    assert len({rows.key(index) for index in range(len(rows))}) == len(rows)
    again = open_table(tmp_path / name)
    assert (again.fingerprint(), again.identity) == (rows.fingerprint(), rows.identity)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
@pytest.mark.parametrize("form", TABLES)
def test_tables_are_read_from_any_form_under_any_name(tmp_path, form, name):
    write_sharegpt(tmp_path, len(RECORDS))
    (tmp_path / name).write_bytes(TABLES[form])
    rows = open_table(tmp_path / name)
    found = [rows.record(index) for index in range(len(rows))]
    assert [root for _, root in found] == [tmp_path] * len(PLAIN)
    for (read, root), row in zip(found, PLAIN, strict=True):
        conversation, images, _ = read_record(read, root)
        assert conversation == parse_record(row).stored()
        assert images == [(tmp_path / row["image"]).read_bytes()]


def test_a_changed_packed_file_is_unpacked_again(tmp_path):
    for count in (2, 3):
        (tmp_path / "rows.gz").write_bytes(gzip.compress(b"".join(UTF_8.splitlines(True)[:count])))
        assert len(open_table(tmp_path / "rows.gz")) == count


def test_one_line_of_turns_is_a_record_and_a_damaged_line_a_bad_one(tmp_path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "one.jsonl").write_text(json.dumps(turns))
    assert open_table(tmp_path / "one.jsonl").record(0)[0] == {"messages": turns}
    (tmp_path / "two.jsonl").write_text(f"{json.dumps(turns)}\n" * 2)
    assert open_table(tmp_path / "two.jsonl").record(1)[0] == {"messages": turns}
    (tmp_path / "cut.jsonl").write_bytes(
        UTF_8[9:] + '{"question": "où?"}\n'.encode("latin-1") + "{}çà".encode()
    )
    rows = open_table(tmp_path / "cut.jsonl")
    assert [rows.record(index)[0] for index in range(1, 7)] == RECORDS[1:]
    for index, said in ((0, "Extra data|Expecting"), (7, "can't decode byte")):
        with pytest.raises(BadSample, match=f"bad_json.*(?:{said})"):
            rows.record(index)


CARDS = {  # what a dataset's card says -> how it is refused
    "data_files: [{split: a, path: [rows.jsonl, ../x.jsonl]}]": "names the data .*x.jsonl, outside of",
    "data_files: 'zip://rows.jsonl::rows.zip'": "rows.zip",
    "data_dir: ..": "outside of|cannot be read",
    "data_files: 'l*.jsonl'": "names the data .*link.jsonl, outside of",
}


@pytest.mark.parametrize("card", CARDS)
def test_a_dataset_reads_no_other_whatever_its_card_says(tmp_path, card):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: a\n  {card}\n---\nWords.\n")
    for file in (folder / "rows.jsonl", tmp_path / "x.jsonl"):
        file.write_text('{"messages": "x"}\n')
    (folder / "link.jsonl").symlink_to(tmp_path / "x.jsonl")
    for read in (hub.open_stream, hub.open_rows):
        with pytest.raises(ValueError, match=CARDS[card]):
            read(folder)


def test_a_saved_dataset_reads_no_other(tmp_path):
    rows = datasets.Dataset.from_dict({"a": [1]})
    rows.save_to_disk(tmp_path / "other")
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["../other"]}')
    with pytest.raises(ValueError, match="saved: names the data .*other.*, outside of"):
        hub.open_rows(tmp_path / "saved")


def test_a_folder_of_tables_is_refused_and_one_that_cannot_be_read_is_named(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, text, words in (
        ("rows.csv", b"question,answer\nNA,007\n", "holds tables, .* would guess .*; give the files"),
        ("rows.jsonl", UTF_8[:-9], "cannot be read .JSON parse error"),
    ):
        (folder / name).write_bytes(text)
        with pytest.raises(ValueError, match=f"{folder}: {words}"):
            open_table(folder)
        with pytest.raises(ValueError, match=f"{folder}: {words}"):
            list(StreamedRows.open(str(folder), Columns()).records(0))
        (folder / name).unlink()


@pytest.mark.parametrize(
    "content, said",
    [
        (LINES.replace("Which", "Où").encode("latin-1"), "can't decode byte .*; write .* in UTF-8"),
        (LINES.encode("utf-32"), "is text in UTF-16 or UTF-32; save it as UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer, .*; run `git lfs pull`"),
        (gzip.compress(UTF_8)[:-40], "cannot be read .*; unpack it yourself, or download it"),
        (b"", "is an empty file; download or write"),
        (b"text\nhello there\n", "its first line, 'text', is neither JSON nor a header of two col"),
        (json.dumps(RECORDS[0], indent=1).encode() * 2, "Extra data: line"),
        (
            json.dumps({"train": RECORDS, "test": RECORDS}).encode(),
            "an object with 2 lists of records .train, test., and one is read",
        ),
    ],
)
def test_what_cannot_be_rows_is_named(tmp_path, content, said):
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=f"rows.jsonl.*(?:{said})"):
        open_table(tmp_path / "rows.jsonl")


# -- media


def test_a_path_is_a_file_under_just_this_name(tmp_path):
    for name in ("root/Im/A.PNG", "out/b.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "root/out").symlink_to(tmp_path / "out")
    assert read_media(f"{tmp_path}/root/Im/A.PNG", tmp_path / "root") == b"root/Im/A.PNG"
    for name, said in (
        ("im/A.PNG", "No such file"),
        (" Im/A.PNG", "No such file"),
        ("out/b.png", f"outside of .*; set data.media_dir={tmp_path}, or copy"),
        (f"{tmp_path}/out/b.png", "outside of .*; set data.media_dir=/ and give absolute paths"),
    ):
        with pytest.raises(BadSample, match=f"missing_media.*{said}"):
            read_media(name, tmp_path / "root")
    assert (
        read_media("b.png", tmp_path / "out")
        == read_media(f"{tmp_path}/out/b.png", Path("/"))
        == b"out/b.png"
    )


def test_base64_is_read_without_its_head(tmp_path):
    for content in (image_bytes(1), image_bytes(1, "PNG"), image_bytes(1, "WEBP"), image_bytes(1, "BMP")):
        assert read_media(base64.b64encode(content).decode(), tmp_path) == content
        assert read_media(base64.encodebytes(content).decode(), tmp_path) == content
    with pytest.raises(BadSample, match="missing_media"):
        read_media(base64.b64encode(content).decode()[:-3] + "!", tmp_path)


@pytest.mark.parametrize("write", [pa.ipc.new_file, pa.parquet.ParquetWriter], ids=["arrow", "parquet"])
def test_a_column_that_is_not_read_is_named_and_not_its_file_blamed(tmp_path, write):
    of_kinds = {"map": pa.map_(pa.string(), pa.int64()), "list_view": pa.list_view(pa.string())}
    tables = {
        f"cannot be read .*{name}<": pa.table({"answer": ["a"], "tags": pa.array([[]], kind)})
        for name, kind in of_kinds.items()
    }
    tables["cannot be read .*answer"] = pa.table([pa.array(["a"])] * 2, names=["answer", "answer"])
    for number, (said, table) in enumerate(tables.items()):
        with write(tmp_path / f"{number}", table.schema) as file:
            file.write_table(table)
        with pytest.raises(ValueError, match=f"{number}: {said}"):
            open_table(tmp_path / f"{number}")


def told(folder: Path, rows: list[dict]) -> list[str]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(first_notes(sample_sources(open_table(folder / "rows.jsonl"))))


def test_placeholders_that_stay_text_are_counted_and_said_once(tmp_path):
    plain = {"question": "q", "answer": "a"}
    read, left = told(
        tmp_path,
        [
            *(plain | {"question": "<img> q", "image": "0.png"} for _ in range(2)),
            plain | {"question": "<img><img> q", "image": "0.png"},
            plain | {"question": "what is <img> in HTML?"},
        ],
    )
    assert "2 of 4 records looked at write <img> beside their images, which is read as <image>" in read
    assert "1 of 4 records looked at write <img> beside their images, which stays text; write <image>" in left


def test_places_that_no_image_takes_are_said(tmp_path):
    plain = {"question": "q", "answer": "a"}
    tagged = [{"type": "image"}, {"type": "text", "text": "<image>q"}]
    notes = told(
        tmp_path,
        [
            plain | {"question": "![a cat](a.png) q"},
            plain | {"question": "<img src='a.jpg'> q"},
            plain | {"answer": "<image>", "image": "0.png"},
            {"messages": [{"role": "user", "content": tagged}], "image": "0.png"},
            plain | {"question": "![](…) and <img> in HTML"},
            plain | {"answer": "<bbox>", "image": "0.png"},
        ],
    )
    said = [note.partition("looked at ")[2] for note in notes]
    assert said == [
        "write ![](…) and list no images, which stays text; name the files under images",
        "write <img …> and list no images, which stays text; name the files under images",
        "have <image> in a text beside other places of their images; it stays text",
        "write <bbox> and have no objects; it stays text",
    ]
    assert "2 of 6" in notes[2]


def test_a_key_that_stands_twice_is_no_record(tmp_path):
    record = '{"question": "q", "answer": "a", "image": "a.png", "image": "b.png"}'
    (tmp_path / "a.jsonl").write_text(f'{{"question": "q", "answer": "a"}}\n{record}\n')
    with pytest.raises(BadSample, match="bad_json: the key 'image' stands twice in an object"):
        open_table(tmp_path / "a.jsonl").record(1)
    (tmp_path / "a.json").write_text(f"[{record}]")
    with pytest.raises(ValueError, match="the key 'image' stands twice in an object; leave one out"):
        open_table(tmp_path / "a.json")


def test_answers_of_a_table_with_an_empty_answer_are_read(tmp_path):
    (tmp_path / "a.csv").write_text('question,answer,answers\nq,a,\nq,,"[""b"", ""c"", ""c""]"\n')
    table = open_table(tmp_path / "a.csv")
    replies = [parse_record(table.record(row)[0]).messages[1]["content"] for row in (0, 1)]
    assert replies == [[{"type": "text", "text": "a"}], [{"type": "text", "text": "c"}]]


# -- placeholders of other models


def parts(text: str, images: int, videos: int = 0, reply: str = "a") -> list[str]:
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
    messages, _, _ = clean({"messages": turns}, images, videos)
    assert messages[1]["content"] == [{"type": "text", "text": reply}]
    return [part.get("text", part["type"].upper()) for part in messages[0]["content"]]


@pytest.mark.parametrize(
    "spelling",
    [
        *(
            "<img>",
            "<img></img>",
            "<img>a</img>",
            "<|image_pad|>",
            "<|vision_start|><|image_pad|><|vision_end|>",
        ),
        *(
            "[IMG]",
            "<image_placeholder>",
            "<start_of_image>",
            "<|image|>",
            "<ImageHere>",
            "<IMG_CONTEXT>",
            "<Image>",
        ),
        *("<|begin_of_image|><|image|><|end_of_image|>", "<img><IMG_CONTEXT></img>", "[image]", "<image/>"),
    ],
)
def test_a_placeholder_of_another_model_is_the_images(spelling):
    assert parts(f"a {spelling}\nb{spelling}", 2) == ["a ", "IMAGE", "\nb", "IMAGE"]
    assert parts(f"a {spelling}\nb", 0) == [f"a {spelling}\nb"]  # no images: text
    assert parts(f"a {spelling}\nb", 2) == ["IMAGE", "IMAGE", f"a {spelling}\nb"]
    assert parts(f"<image>a {spelling}", 1, reply=spelling) == ["IMAGE", f"a {spelling}"]
    with pytest.raises(BadSample, match="1 placeholders for 2 images, and 1 .*text beside"):
        parts(f"<image>a {spelling}", 2)


def test_numbered_placeholders_and_those_of_videos():
    assert parts("<|image_1|>a<|image_2|>", 2) == ["IMAGE", "a", "IMAGE"]
    assert parts("<image 0> or <image 1>?", 2) == ["IMAGE", " or ", "IMAGE", "?"]
    assert parts("<image_2>a<image_1>", 2) == ["IMAGE", "IMAGE", "<image_2>a<image_1>"]
    assert parts("<img>a[IMG]", 2) == ["IMAGE", "IMAGE", "<img>a[IMG]"]
    assert parts("<|video_pad|>a<img>", 1, 1) == ["VIDEO", "a", "IMAGE"]
    assert parts("<image>a<vid>", 1, 1) == ["IMAGE", "a", "VIDEO"]
