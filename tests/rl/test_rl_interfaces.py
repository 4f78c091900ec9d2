"""examples/rl/ has the methods that SkyRL and verl call, and they give what Policy gives."""

from __future__ import annotations

import inspect

import policy_in_ranks
import pytest
import rl_interfaces
import torch

from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed


@pytest.mark.parametrize("name", rl_interfaces.PUBLISHED)
def test_methods_take_what_is_published(name):
    """With these names, and nothing else that has to be given."""
    ours = rl_interfaces.example(name)
    for method, wanted in rl_interfaces.PUBLISHED[name].items():
        found = getattr(ours, method)
        if not callable(found):
            assert wanted == []  # a property
            continue
        parameters = [each for each in inspect.signature(found).parameters.values() if each.name != "self"]
        optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        assert [each.name for each in parameters][: len(wanted)] == wanted, method
        needed = [p for p in parameters[len(wanted) :] if p.default is p.empty and p.kind not in optional]
        assert needed == [] or method.startswith("get_data_parallel")


@pytest.mark.parametrize("name", rl_interfaces.PUBLISHED)
def test_an_example_has_at_most_80_lines(name):
    path = rl_interfaces.ROOT / "examples" / "rl" / f"{name.split('.')[0]}.py"
    assert len(path.read_text().splitlines()) <= 80


@pytest.fixture(scope="module")
def met(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interfaces")
    path = build_tiny_checkpoint("gemma3", folder / "checkpoint")
    torch.save((policy_in_ranks.samples_of("gemma3", path), None), folder / "held.pt")
    return run_distributed(2, rl_interfaces.meet, str(path), str(folder / "held.pt"), timeout=600)


@pytest.mark.soak
def test_skyrl_gets_scores_and_the_step_of_its_loss(met):
    for found in met:
        assert found["skyrl scores"] == 0
        assert found["skyrl loss"][0] == pytest.approx(found["skyrl loss"][1], abs=1e-5)
        assert found["skyrl norm"][0] == pytest.approx(found["skyrl norm"][1], rel=1e-5)
        assert found["skyrl outputs"] == found["skyrl wanted"]


@pytest.mark.soak
def test_verl_gets_scores_and_the_step_of_its_loss(met):
    for found in met:
        assert found["verl scores"] <= 1e-6
        assert found["verl loss"][0] == pytest.approx(found["verl loss"][1], abs=1e-5)
        assert found["verl norm"][0] == pytest.approx(found["verl norm"][1], rel=1e-5)
        assert found["verl tokens"][0] == found["verl tokens"][1] > 0
