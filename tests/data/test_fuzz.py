"""Whatever records hold: each is trained on or dropped for a reason, once; the good ones as if alone."""

from __future__ import annotations

import json
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.energon import WorkerConfig, get_loader, get_val_dataset
from megatron.energon.errors import SkipSample
from pairs import pairwise
from samples import sample_of

from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts.drops import REASONS
from megatron_vlm.data.chatml.record import parse_record
from megatron_vlm.data.chatml.turns import is_blank
from megatron_vlm.data.encode.chat_template import RESERVED as MARKS
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, PackingVLMTaskEncoder
from megatron_vlm.data.load.energon import EnergonProvider, _raise_with_key
from megatron_vlm.data.load.hf import MEASURED_AT_ONCE, HFProvider
from megatron_vlm.data.load.workers import close_loader

SEQ_LENGTH = 256
ALONE = {"micro_batch_size": 1, "rank": 0, "world_size": 1}


def make_encoder(processor, packed: bool, max_pixels: int = 10_000):
    kind = PackingVLMTaskEncoder if packed else HFEncoderVLMTaskEncoder
    return kind(processor, DataConfig(seq_length=SEQ_LENGTH, max_pixels=max_pixels))


def energon_batches(path, encoder, packed: bool, rows: int, rank=0, world_size=1, num_workers=0):
    if not packed:
        provider = EnergonProvider(DataConfig(train_data_path=str(path), num_workers=0, max_drop_share=1.0))
        yield from provider.valid_loader(encoder, **ALONE)
        return
    workers = WorkerConfig(
        rank=rank, world_size=world_size, num_workers=num_workers, global_error_handler=_raise_with_key
    )
    options = {"worker_config": workers, "batch_size": 1, "packing_buffer_size": 50}
    loader = get_loader(get_val_dataset(path, split_part="val", task_encoder=encoder, **options))
    loader.pin_memory = False
    yield from loader
    close_loader(loader)


def hf_batches(path, encoder, packed: bool, rows: int, rank=0, world_size=1, num_workers=0):
    """One epoch, packed in one buffer."""
    provider = HFProvider(
        DataConfig(
            train_data_path=str(path),
            valid_data_path=str(path),
            num_workers=num_workers,
            max_drop_share=1.0,
            packing="stream" if packed else "none",
            packing_buffer_size=len(range(rank, rows, world_size)),
        )
    )
    if not packed:
        yield from provider.valid_loader(encoder, **ALONE)
        return
    place = {"rank": rank, "world_size": world_size}
    loader = provider.train_loader(encoder, seed=0, micro_batch_size=1, **place)
    while loader.state_dict()["place"][:2] == [0, 0]:  # where the buffer began
        yield next(loader)
    loader.close()


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


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each.values, marks=each.marks) for each in pairwise(["energon", "hf"], [False, True])
    ],
    ids=str,
)
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


@pytest.mark.long
@pytest.mark.parametrize("num_workers, ranks", [(1, 1), (3, 3)])
@pytest.mark.parametrize("source", ["energon", "hf"])
def test_workers_and_ranks_share_them_without_loss(written, processor, source, num_workers, ranks):
    path, records, _, _ = written[source]
    encoder = make_encoder(processor, packed=False)
    provider = {"energon": EnergonProvider, "hf": HFProvider}[source](
        DataConfig(
            train_data_path=str(path),
            valid_data_path=str(path),
            num_workers=num_workers,
            max_drop_share=1.0,
        )
    )
    seen: list[int] = []
    for rank in range(ranks):
        loader = provider.valid_loader(encoder, micro_batch_size=4, rank=rank, world_size=ranks)
        seen += [int(key) for batch in loader for row in batch["__key__"] for key in row]
    seen += [int(drop["key"]) for drop in encoder.drops.examples()]
    assert sorted(seen) == list(range(len(records)))


@pytest.mark.long
@pytest.mark.parametrize("source", [pytest.param("energon", marks=pytest.mark.long), "hf"])
def test_workers_and_ranks_share_packed_rows_without_loss(written, processor, source):
    path, records, _, _ = written[source]
    trained, dropped = Counter(), set()
    for rank in range(3):
        encoder = make_encoder(processor, packed=True)
        for batch in BATCHES[source](path, encoder, True, len(records), rank, 3, 3):
            trained.update(int(key) for row in batch["__key__"] for key in row)
        dropped |= {int(drop["key"]) for drop in encoder.drops.examples()}  # of hf, the next epoch's, too
    assert len(trained) > 100 and set(trained.values()) == {1}
    assert sorted([*trained, *dropped]) == list(range(len(records)))


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


# -- any JSON

WORDS = [
    "user",
    "human",
    "assistant",
    "gpt",
    "system",
    "tool",
    "text",
    "image",
    "video",
    "<image>",
    "hello\n",
]
WORDS += ["<end_of_turn>\n<start_of_turn>model\nx", "<start_of_image>", "<bos>", " a <image> b ", "\u2581"]
NAMES = ["role", "from", "content", "value", "type", "text", "messages", "conversations", "system", "tools"]
TEXTS = st.sampled_from(WORDS) | st.text(max_size=20)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | TEXTS, inner, max_size=4)
    ),
    max_leaves=12,
)
PARTS = st.lists(
    TEXTS
    | st.fixed_dictionaries({"type": st.sampled_from(["text", "image", "video"])}, optional={"text": TEXTS})
    | ANYTHING,
    max_size=3,
)
CONTENT = TEXTS | PARTS | ANYTHING
EXTRA = {"optional": {"tool_calls": ANYTHING, "name": ANYTHING, "reasoning_content": ANYTHING}}
ASKED = st.fixed_dictionaries({"role": st.just("user"), "content": CONTENT}, **EXTRA)
ANSWERED = st.fixed_dictionaries({"from": st.just("gpt"), "value": TEXTS | CONTENT}, **EXTRA)
TALK = st.lists(st.tuples(ASKED, ANSWERED), min_size=1, max_size=3).map(
    lambda t: [m for pair in t for m in pair]
)
RECORD = st.fixed_dictionaries({"messages": TALK}, optional={"system": CONTENT, "tools": ANYTHING})
CONVERSATIONS = TALK | RECORD | ANYTHING | st.lists(ASKED | ANSWERED | ANYTHING, max_size=5)
MANY = settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def any_encoder(processor):
    encoder = make_encoder(processor, packed=False)
    yield encoder
    counts = encoder.drops.summary()
    assert counts["encoded"] >= 25 and counts["dropped"] >= 25, counts  # the property was tried on both


def said(messages: list[dict]) -> str:
    """What the tiny template writes of replies."""
    turns = [message["content"] for message in messages if message["role"] == "assistant"]
    texts = ["".join(p["text"].strip() for p in parts) for parts in turns]
    return "".join(text + "<end_of_turn>" for text in texts if not is_blank(MARKS.sub("", text)))


def letters(text: str) -> str:
    """Without what separates the pieces of a control token that a record typed, and spaces."""
    return "".join(text.replace("\u2581", " ").split())


@MANY
@given(conversation=CONVERSATIONS, images=st.integers(0, 2))
def test_any_json_trains_exactly_its_replies_or_is_dropped(any_encoder, conversation, images):
    text, imgs = json.dumps(conversation), [good(2).images[i] for i in range(images)]
    before = any_encoder.drops.summary()["dropped"]
    sample = sample_of(text, imgs, key="any")
    try:
        encoded = any_encoder.encode_sample(sample)
    except SkipSample:
        assert any_encoder.drops.summary()["dropped"] == before + 1
        return
    trained = encoded.labels[encoded.labels >= 0]
    messages = parse_record(text).messages
    assert letters(any_encoder.processor.tokenizer.decode(trained)) == letters(said(messages))
