"""A rank that fails alone, in the middle of a pass, ends the others within seconds, with its words."""

from __future__ import annotations

import os
import subprocess
import sys

import failing_ranks
import policy_in_ranks
import pytest
import torch
from places import HELPERS, ROOT

from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

SECONDS = 250  # with all imports, on a machine that is busy; gloo would wait for 1800
WORDS = f"OutOfMemoryError: {failing_ranks.OUT_OF_MEMORY}"


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("alarm")
    path = build_tiny_checkpoint("gemma3", folder / "checkpoint")
    torch.save((policy_in_ranks.samples_of("gemma3", path), None), folder / "held.pt")
    return str(path), str(folder / "held.pt")


@pytest.mark.long
@pytest.mark.parametrize("case", failing_ranks.CASES)
def test_an_error_of_one_rank_in_a_pass_ends_the_others(given, tmp_path, case):
    heard = tmp_path / "heard"
    with pytest.raises(RuntimeError, match=r"ranks \[0\] of 2 failed") as raised:
        run_distributed(2, failing_ranks.fails, case, *given, str(heard), timeout=SECONDS)
    assert f"rank 1 has failed: {WORDS}" in str(raised.value).strip().splitlines()[-1]
    first, again, training = heard.read_text().splitlines()
    assert first == WORDS and training == "True"
    assert again.startswith(f"AnotherRankFailed: rank 1 has failed: {WORDS}; start again")


@pytest.mark.long
def test_a_rank_that_waits_for_anything_else_is_ended_too():
    with pytest.raises(RuntimeError, match=r"ranks \[0\] of 2 failed") as raised:
        run_distributed(2, failing_ranks.stuck, timeout=SECONDS)
    assert r"rank 1 has failed: MemoryError: no more\x1b[31m" in str(raised.value).strip().splitlines()[-1]


WAITS = """
import threading, time
from megatron_vlm.job.failures import end_after
threading.Thread(target=end_after, args=("rank 1 has failed: X",), daemon=True).start()
time.sleep(60)
"""


def test_a_rank_ends_also_where_its_words_cannot_be_written(tmp_path):
    environment = os.environ | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "none" / "error.json")}
    done = subprocess.run([sys.executable, "-c", WAITS], env=environment, timeout=50)
    assert done.returncode == 1


@pytest.mark.parametrize(
    "catches", [pytest.param("no", marks=pytest.mark.long), pytest.param("yes", marks=pytest.mark.soak)]
)
def test_a_loop_of_a_users_own_ends_with_the_reason(given, tmp_path, catches):
    """As torchrun starts it, whether or not the caller catches the error."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words = [*launcher, "-m", "own_loop", *given, tmp_path / "run", catches]
    places = [str(HELPERS), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1
    assert failing_ranks.OUT_OF_MEMORY in "".join(done.stderr.splitlines()[-4:]), done.stderr
