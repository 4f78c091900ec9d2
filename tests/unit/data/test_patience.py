"""A medium that takes too long costs its sample and no more, wherever the time passes."""

import io
import threading
import time

import av
import numpy as np
import pytest
from megatron.energon.errors import SkipSample
from samples import sample_of
from transformers import AutoProcessor

from megatron_vlm.batch import DataNeeds
from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.media import images, videos
from megatron_vlm.data.media.images import call_with_timeout
from megatron_vlm.data.media.videos import VideoRules, decode_video, plan_video
from megatron_vlm.models.families import load
from tiny.checkpoints import build_tiny_checkpoint

FRAMES = 6000


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(images, "_late", set())


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


@pytest.mark.parametrize("decode", [decode_video, plan_video])
def test_a_clip_that_takes_long_is_dropped_and_its_thread_ends(long_clip, decode, monkeypatch):
    frames = []
    monkeypatch.setattr(videos, "exit_if_abandoned", lambda: (frames.append(1), images.exit_if_abandoned()))
    rules = VideoRules(fps=100, max_frames=FRAMES)
    with pytest.raises(
        BadSample, match=f"decode_timeout: {len(long_clip)} bytes, not decoded in 0.01 seconds"
    ):
        call_with_timeout(0.01, decode, long_clip, rules)
    assert wait_until(lambda: not [t for t in decoding_threads() if t.is_late])
    assert len(frames) < FRAMES  # of which the first pass alone looks at each
    with pytest.raises(BadSample, match="0.01 seconds before"):  # at once
        call_with_timeout(0.01, decode, long_clip, rules)
    assert not [t for t in decoding_threads() if t.is_late]


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
