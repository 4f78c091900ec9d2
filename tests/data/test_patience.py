"""A medium that takes too long costs its sample and no more, wherever the time passes."""

import io
import multiprocessing
import os
import signal
import threading
import time

import av
import numpy as np
import pytest
from megatron.energon.errors import SkipSample
from PIL import Image
from samples import sample_of
from transformers import AutoProcessor

from megatron_vlm.batch import DataNeeds
from megatron_vlm.config import ConfigError, DataConfig, RunConfig
from megatron_vlm.data.accounts.bad_sample import BadSample
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.media import patience, videos
from megatron_vlm.data.media.images import decode_pixels
from megatron_vlm.data.media.patience import in_time
from megatron_vlm.data.media.videos import VideoRules, decode_video, plan_video
from megatron_vlm.models.families import load
from megatron_vlm.overrides import apply_overrides
from tiny.checkpoints import build_tiny_checkpoint

FRAMES = 6000


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(patience, "_late", set())


def clip(frames: int) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as target:
        stream = target.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        grey = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")
        for _ in range(frames):
            target.mux(stream.encode(grey))
        target.mux(stream.encode())
    return out.getvalue()


def photo() -> bytes:
    out = io.BytesIO()
    Image.effect_noise((640, 480), 60).convert("RGB").save(out, "JPEG")
    return out.getvalue()


@pytest.fixture(scope="module")
def long_clip():
    return clip(FRAMES)


def decoding_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "decode"]


def wait_until(holds, seconds=30.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


class NeverRead(io.BytesIO):
    """A file that FFmpeg waits for, within one call."""

    def __init__(self):
        super().__init__()
        self.released = threading.Event()

    def read(self, size=-1):
        self.released.wait()
        return b""


def test_what_is_decoded_in_time_is_what_is_decoded():
    data = photo()
    assert np.array_equal(in_time(60.0, decode_pixels, data), decode_pixels(data))
    assert len(decoding_threads()) == 1
    with pytest.raises(BadSample, match="image_undecodable"):
        in_time(60.0, decode_pixels, b"text")
    in_time(60.0, decode_pixels, data)
    assert len(decoding_threads()) == 1  # the same one, also after an error


def test_a_call_of_ffmpeg_that_does_not_return_is_left_behind():
    file = NeverRead()
    began = time.monotonic()
    with pytest.raises(BadSample, match=r"decode_timeout.*not decoded in 0.3 seconds"):
        in_time(0.3, av.open, file)
    assert time.monotonic() - began < 10
    assert in_time(60.0, decode_pixels, photo()).shape == (480, 640, 3)
    file.released.set()
    assert wait_until(lambda: len(decoding_threads()) == 1)  # the late one ends when its call does


@pytest.mark.parametrize("decode", [decode_video, plan_video])
def test_a_clip_that_takes_long_is_dropped_and_its_thread_ends(long_clip, decode, monkeypatch):
    frames = []
    monkeypatch.setattr(videos, "leave_if_late", lambda: (frames.append(1), patience.leave_if_late()))
    rules = VideoRules(fps=100, max_frames=FRAMES)
    with pytest.raises(
        BadSample, match=f"decode_timeout: {len(long_clip)} bytes, not decoded in 0.01 seconds"
    ):
        in_time(0.01, decode, long_clip, rules)
    assert wait_until(lambda: not [t for t in decoding_threads() if t.is_late])
    assert len(frames) < FRAMES  # of which the first pass alone looks at each
    with pytest.raises(BadSample, match="0.01 seconds before"):  # at once
        in_time(0.01, decode, long_clip, rules)
    assert not [t for t in decoding_threads() if t.is_late]


def test_a_forked_process_has_a_thread_of_its_own():
    data = photo()
    in_time(60.0, decode_pixels, data)
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=lambda: in_time(20.0, decode_pixels, data))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0


def test_a_process_that_was_stopped_is_not_late():
    """For longer than the set time; it had no chance to decode."""

    def work(begun):
        def decode(data):
            begun.set()
            for _ in range(10):  # most of them after it goes on
                time.sleep(0.1)
            return data

        assert in_time(3.0, decode, b"a") == b"a"

    context = multiprocessing.get_context("fork")
    begun = context.Event()
    worker = context.Process(target=work, args=(begun,))
    worker.start()
    assert begun.wait(30)
    os.kill(worker.pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(worker.pid, signal.SIGCONT)
    worker.join(60)
    assert worker.exitcode == 0


def test_the_price_of_handing_over_is_small():
    """Against a small photo: 640 x 480; a sample costs its resizing and its text besides."""
    data, rounds = photo(), 40

    def seconds(call) -> float:
        began = time.process_time()
        for _ in range(rounds):
            call()
        return (time.process_time() - began) / rounds

    handed = min(seconds(lambda: in_time(60.0, len, data)) for _ in range(5))
    decoded = min(seconds(lambda: decode_pixels(data)) for _ in range(3))
    assert handed < 0.1 * decoded, (handed, decoded)  # 0.01 on an idle machine


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    path = build_tiny_checkpoint("qwen3_vl", tmp_path_factory.mktemp("tiny") / "qwen3_vl")
    return AutoProcessor.from_pretrained(path)


@pytest.mark.parametrize("packed", [False, True])
def test_an_encoder_counts_a_late_clip_and_trains_on_the_next_sample(qwen, long_clip, packed):
    kind = PackingVLMTaskEncoder if packed else HFEncoderVLMTaskEncoder
    encoder = kind(qwen, DataConfig(decode_seconds=0.01), DataNeeds(load("qwen3_vl").visual_keys))
    encode = encoder.encode_sample
    if packed:

        def encode(sample):
            return encoder.postencode_sample(encoder.preencode_sample(sample))

    def sample(question, **media):
        talk = [{"role": "user", "content": question}, {"role": "assistant", "content": "b"}]
        return sample_of(talk, **media)

    with pytest.raises(SkipSample):
        encode(sample("<video>a", videos=[long_clip]))
    assert encode(sample("a")).loss_mask.sum() > 0
    [drop] = encoder.drops.examples()
    assert drop["reason"] == "decode_timeout" and "not decoded in 0.01 seconds" in drop["detail"]
    assert encoder.drops.summary() == {"encoded": 1, "dropped": 1, "reasons": {"decode_timeout": 1}}


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "nan"])
def test_no_time_at_all_and_endless_time_are_refused(seconds):
    with pytest.raises(ConfigError, match="data.decode_seconds: "):
        apply_overrides(RunConfig(), [f"data.decode_seconds={seconds}"])
