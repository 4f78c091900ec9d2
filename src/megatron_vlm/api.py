"""The commands as functions for Python. Each loads its model in this process and frees it again."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_vlm.commands import arguments
from megatron_vlm.commands.runs import export_run, generate_from_run
from megatron_vlm.config import ConfigError
from megatron_vlm.files import read_text
from megatron_vlm.parallel import setup


@setup.left_on_error()
def export(run_dir: str | Path, output: str | Path, adapter: bool = False) -> None:
    """Write a run's latest checkpoint as a Hugging Face folder.

    Args:
        run_dir: The run folder.
        output: The folder to write, which must not exist.
        adapter: Write the adapters alone, as peft does. Otherwise they are merged into the weights.

    Raises:
        ConfigError: The run has no complete checkpoint, or no adapters although `adapter` asks for them.
    """
    config = arguments.config_of_trained_run(Path(run_dir), None, None)
    export_run(config, arguments.new_output(str(output), config, adapter), adapter)


@setup.left_on_error()
def generate(
    model: str | Path,
    question: str,
    images: str | Path | bytes | Sequence[str | Path | bytes] = (),
    max_new_tokens: int = 64,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    answers: int = 1,
    seed: int = 0,
) -> list[str]:
    """Answer a question about images.

    Args:
        model: A run folder, whose latest checkpoint answers, or a Hugging Face folder or hub name.
        question: The user's turn. `<image>` stands for each image; without any, images come first.
        images: Path or bytes of an image file, or a list of them.
        max_new_tokens: Tokens of the longest answer.
        temperature: 0 takes the likeliest token; otherwise tokens are sampled.
        top_p: Sample among the likeliest tokens that together have this probability.
        answers: Number of answers; several need a temperature.
        seed: The same seed gives the same answers.

    Returns:
        The answers.

    Raises:
        ConfigError: The model cannot be loaded, or an image cannot be read.
        ValueError: Question and images do not match.
    """
    if isinstance(images, str | Path | bytes):
        images = [images]
    # a path is opened as the command opens it, so a mistake has the same message
    contents = [image if isinstance(image, bytes) else arguments.image_of(Path(image)) for image in images]
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "answers": answers, "seed": seed}
    return generate_from_run(
        arguments.config_of_model(str(model)), question, contents, max_new_tokens, **sampling
    )


@setup.left_on_error()
def evaluate(
    model: str | Path,
    data: str | None = None,
    metrics: Sequence[str] = ("exact_match",),
    output: str | Path | None = None,
    samples: int | None = None,
    max_new_tokens: int = 64,
    settings: Sequence[str] = (),
) -> dict[str, float]:
    """Answer held-out conversations and score the answers, as `megatron-vlm evaluate` does.

    Args:
        model: A run folder, or a Hugging Face folder or hub name.
        data: Conversations: a file, folder or hub name. A run has its validation data as default.
        metrics: Names of metrics, or `file.py:function`.
        output: The folder for answers.jsonl, scores.json and answers.html; default: evaluation/MODEL.
        samples: Number of conversations, drawn at random; all by default.
        max_new_tokens: Tokens of the longest answer.
        settings: `key=value` settings, such as `data.max_pixels=200000`.

    Returns:
        The mean of each score over the conversations.

    Raises:
        ConfigError: The model or the data cannot be read, `output` holds another evaluation, or no
            conversation can be scored.
    """
    from megatron_vlm.extras.evaluate.command import check_folder, with_data
    from megatron_vlm.extras.evaluate.evaluating import evaluate_model
    from megatron_vlm.extras.evaluate.metrics import metric_of

    output = Path(output or Path("evaluation", Path(model).name))
    check_folder(output)
    output.mkdir(parents=True, exist_ok=True)
    config = with_data(arguments.config_of_model(str(model), settings), [data] if data else [])
    # what it yields are the lines that the command prints; scores.json has the numbers
    for _ in evaluate_model(
        config, {name: metric_of(name) for name in metrics}, output, samples, max_new_tokens
    ):
        pass
    result = json.loads(read_text(output / "scores.json"))
    if not result["scores"]:
        source = data or "the validation data"
        raise ConfigError(f"evaluate: no conversation of {source} could be scored: {result['unscored']}")
    return {name: score["score"] for name, score in result["scores"].items()}
