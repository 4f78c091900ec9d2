"""Encoded images and films in shades of grey that say which frame is which, and samples that show them."""

import io
from fractions import Fraction

import av
import numpy as np
from PIL import Image
from samples import sample_of

SHADE = 8  # frame i is grey 8 i


def file(times, container="mp4", codec="libx264", size=(64, 48), gop=10):
    """An encoded video whose frame i, shown at times[i] seconds, is grey of shade `SHADE` * i."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as target:
        stream = target.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.gop_size = gop
        stream.time_base = stream.codec_context.time_base = Fraction(1, 10 if container == "avi" else 1000)
        for index, time in enumerate(times):
            grey = np.full((size[1], size[0], 3), min(255, SHADE * index), np.uint8)
            frame = av.VideoFrame.from_ndarray(grey, format="rgb24")
            frame.pts, frame.time_base = round(time / stream.time_base), stream.time_base
            target.mux(stream.encode(frame))
        target.mux(stream.encode())
    return out.getvalue()


def steady(count, fps=10, **how):
    return file([index / fps for index in range(count)], **how)


def picture(index, format="JPEG", size=(64, 48)):
    out = io.BytesIO()
    Image.new("RGB", size, (SHADE * index,) * 3).save(out, format)
    return out.getvalue()


def frame_list(count):
    return [picture(index) for index in range(count)]


def sample(videos=(), imgs=(), question=None, key="s0"):
    question = question or "<image>" * len(imgs) + "<video>" * len(videos) + "What happens here?"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "A cat jumps."}]
    return sample_of(turns, imgs, videos=videos, key=key)
