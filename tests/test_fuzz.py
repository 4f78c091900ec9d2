"""Whatever records hold: each is trained on or dropped for a reason, once; the good ones as if alone."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from broken import (
    MARKER,
    TRAINED,
    Wild,
    energon_only,
    good,
    hf_only,
    is_text,
    wild_records,
    write_energon,
    write_hf,
)
from megatron.energon import WorkerConfig, get_loader, get_val_dataset
from transformers import AutoProcessor

from megatron_vlm.data.drops import REASONS, DropReport
from megatron_vlm.data.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.energon import EnergonProvider, _raise_with_key
from megatron_vlm.data.hf import MEASURED_AT_ONCE, HFProvider

SEQ_LENGTH = 256
ALONE = {"micro_batch_size": 1, "rank": 0, "world_size": 1}


@pytest.fixture(scope="module")
def processor(tiny_gemma3):
    return AutoProcessor.from_pretrained(tiny_gemma3)


def make_encoder(processor, packed: bool, max_pixels: int = 10_000):
    kind = PackingVLMTaskEncoder if packed else HFEncoderVLMTaskEncoder
    return kind(processor, SEQ_LENGTH, max_pixels=max_pixels, drops=DropReport(examples_per_reason=10**6))


def energon_batches(path, encoder, packed: bool, rows: int):
    if not packed:
        provider = EnergonProvider(str(path), num_workers=0, max_drop_share=1.0)
        return iter(provider.valid_loader(encoder, **ALONE))
    workers = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=_raise_with_key)
    options = {"worker_config": workers, "batch_size": 1, "packing_buffer_size": 50}
    return iter(get_loader(get_val_dataset(path, split_part="val", task_encoder=encoder, **options)))


def hf_batches(path, encoder, packed: bool, rows: int):
    """One epoch."""
    provider = HFProvider(
        str(path),
        str(path),
        num_workers=0,
        max_drop_share=1.0,
        packing="stream" if packed else "none",
        packing_buffer_size=rows,
    )
    if not packed:
        yield from provider.valid_loader(encoder, **ALONE)
        return
    loader = provider.train_loader(encoder, seed=0, **ALONE)
    while loader.state_dict()["place"][:2] == [0, 0]:  # where the buffer began
        yield next(loader)


BATCHES = {"energon": energon_batches, "hf": hf_batches}
WRITE = {"energon": write_energon, "hf": write_hf}


def documents(batch: dict) -> dict[str, tuple]:
    """By key: ids, labels, positions and pixels of each document."""
    (keys,), numbers, found = batch["__key__"], batch["attention_mask"][0], {}
    images, image_token = 0, 16  # tokens of an image of the tiny Gemma3
    for number, key in enumerate(keys, start=1):
        inside = numbers == number
        parts = [batch[name][0][inside].tolist() for name in ("input_ids", "labels", "position_ids")]
        count = Counter(parts[0])[IMAGE_ID] // image_token
        pixels = batch["visual_inputs"].pixel_values[images : images + count] if count else torch.zeros(0)
        images += count
        assert key not in found
        found[key] = (*parts, pixels)
    return found


def epoch(source: str, path, encoder, packed: bool, rows: int) -> tuple[dict[int, tuple], Counter, dict]:
    """(documents by record, how often each record was trained, reasons by record)."""
    trained, times = {}, Counter()
    for batch in BATCHES[source](path, encoder, packed, rows):
        for key, document in documents(batch).items() if batch["__key__"] != [[]] else ():
            trained[int(key)] = document
            times[int(key)] += 1
    dropped: dict[int, list[str]] = {}
    for drop in encoder.drops.examples():
        dropped.setdefault(int(drop["key"]), []).append(drop["reason"])
    return trained, times, dropped


IMAGE_ID = None


@pytest.fixture(scope="module")
def written(processor, tmp_path_factory) -> dict[str, tuple]:
    """By source: (folder, records as numbered there, folder of the good ones alone, which these are)."""
    global IMAGE_ID
    IMAGE_ID = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    folder = tmp_path_factory.mktemp("wild")
    out = {}
    for source in ("energon", "hf"):
        path = folder / source / "all"
        (folder / source).mkdir()
        if source == "energon":
            records = wild_records() + energon_only()
        else:
            records = [r for r in wild_records() if is_text(r.turns)] + hf_only(path)
            # rows are measured so many at a time: none of the next epoch, which would count its drops again
            records += [good(n) for n in range(-len(records) % MEASURED_AT_ONCE)]
        numbers = [n for n, record in enumerate(records) if record.kind == "good"]
        alone = WRITE[source](folder / source / "good", [records[n] for n in numbers])
        out[source] = WRITE[source](path, records), records, alone, numbers
    return out


def test_the_set_is_large_and_varied(written):
    for _, records, _, numbers in written.values():
        assert len(records) - len(numbers) >= 300
        assert len({record.kind for record in records}) > 200


@pytest.fixture(scope="module", params=[(s, p) for s in ("energon", "hf") for p in (False, True)], ids=str)
def result(request, written, processor):
    source, packed = request.param
    path, records, alone, numbers = written[source]
    encoder = make_encoder(processor, packed)
    found = epoch(source, path, encoder, packed, len(records))
    expected, *_ = epoch(source, alone, make_encoder(processor, packed), packed, len(numbers))
    return records, numbers, found, expected, encoder.drops.summary()


def test_every_record_is_trained_or_dropped_and_once(result):
    records, _, (_, times, dropped), _, summary = result
    assert sorted([*times, *dropped]) == list(range(len(records)))
    assert set(times.values()) == {1} and {len(reasons) for reasons in dropped.values()} == {1}
    assert summary["encoded"] == len(times) and summary["dropped"] == len(dropped)
    assert {reason for reasons in dropped.values() for reason in reasons} <= set(REASONS)


def fits(record: Wild, outcome: str) -> bool:
    expected = record.expected or "*"
    return outcome == expected or (expected.endswith("*") and outcome.startswith(expected[:-1]))


def test_each_ends_as_it_should(result):
    records, _, (trained, _, dropped), _, _ = result
    outcomes = [TRAINED if n in trained else dropped[n][0] for n in range(len(records))]
    wrong = [(r.kind, r.expected, o) for r, o in zip(records, outcomes, strict=True) if not fits(r, o)]
    assert not wrong


def test_good_records_train_as_if_alone(result):
    _, numbers, (trained, *_), alone, _ = result
    assert len(alone) == len(numbers) > 100
    for place, number in enumerate(numbers):
        assert trained[number][:3] == alone[place][:3]
        assert torch.equal(trained[number][3], alone[place][3])


def test_no_record_ran_code(result):
    assert not MARKER.exists()
