"""The stored formats: record of a webdataset shard → `ChatMLSample`, and a sample → the files of its record.

Ours: a part `json` with the conversation (an object or a list of turns) and the images as encoded files
`img000.jpg`, `img001.png`, ...; `"images": [part names]` in the object fixes their order. Videos are stored
likewise (`vid000.mp4`, ..., `"videos"`); an entry `{"frames": [part names], "fps": ...}` is a list of images.
Older: a part `json` and pickled lists of encoded images `jpgs` and of videos `videos`.

Energon must hand over raw bytes (`decoder = None`): its own decoder executes pickles.
"""

import io
import json
from collections import Counter
from typing import Any

from megatron.energon import Cooker, basic_sample_keys, stateless
from PIL import Image

from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import Columns, Conversation, listed, parse_record, record_id
from megatron_vlm.data.chatml.sample import ChatMLSample, make_sample
from megatron_vlm.data.media.images import call_with_timeout, decode_image
from megatron_vlm.data.media.videos import VideoRules, file_extension, plan_video
from megatron_vlm.data.on_disk.fields import COLUMNS, MEDIA
from megatron_vlm.data.on_disk.paths import FILMS, PICTURES
from megatron_vlm.data.shard_types import RULE, SampleRule, media_of, pickled_media, record_of

DECODE_SECONDS = DataConfig.decode_seconds
# Others: Pillow's format name in lower case
EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif", "JPEG2000": "jp2"}

SOURCE = "_source"  # subflavor: the name of one of several paths; fingerprints leave out what begins with _


@stateless
def cook_record(record: dict) -> ChatMLSample:
    """A record as a sample. A bad record does not raise: `problem` tells the encoder what is wrong with it.

    If there are several paths, the key says which one the record is from.
    """
    keys = basic_sample_keys(record)
    if source := (keys.get("__subflavors__") or {}).get(SOURCE):
        keys["__key__"] = f"{source}-{keys['__key__']}"
    try:
        stored = record_of_parts(record)
        keys["record_id"] = record_id(stored)
        conversation = parse_record(stored)
        images, videos = ([media_of(m, record) for m in conversation.media[kind]] for kind in MEDIA)
        return make_sample(conversation, images, videos, **keys)
    except BadSample as bad:
        problem = BadSample(bad.reason, bad.detail + _place(record))
    return ChatMLSample(problem=problem, **keys)


COOKERS = [Cooker(cook_record)]


def _place(record: dict) -> str:
    """The record's shard, if Energon tells it."""
    shards = [source.shard_name for source in record.get("__sources__") or () if source.shard_name]
    return f"; in shard {shards[0]}" if shards else ""


def _check_names(record: dict) -> None:
    """Energon joins neighbours of one key to one sample, in which parts of one name replace each other."""
    for source in record.get("__sources__") or ():
        times = Counter(source.file_names)
        if twice := [name for name, count in times.items() if count > 1]:
            raise BadSample("duplicate_key", f"{times[twice[0]]} files are called {twice[0]}")


def record_of_parts(record: dict) -> dict:
    """Return the record that the parts of a sample are, by the rule of its dataset if it has one."""
    _check_names(record)
    if rule := (record.get("__subflavors__") or {}).get(RULE):
        return record_of(record, SampleRule(**rule))
    return read_parts(record)


def read_parts(record: dict) -> dict:
    """Return the record in the parts of a sample as we store them: it has encoded media and not their names.

    A part `txt` without a `json` is the caption of its images, as img2dataset writes it.
    """
    if "json" not in record and "txt" in record:
        caption = {"caption": record["txt"].decode(errors="replace")}
        record = {name: part for name, part in record.items() if name != "txt"}
        record["json"] = json.dumps(caption).encode()
    if "json" not in record:
        parts = sorted(name for name in record if not name.startswith("__"))
        raise BadSample("bad_conversation", f"no part json among {parts}")
    document = Columns()(record["json"])
    if "jpgs" in record or "videos" in record:
        imgs, videos = (pickled_media(name, record.get(name)) for name in ("jpgs", "videos"))
    else:
        videos, frames = _videos(document, record)
        names = _names_of(document, "image", [n for n in _parts_ending(record, PICTURES) if n not in frames])
        imgs, videos = _with_files(names, record), _with_files(videos, record)
    fields = {name: value for name, value in document.items() if name not in ("image", "video")}
    read_parts = {"json", "jpgs", "videos", *_parts_ending(record, (*PICTURES, *FILMS))}
    unread = {name for name in record.keys() - read_parts if not name.startswith("__")}
    return fields | {"images": imgs, "videos": videos} | {f"part {name}": record[name] for name in unread}


def _names_of(document: dict, kind: str, stored: list[str]) -> list:
    """Return the names under `images` or `videos`; else under `image` or `video`, if they are `stored` parts.

    Other names there are of files that became these parts. Raises BadSample.
    """
    names = document.get(f"{kind}s")
    if names is None:
        names = listed(kind, document.get(kind))
        return names if sorted(map(str, names)) == stored else stored
    files = [name for name in listed(kind, names) if not _is_frames(name)]
    if set(map(str, files)) != set(stored):
        raise BadSample("missing_media", f"the record names {kind}s {names}, its shard holds {stored}")
    return listed(kind, names)


def _is_frames(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("frames"), list)


def _videos(document: dict, record: dict) -> tuple[list, set[str]]:
    """The names of the videos or lists of frames, and the parts that are frames of videos."""
    videos, frames = [], []
    for entry in _names_of(document, "video", _parts_ending(record, FILMS)):
        if _is_frames(entry):
            frames += entry["frames"]
            entry = entry | {"frames": [_media_part(record, name) for name in entry["frames"]]}
        videos.append(entry)
    return videos, set(frames)


def _with_files(media: list, record: dict) -> list:
    """Return the files of these parts; with their names if turns may say them, so that these are compared."""
    names = [name for name in media if isinstance(name, str)]
    has_names = len(media) > 1 and any("." in name and name.encode() in record["json"] for name in names)
    files = [name if _is_frames(name) else _media_part(record, name) for name in media]
    pairs = zip(media, files, strict=True)
    return [{"path": name, "bytes": file} if has_names and file is not name else file for name, file in pairs]


def _media_part(record: dict, name: Any) -> bytes:
    if not isinstance(name, str) or name.startswith("__") or name not in record:
        raise BadSample("missing_media", f"the record names {name}, which its shard does not hold")
    return record[name]


def _parts_ending(record: dict, extensions: tuple[str, ...]) -> list[str]:
    dotted = ((f".{name}".lower(), name) for name in record if not name.startswith("__"))
    return sorted(name for key, name in dotted if key.endswith(extensions))


# -- writing


def sample_parts(
    conversation: Conversation, images: list[bytes], videos: list[bytes | dict]
) -> dict[str, bytes]:
    """The files of a sample in a shard, by name, as `cook_record` reads them.

    Raises BadSample where every encoder would drop the sample.
    """
    if conversation.no_reply is not None:
        raise conversation.no_reply
    make_sample(conversation, images, videos, __key__="", __restore_key__=())
    files = {f"img{index:03d}.{_extension(image)}": image for index, image in enumerate(images)}
    described = conversation.stored() | ({"images": list(files)} if files else {})
    if columns := {name: value for name, value in conversation.columns.items() if _is_json(value)}:
        described[COLUMNS] = columns
    if videos:
        described["videos"] = [_store_video(f"vid{i:03d}", video, files) for i, video in enumerate(videos)]
    return {"json": _json(described), **files}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _json(document: dict) -> bytes:
    try:
        return json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise BadSample("bad_json", str(error)) from error


def _store_video(name: str, video: bytes | dict, files: dict[str, bytes]) -> str | dict:
    """The video's entry in the conversation; its files are added to `files`."""
    call_with_timeout(
        DECODE_SECONDS, plan_video, video, VideoRules(max_frames=2)
    )  # raises if no setting can read it
    if isinstance(video, bytes):
        name = f"{name}.{file_extension(video)}"
        files[name] = video
        return name
    frames = {f"{name}f{i:04d}.{_extension(frame)}": frame for i, frame in enumerate(video["frames"])}
    files.update(frames)
    return video | {"frames": list(frames)}


def _extension(image: bytes) -> str:
    call_with_timeout(DECODE_SECONDS, decode_image, image)
    format = Image.open(io.BytesIO(image)).format
    return EXTENSIONS.get(format, format.lower())
