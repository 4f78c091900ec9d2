"""The fast path makes of a sample what the Hugging Face processor makes of it, to the bit."""

import functools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from megatron.energon.errors import SkipSample
from noisy_media import film, picture
from PIL import Image
from samples import sample_of, templated
from transformers import AutoConfig, AutoProcessor
from transformers.image_utils import SizeDict
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from megatron_vlm.batch import DataNeeds, GenericVisualInputs, count_up, is_raw
from megatron_vlm.config import DataConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.media.images import decode_image, decode_pixels
from megatron_vlm.models.families import load
from megatron_vlm.models.vlm import PixelNormalizer
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint, without_generation_tags
from tiny.corpus import default_corpus
from tiny.distributed import run_distributed

AS_OTHERS = {"glm4v", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}  # have another family's processor
# resize as glm4v_moe, qwen2_5_vl and minicpmv4_6; the factor of published GLM-GAs is not known
TINY_ALONE = {"glm46v", "glmga", "qwen2_vl", "minicpmv4_7"}
# Sizes of the published checkpoints; pixels of a square of this side are the most of the patch towers
PUBLISHED = {
    name: {} if name in TINY_ALONE else parts.published or {}
    for name, parts in TINY_FAMILIES.items()
    if name not in AS_OTHERS
}
PUBLISHED |= {"llava, siglip": {"image_size": 384}, "lfm2_vl": {"image_tokens": 256, "patch_size": 16}}
TOWERS = {  # as published, for images of published sizes
    "gemma4": {"position_embedding_size": 10_240},
    "gemma4_unified": {"mm_posemb_size": 1120},
}
TINY_FIRST = {"gemma4", "llava_onevision", "internvl", "smolvlm", "minicpmv4_6"}  # in `make test`
SOON = ("gemma3", "gemma4", "qwen3_vl", "internvl", "lfm2_vl", "mistral3")  # one of each kind of images
LATER = {"llava", "llava, siglip", "qianfan_ocr"}
VARIANTS = {"llava, siglip": {"tower": "siglip_vision_model", "strategy": "full"}}
UPRIGHT, ROTATED = Image.Exif(), Image.Exif()
UPRIGHT[0x0112], ROTATED[0x0112] = 1, 6
XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
FILES = [  # (width, height), mode, format, options
    ((64, 48), "RGB", "JPEG", {}),
    ((448, 448), "RGB", "JPEG", {"subsampling": 0}),
    ((1024, 768), "RGB", "JPEG", {"quality": 90}),
    ((333, 201), "RGB", "JPEG", {"subsampling": 2, "progressive": True}),
    ((201, 77), "RGB", "JPEG", {"exif": ROTATED}),
    ((97, 131), "L", "JPEG", {}),
    ((202, 78), "RGB", "JPEG", {"exif": UPRIGHT, "comment": b"none", "icc_profile": b"none"}),
    ((203, 79), "RGB", "JPEG", {"xmp": XMP}),
    ((90, 60), "CMYK", "JPEG", {}),
    ((3, 111), "RGB", "PNG", {}),
    ((200, 3), "RGB", "PNG", {}),
    ((150, 1), "RGB", "PNG", {}),
    ((1, 1), "RGB", "PNG", {}),
    ((120, 80), "RGBA", "PNG", {}),
    ((120, 80), "I;16", "PNG", {}),
    ((58, 300), "P", "GIF", {}),
    ((15, 601), "RGB", "PNG", {}),
    ((400, 31), "RGB", "WEBP", {}),
]
TEXTS = [
    "What is in the image?",
    "図の中の犬🐕は何匹？",
    "\n\n  and \n",
    "<b>\u00a0</b> [x] 👩‍👩‍👧 é e\u0301",
    "",
    " ",
]


@functools.cache
def samples():
    """Each file alone, then 0 to 3 of them in up to 8 turns, beside one another too."""
    return list(_samples())


def _samples():
    rng = random.Random(0)
    files = [picture(*file, seed=seed) for seed, file in enumerate(FILES)]
    for number in range(len(FILES) + 12):
        alone, turns = number < len(FILES), []
        imgs = [files[number]] if alone else rng.choices(files, k=number % 4)
        questions = [""] * (1 if alone else rng.choice([1, 2, 8]))
        for _ in imgs:
            questions[rng.randrange(len(questions))] += rng.choice(TEXTS) + "<image>"
        for question in questions:
            turns.append({"role": "user", "content": question + rng.choice(TEXTS)})
            reply = rng.choice(TEXTS)  # empty ones only beside others: alone they are no reply
            turns.append({"role": "assistant", "content": reply if turns[1:] or reply.strip() else "A dog."})
        yield sample_of(turns, imgs, key=str(number))


def clip(size, count):
    """A list of encoded frames at uneven times."""
    frames = [picture(size, "RGB", "JPEG", {"quality": 95}, seed) for seed in range(count)]
    return {"frames": frames, "timestamps": [number**1.5 / 3 for number in range(count)]}


def video_samples(processor):
    """Videos alone, several, and beside images, for processors that take them."""
    if not processor.needs.videos:
        return []
    # processors whose frames are tiles refuse videos of different lengths in one conversation
    of_one_length = processor.needs.frames_as_images or "video_frames" in processor.needs.visual_keys
    return _video_samples(processor.needs.images_or_videos, of_one_length)


@functools.cache
def _video_samples(images_or_videos, of_one_length):
    return list(_videos_and_images(images_or_videos, of_one_length))


def _videos_and_images(images_or_videos, of_one_length):
    videos = [
        clip((64, 48), 1),
        clip((201, 77), 3),
        clip((448, 448), 4),
        clip((36, 90), 7),
        film((160, 90), 12),
    ]
    several = [clip((201, 77), 4), videos[2]] if of_one_length else videos[2:]
    rows = [([], [video]) for video in videos] + [([], several)]
    if not images_or_videos:
        image = picture(*FILES[3])
        rows += [([image], videos[:1]), ([image, image], videos[-1:]), ([image], several[:2])]
    rng = random.Random(0)
    for number, (imgs, videos) in enumerate(rows):
        media = ["<image>"] * len(imgs) + ["<video>"] * len(videos)
        rng.shuffle(media)
        question = "".join(rng.choice(TEXTS) + medium for medium in media)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "A dog."}] * 2
        turns[2] = turns[2] | {"content": rng.choice(TEXTS)}
        yield sample_of(turns, imgs, videos=videos, key=f"video {number}")


PROCESSORS = [
    pytest.param(
        (name, sizes),
        id=f"{name} {at}",
        marks=() if soon and name in SOON else pytest.mark.long if soon else further,
    )
    for name, published in PUBLISHED.items()
    for at, sizes in {"tiny": {}, "published": published}.items()
    for soon in [name not in LATER and (at == "tiny") == (name in TINY_FIRST)]
    for further in [pytest.mark.long if at == "published" and name in TINY_FIRST else pytest.mark.soak]
    if sizes or at == "tiny"
]
SOON_BOUNDS = ("gemma3 tiny", "qwen3_vl published", "internvl tiny", "gemma4_unified tiny", "lfm2_vl tiny")
OF_TEMPLATES = [  # which know nothing of sizes
    pytest.param(*each.values, id=each.id, marks=pytest.mark.soak if each.values[0][1] else ())
    for each in PROCESSORS
]
OF_BOUNDS = [  # one of each kind of images in `make test`
    pytest.param(*each.values, id=each.id, marks=[] if each.id in SOON_BOUNDS else pytest.mark.soak)
    for each in PROCESSORS
]


@pytest.fixture(scope="module", params=PROCESSORS)
def processor(request):
    name, sizes = request.param
    family = name.split(",")[0]
    parts = TINY_FAMILIES[family]
    processor = parts.processor(default_corpus(), parts.template, **sizes, **VARIANTS.get(name, {}))
    known_as(family, processor).made = {}
    yield processor
    processor.made.clear()


def known_as(family, processor):
    needs = load(family)(TINY_FAMILIES[family].config(processor, {}, TOWERS.get(family, {}))).data_needs
    processor.needs = replace(needs, position_ids=count_up)
    return processor


def encoders(processor, needs: DataNeeds | None = None, **settings):
    """(fast, through the HF processor)"""
    data = DataConfig(seq_length=100_000, **settings)
    parts = (processor, data, needs or processor.needs)
    return [HFEncoderVLMTaskEncoder(*parts, fast=fast) for fast in (True, False)]


def by_processor(processor, sample):
    """What the Hugging Face processor makes of a sample, computed once for all tests."""
    if "encoder" not in processor.made:
        processor.made["encoder"] = encoders(processor)[1]
    if sample.__key__ not in processor.made:
        processor.made[sample.__key__] = processor.made["encoder"].encode_sample(sample)
    return processor.made[sample.__key__]


def ready(processor, visual: GenericVisualInputs | None) -> dict[str, torch.Tensor]:
    if visual is None:
        return {}
    return PixelNormalizer(processor)(visual.normalized_for_model(), torch.float32)


def assert_equal_but_for_normalization(processor, ours, theirs):
    for field in ("input_ids", "labels", "loss_mask", "attention_mask", "position_ids"):
        assert torch.equal(getattr(ours, field), getattr(theirs, field)), (ours.__key__, field)
    for name, tensor in (ours.visual_inputs or GenericVisualInputs()).as_model_kwargs().items():
        assert is_raw(tensor) == name.startswith("pixel_values")
    visual, expected = ready(processor, ours.visual_inputs), ready(processor, theirs.visual_inputs)
    assert visual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == visual[name].dtype and torch.equal(visual[name], tensor), (ours.__key__, name)


def test_everything_equals_what_the_processor_makes(processor):
    fast, hf = encoders(processor)
    assert fast.documents.why_hf_processor is None and hf.documents.why_hf_processor
    lengths = set()
    for sample in (*samples(), *video_samples(processor)):
        theirs = by_processor(processor, sample)
        assert_equal_but_for_normalization(processor, fast.encode_sample(sample), theirs)
        lengths.add(len(theirs.input_ids))
    assert len(lengths) > 5


def encoded_or_reason(encoder, sample):
    try:
        return encoder.encode_sample(sample)
    except SkipSample as skipped:
        return str(skipped)


@pytest.mark.parametrize("processor", OF_BOUNDS, indirect=True)
def test_bounds_on_pixels_are_kept(processor):
    for bounds in ({"max_pixels": 9000, "video_max_pixels": 5000}, {"min_pixels": 60_000}):
        fast, hf = encoders(processor, **bounds)
        for sample in (*samples()[: len(FILES)], *video_samples(processor)):
            ours, theirs = (encoded_or_reason(encoder, sample) for encoder in (fast, hf))
            if isinstance(theirs, str):  # LFM2-VL's tiny processor takes none that is so long
                assert ours == theirs and "patches, max_num_patches 96" in theirs
            else:
                assert_equal_but_for_normalization(processor, ours, theirs)


@pytest.mark.parametrize("processor", OF_TEMPLATES, indirect=True)
def test_templates_without_generation_blocks(processor):
    untagged = templated(processor, without_generation_tags(processor.chat_template))
    fast, hf = encoders(untagged)
    for sample in samples()[len(FILES) :]:
        assert_equal_but_for_normalization(processor, fast.encode_sample(sample), hf.encode_sample(sample))


def test_packed_samples_are_equal_too(processor):
    """Here ids come from the sizes, before images and videos are decoded."""
    packing = PackingVLMTaskEncoder(processor, DataConfig(seq_length=100_000), processor.needs)
    known, decoded = packing.documents.processing, []
    known.decode = lambda *image: decoded.append(image) or decode_pixels(*image)
    for sample in (*samples()[len(FILES) :], *video_samples(processor)):
        decoded.clear()
        measured = packing.preencode_sample(sample)
        assert not decoded
        ours = packing.postencode_sample(measured)
        assert len(decoded) == len(sample.imgs or [])
        assert_equal_but_for_normalization(processor, ours, by_processor(processor, sample))


def tiny_qwen():
    parts = TINY_FAMILIES["qwen2_5_vl"]
    return parts.processor(default_corpus(100), parts.template)


def changed(part="image_processor", **settings):
    processor = tiny_qwen()
    for name, value in settings.items():
        setattr(getattr(processor, part), name, value)
    return processor


class OtherImageProcessor(Qwen2VLImageProcessor):
    pass


class OtherVideoProcessor(Qwen2VLVideoProcessor):
    pass


def with_other(part, kind):
    processor = tiny_qwen()
    setattr(processor, part, kind(size=dict(getattr(processor, part).size)))
    return processor


def other_processor():
    processor = tiny_qwen()
    processor.__class__ = type("Qwen2_5_VLProcessor", (type(processor),), {})
    return processor


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: changed(do_rescale=False), "do_rescale = False"),
        (lambda: changed(do_normalize=None), "do_normalize = None"),
        (
            lambda: changed(do_center_crop=True, crop_size=SizeDict(height=28, width=28)),
            "do_center_crop = True",
        ),
        (lambda: changed(resample=0), "resample = 0"),
        (lambda: changed("video_processor", do_rescale=False), "VideoProcessor with do_rescale = False"),
        (lambda: changed("video_processor", resample=1), "VideoProcessor with resample = 1"),
        (lambda: with_other("image_processor", OtherImageProcessor), "OtherImageProcessor"),
        (lambda: with_other("video_processor", OtherVideoProcessor), "OtherVideoProcessor"),
        (other_processor, "not one of the known"),
    ],
)
def test_settings_and_classes_that_are_not_known_go_to_the_processor(make, reason):
    encoder = HFEncoderVLMTaskEncoder(make(), DataConfig(), DataNeeds(load("qwen2_5_vl").visual_keys))
    assert reason in encoder.documents.why_hf_processor
    first, *_ = samples()
    assert not is_raw(encoder.encode_sample(first).visual_inputs.pixel_values)


def all_losses(folder: str) -> dict[str, list[torch.Tensor]]:
    from megatron_vlm.parallel import setup

    setup.init_distributed(ParallelConfig(), seed=1)
    return {family: losses(f"{folder}/{family}", family) for family in NORMALIZED}


def losses(path: str, family: str) -> list[torch.Tensor]:
    """Of the model on a batch with raw and on one with ready pixels."""
    from megatron_vlm.models.opened import build_model
    from megatron_vlm.models.weights.importing import import_hf
    from megatron_vlm.parallel import setup

    processor = known_as(family, AutoProcessor.from_pretrained(path))
    description = load(family)(AutoConfig.from_pretrained(path))
    run = RunConfig(model=ModelConfig(dtype="bf16"))
    [model] = build_model(run, description, setup.device(), processor)
    import_hf([model], path, description.weight_map)
    found = []
    for encoder in encoders(processor, description.data_needs):
        given = [sample for sample in samples() if int(sample.__key__) % 8 in (1, 6)]
        given += list(video_samples(processor))[-1:]
        batch = encoder.encode_batch(encoder.batch([encoder.encode_sample(sample) for sample in given]))
        layout, windows = model.layout(batch), set(model.config.layer_windows or [None])
        with torch.no_grad():
            found.append(model(layout.stream(0, layout.longest, windows, setup.device())))
    return found


NORMALIZED = ["mistral3", "qwen2_5_vl", "gemma4", "llava", "llava_onevision", "internvl"]


@pytest.mark.long
def test_the_model_makes_the_same_of_raw_and_of_ready_pixels(tmp_path):
    for family in NORMALIZED:
        build_tiny_checkpoint(family, tmp_path / family)
    [found] = run_distributed(1, all_losses, str(tmp_path))
    assert list(found) == NORMALIZED
    for family, (raw, ready) in found.items():
        assert raw.isfinite().all() and torch.equal(raw, ready), family


# ----------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file[1]}-{file[2]}-{file[0]}")
def test_pixels_are_those_of_the_decoded_image(file):
    data = picture(*file)
    assert np.array_equal(decode_pixels(data), np.asarray(decode_image(data)))


def test_damaged_jpegs_decode_alike_or_are_refused_alike():
    """Cut anywhere, bytes changed anywhere."""
    rng, whole = random.Random(1), picture((120, 90), "RGB", "JPEG", {})
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(3)):
            damaged[rng.randrange(len(whole))] = rng.randrange(256)
        if rng.random() < 0.5:
            del damaged[rng.randrange(len(whole)) :]
        ours, theirs = (outcome(decode, bytes(damaged)) for decode in (decode_pixels, decode_image))
        assert ours == theirs
        refused += isinstance(ours, str)
    assert 50 < refused < 250


def outcome(decode, data):
    try:
        return np.asarray(decode(data)).tolist()
    except BadSample as bad:
        return bad.reason
