"""The job of examples/cluster under a real Slurm: two nodes, the warning of its time limit, a requeue."""

import os
import re
import sys
from pathlib import Path

import pytest
from logged_figures import figures
from programs import COMMAND, run_program
from slurm import IS_THERE, said, slurm, wait_for
from sources import write_sharegpt

SCRIPT = Path(__file__).parents[2] / "examples/cluster/slurm.sbatch"
STEPS = 800


def words(run_dir: Path, checkpoint: Path, rows: Path, *settings: str) -> list[str]:
    return [
        *("--recipe", "gemma3_tiny_digits", "tp=1", "--run_dir", str(run_dir), f"steps={STEPS}"),
        *("--hf_path", str(checkpoint), "--dataset_type", "hf", "--train_data_path", str(rows)),
        *("eval_every=0", "save_every=0", "num_workers=0", "micro_batch_size=1", "global_batch_size=2"),
        *("warmup_steps=1", "logging.tensorboard=false", *settings),
    ]


@pytest.mark.soak
@pytest.mark.skipif(not IS_THERE, reason="no root, or no slurmctld, slurmd, slurm-client and munge")
def test_a_job_that_is_warned_of_its_time_limit_is_requeued_and_goes_on_bit_equal(tiny_gemma3, tmp_path):
    rows = write_sharegpt(tmp_path / "source", 60)
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    with slurm(tmp_path / "slurm") as environment:
        environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        small = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1"]
        limits = ["--time=2", "--signal=USR1@60", f"--output={tmp_path}/job.log"]
        command = ["sbatch", "--parsable", *small, *limits, str(SCRIPT), *words(stopped, tiny_gemma3, rows)]
        job = said(environment, *command)
        assert job.isdigit()
        done = "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"
        told = lambda: said(environment, "scontrol", "show", "job", job)  # noqa: E731
        wait_for(lambda: any(f"JobState={state}" in told() for state in done), 400, "end of the job")
        log = (tmp_path / "job.log").read_text()
        assert "JobState=COMPLETED" in told(), log
        assert int(re.search(r"Restarts=(\d+)", told())[1]) >= 1
    steps = [int(step) for step in re.findall(rf"stopped after step (\d+) of {STEPS} by SIGUSR1", log)]
    assert steps and f"resumed after step {steps[0]} " in log
    train = run_program(COMMAND, "train", "--nproc=2", *words(whole, tiny_gemma3, rows))
    assert train.returncode == 0
    assert figures(stopped) == figures(whole)
