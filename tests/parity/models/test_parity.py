"""Equal to Transformers under every layout: logits, loss and the gradient of every parameter, fp32 on CPU."""

from __future__ import annotations

from itertools import accumulate

import parity
import pytest

from megatron_vlm.models.hf import open_source
from megatron_vlm.models.layers.delta_rule import CHUNK
from megatron_vlm.parallel.context import place
from tiny.checkpoints import build_tiny_checkpoint


@pytest.fixture(scope="module")
def rows_of(request, tmp_path_factory):
    return parity.measured(request, tmp_path_factory, parity.LAYOUTS, parity.cases_of, parity.measure)


def inputs_of(family: str) -> list[str]:
    return [*parity.inputs_of(family), *parity.packed_of(family)]


CELLS = parity.cells_of_pairs(parity.layouts_of, inputs_of, parity.OFTEN)


@pytest.mark.parametrize(("family", "layout", "inputs"), CELLS)
def test_equals_transformers(rows_of, family, layout, inputs):
    processes = parity.LAYOUTS[layout][0]
    mine = [row for row in rows_of(processes) if (row["family"], row["layout"]) == (family, layout)]
    assert {row["input"] for row in mine} >= {*inputs}
    for row in mine:
        assert row["passed"], row


@pytest.mark.long
def test_images_of_packed_rows_lie_across_chunks_and_across_cuts(tmp_path):
    """Else nothing above would show that gated delta nets compute them."""
    source = open_source(build_tiny_checkpoint("qwen3_5", tmp_path))
    chunks, cuts = [], []
    for rows in parity.PACKED.values():
        _, batch, single = parity.encode(source.processor, source.description, rows)
        packed = parity.pack(single)
        lengths = batch["attention_mask"].sum(1).tolist()
        starts = [0, *accumulate(lengths)]
        image = packed["input_ids"][0] == source.description.hf_config.image_token_id
        inside = {t for t in range(1, sum(lengths)) if image[t - 1] and image[t]}
        chunks += [t for t in inside if t % CHUNK == 0]
        pieces = [piece for held in place(lengths, 2) for piece in held]
        cuts += [
            starts[document] + start for document, start, _ in pieces if starts[document] + start in inside
        ]
    assert chunks and cuts
