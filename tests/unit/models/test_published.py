"""Every published checkpoint that we know of: it trains, or is refused in the words that we say here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from published import PAGE, TRAINS, outcome, published, table
from tables import replaced

ENTRIES = [pytest.param(*pair, id=pair[0]["names"][0]) for pair in published()]

BUILD = """
import json, sys
from megatron_vlm.config import fewest_processes
from megatron_vlm.models.hf import look_at
from megatron_vlm.extras.plan.plan import make_plan
from megatron_vlm.recipes import load_recipe

for recipe, file in json.loads(sys.argv[1]):
    run = load_recipe(recipe)(train_data_path="none://")
    plan = make_plan(run, look_at(file)[0], fewest_processes(run.parallel))
    print(json.dumps([recipe, sum(stage.parameters for stage in plan.stages)]))
"""


@pytest.mark.parametrize(("entry", "config"), ENTRIES)
def test_published_checkpoint(entry, config):
    found = outcome(config)
    assert (found == TRAINS) == (entry["expected"] == TRAINS) and entry["expected"] in found


def test_every_recipe_has_its_published_checkpoints():
    from megatron_vlm.recipes import RECIPES

    trained = {entry["like"] for entry, _ in published() if entry["expected"] == TRAINS}
    assert trained == {name for name in RECIPES if "tiny" not in name}


@pytest.mark.soak
def test_what_trains_is_built_in_its_recipes_layout(tmp_path):
    """On the meta device."""
    jobs = {}
    for number, (entry, config) in enumerate(published()):
        if entry["expected"] == TRAINS and not config.get("quantization_config"):
            file = tmp_path / f"{number}.json"
            file.write_text(json.dumps(config))
            jobs[entry["names"][0]] = (entry["like"], str(file))
    assert len(jobs) >= 40
    done = subprocess.run(
        [sys.executable, "-c", BUILD, json.dumps(list(jobs.values()))], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(jobs)


def test_the_page_shows_what_happens():
    page = PAGE.read_text(encoding="utf-8")
    assert replaced(page, table(), "published") == page
