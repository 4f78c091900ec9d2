"""The real command in real processes."""

import json
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from machine import is_quick, processor_seconds
from places import ROOT
from programs import TYPED, ask

from megatron_vlm.overrides import from_yaml

RUN_RECIPE = [sys.executable, str(ROOT / "examples" / "run_recipe.py")]
QUICK_SECONDS = 1.0  # 0.6 measured


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["recipes"],
        ["train", "--recipe", "gemma3_vl_27b", "pp=2", "train.steps=10", "--dry-run"],
    ],
    ids=lambda arguments: " ".join(arguments[:3]),
)
def test_answers_within_a_second(arguments):
    """Processor time, which equals the time on an idle machine and does not depend on other load."""

    def take() -> float:
        before = processor_seconds()
        answer = ask(*TYPED, *arguments)
        assert answer.returncode == 0 and answer.stdout
        return processor_seconds() - before

    assert is_quick(take, QUICK_SECONDS)


def test_help_shows_a_sentence_of_each_command_and_the_flags_of_all():
    text = ask(*TYPED, "-h", COLUMNS="80").stdout
    commands = [line for line in text.partition("Commands:\n")[2].splitlines() if line.strip()]
    assert len(commands) >= 14 and all(re.fullmatch(r"  [a-z-]+ +[A-Z].*[^.]\.", line) for line in commands)
    assert "--version" in text and "-q, --quiet" in ask(*TYPED, "plan", "--help").stdout
    for command in ("train", "preview", "plan", "import"):
        flags = ask(*TYPED, command, "-h").stdout
        assert all(f"  {flag} " in flags for flag in ("--model", "--data", "--valid-data", "--run-dir"))
        assert not re.search(r"--\w+_", flags)


def test_version_is_read_without_importing():
    code = "import sys\nfrom megatron_vlm import cli\ntry:\n    cli.app(['--version'])\n"
    code += "finally:\n    assert not {'torch', 'transformers', 'megatron.core'} & sys.modules.keys()"
    answer = ask(sys.executable, "-c", code)
    assert answer.returncode == 0, answer.stderr
    versions = dict(line.split() for line in answer.stdout.splitlines())
    assert versions["torch"] == version("torch") and "megatron-core" in versions


@pytest.mark.parametrize("words", [["-v", "train"], ["train", "--verbose"]], ids=" ".join)
def test_verbose_shows_tracebacks_of_mistakes(words):
    answer = ask(*TYPED, *words, "--recipe=no")
    assert answer.returncode == 2 and "Traceback (most recent call last)" in answer.stderr


def test_completion_knows_commands_and_flags():
    for words, last, completed in (("tr", "1", "train"), ("train --valid", "2", "--valid-data")):
        line = {"COMP_WORDS": f"megatron-vlm {words}", "COMP_CWORD": last}
        answer = ask(*TYPED, _MEGATRON_VLM_COMPLETE="complete_bash", **line)
        assert answer.stdout.split() == [completed]


def test_recipes_lists_recipes_and_run_files_but_no_demo():
    listing = ask(*TYPED, "recipes").stdout.splitlines()
    assert "gemma3_vl_4b          Gemma3 4B, for 2 GPUs of 80 GB and up (of 141 GB: tp=1)." in listing
    names = [line.split()[0] for line in listing if line]
    assert names.index("gemma3_vl_4b") < names.index("Run") < names.index("qwen3_vl_8b_lora")
    assert not [name for name in names if "digits" in name]
    table = json.loads(ask(*TYPED, "recipes", "--json").stdout)
    assert set(names) >= {*table["recipes"], *table["run_files"]} and "tp" in table["arguments"]
    assert len(table["run_files"]) == len(list((ROOT / "recipes").glob("*.yaml"))) > 40


@pytest.mark.parametrize("file", ["qwen3_vl_8b_lora", "recipes/qwen3_vl_8b_lora.yaml"])
def test_run_files_of_the_package_work_by_name_from_anywhere(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = from_yaml(ask(*TYPED, "train", "--config", file, "--dry-run").stdout)
    assert (config.name, config.adapter.r) == ("qwen3_vl_8b_lora", 16)


@pytest.mark.parametrize("program", [[*TYPED, "train"], RUN_RECIPE], ids=["megatron-vlm", "run_recipe"])
def test_dry_run_prints_the_merged_configuration_as_yaml(program):
    flags = ["--recipe", "gemma3_vl_4b", "--dataset_type", "hf", "--train_data_path", "/data", "--run_dir=/r"]
    answer = ask(*program, *flags, "tp=4", "train.steps=10", "--dry-run", "--nproc", "8")
    config = from_yaml(answer.stdout)
    assert (config.data.dataset_type, config.data.train_data_path, config.run_dir) == ("hf", "/data", "/r")
    assert (config.parallel.tp, config.train.steps) == (4, 10)
    assert {"# processes: 8", "# data_parallel: 2"} <= set(answer.stdout.splitlines())


def test_a_librarys_error_names_the_file_of_its_traceback():
    code = "from megatron_vlm.cli import run, single\ndef bad(): int('x')\nrun(single(bad), 'bad')"
    answer = ask(sys.executable, "-c", code)
    assert answer.returncode == 1 and "Traceback" not in answer.stderr
    what, where = answer.stderr.splitlines()
    assert what.startswith(
        "bad: ValueError: invalid literal for int() with base 10: 'x'; in bad (<string>:2)"
    )
    kept = Path(re.search(r"the traceback is in (\S+)\.$", where)[1])
    assert "Traceback" in kept.read_text()
    kept.unlink()


def test_a_program_runs_although_the_shell_has_closed_what_it_writes_to():
    code = (
        "import sys; from megatron_vlm.cli import run, single\n"
        "def write():\n    print('said', flush=True); sys.stderr.flush()\nrun(single(write), 'write')"
    )
    assert (
        subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", code]).returncode == 0
    )


def test_ctrl_c_ends_quietly():
    code = (
        "import time; from megatron_vlm.cli import run, single\n"
        "def wait():\n    print('ready', flush=True); time.sleep(60)\n"
        "run(single(wait), 'wait')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert (process.returncode, output, errors) == (130, "", "")


@pytest.mark.long
def test_nproc_starts_processes_and_returns_their_message_and_code():
    code = "from megatron_vlm.job.launch import launch; exit(launch(2, ['train', '--recipe=no']))"
    answer = ask(sys.executable, "-c", code)
    assert answer.returncode == 2 and "Traceback" not in answer.stderr
    assert answer.stderr.startswith("megatron-vlm: no: no such recipe; ")
    assert len(answer.stderr.splitlines()) == 1  # of two ranks, one speaks
