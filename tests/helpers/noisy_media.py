"""Encoded images and films of noise, in which nothing is rounded by chance alone."""

import io

import av
import numpy as np
from PIL import Image

from megatron_vlm.data.media.images import decode_pixels


def picture(size, mode, format, options, seed=0):
    """Smooth, so that resizing has something to round, and noisy."""
    rng, (width, height) = np.random.default_rng(seed), size
    noise = Image.fromarray(
        rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 4), dtype=np.uint8), "RGBA"
    )
    rgba = np.array(noise.resize(size, Image.Resampling.BICUBIC)) ^ rng.integers(0, 4, (height, width, 4))
    if mode == "I;16":
        image = Image.fromarray((rgba[..., 0] * 257).astype(np.uint16))
    else:
        rgba = Image.fromarray(rgba.astype(np.uint8), "RGBA")
        image = rgba if mode == "RGBA" else rgba.convert("RGB").convert(mode)
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def film(size, count):
    """An encoded file, 4 frames a second."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as target:
        stream = target.add_stream("libx264", rate=4)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for seed in range(count):
            rgb = decode_pixels(picture(size, "RGB", "PNG", {}, seed))
            target.mux(stream.encode(av.VideoFrame.from_ndarray(rgb, format="rgb24")))
        target.mux(stream.encode())
    return out.getvalue()
