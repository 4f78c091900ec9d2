"""Every rank gets, bit for bit, the batch that one rank of its group read."""

import functools

import pytest
import torch

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.config import ParallelConfig
from tiny.distributed import run_distributed

LAYOUTS = {
    "tp_pp": ParallelConfig(tp=2, pp=2),
    "dp_pp": ParallelConfig(pp=2),
    "tp_cp": ParallelConfig(tp=2, cp=2),
    "dp": ParallelConfig(),
}


def batch(number: int) -> dict:
    """Batch `number`, with and without images in turn, of a different size each."""
    generator = torch.Generator().manual_seed(number)
    rows, tokens = 2, 4 + number
    ids = torch.randint(0, 2**40, (rows, tokens), generator=generator)
    pixels = torch.randn(3, 3, 4, 4, generator=generator)
    visual = GenericVisualInputs(
        pixel_values=pixels.bfloat16(),
        pixel_values_videos=(pixels * 50).to(torch.uint8).transpose(1, 2),  # not contiguous
        image_grid_thw=torch.arange(9).view(3, 3),
        second_per_grid_ts=torch.empty(0),
    )
    return {
        "input_ids": ids,
        "labels": ids.roll(-1, 1),
        "loss_mask": torch.rand(rows, tokens, generator=generator),
        "position_ids": torch.arange(tokens).expand(3, rows, -1),
        "attention_mask": torch.ones(rows, tokens, dtype=torch.int32),
        "visual_inputs": visual if number % 2 == 0 else None,
        "__key__": [[f"sample_{number}"]] * rows,
        "__restore_key__": ("Webdataset", number, 0),
    }


def _fails_after(number: int):
    yield batch(number)
    raise OSError("shard 3 is unreadable")


def _plain(received: dict | None) -> dict | None:
    if received is None or received["visual_inputs"] is None:
        return received
    return {**received, "visual_inputs": received["visual_inputs"].as_model_kwargs()}


def _received() -> dict:
    from megatron.core import parallel_state as ps

    from megatron_vlm.parallel import setup
    from megatron_vlm.parallel.broadcast import BatchBroadcaster

    setup.init_distributed(ParallelConfig(), 1)
    out = {}
    for name, parallel in LAYOUTS.items():
        setup.reset_layout(parallel, 1)
        broadcaster = BatchBroadcaster()
        dp = ps.get_data_parallel_rank()
        source = iter([batch(10 * dp), batch(10 * dp + 1)]) if broadcaster.reads else None
        batches = [_plain(received) for received in broadcaster.take(source, 5)]
        ended = broadcaster.next(source) is None
        failing = _fails_after(10 * dp) if broadcaster.reads else None
        broadcaster.next(failing)
        with pytest.raises(RuntimeError) as caught:
            broadcaster.next(failing)
        out[name] = {
            "dp": dp,
            "first_stage": ps.get_pipeline_model_parallel_rank() == 0,
            "reads": broadcaster.reads,
            "batches": batches,
            "ended": ended,
            "error": str(caught.value),
        }
    return out


@functools.cache
def received() -> list[dict]:
    return run_distributed(4, _received)


def _same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return got.dtype == expected.dtype and torch.equal(got, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_arrives_bit_equal_on_every_rank(layout):
    for rank in received():
        got = rank[layout]["batches"]
        assert len(got) == 2
        for number, one in enumerate(got, start=10 * rank[layout]["dp"]):
            expected = batch(number)
            for name in ("input_ids", "labels", "loss_mask", "position_ids", "attention_mask"):
                assert _same(one[name], expected[name]), name
            assert one["__key__"] == expected["__key__"]
            assert one["__restore_key__"] == expected["__restore_key__"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_arrive_bit_equal_on_the_first_stage_alone(layout):
    for rank in received():
        with_images, without = rank[layout]["batches"]
        assert without["visual_inputs"] is None
        if not rank[layout]["first_stage"]:
            assert with_images["visual_inputs"] is None
            continue
        expected = batch(10 * rank[layout]["dp"])["visual_inputs"].as_model_kwargs()
        assert set(with_images["visual_inputs"]) == set(expected)
        for name, value in expected.items():
            assert _same(with_images["visual_inputs"][name], value), name


@pytest.mark.parametrize(("layout", "readers"), [("tp_pp", 1), ("dp_pp", 2), ("tp_cp", 1), ("dp", 4)])
def test_one_rank_of_each_group_reads(layout, readers):
    assert sum(rank[layout]["reads"] for rank in received()) == readers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_end_is_the_end_everywhere(layout):
    assert all(rank[layout]["ended"] for rank in received())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_error_of_the_reader_is_raised_everywhere_with_its_text(layout):
    groups = {}
    for rank in received():
        groups.setdefault(rank[layout]["dp"], set()).add(rank[layout]["error"])
    for errors in groups.values():
        assert len(errors) == 1
        assert "could not read a batch: OSError: shard 3 is unreadable" in errors.pop()
