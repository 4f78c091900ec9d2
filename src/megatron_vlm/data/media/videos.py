"""A video, as a file or as a list of encoded frames → the frames that the model sees and when each was shown.

Which frames are chosen depends on the times at which frames are shown. These times come from the file's
packets, which are read but not decoded; so `plan_video` knows what `decode_video` will return. PyAV is
imported where a file is opened: models, which know plans alone, do without it.
"""

from __future__ import annotations

import bisect
import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.media.images import decode_pixels, exit_if_abandoned, image_size, target_size
from megatron_vlm.inputs import explain

# Containers of one video each: no playlists, which would open other files, and no single images.
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"
MAX_FRAME_PIXELS = 40_000_000  # of a frame, before it is scaled; 8K has 33 million
MAX_VIDEO_PIXELS = 400_000_000  # of all chosen frames, after; as RGB 1.2 GB
MOST_SECONDS = 10_000_000  # from 0, for the timestamps of a list of frames: 115 days
MIN_SIDE = 4  # processors would take 3 rows or columns for colours
# A file that ends this long before the time in its header was cut.
MISSING_SECONDS, MISSING_SHARE = 0.5, 0.05
SAME_TIME = 1e-6  # seconds; times of containers are rounded
# With one of these keys a record chooses the frames of a video, see `Clip`.
CHOOSES_FRAMES = ("video_start", "video_end", "fps", "nframes", "min_frames", "max_frames")
MICROSECONDS = 1_000_000  # of a second: FFmpeg's unit for the times of a container


@dataclass(frozen=True)
class VideoRules:
    """Which frames of a video are taken, and how large they become.

    fps          frames for each second of the video, if it has as many
    min_frames, max_frames   of a video; a video with fewer than `min_frames` gives all its frames
    min_pixels, max_pixels   of a frame; others are scaled, aspect kept, before the processor sees them
    total_pixels  most pixels of all frames, in units of one temporal patch as qwen-vl-utils counts them
    size         (width, height) that frames are resized to; then the limits on pixels are not used
    multiple     the tower's temporal patch: the last frame is repeated until it divides the number of frames
    clip         what the record says of its frames; None: frames are chosen at even times by the rules above
    """

    fps: float = DataConfig.video_fps
    min_frames: int = 4
    max_frames: int = DataConfig.video_max_frames
    max_pixels: int | None = DataConfig.video_max_pixels
    multiple: int = 2
    min_pixels: int | None = None
    total_pixels: int | None = None
    size: tuple[int, int] | None = None
    clip: Clip | None = None


@dataclass(frozen=True)
class Clip:
    """Which frames a record asks for, in the words of qwen-vl-utils, and chosen as it chooses them.

    video_start, video_end   seconds between which frames are taken; None: all of the video
    nframes      the number of frames; None: `VideoRules.fps`, `min_frames` and `max_frames` decide
    """

    video_start: float | None = None
    video_end: float | None = None
    nframes: int | None = None


def rules_of_video(limits: dict, rules: VideoRules, is_list: bool) -> VideoRules:
    """Return the run's rules with what a record names of one video.

    The run limits frames and pixels; within that, frames are chosen as qwen-vl-utils chooses them. A list of
    frames that has `sample_fps` is not sampled again.

    Args:
        limits: as `data.chatml.record.limits_of` returns it.
        rules: the run's.
        is_list: the video is a list of frames.
    """
    # The record may ask for less than the run allows, and not for more
    most_pixels = min(limits.get("max_pixels", math.inf), rules.max_pixels or math.inf)
    changed = {
        "max_frames": min(limits.get("max_frames", math.inf), rules.max_frames),
        "max_pixels": None if most_pixels == math.inf else most_pixels,
        "min_frames": limits.get("min_frames", rules.min_frames),
        "min_pixels": limits.get("min_pixels"),
        "total_pixels": limits.get("total_pixels"),
        "fps": limits.get("fps", rules.fps),
    }
    if is_list and "sample_fps" in limits:
        changed["fps"] = limits["sample_fps"]
    if "resized_width" in limits:
        size = (limits["resized_width"], limits["resized_height"])
        changed["size"] = target_size(size, changed["max_pixels"], None)
    # With one of these keys, frames are chosen as qwen-vl-utils does, not at even times
    if any(name in limits for name in CHOOSES_FRAMES):
        clip = {name: limits.get(name) for name in ("video_start", "video_end", "nframes")}
        changed["clip"] = Clip(**clip)
    return replace(rules, **changed)


@dataclass
class VideoPlan:
    """A video as `decode_video` returns it, without the pixels."""

    times: list[float]  # seconds from the first frame of the video to each chosen one
    size: tuple[int, int]  # width, height
    interval: float  # mean seconds between chosen frames, repetitions aside

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata with which HF processors place frame i at `times[i]` seconds.

        They take `frames_indices / fps` as a frame's time, and `total_num_frames / fps / len(frames_indices)`
        as the time between frames.
        """
        seconds = self.interval * len(self.times)
        return {"fps": 1.0, "frames_indices": list(self.times), "total_num_frames": seconds}


Frames = tuple[np.ndarray, VideoPlan]  # of a video, as `decode_video` gives them


def video_options(plans: list[VideoPlan]) -> dict[str, Any]:
    """The options that tell an HF processor that frames are already chosen, and when each is shown."""
    return {
        "do_sample_frames": False,
        "video_metadata": [plan.metadata for plan in plans],
        "input_data_format": "channels_last",
    }


def outputs_of_plan(video_processor: Any, plan: VideoPlan) -> dict[str, Any]:
    """An HF video processor's outputs for frames without memory: its own rules apply to their shape."""
    width, height = plan.size
    frames = torch.empty((len(plan.times), 3, height, width), dtype=torch.uint8, device="meta")
    options = video_options([plan]) | {"input_data_format": "channels_first", "return_metadata": True}
    return video_processor([frames], return_tensors="pt", **options)


def plan_video(video: Any, rules: VideoRules) -> VideoPlan:
    """Times and size of the frames that `decode_video` returns. Raises BadSample as that does, except for
    damage that only the pixels show."""
    return _plan(_open(video, rules), rules)[1]


def decode_video(video: Any, rules: VideoRules) -> Frames:
    """The chosen frames, (T, H, W, 3) uint8 RGB, and their times.

    `video` is an encoded file, a list of encoded images, or `{"frames": [...]}` with such a list and either
    `fps` or `timestamps` in seconds; with neither, the list is taken to be shown at `rules.fps`. Frames of a
    file are turned as its display matrix says. The i-th of `n` chosen frames is on screen at i/n of the
    duration. Raises BadSample; the size is checked before any but the first frame is decoded.
    """
    source = _open(video, rules)
    chosen, plan = _plan(source, rules)
    width, height = plan.size
    frames = np.empty((len(plan.times), height, width, 3), np.uint8)
    for place, picture in source.pictures(chosen):
        if picture.shape[1::-1] != plan.size:
            picture = Image.fromarray(picture).resize(plan.size, Image.Resampling.BICUBIC)
        frames[place] = picture
    frames[len(chosen) :] = frames[len(chosen) - 1]
    return frames, plan


def file_extension(data: bytes) -> str:
    """The extension of an encoded video, from its first bytes: mp4, mkv (also for WebM) or avi."""
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "mkv"
    return "avi" if data[:4] == b"RIFF" and data[8:12] == b"AVI " else "mp4"


def choose_frames(times: list[float], rules: VideoRules) -> list[int]:
    """The indices of the chosen among the frames shown at `times`, in order; always has the first frame."""
    # the last frame is shown as long as the others on average
    duration = (times[-1] - times[0]) * len(times) / max(1, len(times) - 1)
    max_frames = max(1, rules.max_frames // rules.multiple) * rules.multiple
    count = min(max(math.floor(duration * rules.fps + SAME_TIME), rules.min_frames), max_frames)
    indices = [
        bisect.bisect_right(times, times[0] + duration * step / count + SAME_TIME) - 1
        for step in range(count)
    ]
    return list(dict.fromkeys(indices))


def choose_clip(count: int, rate: float, rules: VideoRules) -> tuple[list[int], float]:
    """Return the frames that `rules.clip` asks for, and the seconds between two, as qwen-vl-utils does.

    Args:
        count: number of frames in the video.
        rate: frames per second, on average.
        rules: with a `clip`; its `max_frames` also limits `clip.nframes`.

    Raises:
        BadSample: the clip holds fewer than two frames, or than it asks for.
    """
    clip = rules.clip
    multiple = rules.multiple
    first = 0
    last = count - 1
    seconds = count / rate
    if clip.video_start is not None:
        first = math.ceil(min(clip.video_start, seconds) * rate)
    if clip.video_end is not None:
        last = min(math.floor(min(clip.video_end, seconds) * rate), last)
    if first >= last and (clip.video_start, clip.video_end) != (None, None):
        where = f"video_start {clip.video_start} and video_end {clip.video_end}"
        raise BadSample("video_clip", f"{where} hold under two frames of a video of {seconds:.2f} seconds")
    available = last - first + 1
    max_frames = max(1, rules.max_frames // multiple) * multiple
    if clip.nframes is not None:
        frames = min(round(clip.nframes / multiple) * multiple, max_frames)
        if not multiple <= frames <= available:
            raise BadSample("video_clip", f"nframes {clip.nframes} of a clip of {available} frames")
    else:
        min_frames = math.ceil(rules.min_frames / multiple) * multiple
        frames = min(max(available / rate * rules.fps, min_frames), max_frames, available)
        # a clip shorter than a temporal patch gives what it has, and the last frame is repeated
        frames = max(1, math.floor(frames / multiple) * multiple)
    return torch.linspace(first, last, frames).round().long().tolist(), available / rate / frames


def _plan(source: _File | _FrameList, rules: VideoRules) -> tuple[list[int], VideoPlan]:
    if rules.clip is None:
        chosen = choose_frames(source.times, rules)
        duration = source.times[chosen[-1]] - source.times[0]
        interval = duration / (len(chosen) - 1) if len(chosen) > 1 else 1 / rules.fps
    else:
        chosen, interval = choose_clip(len(source.times), source.rate, rules)
    times = [source.times[index] - source.times[0] for index in chosen]
    times += [times[-1]] * (-len(times) % rules.multiple)
    size = _frame_size(source.size, len(times), rules)
    if min(size) < MIN_SIDE:
        raise BadSample("video_undecodable", f"frames of {size[0]}x{size[1]}, a side under {MIN_SIDE}")
    if len(times) * math.prod(size) > MAX_VIDEO_PIXELS:
        raise BadSample(
            "video_too_large", f"{len(times)} frames of {size[0]}x{size[1]}: over {MAX_VIDEO_PIXELS} pixels"
        )
    return chosen, VideoPlan(times, size, interval)


def _frame_size(size: tuple[int, int], count: int, rules: VideoRules) -> tuple[int, int]:
    """Return (width, height) of `count` frames, limited as qwen-vl-utils does by `total_pixels`."""
    max_pixels = rules.max_pixels
    if rules.total_pixels is not None:
        max_pixels = min(max_pixels or math.inf, rules.total_pixels * rules.multiple // count)
    if rules.min_pixels is not None and max_pixels is not None:
        max_pixels = max(max_pixels, math.ceil(1.05 * rules.min_pixels))
    return rules.size or target_size(size, max_pixels, rules.min_pixels)


def _open(video: Any, rules: VideoRules) -> _File | _FrameList:
    if isinstance(video, bytes):
        return _File(video)
    if isinstance(video, list | tuple):
        video = {"frames": video}
    frames = video.get("frames") if isinstance(video, dict) else None
    if not isinstance(frames, list | tuple) or not all(isinstance(frame, bytes) for frame in frames):
        raise BadSample("video_undecodable", f"neither a file nor a list of encoded frames: {type(video)}")
    return _FrameList(list(frames), _listed_times(video, len(frames), rules.fps))


def _listed_times(video: dict, count: int, fps: float) -> list[float]:
    if count == 0:
        raise BadSample("video_undecodable", "no frames")
    times, fps = video.get("timestamps"), video.get("fps") or fps
    if times is None and isinstance(fps, int | float) and fps > 0:
        times = [index / fps for index in range(count)]
    if (
        not isinstance(times, list | tuple)
        or len(times) != count
        or not all(isinstance(time, int | float) and abs(time) <= MOST_SECONDS for time in times)
        or any(later <= earlier for earlier, later in zip(times, times[1:], strict=False))
    ):
        raise BadSample(
            "video_undecodable",
            f"{count} frames need as many rising timestamps, or an fps; at most {MOST_SECONDS} seconds",
        )
    return [float(time) for time in times]


def average_rate(times: list[float]) -> float:
    """Return the frames per second of frames shown at `times`; 1 for a single frame."""
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 1.0


@dataclass
class _FrameList:
    frames: list[bytes]
    times: list[float]

    @property
    def size(self) -> tuple[int, int]:
        return image_size(self.frames[0])

    @property
    def rate(self) -> float:
        """Frames per second, on average."""
        return average_rate(self.times)

    def pictures(self, chosen: list[int]) -> Iterator[tuple[int, np.ndarray]]:
        """The chosen pictures, each with its index in `chosen`."""
        for place, index in enumerate(chosen):
            exit_if_abandoned()
            yield place, decode_pixels(self.frames[index])


class _File:
    """A video file. Reads all packets for their times, and decodes the first frame for its size."""

    def __init__(self, data: bytes):
        from av.video.reformatter import VideoReformatter

        self._data = data
        # PyAV's own reformatter keeps threads, and a forked worker would wait for them without end
        self._reformatter = VideoReformatter()
        with _opened(data) as (container, stream):
            seconds = stream.time_base  # a fraction
            # Packets of an AVI carry the times at which they are decoded, not shown.
            self._in_order = container.format.name == "avi"
            self._keyframes: list[int] = []
            self.size, stamps, end = self._read(container, stream)
            stated = (container.duration or 0) / MICROSECONDS
            rate = stream.average_rate
        if end < stated - max(MISSING_SECONDS, MISSING_SHARE * stated):
            raise BadSample("video_truncated", f"ends after {end:.1f} of {stated:.1f} seconds")
        if not stamps or self.size is None:
            raise BadSample("video_undecodable", f"{len(stamps)} frames, none of which can be decoded")
        self._stamps = sorted(stamps)
        self.times = [float((stamp - self._stamps[0]) * seconds) for stamp in self._stamps]
        self.rate = float(rate) if rate else average_rate(self.times)

    def pictures(self, chosen: list[int]) -> Iterator[tuple[int, np.ndarray]]:
        """The chosen pictures, each with its index in `chosen`. Seeks to the keyframes before them; if that
        does not find all, decodes the file from its start."""
        yielded = 0
        if not self._in_order:
            for picture in self._pictures_by_seeking([self._stamps[index] for index in chosen]):
                yielded += 1
                yield picture
        if yielded < len(chosen):
            yield from self._pictures_in_order(chosen)

    def _read(self, container: Any, stream: Any) -> tuple[tuple[int, int] | None, list[int], float]:
        """The first frame's size, the times at which frames are shown, and the end of the last packet."""
        size, stamps, end = None, [], 0.0
        for packet in container.demux():
            exit_if_abandoned()
            stamp = packet.dts if packet.pts is None else packet.pts
            if stamp is not None and packet.time_base:
                end = max(end, float((stamp + (packet.duration or 0)) * packet.time_base))
            if packet.stream_index != stream.index:
                continue
            if size is None and (decoded := packet.decode()):
                size = self._upright(decoded[0]).shape[1::-1]
            if packet.size and not packet.is_discard and stamp is not None:
                self._in_order |= packet.pts is None
                stamps.append(stamp)
                if packet.is_keyframe:
                    self._keyframes.append(stamp)
        self._keyframes.sort()
        return size, stamps, end - (container.start_time or 0) / MICROSECONDS

    def _pictures_by_seeking(self, stamps: list[int]) -> Iterator[tuple[int, np.ndarray]]:
        places = {stamp: place for place, stamp in enumerate(stamps)}
        last_of_run: dict[int, int] = {}  # keyframe -> the last frame chosen before the next keyframe
        for stamp in stamps:
            before = bisect.bisect_right(self._keyframes, stamp)
            last_of_run[self._keyframes[before - 1] if before else self._stamps[0]] = stamp
        with _opened(self._data) as (container, stream):
            for keyframe, last in last_of_run.items():
                container.seek(keyframe, stream=stream)
                for frame in container.decode(stream):
                    exit_if_abandoned()
                    if (place := places.pop(frame.pts, None)) is not None:
                        yield place, self._upright(frame)
                    if frame.pts is None or frame.pts >= last:
                        break

    def _pictures_in_order(self, chosen: list[int]) -> Iterator[tuple[int, np.ndarray]]:
        """The pictures of a file in which the i-th frame that the decoder returns is the i-th shown."""
        places = {index: place for place, index in enumerate(chosen)}
        with _opened(self._data) as (container, stream):
            for index, frame in enumerate(container.decode(stream)):
                exit_if_abandoned()
                if index in places:
                    yield places.pop(index), self._upright(frame)
                if not places:
                    return
        raise BadSample("video_undecodable", f"frame {chosen[-1]} of {len(self.times)} cannot be decoded")

    def _upright(self, frame: Any) -> np.ndarray:
        turns = round(frame.rotation / 90) % 4  # counterclockwise
        rgb = self._reformatter.reformat(frame, format="rgb24", threads=1)
        return np.rot90(rgb.to_ndarray(), turns)


@contextmanager
def _opened(data: bytes) -> Iterator[tuple[Any, Any]]:
    """Container and video stream; turns what FFmpeg raises on damaged files into BadSample."""
    import av

    try:
        with av.open(io.BytesIO(data), options={"format_whitelist": FORMATS}) as container:
            # with a known codec and clock, and not the cover picture of a piece of music
            streams = [film for film in container.streams.video if film.codec_context and film.time_base]
            cover = av.stream.Disposition.attached_pic
            stream = next((film for film in streams if not film.disposition & cover), None)
            if stream is None:
                raise BadSample("video_undecodable", "the file has no video that FFmpeg can decode")
            stream.codec_context.options = {"max_pixels": str(MAX_FRAME_PIXELS)}
            stream.codec_context.thread_count = 1  # loader workers share the cores already
            width, height = stream.codec_context.width, stream.codec_context.height
            if width * height > MAX_FRAME_PIXELS:
                raise BadSample(
                    "video_too_large", f"frames of {width}x{height}: over {MAX_FRAME_PIXELS} pixels"
                )
            yield container, stream
    except av.FFmpegError as error:
        raise BadSample("video_undecodable", f"{explain(data) or error}") from error
