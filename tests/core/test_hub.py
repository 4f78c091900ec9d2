"""A hub that does not answer costs seconds, and the message names the command that fetches the files."""

import json
import socket
import time

import pytest
from hub_server import answering
from programs import COMMAND, run_program

from megatron_vlm import hub
from megatron_vlm.recipes.published import CONFIGS, SIZES, shipped_config
from megatron_vlm.supported import read_config


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Says what of a hub at an address is known."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    hub._unreachable.cache_clear()

    def asked(address: str) -> str | None:
        monkeypatch.setenv("HF_ENDPOINT", address)
        return hub.why_not()

    yield asked
    hub._unreachable.cache_clear()


def listening() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    return server


def test_a_hub_that_refuses_or_never_answers_costs_at_most_five_seconds(ask):
    with listening() as closed, listening() as silent:
        silent.listen()
        begun = time.monotonic()
        for server in (closed, silent):
            address = f"http://127.0.0.1:{server.getsockname()[1]}"
            assert address in ask(address)
        assert time.monotonic() - begun < 5
        with pytest.raises(FileNotFoundError, match="`hf download org/name --local-dir FOLDER` fetches it"):
            read_config("org/name")


@pytest.mark.parametrize("status", [200, 403])
def test_a_hub_that_answers_can_be_asked(monkeypatch, status):
    with answering(monkeypatch, status):
        assert hub.why_not() is None


def test_every_published_size_comes_with_its_config(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for (family, organisation), sizes in SIZES.items():
        for name, _, _, checkpoint, *_ in sizes:
            file = shipped_config(f"{organisation}/{checkpoint}")
            assert file == CONFIGS / f"{name}.json"
            assert json.loads(file.read_text())["model_type"] == family
    assert shipped_config("org/name") is None


@pytest.mark.long
def test_a_plan_of_a_published_size_needs_no_hub(tmp_path):
    offline = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    made = run_program(COMMAND, "plan", "--recipe", "qwen3_vl_2b", "--gpus", "1", **offline)
    line = "Read for Qwen/Qwen3-VL-2B-Instruct: the copy of its config.json in this package."
    assert line in made.stdout, made.stderr
