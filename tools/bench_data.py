"""Measure encoding of image conversations, print a table and write reports/bench_data.json.

python tools/bench_data.py [--families gemma3 qwen3_vl] [--rounds 5] [--workers-only] [--out FILE]

Every path gets the same JPEG files and conversations, on one core, in turns, and its fastest round counts;
seconds are CPU time. Processors have the image settings of the published checkpoints, and small tokenizers.

floor            JPEG decoding with the fastest codec installed, resizing, normalizing: what nobody can skip
floor_and_text   the floor, and the rendered text through the Rust tokenizer, whose offsets tell the replies
megatron_vlm     this package's encoder: the batch contract's sample, with pixels for the device to normalize
hf_processor     apply_chat_template with the mask of assistant tokens, as one would write it
automodel        NeMo Automodel's PreTokenizedDatasetWrapper, if installed
bridge           Megatron-Bridge's collate function for the processor, if installed; its package's modules
                 are imported without their `__init__`, which needs Transformer Engine

Families that take videos get a file of 16 frames as well, all taken: there the floor is decoding and
normalizing them, and `hf_processor` the processor after this package's decoder.

Last, samples per second of wall-clock time out of an Energon dataset with one and with two workers.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import datetime
import functools
import importlib
import io
import json
import logging
import platform
import random
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as tv
from transformers import ProcessorMixin
from transformers.utils import logging as transformers_logging

from megatron_vlm.batch import IGNORE_INDEX
from megatron_vlm.config import DataConfig
from megatron_vlm.data.chatml.record import parse_record
from megatron_vlm.data.chatml.sample import ChatMLSample, make_sample
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder
from megatron_vlm.data.image_processors import get_image_spec
from megatron_vlm.data.image_processors.base import RESAMPLE
from megatron_vlm.data.image_processors.tiles import Tiles
from megatron_vlm.data.load.energon import EnergonProvider
from megatron_vlm.data.prepare import prepare_energon_dataset
from megatron_vlm.models.families import load

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # `tiny` is not installed

from tiny.checkpoints import TINY_FAMILIES  # noqa: E402
from tiny.corpus import default_corpus  # noqa: E402

FAMILIES = {name: parts.published for name, parts in TINY_FAMILIES.items() if parts.published}
IMAGES = ((448, 448), (1024, 768))
VIDEO = (16, 448, 448)  # frames, 2 a second, of a size that is not changed
TURNS = (1, 8)
WORDS = (12, 24)  # in a question and in a reply
SAMPLES = 8
PACKAGES = ("torch", "torchvision", "transformers", "tokenizers", "pillow", "simplejpeg")
PEERS = ("nemo-automodel", "megatron-bridge")
LIMITS = {"floor": 0.7, "floor_and_text": 0.7, "hf_processor": 2.0, "bridge": 8.0, "workers": 1.8}  # at least


@dataclass
class Conversation:
    texts: list[tuple[str, str]]  # question and reply of each turn; the image stands before the first
    jpeg: bytes

    def messages(self, image: Any = None) -> list[dict]:
        """The messages as Transformers' templates take them, with the image in place."""
        messages = []
        for question, reply in self.texts:
            messages.append({"role": "user", "content": [{"type": "text", "text": question}]})
            messages.append({"role": "assistant", "content": [{"type": "text", "text": reply}]})
        messages[0]["content"].insert(0, {"type": "image", "image": image})
        return messages

    def sample(self) -> ChatMLSample:
        turns = []
        for question, reply in self.texts:
            turns.append({"role": "user", "content": question})
            turns.append({"role": "assistant", "content": reply})
        turns[0]["content"] = "<image>" + turns[0]["content"]
        return make_sample(parse_record(turns), [self.jpeg], [], __key__="0", __restore_key__=())


Work = Callable[[Conversation], Any]


def conversations(size: tuple[int, int], turns: int) -> list[Conversation]:
    rng, words = random.Random(0), " ".join(default_corpus(200)).split()
    texts = [
        [tuple(" ".join(rng.choices(words, k=count)) for count in WORDS) for _ in range(turns)]
        for _ in range(SAMPLES)
    ]
    return [Conversation(text, jpeg(size, seed)) for seed, text in enumerate(texts)]


def jpeg(size: tuple[int, int], seed: int) -> bytes:
    """A JPEG of smooth shapes with some grain, quality 90: about 0.25 bytes per pixel, as from a camera."""
    rng, (width, height) = np.random.default_rng(seed), size
    coarse = rng.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), np.int16)
    grain = rng.integers(-4, 5, (height, width, 1))
    out = io.BytesIO()
    Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def h264() -> bytes:
    """An mp4 with the size of VIDEO, with grain and shapes as in the images."""
    count, height, width = VIDEO
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as target:
        stream = target.add_stream("libx264", rate=2)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for seed in range(count):
            rgb = pillow(jpeg((width, height), seed))
            target.mux(stream.encode(av.VideoFrame.from_ndarray(rgb, format="rgb24")))
        target.mux(stream.encode())
    return out.getvalue()


def pillow(data: bytes) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def codecs() -> dict[str, Callable[[bytes], np.ndarray]]:
    """The installed JPEG decoders: name → function from bytes to (H, W, 3)."""
    found = {"pillow": pillow}
    if find_spec("simplejpeg"):
        found["simplejpeg"] = importlib.import_module("simplejpeg").decode_jpeg
    if hasattr(torch.ops.image, "decode_jpeg"):

        def torchvision(data: bytes) -> np.ndarray:
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return torch.ops.image.decode_jpeg(encoded, 3, False).permute(1, 2, 0).numpy()

        found["torchvision"] = torchvision
    if find_spec("cv2"):
        cv2 = importlib.import_module("cv2")
        found["opencv"] = lambda data: cv2.imdecode(np.frombuffer(data, np.uint8), 1)[..., ::-1]
    return found


def fastest_codec() -> str:
    file = jpeg((1024, 768), 0)
    return min(codecs(), key=lambda name: seconds(lambda _: codecs()[name](file), [None] * SAMPLES, 5))


def floor(family: str, processor: ProcessorMixin, codec: str) -> Work:
    decode, kind, images = codecs()[codec], get_image_spec(processor), processor.image_processor
    scale = 1 / (255 * torch.tensor(images.image_std))
    shift = -torch.tensor(images.image_mean) / torch.tensor(images.image_std)

    def sized(pixels: torch.Tensor) -> torch.Tensor:
        """Colours last."""
        if isinstance(kind, Tiles):  # as many images in one size
            return kind.tensors(pixels.numpy(), alone=True)["pixel_values"].flatten(0, 1)
        size = list(kind.target(*pixels.shape[:2]))
        resample = RESAMPLE[int(images.resample)]
        return tv.resize(pixels.permute(2, 0, 1), size, resample, antialias=True).permute(1, 2, 0)

    def work(conversation: Conversation) -> torch.Tensor:
        lines = sized(torch.from_numpy(decode(conversation.jpeg))).flatten(1).float()
        times = lines.shape[1] // 3  # by whole lines, three times as fast
        return lines.mul_(scale.repeat(times)).add_(shift.repeat(times))

    return work


def floor_and_text(family: str, processor: ProcessorMixin, codec: str) -> Work:
    image_alone, tokenizer = floor(family, processor, codec), processor.tokenizer.backend_tokenizer

    @functools.cache  # rendering then only costs time in the first round, which is not the fastest
    def rendered(texts: tuple[tuple[str, str], ...]) -> str:
        return processor.apply_chat_template(Conversation(texts, b"").messages(), tokenize=False)

    def work(conversation: Conversation) -> tuple:
        encoding = tokenizer.encode(rendered(tuple(conversation.texts)), add_special_tokens=False)
        return image_alone(conversation), encoding.ids, encoding.offsets

    return work


def megatron_vlm(family: str, processor: ProcessorMixin, codec: str) -> Work:
    encoder = encoder_of(family, processor)
    assert encoder.documents.why_hf_processor is None, encoder.documents.why_hf_processor
    return lambda conversation: encoder.encode_sample(conversation.sample())


def encoder_of(family: str, processor: ProcessorMixin, fast: bool = True) -> HFEncoderVLMTaskEncoder:
    needs = load(family)(TINY_FAMILIES[family].config(processor, {}, {})).data_needs
    return HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=100_000), needs, fast=fast)


def hf_processor(family: str, processor: ProcessorMixin, codec: str) -> Work:
    def work(conversation: Conversation) -> dict[str, torch.Tensor]:
        image = Image.open(io.BytesIO(conversation.jpeg)).convert("RGB")
        batch = processor.apply_chat_template(
            conversation.messages(image),
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            return_assistant_tokens_mask=True,
        )
        mask = torch.as_tensor(batch["assistant_masks"]).bool()
        return dict(batch) | {"labels": batch["input_ids"].where(mask, IGNORE_INDEX)}

    return work


class _Rows:
    """What Automodel's wrapper indexes. Each access gives a new conversation, as the wrapper changes it."""

    def __init__(self):
        self.conversation: Conversation | None = None

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict:
        image = Image.open(io.BytesIO(self.conversation.jpeg))
        return {"conversation": self.conversation.messages(image)}


def automodel(family: str, processor: ProcessorMixin, codec: str) -> Work:
    datasets = importlib.import_module("nemo_automodel.components.datasets.vlm.datasets")
    rows = _Rows()
    wrapper = datasets.PreTokenizedDatasetWrapper(rows, processor, max_length=None)

    def work(conversation: Conversation) -> dict:
        rows.conversation = conversation
        return wrapper[0]

    return work


def bridge(family: str, processor: ProcessorMixin, codec: str) -> Work:
    import_without_init("megatron.bridge")
    registry = importlib.import_module("megatron.bridge.data.collators.registry")
    collate = registry.resolve_model_collate(type(processor).__name__)

    def work(conversation: Conversation) -> dict:
        image = Image.open(io.BytesIO(conversation.jpeg)).convert("RGB")
        return collate([{"conversation": conversation.messages(image)}], processor)

    return work


def import_without_init(package: str) -> None:
    """Make the package's modules importable one by one, whatever its `__init__` files would import."""
    if package in sys.modules:
        return
    [root] = find_spec(package).submodule_search_locations
    for init in sorted(Path(root).rglob("__init__.py")):
        name = ".".join((package, *init.parent.relative_to(root).parts))
        if name not in sys.modules:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [str(init.parent)]


PATHS = {
    "floor": floor,
    "floor_and_text": floor_and_text,
    "megatron_vlm": megatron_vlm,
    "hf_processor": hf_processor,
    "automodel": automodel,
    "bridge": bridge,
}


def paths_of(family: str, processor: ProcessorMixin, codec: str) -> Iterator[tuple[str, Work | str]]:
    """Every path by name, or why it cannot be run."""
    example = conversations(IMAGES[0], 1)[0]
    for name, make in PATHS.items():
        try:
            work = make(family, processor, codec)
            work(example)
        except Exception as error:  # noqa: BLE001  others may fail in any way; ours and the floor may not
            if name in ("floor", "floor_and_text", "megatron_vlm"):
                raise
            yield name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        else:
            yield name, work


def seconds(work: Work, given: list, rounds: int) -> float:
    """CPU seconds for one of `given`, in the fastest round over all of them."""
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        for one in given:
            work(one)
        best = min(best, (time.process_time() - began) / len(given))
    return best


def measure(family: str, rounds: int, codec: str) -> Iterator[dict]:
    parts = TINY_FAMILIES[family]
    processor = parts.processor(default_corpus(), parts.template, **FAMILIES[family])
    works = {}
    for name, work in paths_of(family, processor, codec):
        if callable(work):
            works[name] = work
        else:
            print(f"{family}: {name} cannot be run: {work}", flush=True)
    for size in IMAGES:
        for turns in TURNS:
            given = conversations(size, turns)
            best = dict.fromkeys(works, float("inf"))
            for _ in range(rounds):
                for name, work in works.items():
                    best[name] = min(best[name], seconds(work, given, 1))
            yield from rows_of(best, family, size, turns)
    if "video_grid_thw" in load(family).visual_keys:
        yield from measure_video(family, processor, rounds)


def measure_video(family: str, processor: ProcessorMixin, rounds: int) -> Iterator[dict]:
    ours, hf = (encoder_of(family, processor, fast) for fast in (True, False))
    images = processor.video_processor
    mean, std = 255 * torch.tensor(images.image_mean), 255 * torch.tensor(images.image_std)

    def normalized(sample: ChatMLSample) -> torch.Tensor:
        with av.open(io.BytesIO(sample.videos[0])) as container:
            container.streams.video[0].codec_context.thread_count = 1
            frames = [frame.to_ndarray(format="rgb24", threads=1) for frame in container.decode(video=0)]
        return torch.from_numpy(np.stack(frames)).float().sub_(mean).div_(std)

    works = {"floor": normalized, "megatron_vlm": ours.encode_sample, "hf_processor": hf.encode_sample}
    turns = json.dumps(
        [{"role": "user", "content": "<video> What is shown?"}, {"role": "assistant", "content": "A cat."}]
    )
    sample = make_sample(parse_record(turns), [], [h264()], __key__="0", __restore_key__=())
    best = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            best[name] = min(best[name], seconds(work, [sample], 1))
    yield from rows_of(best, family, VIDEO, 1)


def rows_of(best: dict[str, float], family: str, size: tuple[int, ...], turns: int) -> Iterator[dict]:
    floors = [name for name in ("floor", "floor_and_text") if name in best]
    for name, taken in best.items():
        yield {
            "path": name,
            "family": family,
            "image": "x".join(map(str, size)),
            "turns": turns,
            "samples_per_second": round(1 / taken, 1),
            **{f"ratio_to_{floor}": round(best[floor] / taken, 3) for floor in floors},
        }


def measure_workers(family: str, batches: int = 60) -> dict:
    """Samples per second of wall-clock time with one and with two workers, the better of two tries."""
    parts = TINY_FAMILIES[family]
    encoder = encoder_of(family, parts.processor(default_corpus(), parts.template, **FAMILIES[family]))
    with tempfile.TemporaryDirectory() as folder:
        dataset = energon_dataset(Path(folder), samples=200)
        rates = {1: 0.0, 2: 0.0}
        for count in (1, 2, 1, 2):
            rates[count] = max(rates[count], rate(dataset, encoder, count, batches))
    return {
        "family": family,
        "image": "1024x768",
        "turns": 1,
        "samples_per_second": {str(count): round(value, 1) for count, value in rates.items()},
        "scaling": round(rates[2] / rates[1], 3),
    }


def energon_dataset(folder: Path, samples: int) -> Path:
    given, records = conversations((1024, 768), 1), []
    for number in range(samples):
        one = given[number % len(given)]
        (folder / f"{number}.jpg").write_bytes(one.jpeg)
        records.append({"images": [f"{number}.jpg"], "messages": one.sample().messages})
    (folder / "source.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    prepare_energon_dataset(
        folder / "source.jsonl",
        folder / "dataset",
        splits={"train": samples},
        samples_per_shard=20,
        workers=1,
        progress=False,
    )
    return folder / "dataset"


def rate(dataset: Path, encoder: HFEncoderVLMTaskEncoder, num_workers: int, batches: int) -> float:
    provider = EnergonProvider(
        DataConfig(train_data_path=str(dataset), num_workers=num_workers, shuffle_buffer_size=16)
    )
    loader = provider.train_loader(encoder, micro_batch_size=4, rank=0, world_size=1, seed=0)
    try:
        for _ in range(4 + 4 * num_workers):  # skip what the workers make ahead
            next(loader)
        began = time.perf_counter()
        for _ in range(batches):
            next(loader)
        return 4 * batches / (time.perf_counter() - began)
    finally:
        loader.close()


def show(rows: list[dict], workers: dict) -> None:
    """Print a line for each case: samples per second, ours divided by the others, and missed targets."""
    cases: dict[tuple, dict[str, float]] = {}
    for row in rows:
        case = cases.setdefault((row["family"], row["image"], row["turns"]), {})
        case[row["path"]] = row["samples_per_second"]
    print(
        f"\n{'samples per second':<32}" + "".join(f"{name:>16}" for name in PATHS) + "  ours over the others"
    )
    for (family, image, turns), rates in cases.items():
        cells = "".join(f"{rates.get(name, '-'):>16}" for name in PATHS)
        over = {name: rates["megatron_vlm"] / rate for name, rate in rates.items() if name != "megatron_vlm"}
        told = "  ".join(f"{name} {ratio:.2f}" for name, ratio in over.items())
        missed = [name for name, ratio in over.items() if ratio < limit(name, turns)]
        print(
            f"{family:<12}{image:>10}{turns:>3} turns {cells}  {told}"
            + "".join(f" ! {name}" for name in missed)
        )
    scaling = workers["scaling"]
    print(
        f"\nworkers 1 and 2: {workers['samples_per_second']}, {scaling}"
        + " !" * (scaling < LIMITS["workers"])
    )


def limit(path: str, turns: int) -> float:
    return 0.0 if path == "bridge" and turns < max(TURNS) else LIMITS.get(path, 0.0)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES + PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers-only", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "bench_data.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

    codec = fastest_codec()
    print(f"fastest JPEG decoder: {codec}")
    families = [] if arguments.workers_only else arguments.families
    rows = [row for family in families for row in measure(family, arguments.rounds, codec)]
    workers = measure_workers(arguments.families[-1])
    show(rows, workers)
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "versions": versions(),
        "floor_codec": codec,
        "limits": {f"over {name}": f"at least {limit}" for name, limit in LIMITS.items()},
        "rows": rows,
        "workers": workers,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
