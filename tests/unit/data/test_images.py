import io
import multiprocessing
import struct
import zlib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from pairs import first_soon
from PIL import Image

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.media import images
from megatron_vlm.data.media.images import Scaling, decode_image


def encoded(image, format="PNG", **options):
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def center(data):
    image = decode_image(data)
    assert image.mode == "RGB"
    return image.getpixel((image.width // 2, image.height // 2))


def grey(dtype, value):
    return Image.fromarray(np.full((8, 8), value, dtype))


def palette(transparent):
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 250, 0, 0])
    return encoded(image, transparency=1 if transparent else 0)


@pytest.mark.parametrize(
    "data, expected",
    [
        (encoded(Image.new("RGBA", (8, 8), (255, 0, 0, 0))), (255, 255, 255)),
        (encoded(Image.new("RGBA", (8, 8), (255, 0, 0, 128))), (255, 127, 127)),
        (encoded(Image.new("LA", (8, 8), (0, 0))), (255, 255, 255)),
        (encoded(Image.new("RGB", (8, 8), (9, 9, 9)), transparency=(9, 9, 9)), (255, 255, 255)),
        (palette(transparent=True), (255, 255, 255)),
        (palette(transparent=False), (250, 0, 0)),
        (encoded(Image.new("1", (8, 8), 1)), (255, 255, 255)),
        (encoded(Image.new("L", (8, 8), 77)), (77, 77, 77)),
        (encoded(grey(np.uint16, 77 * 257)), (77, 77, 77)),
        (encoded(grey(np.int32, 77 * 257), "TIFF"), (77, 77, 77)),
        (encoded(grey(np.float32, 0.5), "TIFF"), (128, 128, 128)),
        (encoded(grey(np.float32, 77.0), "TIFF"), (77, 77, 77)),
        (encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF"), (255, 0, 0)),
    ],
    ids="RGBA half-RGBA LA RGB-key P-key P 1 L I;16 I F-unit F-255 CMYK".split(),
)
def test_every_mode_becomes_rgb(data, expected):
    assert center(data) == expected


def noisy(mode, width=96, height=64):
    rng = np.random.default_rng(0)
    if mode in ("I;16", "I", "I far", "F", "F far"):
        values = rng.random((height, width)) * {"I;16": 65535, "I": 65535, "F": 1}.get(mode, 1e6)
        return Image.fromarray(
            values.astype({"I;16": np.uint16}.get(mode, np.int32 if "I" in mode else np.float32))
        )
    values = rng.integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(values, "CMYK" if mode == "CMYK" else "RGBA").convert(mode)


def by_one_formula(mode, image):
    """8 bits of a whole grey image at once."""
    values = np.asarray(image, np.float64)
    low, white = (values.min(), np.ptp(values)) if "far" in mode else (0, 1 if mode == "F" else 65535)
    return np.rint((values - low) * (255 / white)).astype(np.uint8)[..., None].repeat(3, 2)


MODES = ("I;16", "I", "I far", "F", "F far", "1", "L", "LA", "P", "RGB", "RGBA", "CMYK")


@pytest.mark.parametrize("mode", MODES)
def test_an_image_is_the_same_in_bands(monkeypatch, mode):
    image = noisy(mode)
    data = encoded(image, "PNG" if mode in ("LA", "P", "RGBA", "I;16") else "TIFF")
    whole = images.decode_pixels(data)
    if mode[0] in "IF":
        np.testing.assert_array_equal(whole, by_one_formula(mode, image))
    monkeypatch.setattr(images, "BAND_PIXELS", 96 * 5)
    np.testing.assert_array_equal(images.decode_pixels(data), whole)


KINDS = {  # mode and format: the most bytes a pixel that decoding takes
    **{("I;16", "PNG"): 8, ("RGBA", "PNG"): 8, ("RGB", "PNG"): 8, ("CMYK", "JPEG"): 8},
    **{("RGB", "WEBP"): 20, ("RGB", "JPEG2000"): 20},
}


@pytest.fixture(scope="module")
def fresh_processes():
    """Every call in a process of its own: in one that has run other tests, the allocator keeps pieces of
    memory, which the next image then may or may not fit into."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_vlm.data.media.images"])
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        yield pool


@pytest.mark.parametrize("mode, format", first_soon(KINDS, 2))
def test_a_large_image_takes_a_few_bytes_a_pixel(mode, format, fresh_processes):
    taken = fresh_processes.submit(bytes_a_pixel, mode, format).result()
    assert taken < KINDS[mode, format], taken


def bytes_a_pixel(mode, format, side=5000):
    """The most that decoding an image takes, but for one band."""
    image = Image.new("L", (side, side)) if mode == "I;16" else Image.new(mode, (side, side))
    image = Image.fromarray(np.asarray(image, np.uint16)) if mode == "I;16" else image
    data = encoded(image, format, **({"method": 0} if format == "WEBP" else {}))
    del image
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    assert images.decode_pixels(data).shape == (side, side, 3)
    return (memory("VmHWM") - before - 50_000_000) / side**2


def memory(name):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return 1024 * int(line.split()[1])


def test_exif_rotation_is_applied():
    image = Image.new("RGB", (16, 8), "black")
    image.paste("red", (0, 0, 8, 8))  # left half; orientation 6 shows it on top
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = decode_image(encoded(image, exif=exif), Scaling(32))
    assert turned.size == (4, 8)
    assert turned.getpixel((2, 0)) == (255, 0, 0) and turned.getpixel((2, 7)) == (0, 0, 0)


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_large_images_shrink_and_keep_their_aspect(format):
    image = decode_image(encoded(Image.new("RGB", (400, 200), "red"), format), Scaling(5000))
    assert image.size == (100, 50)


def png_header(width, height):
    """A valid PNG start that announces a size and holds no pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    header = struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return b"\x89PNG\r\n\x1a\n" + header + struct.pack(">I", 1000) + b"IDAT"


def tiff_of_a_large_tile():
    """64 pixels wide, of which libtiff would decode a gigabyte."""
    tags = {256: 64, 257: 64, 258: 8, 259: 8, 262: 1, 277: 1, 322: 2**15, 323: 2**15, 324: 8, 325: 0}
    data = zlib.compress(bytes(2**20))
    tags[325] = len(data)
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + directory


def flipped_png():
    data = bytearray(encoded(Image.effect_noise((64, 64), 50)))
    data[60:90] = bytes(30)
    return bytes(data)


NOISE_JPEG = encoded(Image.effect_noise((64, 64), 50), "JPEG")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    "data, reason",
    [
        (b"", "image_undecodable"),
        (b"not an image", "image_undecodable"),
        (flipped_png(), "image_undecodable"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "image_undecodable"),
        (encoded(grey(np.float32, np.nan), "TIFF"), "image_undecodable"),
        (NOISE_JPEG[: len(NOISE_JPEG) // 2], "image_truncated"),
        (png_header(9000, 9000), "image_too_large"),
        (png_header(12_000, 12_000), "image_too_large"),
        (png_header(60_000, 60_000), "image_too_large"),
        (png_header(1, 2**17 + 1), "image_too_large"),
        (tiff_of_a_large_tile(), "image_too_large"),
    ],
    ids="empty text damaged eps nan truncated large warned bomb long tile".split(),
)
def test_a_bad_image_says_why(data, reason):
    with pytest.raises(BadSample) as bad:
        decode_image(data)
    assert bad.value.reason == reason


@pytest.mark.parametrize("bits", [10, 12, 14, 16])
def test_grey_of_10_to_14_bits_in_16_is_not_black(bits):
    values = np.array([[0, 2**bits // 2, 2**bits - 1]] * 3, np.uint16)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    assert np.asarray(decode_image(file.getvalue()))[0, :, 0].tolist() == [0, 128, 255]
