"""`plan` counts gradients and optimizer states of adapters alone, and a rehearsed step needs what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_vlm.models.hf import load_config
from megatron_vlm.planning.plan import RESERVE, make_plan
from megatron_vlm.planning.rehearsal import rehearse
from megatron_vlm.recipes import compose

ROOT = Path(__file__).parent.parent
LISTED = ["adapter.target_modules=[q_proj,down_proj]", "adapter.exclude_modules=.*vision.*"]


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        # rank 16; 34 layers of 2,560 channels, 8 query and 4 key/value heads of 256, 10,240 inner channels
        (["tp=1"], 34 * 16 * (2560 * 5 + 2048 * 2 + 1024 * 2 + 10240 * 3 + 2560 * 2)),
        # a rank of two holds half of B of q and of A of down
        (["tp=2", *LISTED], 34 * 16 * (2560 + 2048 // 2 + 10240 // 2 + 2560)),
    ],
)
def test_what_is_trained_is_what_adapters_hold(settings, trained):
    file = ROOT / "recipes/gemma3_vl_4b_lora.yaml"
    run = compose(file=file, settings=settings, arguments={"train_data_path": "none://"})
    hf_config = load_config(ROOT / "tests/hf_configs/gemma3_vl_4b.json")
    gpus = run.parallel.tp
    [stage] = make_plan(run, hf_config, gpus).stages
    assert (stage.gradients, stage.optimizer) == (4 * trained, 12 * trained)
    rehearsed = rehearse(run, hf_config, gpus, 0)
    assert rehearsed.gradients == pytest.approx(stage.gradients, rel=1e-3)  # buffers are padded
    assert stage.memory - RESERVE == pytest.approx(rehearsed.peak, rel=0.1)
