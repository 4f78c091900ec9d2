import io
import json
import multiprocessing
from collections import Counter

import pytest
import torch
from megatron.energon.errors import SkipSample
from PIL import Image
from samples import sample_of
from transformers import AutoConfig, AutoProcessor

from megatron_vlm.batch import IGNORE_INDEX
from megatron_vlm.config import DataConfig
from megatron_vlm.data.accounts import drops
from megatron_vlm.data.accounts.drops import BadSample, DropReport, TooManyDrops
from megatron_vlm.data.chatml.sample import ChatMLSample
from megatron_vlm.data.encode.encoder import HFEncoderVLMTaskEncoder, join_documents
from megatron_vlm.models.families import describe
from tiny.checkpoints import build_tiny_checkpoint


def jpeg(index=0):
    out = io.BytesIO()
    Image.new("RGB", (60, 40), (60 * index, 0, 0)).save(out, "JPEG")
    return out.getvalue()


def conversation(images=0, question="Which digit is this?", answer="A seven."):
    return [
        {"role": "user", "content": "<image>" * images + question},
        {"role": "assistant", "content": answer},
    ]


def sample(turns, images=0, key="s0"):
    imgs = [jpeg(index) for index in range(images)]
    turns = turns if isinstance(turns, str) else json.dumps(turns)
    return sample_of(turns, imgs, key=key)


def dropped(encoder, bad):
    with pytest.raises(SkipSample):
        encoder.encode_sample(bad)
    [example] = encoder.drops.examples()
    assert example["key"] == bad.__key__
    return example["reason"]


@pytest.fixture
def encoder(processor):
    return HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=256))


def test_labels_are_the_next_tokens_of_replies(encoder):
    encoded = encoder.encode_sample(sample(conversation(images=1), images=1))
    trained = encoded.labels != IGNORE_INDEX
    assert encoder.processor.tokenizer.decode(encoded.labels[trained]) == "A seven.<end_of_turn>"
    assert encoded.labels[:-1][trained[:-1]].equal(encoded.input_ids[1:][trained[:-1]])
    assert encoded.labels[-1] == IGNORE_INDEX


# ------------------------------------------------------------------------------------------------ batches


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def grid_encoder(request, tmp_path_factory):
    """The encoder of a family whose images have grids and whose positions have three axes."""
    path = build_tiny_checkpoint(request.param, tmp_path_factory.mktemp("tiny") / request.param)
    description = describe(AutoConfig.from_pretrained(path))
    return HFEncoderVLMTaskEncoder(
        AutoProcessor.from_pretrained(path), DataConfig(seq_length=256), description.data_needs
    )


def test_positions_on_three_axes_restart_with_every_document_of_a_row(grid_encoder):
    one, two = (
        grid_encoder.encode_sample(sample(conversation(images=count), images=count)) for count in (1, 2)
    )
    batch = grid_encoder.batch([join_documents([one, two]), two])
    first, second = one.position_ids.shape[1], two.position_ids.shape[1]
    assert batch.position_ids.shape == (3, 2, first + second)
    assert torch.equal(batch.position_ids[:, 0, first:], two.position_ids)
    assert torch.equal(batch.position_ids[:, 1, :second], two.position_ids)
    assert (two.position_ids[:, 0] == 0).all() and not torch.equal(*two.position_ids[1:])


def test_the_batch_is_the_contract(encoder):
    rows = [encoder.encode_sample(sample(conversation(n), n, key=f"s{n}")) for n in (0, 2, 1)]
    batch = encoder.encode_batch(encoder.batch(rows))
    length = max(len(row.input_ids) for row in rows)
    found = {k: (v.dtype, tuple(v.shape)) for k, v in batch.items() if isinstance(v, torch.Tensor)}
    assert found == {
        "input_ids": (torch.int64, (3, length)),
        "labels": (torch.int64, (3, length)),
        "loss_mask": (torch.float32, (3, length)),
        "position_ids": (torch.int64, (3, length)),
        "attention_mask": (torch.int32, (3, length)),
    }
    assert set(batch) - set(found) == {"visual_inputs", "__key__", "__restore_key__", "__dropped__"}
    assert batch["__key__"] == [["s0"], ["s2"], ["s1"]]
    assert batch["__restore_key__"] == [("s0",), ("s2",), ("s1",)]


def test_joined_documents_are_numbered_and_predict_nothing_of_each_other(encoder):
    documents = [encoder.encode_sample(sample(conversation(n), n, key=f"s{n}")) for n in (1, 0, 2)]
    row = join_documents([join_documents(documents[:2]), documents[2]])
    lengths = [len(document.input_ids) for document in documents]
    assert row.attention_mask.tolist() == [n for n, length in enumerate(lengths, 1) for _ in range(length)]
    assert row.position_ids.tolist() == [p for length in lengths for p in range(length)]
    assert row.labels.equal(torch.cat([document.labels for document in documents]))
    assert row.document_keys == ["s1", "s0", "s2"]
    assert len(row.visual_inputs.pixel_values) == 3


def test_the_last_reply_alone_is_trained_if_that_is_asked_for(processor):
    turns = [*conversation(), *conversation(0, "And these?", "A one and a two.")]
    every, last = (
        HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=256, train_replies=which)).encode_sample(
            sample(turns, images=1)
        )
        for which in ("all", "last")
    )
    assert last.input_ids.equal(every.input_ids) and 0 < last.loss_mask.sum() < every.loss_mask.sum()
    expected = every.labels.clone()
    said = (last.labels != IGNORE_INDEX).nonzero().flatten()
    expected[: said[0]] = IGNORE_INDEX
    assert last.labels.equal(expected)
    assert processor.tokenizer.decode(last.labels[said]).startswith("A one and a two.")


# ------------------------------------------------------------------------------------------ over length


def test_truncation_keeps_whole_images_at_every_length(processor, tiny_gemma3):
    needs = describe(AutoConfig.from_pretrained(tiny_gemma3)).data_needs
    turns = [*conversation(1), *conversation(2, "And these?", "A one and a two."), *conversation(0)]
    whole = HFEncoderVLMTaskEncoder(processor, DataConfig(seq_length=256)).encode_sample(
        sample(turns, images=3)
    )
    kept, dropped_lengths = set(), 0
    for length in range(1, len(whole.input_ids) + 1):
        data = DataConfig(seq_length=length, over_length="truncate")
        encoder = HFEncoderVLMTaskEncoder(processor, data, needs)
        try:
            cut = encoder.encode_sample(sample(turns, images=3))
        except SkipSample:
            dropped_lengths += 1
            assert encoder.drops.summary()["reasons"] == {"no_trained_tokens": 1}
            continue
        size = len(cut.input_ids)
        images = 0 if cut.visual_inputs is None else len(cut.visual_inputs.pixel_values)
        assert size <= length and cut.input_ids.equal(whole.input_ids[:size])
        assert (cut.input_ids == encoder.processor.tokenizer.image_token_id).sum() == 16 * images
        assert images == 0 or cut.visual_inputs.pixel_values.equal(whole.visual_inputs.pixel_values[:images])
        assert (cut.labels == IGNORE_INDEX)[-1] and cut.loss_mask.sum() > 0
        kept.add(images)
    assert kept == {1, 2, 3} and dropped_lengths > 16


# ------------------------------------------------------------------------------------------------ drops


def nested(depth):
    """A conversation with a tool call that holds lists in lists."""
    call = "[" * depth + "]" * depth
    reply = '{"role": "assistant", "content": "y"}'
    return '[{"role": "user", "content": "x", "tool_calls": ' + call + "}, " + reply + "]"


def unread():
    return ChatMLSample(__key__="raw", __restore_key__=(), problem=BadSample("missing_media"))


@pytest.mark.parametrize(
    "bad, reason",
    [
        (sample("{"), "bad_json"),
        (sample([]), "bad_conversation"),
        (sample(conversation(question="half a pair: \ud800")), "bad_conversation"),
        (sample(nested(1400)), "bad_conversation"),
        (sample(conversation(2), images=1), "placeholder_mismatch"),
        (sample(conversation(1), images=0), "placeholder_mismatch"),
        (sample(conversation()[:1]), "no_trained_tokens"),
        (sample(conversation(question="why " * 300)), "over_length"),
        (sample(conversation() + conversation()[1:]), "template_error"),
        (sample_of(conversation(), [b"x"]), "image_undecodable"),
        (sample_of(conversation(), videos=[b"x"]), "video_unsupported"),
        (unread(), "missing_media"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_trained_on_is_counted_with_key_and_reason(encoder, bad, reason):
    assert dropped(encoder, bad) == reason


def _drop_some(report, worker):
    for number in range(50):
        report.keep()
        report.drop(f"w{worker}/{number}", "over_length" if number % 2 else "bad_json", "x" * 1000)


@pytest.mark.filterwarnings("ignore")  # of forking from a process with threads
def test_drops_are_counted_over_forked_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(drops, "DETAILS", 5)
    path = tmp_path / "run" / "drops.jsonl"
    report = DropReport(path)
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_drop_some, args=(report, number)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert report.summary() == {
        "encoded": 200,
        "dropped": 200,
        "reasons": {"bad_json": 100, "over_length": 100},
    }
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == report.examples()
    assert Counter(line["key"] for line in lines) == Counter(
        f"w{worker}/{number}" for worker in range(4) for number in range(50)
    )
    assert 10 <= sum("detail" in line for line in lines) <= 10 + 2 * 3  # of each reason, one more a worker


def test_too_many_drops_stop_the_run_and_say_what_to_do():
    report = DropReport().with_max_share(0.1)
    for _ in range(9):
        report.keep()
    report.epoch = 10
    report.drop("shard/7", "over_length")
    report.epoch = 12
    report.drop("shard/8", "over_length")
    report.epoch = 11
    with pytest.raises(TooManyDrops, match="2 of 11(.|\n)*2 over_length: raise .*shard/7, shard/8"):
        report.check()
