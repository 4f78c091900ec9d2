"""Tells what a file is by its first bytes: one table for rows, media, weights and files of tokenizers.

Who reads a file looks here if it cannot read it, or to learn how; the message is `{path} is {known}`.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from megatron_vlm.files import open_file

FIRST = 4096  # bytes that are enough


@dataclass(frozen=True)
class FileKind:
    """A kind of file, and what its owner can do; `str` has both: `a Git LFS pointer; run …`."""

    name: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


_UNPACK = "unpack it, and give the file that is in it"
_PICTURE = "name it under `images` in a record"
_CONVERT = "convert it to PNG or JPEG"
_FILM = "name it under `videos` in a record"
_SOUND = "sound is not read; take it out"
_ROWS = "give it as the file of records"
_AGAIN = "download the file itself again: this is what a server or a browser showed in its place"
_WEIGHTS = "give the model's safetensors files"
_TABLE = "write its rows as JSON Lines or parquet"

LFS = FileKind("lfs", "a Git LFS pointer, not the file", "run `git lfs pull` in that folder")
PAGE = FileKind("page", "an HTML or XML page", _AGAIN)
SVG = FileKind("svg", "an SVG drawing", _CONVERT)
HEIC = FileKind("heic", "a HEIC image", _CONVERT)
REFUSAL = FileKind("refusal", "what a server answered in place of a file", "download the file itself again")
PRINTED = FileKind(
    "printed", "a value as Python prints it", "write records with json.dumps, and images as files"
)
AVIF = FileKind("avif", "an AVIF image", _PICTURE)
MP4 = FileKind("mp4", "an MP4 or MOV video", _FILM)
MP3 = FileKind("mp3", "an MP3 sound", _SOUND)
OFFICE = FileKind("office", "an Office file (Excel, Word)", "save its table as CSV")
PICKLE = FileKind(
    "pickle", "a Python pickle, which can run any code and is not read", "save it as safetensors"
)
SAFETENSORS = FileKind("safetensors", "a safetensors file", _WEIGHTS)
EMPTY = FileKind("empty", "an empty file", "download or write it again")
ZEROS = FileKind("zeros", "a file that begins with zeros alone", "download it again: the download was cut")
UTF32, UTF16, UTF16_LE, UTF16_BE = (
    FileKind(encoding, f"text in {encoding[:6].upper()}", "save it as UTF-8")
    for encoding in ("utf-32", "utf-16", "utf-16-le", "utf-16-be")
)
OTHER_TEXT = FileKind(
    "text", "text that is not in UTF-8", "run `iconv -f cp1252 -t utf-8` on it, if it is in latin-1"
)
BINARY = FileKind("binary", "a binary file of no known kind", "download it again, or give another")

SIGNATURES = {  # the first bytes of each kind; `.` stands for any byte
    b"version https://git-lfs": LFS,
    b"PAR1": FileKind("parquet", "a parquet file", _ROWS),
    b"ARROW1": FileKind("arrow", "an Arrow file", _ROWS),
    b"\xff\xff\xff\xff..\0\0": FileKind("arrow", "an Arrow stream", _ROWS),
    b"\x1f\x8b": FileKind("gzip", "a gzip file", _UNPACK),
    b"\x28\xb5\x2f\xfd": FileKind("zstd", "a zstd file", _UNPACK),
    b"PK\x03\x04": FileKind("zip", "a zip archive", _UNPACK),
    b"BZh": FileKind("bz2", "a bzip2 file", _UNPACK),
    b"\xfd7zXZ\0": FileKind("xz", "an xz file", _UNPACK),
    b"\x04\x22\x4d\x18": FileKind("lz4", "an lz4 file", _UNPACK),
    b"\xff\x06\0\0sNaPpY": FileKind("snappy", "a Snappy file", _UNPACK),
    b"\x1f\x9d": FileKind("compress", "a file of `compress`", _UNPACK),
    b"Obj\x01": FileKind("avro", "an Avro file", _TABLE),
    b"ORC": FileKind("orc", "an ORC file", _TABLE),
    b"FEA1": FileKind("feather", "a Feather file of version 1", _TABLE),
    b"\x89HDF\r\n\x1a\n": FileKind("hdf5", "an HDF5 file", _TABLE),
    b"MATLAB 5.0 MAT-file": FileKind("mat", "a MATLAB file", _TABLE),
    b"." * 8 + b"DUCK": FileKind("duckdb", "a DuckDB database", _TABLE),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": OFFICE,
    b"SQLite format 3\0": FileKind("sqlite", "an SQLite database", "write its table as CSV"),
    b"\x93NUMPY": FileKind("npy", "a NumPy array", "name pictures as files, in records"),
    b"7z\xbc\xaf\x27\x1c": FileKind("7z", "a 7z archive", _UNPACK),
    b"Rar!\x1a\x07": FileKind("rar", "a RAR archive", _UNPACK),
    b"." * 257 + b"ustar": FileKind("tar", "a tar archive", _UNPACK),
    b"\x89PNG\r\n\x1a\n": FileKind("png", "a PNG image", _PICTURE),
    b"\xff\xd8\xff": FileKind("jpeg", "a JPEG image", _PICTURE),
    b"BM....\0\0\0\0": FileKind("bmp", "a BMP image", _PICTURE),
    b"GIF8": FileKind("gif", "a GIF image", _PICTURE),
    b"RIFF....WEBP": FileKind("webp", "a WebP image", _PICTURE),
    b"II*\0": FileKind("tiff", "a TIFF image", _PICTURE),
    b"MM\0*": FileKind("tiff", "a TIFF image", _PICTURE),
    b"\0\0\0\x0cJXL ": FileKind("jxl", "a JPEG XL image", _CONVERT),
    b"\0\0\0\x0cjP  ": FileKind("jp2", "a JPEG 2000 image", _CONVERT),
    b"8BPS": FileKind("psd", "a Photoshop image", _CONVERT),
    b"v/1\x01": FileKind("exr", "an OpenEXR image", _CONVERT),
    b"." * 128 + b"DICM": FileKind("dicom", "a DICOM image", _CONVERT),
    b"%PDF": FileKind("pdf", "a PDF", "convert its pages to PNG or JPEG"),
    **dict.fromkeys((b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2"), MP3),
    b"OggS": FileKind("ogg", "an Ogg sound or video", "convert a video to MP4; sound is not read"),
    b"fLaC": FileKind("flac", "a FLAC sound", _SOUND),
    b"RIFF....WAVE": FileKind("wav", "a WAV sound", _SOUND),
    b"RIFF....AVI ": FileKind("avi", "an AVI video", _FILM),
    b"\x1a\x45\xdf\xa3": FileKind("mkv", "a WebM or Matroska video", _FILM),
    b"GGUF": FileKind("gguf", "a GGUF file of llama.cpp", _WEIGHTS),
    **{bytes([0x80, protocol]): PICKLE for protocol in range(2, 6)},
    b".......\0{": SAFETENSORS,
    **dict.fromkeys((b"\xff\xfe\0\0", b"\0\0\xfe\xff"), UTF32),
    b"\xff\xfe": UTF16,
    b"\xfe\xff": UTF16,
}
_PATTERNS = [
    (re.compile(re.escape(magic).replace(rb"\.", b"."), re.DOTALL), known)
    for magic, known in SIGNATURES.items()
]
_LETTERS = {known for magic, known in SIGNATURES.items() if magic.isalnum()}  # with which a text may begin
_PAGES = (b"<!doctype", b"<html", b"<head", b"<body", b"<?xml", b"<!--", b"<script", b"<error>")
_REFUSALS = re.compile(  # all that there is, of raw.githubusercontent.com, huggingface.co and curl
    rb"[45]\d\d[: -]{1,3}[a-z' ]+|(\w+ )?not found|forbidden|unauthorized|bad gateway|access denied"
    rb"|access to .{1,200}|invalid (credentials|username) .{1,80}|curl: .{1,200}"
)
_PRINTED = re.compile(
    rb"""[\[(]*(b['"]|\{'|\['|<[\w.]+ .*\bat 0x)|(tensor|array|image|dataset)\([\[{<]""", re.DOTALL
)
_CONTROL = bytes(set(range(32)) - set(b"\t\n\v\f\r\x1b"))


def what_is(first: bytes) -> FileKind | None:
    """The kind of a file that begins with these bytes (FIRST, or all of it); None for text in UTF-8."""
    first = first[:FIRST]
    if not first or not first.strip(b"\0"):
        return ZEROS if first else EMPTY
    known = next((known for pattern, known in _PATTERNS if pattern.match(first)), None)
    if known is not None and not (known in _LETTERS and _of_text(first) is None):
        return _of_zip(first) if known.name == "zip" else known
    return _of_boxes(first) if first[4:8] == b"ftyp" else _of_text(first)


def is_medium(known: FileKind | None) -> bool:
    """Whether it is an image or a video of a kind that is read."""
    return known is not None and known.remedy in (_PICTURE, _FILM)


def unreadable(data: bytes, wanted: str) -> str:
    """A message about the bytes of an `image` or a `video` that no decoder knows."""
    known = what_is(data)
    if known is not None and known.remedy == {"image": _PICTURE, "video": _FILM}[wanted]:
        return f"{len(data)} bytes, {known.what} by its beginning, and damaged; replace it"
    return f"it is {known or 'text; replace it'}"


def what_file(path: str | Path) -> FileKind | None:
    """The kind of a file, as `what_is`. Raises NotAFile and OSError as `files.open_file`."""
    with open_file(path) as file:
        return what_is(file.read(FIRST))


def _of_zip(first: bytes) -> FileKind:
    """A zip archive, or what is written as one, by the name of its first file."""
    name = first[30 : 30 + int.from_bytes(first[26:28], "little")]
    if name in (b"[Content_Types].xml", b"_rels/.rels"):
        return OFFICE
    return PICKLE if name.endswith(b"/data.pkl") else SIGNATURES[b"PK\x03\x04"]


def _of_boxes(first: bytes) -> FileKind:
    """HEIC, AVIF, MP4 and MOV begin with a box that names what may read them (ISO 14496-12, `ftyp`)."""
    brands = first[8 : int.from_bytes(first[:4])]
    if b"avif" in brands or b"avis" in brands:
        return AVIF
    if any(brand in brands for brand in (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1")):
        return HEIC
    return MP4


def _of_text(first: bytes) -> FileKind | None:
    start = first.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if start.startswith((b"<svg", b"<?xml")) and b"<svg" in start:
        return SVG
    if start.startswith(_PAGES):
        return PAGE
    if _REFUSALS.fullmatch(start.rstrip(b"\r\n .!")):
        return REFUSAL
    if _PRINTED.match(start):
        return PRINTED
    if b"\0" in first:  # half of each character of ASCII, if it is UTF-16
        return _of_utf16(first, UTF16_BE if first[:1] == b"\0" else UTF16_LE)
    if _has_control(first):
        return BINARY
    text = first.decode(errors="replace")
    wrong = text[:-1].count("\ufffd")  # the last character may be cut
    few = 2 * wrong <= len(text) - len(text.encode("ascii", "ignore"))
    return None if few else OTHER_TEXT  # a few characters in another encoding are damage


def _of_utf16(first: bytes, known: FileKind) -> FileKind:
    """UTF-16 without a byte order mark, if all of it is text that begins in ASCII."""
    text = first[: len(first) // 2 * 2].decode(known.name, errors="replace")
    is_text = text[:1].isascii() and "\0" not in text and "\ufffd" not in text[:-1]
    return BINARY if not is_text or _has_control(text.encode(errors="replace")) else known


def _has_control(text: bytes) -> bool:
    """Whether over a fiftieth are control characters."""
    return 50 * (len(text) - len(text.translate(None, _CONTROL))) > len(text)
