"""Videos: which frames are taken and when they are shown, and what every family's encoder makes of them."""

import json
import re
import struct

import datasets
import numpy as np
import pytest
import torch
from grey_media import SHADE, file, frame_list, picture, sample, steady
from loaders import arguments_of
from megatron.energon.errors import SkipSample
from pairs import first_soon
from prepared_shards import prepare
from programs import COMMAND, run_program

from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import parse_record
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.encode.processing import TextEncoder
from megatron_vlm.data.load.energon import EnergonProvider
from megatron_vlm.data.load.hf import HFProvider
from megatron_vlm.data.media.videos import VideoRules, choose_frames, decode_video, plan_video
from megatron_vlm.models.vlm import PixelNormalizer
from tiny.checkpoints import build_tiny_checkpoint

FAMILIES = first_soon(
    ["qwen2_5_vl", "qwen3_vl", "glm4v_moe", "qwen3_vl_moe", "qwen2_vl", "glm46v", "glmga"], 3
)
EVERY = VideoRules(fps=100)  # all frames


def shown(frames):
    """The numbers of the frames, from their shade."""
    return np.round(frames[:, frames.shape[1] // 2, frames.shape[2] // 2, 0] / SHADE).astype(int).tolist()


# --- which frames ----------------------------------------------------------------------------------------


def test_frames_are_those_on_screen_at_even_steps():
    rules = VideoRules(fps=2, min_frames=2)
    assert choose_frames([0.1 * i for i in range(30)], rules) == [0, 5, 10, 15, 20, 25]
    assert choose_frames([0, 0.9, 1.9, 3], rules) == [0, 1, 2, 3]  # each once
    assert choose_frames([7, 7.1, 7.2, 7.3], rules) == [0, 2]


@pytest.mark.parametrize(
    "container, codec",
    [
        ("mp4", "libx264"),
        ("mp4", "mpeg4"),
        ("webm", "libvpx-vp9"),
        ("matroska", "libx264"),
        ("avi", "libx264"),
    ],
)
def test_every_container_gives_the_chosen_frames_and_their_times(container, codec):
    frames, plan = decode_video(steady(30, container=container, codec=codec), VideoRules(fps=2))
    assert shown(frames) == [0, 5, 10, 15, 20, 25]
    assert plan.times == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5])
    assert plan.interval == pytest.approx(0.5)


def test_frames_at_uneven_times_keep_them():
    frames, plan = decode_video(file([0, 0.1, 0.7, 1.5, 1.6, 3.0]), EVERY)
    assert shown(frames) == [0, 1, 2, 3, 4, 5]
    assert plan.times == [0, 0.1, 0.7, 1.5, 1.6, 3.0] and plan.interval == pytest.approx(0.6)


def test_seeking_finds_the_pixels_of_reading_from_the_start():
    video = steady(30, gop=4)
    every, _ = decode_video(video, EVERY)
    some, _ = decode_video(video, VideoRules(fps=1, min_frames=2))
    assert len(every) == 30 and np.array_equal(some, every[[0, 10, 20, 20]])


def test_plans_are_what_decoding_gives():
    for video in (steady(7), frame_list(5), file([0, 0.3, 0.4])):
        for rules in (EVERY, VideoRules(fps=2, max_pixels=1000), VideoRules(max_frames=2)):
            frames, plan = decode_video(video, rules)
            assert plan == plan_video(video, rules)
            assert frames.shape == (len(plan.times), *plan.size[::-1], 3)


def test_large_frames_are_scaled():
    assert plan_video(steady(2), VideoRules(max_pixels=1000)).size == (36, 27)


def test_files_are_turned_as_their_header_says():
    """The matrix of a phone held upright, written over the track header's: a quarter turn clockwise."""
    video = bytearray(steady(4, size=(64, 48)))
    at = video.index(b"tkhd") + 4 + 40
    video[at : at + 36] = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 48 << 16, 0, 1 << 30)
    upright = bytes(video)
    assert plan_video(upright, EVERY).size == (48, 64)
    assert decode_video(upright, EVERY)[0].shape == (4, 64, 48, 3)


def test_frame_lists_have_times_of_their_own():
    frames = frame_list(4)
    assert plan_video(frames, VideoRules(fps=2)).times == [0, 0.5, 1, 1.5]
    assert plan_video({"frames": frames, "fps": 8}, EVERY).times == [0, 0.125, 0.25, 0.375]
    assert plan_video({"frames": frames, "timestamps": [3, 4, 6, 9]}, EVERY).times == [0, 1, 3, 6]
    listed, _ = decode_video({"frames": frames, "timestamps": [3, 4, 6, 9]}, VideoRules(0.25, min_frames=2))
    assert shown(listed) == [0, 2]  # 8 seconds; after 4 of them the frame of second 6 is on screen


# --- files that cannot be used ---------------------------------------------------------------------------


@pytest.mark.parametrize("container, codec", [("mp4", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mpeg4")])
def test_files_cut_anywhere_give_a_video_as_measured_or_a_reason(container, codec):
    whole, refused = steady(30, container=container, codec=codec), 0
    for stop in range(0, len(whole), len(whole) // 40):
        try:
            plan = plan_video(whole[:stop], EVERY)
            assert decode_video(whole[:stop], EVERY)[1] == plan
        except BadSample as bad:
            refused += 1
            assert bad.reason in ("video_undecodable", "video_truncated")
    assert refused >= 15


# --- what encoders make of them --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    path = build_tiny_checkpoint(request.param, tmp_path_factory.mktemp("tiny") / request.param)
    return request.param, path


@pytest.fixture(scope="module")
def arguments(family):
    return arguments_of(*family)


def encoder_of(arguments, seq_length=2048, packing=False, fast=True, **settings):
    kind = PackingVLMTaskEncoder if packing else HFEncoderVLMTaskEncoder
    return kind(**arguments, data=DataConfig(seq_length=seq_length, **settings), fast=fast)


def by_processor(encoder, conversation, videos):
    """What the processor makes of the chosen frames, told that frame i of a 10 Hz video is number 10 t."""
    processor, rules = encoder.processor, encoder.documents.video_rules
    prompt, *_ = TextEncoder(processor).chat.render(parse_record(conversation).messages)
    decoded = [decode_video(video, rules) for video in videos]
    metadata = [
        {
            "fps": 10.0,
            "frames_indices": [round(10 * time) for time in plan.times],
            "total_num_frames": 10 * plan.interval * len(plan.times),
        }
        for _, plan in decoded
    ]
    return processor(
        text=[prompt],
        videos=[frames for frames, _ in decoded],
        video_metadata=metadata,
        do_sample_frames=False,
        add_special_tokens=False,
        return_tensors="pt",
    )


def test_ids_grids_and_pixels_are_the_processors_of_the_chosen_frames(arguments):
    encoder = encoder_of(arguments)
    for videos in ([steady(30)], [steady(7), frame_list(3)], [steady(1)]):
        conversation = sample(videos)
        encoded = encoder.encode_sample(conversation)
        expected = by_processor(encoder, conversation.messages, videos)
        assert encoded.input_ids.equal(expected["input_ids"][0])
        raw = encoded.visual_inputs.as_model_kwargs()
        found = PixelNormalizer(encoder.processor)(raw, torch.float32)
        assert set(found) == set(arguments["needs"].visual_keys) & set(expected)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, torch.as_tensor(expected[name]))
        grids = encoded.visual_inputs.video_grid_thw
        assert len(grids) == len(videos)
        assert len(encoded.visual_inputs.pixel_values_videos) == grids.prod(-1).sum()


def first_times(encoded, encoder):
    """The steps of time of the first video, from its first."""
    times = encoded.position_ids[0][encoded.input_ids == encoder.processor.video_token_id]
    first = times[: int(encoded.visual_inputs.video_grid_thw[0].prod()) // 4]
    return (first - first[0]).unique().tolist()


def test_times_by_hand(family, arguments):
    """Frames of 0, 0.5, 1.0, ... seconds, taken in pairs; a video at uneven times; one frame alone."""
    encoder = encoder_of(arguments)
    even, uneven, alone = steady(30), file([0, 1.0, 1.4, 4.2]), steady(1)
    encoded = encoder.encode_sample(sample([even, uneven, alone]))
    text = encoder.processor.tokenizer.decode(encoded.input_ids)
    pads = "<|image|>", "<|image_pad|>", "<|video_pad|>"
    for pad in pads:
        text = re.sub(f"({re.escape(pad)})+", "", text)
    name = family[0]
    if name.startswith("qwen3"):
        # means of pairs: (0 + 0.5) / 2, ...; (0 + 1) / 2, (1.4 + 4.2) / 2
        expected = ["0.2", "1.2", "2.2", "0.5", "2.8", "0.0"]
        assert re.findall(r"<([0-9.]+) seconds>", text) == expected
    elif name == "glm4v_moe":  # whole seconds of the first of a pair
        assert re.findall(r"<\|end_of_image\|>(\d+)", text) == ["0", "1", "2", "0", "1", "0"]
    elif name in ("glm46v", "glmga"):
        expected = ["0.0", "1.0", "2.0", "0.0", "1.4", "0.0"]
        assert re.findall(r"<\|end_of_image\|>([0-9.]+) seconds", text) == expected
    elif name == "qwen2_vl":  # moments, whenever they are
        assert first_times(encoded, encoder) == [0, 1, 2]
    else:  # seconds from pair to pair: 2 x 0.5, 2 x 4.2 / 3, and of a single frame 2 / fps
        seconds = encoded.visual_inputs.second_per_grid_ts
        torch.testing.assert_close(seconds, torch.tensor([1.0, 2.8, 1.0]))
        assert first_times(encoded, encoder) == [0, 2, 4]  # 2 ids a second


def test_truncation_keeps_whole_videos_at_every_length(arguments):
    turns = "<video>Which one?<video>And this?"
    conversation = sample([frame_list(2), frame_list(6)], question=turns)
    before = {"role": "assistant", "content": [{"type": "text", "text": "Yes?"}]}
    conversation.messages = [before, *conversation.messages]
    whole = encoder_of(arguments).encode_sample(conversation)
    kept = set()
    for length in range(4, len(whole.input_ids) + 1, 3):
        encoder = encoder_of(arguments, length, over_length="truncate", packing=True)
        try:
            cut = encoder.postencode_sample(encoder.preencode_sample(conversation))
        except SkipSample:
            continue
        videos = 0 if cut.visual_inputs is None else len(cut.visual_inputs.video_grid_thw)
        kept.add(videos)
        assert cut.input_ids.equal(whole.input_ids[: len(cut.input_ids)]) and len(cut.input_ids) <= length
        for name, tensor in cut.visual_inputs.as_model_kwargs().items() if videos else ():
            assert tensor.equal(getattr(whole.visual_inputs, name)[: len(tensor)])
        begin = encoder.processor.tokenizer.convert_tokens_to_ids("<|begin_of_video|>")
        end = encoder.processor.tokenizer.convert_tokens_to_ids("<|end_of_video|>")
        if begin is not None:
            assert (cut.input_ids == begin).sum() == (cut.input_ids == end).sum() == videos
    assert kept == {0, 1, 2}


def test_images_and_videos_share_a_sample_or_are_counted(arguments):
    encoder = encoder_of(arguments)
    both = sample([frame_list(2)], [picture(1)])
    if arguments["needs"].images_or_videos:
        with pytest.raises(SkipSample):
            encoder.encode_sample(both)
        assert encoder.drops.summary()["reasons"] == {"images_and_videos": 1}
    else:
        visual = encoder.encode_sample(both).visual_inputs
        assert len(visual.image_grid_thw) == len(visual.video_grid_thw) == 1


def test_bad_videos_are_dropped_with_their_reason(arguments):
    encoder = encoder_of(arguments)
    for bad in (b"x", picture(1), steady(0)):
        with pytest.raises(SkipSample):
            encoder.encode_sample(sample([bad]))
        with pytest.raises(BadSample, match="video_undecodable"):
            encoder.documents.measure(sample([bad]))
    assert encoder.drops.summary()["reasons"] == {"video_undecodable": 3}


# --- from records to steps -------------------------------------------------------------------------------


def turns(question, number):
    return [{"from": "human", "value": question}, {"from": "gpt", "value": f"number {number}"}]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A JSONL of records with a file, a list of frames, two videos, an image, neither, and broken ones."""
    folder = tmp_path_factory.mktemp("videos")
    (folder / "clip.mp4").write_bytes(steady(20))
    (folder / "clip.webm").write_bytes(steady(9, container="webm", codec="libvpx-vp9"))
    (folder / "cut.mp4").write_bytes(steady(20)[:-200])
    for index in range(3):
        (folder / f"{index}.jpg").write_bytes(picture(index))
    frames = [f"{index}.jpg" for index in range(3)]
    records = [
        {"video": "clip.mp4"},
        {"videos": [{"frames": frames, "fps": 4}]},
        {"videos": [frames, "clip.webm"]},
        {"images": ["1.jpg"]},
        {},
        {"video": "cut.mp4"},
        {"videos": ["clip.mp4", "clip.webm"], "question": "<video>"},
        {"video": "../clip.mp4"},
    ]
    for number, record in enumerate(records):
        record["conversations"] = turns(record.pop("question", "What?"), number)
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder / "data.jsonl"


@pytest.fixture(scope="module")
def energon(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("energon") / "data"
    prepare(source, folder, splits={"train": 1})
    return folder


def test_both_sources_give_the_same_samples(energon, source, family, tmp_path):
    name, path = family
    first = json.loads(source.read_text().splitlines()[0])
    video = {"path": None, "bytes": (source.parent / first["video"]).read_bytes()}
    rows = datasets.Dataset.from_dict({"conversations": [first["conversations"]], "videos": [[video]]})
    rows.save_to_disk(tmp_path / "hf")
    found = {}
    for kind, folder in {EnergonProvider: energon, HFProvider: tmp_path / "hf"}.items():
        provider = kind(DataConfig(train_data_path=str(folder), num_workers=0))
        loader = provider.train_loader(
            encoder_of(arguments_of(name, path)), micro_batch_size=1, rank=0, world_size=1, seed=1
        )
        batches = (next(loader) for _ in range(50))
        found[kind] = next(batch for batch in batches if batch["__key__"][0][0].endswith("000000000"))
        loader.close()
    assert found[EnergonProvider]["input_ids"].equal(found[HFProvider]["input_ids"])
    for tensor, other in zip(
        *(batch["visual_inputs"].as_model_kwargs().values() for batch in found.values()), strict=True
    ):
        assert tensor.equal(other)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_trains_on_images_and_videos(name, tmp_path, energon):
    checkpoint = build_tiny_checkpoint(name, tmp_path / "checkpoint")
    command = ["train", "--recipe", "gemma3_tiny_digits"]
    command += ["--run_dir", str(tmp_path / "run"), "--hf_path", str(checkpoint)]
    command += ["--train_data_path", str(energon), "tp=1", "micro_batch_size=5", "global_batch_size=5"]
    command += [
        "steps=2",
        "num_workers=1",
        "warmup_steps=0",
        "eval_every=0",
        "save_every=0",
        "seq_length=512",
    ]
    done = run_program(COMMAND, *command)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 2 and losses[1] < losses[0] < 20
    assert "dropped samples" not in done.stdout
