"""Encoded bytes → an RGB picture, by our own rules.

The image processors of different transformers versions treat alpha, 16-bit and rotation differently, so these
are resolved before.

Decoding has a time limit, since a damaged clip can cost FFmpeg hours. It happens in a thread. If that is
late, the worker abandons it and goes on with another. A check between frames would not be enough: the time
may pass within one call of FFmpeg or Pillow. These let other threads run meanwhile.
"""

import contextlib
import io
import math
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.inputs import explain

# Below Pillow's own bomb warning. While it is decoded, a pixel takes up to 8 bytes, so an image up to 640 MB;
# in the libraries for WebP and JPEG 2000 it takes up to 20 bytes (tests/unit/data/test_images.py measures).
MAX_DECODED_PIXELS = 80_000_000
MAX_SIDE = 2**17  # libraries resize one axis at a time: the other one's length then multiplies the new one
BAND_PIXELS = 2**19  # are converted at a time, as copies of a large image would take several times its size
GREY_BITS = (8, 10, 12, 14, 16)  # of integer grey
# Without formats that run an interpreter (EPS), or that no camera, browser or scanner writes.
FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF"]
Image.init()
FORMATS = [name for name in FORMATS if name in Image.OPEN]  # AVIF is optional in Pillow
# Formats whose header gives the size of the decoded image; TIFF's decoder may turn the image.
HEADER_FORMATS = {"JPEG", "MPO", "PNG", "WEBP"}
# Chunks and keys of a PNG that may hold a rotation, and that may follow the pixels.
PNG_ROTATIONS = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
# What Pillow's decoders raise on damaged files.
DECODE_ERRORS = (
    *(OSError, SyntaxError, ValueError, TypeError, EOFError, IndexError, OverflowError),
    *(RuntimeError, struct.error, zlib.error),  # the first is AVIF's
)
# Seconds of one wait. However long a process was stopped, it loses at most one of these.
SLICE = 1.0
_late: set[int] = set()  # hashes of files that were late
_of_caller = threading.local()  # holds the decoding thread of the calling thread


@dataclass(frozen=True)
class Scaling:
    """The size that an image is to get: within limits of its pixels, its aspect kept, or one that is set."""

    max_pixels: int | None = None
    min_pixels: int | None = None
    size: tuple[int, int] | None = None  # (width, height); then the limits are not used

    def of(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the (width, height) that an image of `size` gets."""
        return self.size or target_size(size, self.max_pixels, self.min_pixels)


UNSCALED = Scaling()
SizedImage = tuple[bytes, Scaling]  # an encoded image, and the size that it is to get


def decode_image(data: bytes, scaling: Scaling = UNSCALED) -> Image.Image:
    """An RGB image in the size that it is to get.

    Transparency is composited on white; the EXIF rotation is applied; 16-bit and float grey is scaled to 8
    bits (see `_range`); an animation gives its first frame; colour profiles are ignored.
    Raises BadSample; the size is checked before anything is decoded.
    """
    with _bad_samples(data):
        image = _opened(data)
        scaled = scaling.of(image.size)
        if scaling.size and _swaps_axes(image):
            scaled = scaled[::-1]
        image.draft(None, scaled)  # a JPEG can be decoded at 1/2, 1/4 or 1/8, at the cost of that size
        image.load()
        if _swaps_axes(image):
            scaled = scaled[::-1]
        ImageOps.exif_transpose(image, in_place=True)
        image = to_rgb(image)
    size = scaling.size or scaled
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def decode_pixels(data: bytes, scaling: Scaling = UNSCALED) -> np.ndarray:
    """`decode_image` as (height, width, 3) uint8."""
    with contextlib.suppress(ValueError):  # damaged, or not a JPEG: left to Pillow
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        _check_size((width, height))
        keeps_size = scaling.of((width, height)) == (width, height)
        if colours in ("YCbCr", "RGB") and keeps_size and _is_upright(data):
            return simplejpeg.decode_jpeg(data)  # the same bits as Pillow in three quarters of its time
    image = decode_image(data, scaling)
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for (_, top, _, bottom), band in _bands(image):
        pixels[top:bottom] = band
    return pixels


def image_size(data: bytes, scaling: Scaling = UNSCALED) -> tuple[int, int]:
    """(width, height) of what `decode_image` would return, from the header alone if the format allows it.

    Raises BadSample as `decode_image`, except for damage that only the pixels show.
    """
    with _bad_samples(data):
        image = _opened(data)
        scaled = scaling.of(image.size)
        if scaling.size:
            return scaled
        late_rotation = image.format == "PNG" and any(name in data for name in PNG_ROTATIONS)
        if image.format in HEADER_FORMATS and not late_rotation:
            return scaled[::-1] if image.format != "PNG" and _swaps_axes(image) else scaled
    return decode_image(data, scaling).size


def _opened(data: bytes) -> Image.Image:
    """The image, with its header read and its size checked."""
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    _check_size(image.size)
    tags = getattr(image, "tag_v2", {})  # libtiff decodes whole tiles, however small the image is
    if tags.get(TiffImagePlugin.TILEWIDTH, 1) * tags.get(TiffImagePlugin.TILELENGTH, 1) > MAX_DECODED_PIXELS:
        raise BadSample("image_too_large", f"its tiles have more than {MAX_DECODED_PIXELS} pixels")
    return image


@contextlib.contextmanager
def _bad_samples(data: bytes) -> Iterator[None]:
    """Turns what Pillow raises on damaged files into BadSample."""
    try:
        yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadSample("image_too_large", str(error)) from error
    except UnidentifiedImageError as error:
        formats = f"{len(data)} bytes that Pillow cannot read; convert them to PNG or JPEG"
        raise BadSample("image_undecodable", explain(data) or formats) from error
    except DECODE_ERRORS as error:
        reason = "image_truncated" if "truncated" in str(error).lower() else "image_undecodable"
        raise BadSample(reason, f"{type(error).__name__}: {error}") from error


def _is_upright(jpeg: bytes) -> bool:
    with _bad_samples(jpeg):
        image = _opened(jpeg)
        return image.format == "JPEG" and image.getexif().get(ExifTags.Base.Orientation, 1) == 1


def _swaps_axes(image: Image.Image) -> bool:
    return image.getexif().get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8)


def _check_size(size: tuple[int, int]) -> None:
    width, height = size
    if width * height > MAX_DECODED_PIXELS:
        raise BadSample("image_too_large", f"{width}x{height} is over {MAX_DECODED_PIXELS} pixels")
    if max(size) > MAX_SIDE:
        raise BadSample("image_too_large", f"{width}x{height} has a side over {MAX_SIDE} pixels")


def target_size(size: tuple[int, int], max_pixels: int | None, min_pixels: int | None) -> tuple[int, int]:
    """`size`, scaled to be within the limits if it is not."""
    pixels = size[0] * size[1]
    if max_pixels and pixels > max_pixels:
        scale = math.sqrt(max_pixels / pixels)
        return tuple(max(1, math.floor(side * scale)) for side in size)
    if min_pixels and pixels < min_pixels:
        scale = math.sqrt(min_pixels / pixels)
        return tuple(math.ceil(side * scale) for side in size)
    return size


def _bands(image: Image.Image) -> Iterator[tuple[tuple[int, int, int, int], Image.Image]]:
    """The image in parts of whole rows, each with its place."""
    rows = max(1, BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(image.height, top + rows))
        yield box, image if rows >= image.height else image.crop(box)


def to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    ends = _range(image) if image.mode == "F" or image.mode.startswith("I") else None
    if image.width * image.height <= BAND_PIXELS:
        return _band_to_rgb(image, ends)
    converted = Image.new("RGB", image.size)
    for box, band in _bands(image):
        converted.paste(_band_to_rgb(band, ends), box)
    return converted


def _band_to_rgb(band: Image.Image, ends: tuple[float, float] | None) -> Image.Image:
    if ends:
        black, white = ends
        values = (np.asarray(band, dtype=np.float64) - black) * (255 / (white - black))
        band = Image.fromarray(np.rint(values).astype(np.uint8))
    if "transparency" in band.info or band.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        band = band.convert("RGBA")
        band = Image.alpha_composite(Image.new("RGBA", band.size, "white"), band)
    return band.convert("RGB")


def _range(image: Image.Image) -> tuple[float, float]:
    """The values of black and white in grey of more than 8 bits.

    Integers have the fewest of `GREY_BITS` that hold the greatest, as cameras and scanners write 10 to 14
    bits into 16. Floats up to 1 go from black to white, floats up to 255 are 8-bit values, and others go from
    the least to the greatest.
    """
    ends = [(values.min(), values.max()) for values in (np.asarray(band) for _, band in _bands(image))]
    low, high = float(np.min(ends)), float(np.max(ends))
    if not math.isfinite(low) or not math.isfinite(high):
        raise BadSample("image_undecodable", "the image holds values that are not finite")
    limits = (1.0, 255.0) if image.mode == "F" else [2.0**bits - 1 for bits in GREY_BITS]
    return next(((0.0, limit) for limit in limits if low >= 0 and high <= limit), (low, high))


# -- within a set time


def call_with_timeout(seconds: float, decode: Callable, medium: Any, *args: Any) -> Any:
    """`decode(medium, *args)` for a file or a list of frames. Raises what that call raises, and BadSample
    `decode_timeout` after `seconds`.

    A file that was late is refused at once when this process sees it again.
    """
    is_file = isinstance(medium, bytes)
    if is_file and _late and hash(medium) in _late:
        raise BadSample("decode_timeout", f"{len(medium)} bytes, not decoded in {seconds:g} seconds before")
    thread = getattr(_of_caller, "thread", None)
    if thread is None or thread.is_late:
        thread = _of_caller.thread = _DecodingThread()
    try:
        return thread.call(seconds, decode, medium, *args)
    except _Late as late:
        if is_file:
            _late.add(hash(medium))
        size = f"{len(medium)} {'bytes' if is_file else 'frames'}" if hasattr(medium, "__len__") else ""
        raise BadSample("decode_timeout", f"{size}, not decoded in {seconds:g} seconds") from late


def exit_if_abandoned() -> None:
    """Ends the calling thread if nobody waits for it any more. Decoders call this in their loops."""
    if getattr(threading.current_thread(), "is_late", False):
        raise _Late


class _Late(Exception):
    pass


class _DecodingThread(threading.Thread):
    """Makes the calls that it is given, one at a time, until it is abandoned."""

    def __init__(self) -> None:
        super().__init__(name="decode", daemon=True)
        self.is_late = False
        self._called, self._returned = threading.Lock(), threading.Lock()
        self._called.acquire()
        self._returned.acquire()
        self.start()

    def call(self, seconds: float, function: Callable, *args: Any) -> Any:
        """The function's result. Raises _Late, and what the function raises."""
        self._call = function, args
        self._called.release()
        slices, returned = math.ceil(seconds / SLICE), False
        try:
            returned = any(self._returned.acquire(timeout=seconds / slices) for _ in range(slices))
        finally:
            self.is_late = not returned  # also when Ctrl-C ends the wait
        if self.is_late:
            raise _Late
        (value, error), self._outcome = self._outcome, None
        if error is not None:
            raise error
        return value

    def run(self) -> None:
        while not self.is_late:
            self._called.acquire()
            (function, args), self._call = self._call, None
            try:
                self._outcome = function(*args), None
            except BaseException as error:  # noqa: BLE001  `call` raises it again
                self._outcome = None, error
            del function, args
            self._returned.release()


# threads do not survive a fork: the new process must start its own
os.register_at_fork(after_in_child=lambda: _of_caller.__dict__.clear())
