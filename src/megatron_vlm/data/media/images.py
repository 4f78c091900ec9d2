"""Encoded bytes → an RGB picture, by our own rules.

The image processors of different transformers versions treat alpha, 16-bit and rotation differently, so these
are resolved before.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import struct
import zlib
from collections.abc import Iterator

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from megatron_vlm.data.chatml import BadSample

MAX_DECODED_PIXELS = 80_000_000  # below Pillow's own bomb warning; 80 megapixels decode to 240 MB
MAX_ASPECT = 200  # the Qwen and GLM processors refuse longer images
# Without formats that run an interpreter (EPS), or that no camera, browser or scanner writes.
FORMATS = ["JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF"]
# Formats whose header gives the size of the decoded image; TIFF's decoder may turn the image.
HEADER_FORMATS = {"JPEG", "MPO", "PNG", "WEBP"}
# Chunks and keys of a PNG that may hold a rotation, and that may follow the pixels.
PNG_ROTATIONS = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
# JFIF and Adobe headers, comments, frames and tables only: no APP1, which holds EXIF and XMP data.
BARE_SEGMENTS = {bytes([0xFF, kind]) for kind in (0xE0, 0xEE, 0xFE, 0xC0, 0xC2, 0xC4, 0xDB, 0xDD)}
# What Pillow's decoders raise on damaged files.
DECODE_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    EOFError,
    IndexError,
    OverflowError,
    RuntimeError,  # AVIF
    struct.error,
    zlib.error,
)


def decode_image(data: bytes, max_pixels: int | None = None, min_pixels: int | None = None) -> Image.Image:
    """An RGB image with between `min_pixels` and `max_pixels` pixels, its aspect kept.

    Transparency is composited on white; the EXIF rotation is applied; 16-bit and float grey is scaled to 8
    bits (see `_to_8_bit`); an animation gives its first frame; colour profiles are ignored.
    Raises BadSample; the size is checked before anything is decoded.
    """
    with _bad_samples(data):
        image, size = _opened(data, max_pixels, min_pixels)
        image.draft(None, size)  # a JPEG can be decoded at 1/2, 1/4 or 1/8, at the cost of that size
        image.load()
        if _swaps_axes(image):
            size = size[::-1]
        image = _to_rgb(ImageOps.exif_transpose(image))
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def decode_pixels(data: bytes, max_pixels: int | None = None, min_pixels: int | None = None) -> np.ndarray:
    """`decode_image` as (height, width, 3) uint8."""
    with contextlib.suppress(ValueError):  # damaged, or not a JPEG: left to Pillow
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        _check_size((width, height))
        usual = colours in ("YCbCr", "RGB") and target_size((width, height), max_pixels, min_pixels)
        if usual == (width, height) and (_is_bare(data) or _is_upright(data)):
            return simplejpeg.decode_jpeg(data)  # the same bits as Pillow in three quarters of its time
    return np.array(decode_image(data, max_pixels, min_pixels))


def image_size(data: bytes, max_pixels: int | None = None, min_pixels: int | None = None) -> tuple[int, int]:
    """(width, height) of what `decode_image` would return, from the header alone if the format allows it.

    Raises BadSample as `decode_image`, except for damage that only the pixels show.
    """
    with _bad_samples(data):
        image, size = _opened(data, max_pixels, min_pixels)
        late_rotation = image.format == "PNG" and any(name in data for name in PNG_ROTATIONS)
        if image.format in HEADER_FORMATS and not late_rotation:
            return size[::-1] if image.format != "PNG" and _swaps_axes(image) else size
    return decode_image(data, max_pixels, min_pixels).size


def _opened(
    data: bytes, max_pixels: int | None, min_pixels: int | None
) -> tuple[Image.Image, tuple[int, int]]:
    """The image, with its header read and its size checked, and the size that it is to get."""
    image = Image.open(io.BytesIO(data), formats=_readable_formats())
    _check_size(image.size)
    return image, target_size(image.size, max_pixels, min_pixels)


@contextlib.contextmanager
def _bad_samples(data: bytes) -> Iterator[None]:
    """Turns what Pillow raises on damaged files into BadSample."""
    try:
        yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadSample("image_too_large", str(error)) from error
    except UnidentifiedImageError as error:
        raise BadSample("image_undecodable", f"{len(data)} bytes of no known image format") from error
    except DECODE_ERRORS as error:
        reason = "image_truncated" if "truncated" in str(error).lower() else "image_undecodable"
        raise BadSample(reason, f"{type(error).__name__}: {error}") from error


def _is_bare(jpeg: bytes) -> bool:
    """Whether nothing before the pixels could hold a rotation or name a second picture."""
    at = 2
    while jpeg[at : at + 2] in BARE_SEGMENTS:
        at += 2 + int.from_bytes(jpeg[at + 2 : at + 4])
    return jpeg[at : at + 2] == b"\xff\xda"  # start of scan


def _is_upright(jpeg: bytes) -> bool:
    with _bad_samples(jpeg):
        image, _ = _opened(jpeg, None, None)
        return image.format == "JPEG" and image.getexif().get(ExifTags.Base.Orientation, 1) == 1


def _swaps_axes(image: Image.Image) -> bool:
    return image.getexif().get(ExifTags.Base.Orientation, 1) >= 5  # 5 to 8


@functools.cache
def _readable_formats() -> list[str]:
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]  # AVIF is optional in Pillow


def _check_size(size: tuple[int, int]) -> None:
    width, height = size
    if width * height > MAX_DECODED_PIXELS:
        raise BadSample("image_too_large", f"{width}x{height} is over {MAX_DECODED_PIXELS} pixels")
    if max(size) > MAX_ASPECT * min(size):
        raise BadSample("image_aspect", f"{width}x{height} is longer than {MAX_ASPECT}:1")


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


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        image = _to_8_bit(image)
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _to_8_bit(image: Image.Image) -> Image.Image:
    """Grey of more than 8 bits as 8 bits. Integers up to 65535 are 16-bit; floats up to 1 go from black to
    white; floats up to 255 are 8-bit values; anything else is stretched from its least to its greatest."""
    values = np.asarray(image, dtype=np.float64)
    low, high = float(values.min()), float(values.max())
    if not math.isfinite(low) or not math.isfinite(high):
        raise BadSample("image_undecodable", "the image holds values that are not finite")
    limits = (1.0, 255.0) if image.mode == "F" else (65535.0,)
    white = next((limit for limit in limits if low >= 0 and high <= limit), None)
    if white is None:
        values, white = values - low, high - low
    return Image.fromarray(np.rint(values * (255 / white)).astype(np.uint8))
