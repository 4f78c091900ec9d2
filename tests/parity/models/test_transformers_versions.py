"""The oldest and the newest Transformers: exports answer alike in both, and the fast path equals both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import hf_generate
import parity
import pytest
from PIL import Image
from places import TESTS
from programs import OLDEST, OLDEST_VERSION, run_anew, run_program

from megatron_vlm.config import ModelConfig, ParallelConfig, RunConfig
from megatron_vlm.models.families import load
from megatron_vlm.supported import SUPPORTED
from tiny.checkpoints import TINY_FAMILIES, build_tiny_checkpoint
from tiny.distributed import run_distributed

# text settings of random models that say more than one token; 0.2 for all others
VARIED = {"gemma3": {}, **dict.fromkeys(("gemma4", "gemma4_unified"), {"initializer_range": 0.05})}
LAYOUTS = {"TP2": ParallelConfig(tp=2), "PP2": ParallelConfig(pp=2), "EP2": ParallelConfig(ep=2)}
IN_BOTH = [family for family in TINY_FAMILIES if not SUPPORTED[family].since]


def layouts_of(family: str) -> list[str]:
    return [name for name in LAYOUTS if name != "EP2" or load(family).has_experts]


def answers_of_megatron(source: str, folders: dict[str, str], picture: str) -> list[list[int]]:
    """Import, answer and export in each layout, to its folder."""
    from transformers import AutoProcessor

    from megatron_vlm.generation.generate import generate
    from megatron_vlm.generation.prompt import encode_prompt
    from megatron_vlm.models.weights.exporting import export_hf
    from megatron_vlm.parallel import setup

    content = [{"type": "image"}, {"type": "text", "text": hf_generate.QUESTION}]
    answers = []
    for name, folder in folders.items():
        setup.reset_layout(LAYOUTS[name], seed=1)
        run = RunConfig(parallel=LAYOUTS[name], model=ModelConfig(dtype="fp32"))
        description, chunks = parity.load_chunks(source, run)
        export_hf(chunks, folder, source, description.weight_map)
        prompt = encode_prompt(
            AutoProcessor.from_pretrained(source),
            [{"role": "user", "content": content}],
            [Path(picture).read_bytes()],
            description.data_needs,
        )
        [[answer]] = generate(chunks, [prompt], hf_generate.NEW_TOKENS)
        answers.append(answer.tokens)
    return answers


def all_answers_of_megatron(folder: str, picture: str) -> dict[str, list[list[int]]]:
    from megatron_vlm.parallel import setup

    setup.init_distributed(ParallelConfig(), seed=1)
    return {
        family: answers_of_megatron(f"{folder}/{family}", exports(folder, family), picture)
        for family in IN_BOTH
    }


def exports(folder: Path | str, family: str) -> dict[str, str]:
    return {layout: f"{folder}/{family} {layout}" for layout in layouts_of(family)}


def answers_of_transformers(picture: str, folders: list[str], overlay: Path | None = None) -> dict:
    environment = {"PYTHONPATH": str(overlay) if overlay else "", "HF_HUB_OFFLINE": "1"}
    program = run_program if overlay is None else run_anew
    result = program(Path(hf_generate.__file__), picture, *folders, **environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not OLDEST.is_dir(), reason=f"no {OLDEST}; `make test-oldest` fetches it"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, dict[str, list[list[int]]]]:
    """Who answered -> family -> the answers of its exports. All families share the processes."""
    folder = tmp_path_factory.mktemp("exports")
    for family in IN_BOTH:
        build_tiny_checkpoint(family, folder / family, text=VARIED.get(family, {"initializer_range": 0.2}))
    picture = str(folder / "picture.png")
    Image.radial_gradient("L").resize((80, 60)).convert("RGB").save(picture)
    ranks = run_distributed(2, all_answers_of_megatron, str(folder), picture, timeout=900)
    found = {"megatron": ranks[0]}
    folders = [path for family in IN_BOTH for path in exports(folder, family).values()]
    for name, overlay in (("newest", None), ("oldest", OLDEST)):
        said = answers_of_transformers(picture, folders, overlay)
        assert (said["version"] == OLDEST_VERSION) == (name == "oldest")
        left = iter(said["answers"])
        found[name] = {family: [next(left) for _ in layouts_of(family)] for family in IN_BOTH}
    return found


@pytest.mark.parametrize("family", IN_BOTH)
def test_exports_answer_alike_in_the_oldest_and_newest_transformers(answers, family):
    mine = answers["megatron"][family]
    assert mine == answers["newest"][family] == answers["oldest"][family]
    assert len({token for answer in mine for token in answer}) > 1


@pytest.mark.parametrize("sizes", ["tiny", "published"])
def test_the_fast_path_equals_the_oldest_processors_too(sizes):
    """`test_fast.py` checks the newest."""
    paths = [str(OLDEST), *filter(None, [os.environ.get("PYTHONPATH")])]
    chosen = ["-k", f"everything and {sizes}", str(next(TESTS.rglob("test_fast.py")))]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *chosen],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:]
