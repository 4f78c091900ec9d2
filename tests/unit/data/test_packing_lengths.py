"""What text and image headers predict of a sample's encoding is what the processor makes of it."""

import numpy as np
import pytest
from megatron.energon.errors import SkipSample
from parity import OF_DATA
from PIL import Image
from samples import sample_of
from sources import image
from transformers import AutoConfig, AutoProcessor

from megatron_vlm.config import DataConfig
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.media.images import Scaling, decode_image, image_size
from megatron_vlm.models.families import load
from tiny.checkpoints import build_tiny_checkpoint

SIZES = [(56, 56), (24, 16), (16, 240), (300, 41), (500, 333), (1, 1), (640, 480), (3, 200), (69, 3), (40, 1)]

ONE_AND_TWO = [[(56, 56)], [(56, 56), (56, 56)]]


@pytest.fixture(scope="module", params=OF_DATA)
def parts(request, tmp_path_factory):
    """Processor and needs of a family."""
    path = build_tiny_checkpoint(request.param, tmp_path_factory.mktemp("tiny") / request.param)
    needs = load(request.param)(AutoConfig.from_pretrained(path)).data_needs
    return AutoProcessor.from_pretrained(path), needs


def encoders(parts, seq_length=4096, **options):
    """One in halves, one in whole."""
    processor, needs = parts
    data = DataConfig(seq_length=seq_length, **options)
    return PackingVLMTaskEncoder(processor, data, needs), HFEncoderVLMTaskEncoder(processor, data, needs)


def sample(sizes, question="\n Which? ", turns=1, key="s"):
    """Images amid texts whose spaces and newlines may melt into the tokens around an image."""
    content = "What\n" + "\n and <image>".join([""] * (len(sizes) + 1)) + question
    talk = [{"role": "user", "content": content}, {"role": "assistant", "content": "A seven.\n"}]
    for turn in range(1, turns):
        talk += [{"role": "user", "content": f"And {turn}?"}, {"role": "assistant", "content": "Yes " * turn}]
    imgs = [image(size) for size in sizes]
    return sample_of(talk, imgs, key=key)


def samples():
    rng = np.random.default_rng(0)
    yield sample([])
    yield from (sample([size]) for size in SIZES)
    for turns in range(1, 7):
        yield sample([SIZES[i] for i in rng.integers(len(SIZES), size=turns % 4)], turns=turns)


@pytest.mark.parametrize("bounds", [{}, {"max_pixels": 5000}, {"min_pixels": 9000}])
def test_lengths_and_patches_are_those_of_the_encoded_sample(parts, bounds):
    """`postencode_sample` raises when they are not; the encoding is that of the other encoder."""
    halves, whole = encoders(parts, **bounds)
    lengths = set()
    for given in samples():
        try:
            half = halves.preencode_sample(given)
        except SkipSample as too_long:  # LFM2-VL's tiny processor takes up to 96 patches
            assert bounds and "max_num_patches 96" in str(too_long)
            continue
        encoded, expected = halves.postencode_sample(half), whole.encode_sample(given)
        assert encoded.input_ids.equal(expected.input_ids) and encoded.labels.equal(expected.labels)
        lengths.add(half.measured.length)
    assert len(lengths) > 5


@pytest.mark.parametrize("over_length", ["drop", "truncate"])
def test_both_encoders_drop_and_cut_the_same_samples(parts, over_length):
    least = encoders(parts)[0].preencode_sample(sample([(56, 56)])).measured.length  # over 60 for Gemma 4
    halves, whole = encoders(parts, max(60, least + 5), over_length=over_length)
    for number, given in enumerate(samples()):
        given.__key__ = f"s{number}"
        try:
            halves.postencode_sample(halves.preencode_sample(given))
        except SkipSample:
            pass
        try:
            whole.encode_sample(given)
        except SkipSample:
            pass
    assert halves.drops.summary() == whole.drops.summary()
    assert halves.drops.examples() == whole.drops.examples()
    assert halves.drops.summary()["encoded"] > 3


def test_a_sample_of_too_many_patches_is_dropped(parts):
    """LLaVA-OneVision's one image has more than two have."""
    halves, _ = encoders(parts)
    found = [(halves.preencode_sample(each).measured.patches, each) for each in map(sample, ONE_AND_TWO)]
    (fewer, fits), (more, too_many) = sorted(found, key=lambda pair: pair[0])
    assert 0 < fewer < more
    limited, _ = encoders(parts, max_patches=more - 1)
    limited.preencode_sample(fits)
    with pytest.raises(SkipSample):
        limited.preencode_sample(too_many)
    assert limited.drops.summary()["reasons"] == {"over_patches": 1}


def test_a_wrong_prediction_ends_the_run(parts):
    halves, _ = encoders(parts)
    half = halves.preencode_sample(sample([(56, 56)]))
    half.measured.length += 1
    with pytest.raises(RuntimeError, match=f"s: measured {half.measured.length} tokens .* encoded"):
        halves.postencode_sample(half)


ROTATED = Image.Exif()
ROTATED[0x0112] = 6


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP", "JPEG2000"])
@pytest.mark.parametrize("exif", [None, ROTATED])
@pytest.mark.parametrize("max_pixels", [None, 900])
def test_sizes_from_headers_are_those_of_decoded_images(format, exif, max_pixels):
    data = image((50, 30), format, **({"exif": exif} if exif else {}))
    size = image_size(data, Scaling(max_pixels))
    assert size == decode_image(data, Scaling(max_pixels)).size
    assert (size[0] < size[1]) == (exif is not None and format in ("JPEG", "PNG", "WEBP", "TIFF"))
