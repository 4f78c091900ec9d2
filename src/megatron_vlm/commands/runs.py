"""Operations on a run folder besides training: import into it, export from it, ask its model."""

import io
from pathlib import Path

from PIL.PngImagePlugin import PngInfo

from megatron_vlm import run_folder
from megatron_vlm.config import MISSING, RunConfig
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import parse_turns
from megatron_vlm.data.chatml.sample import grounding, place_media
from megatron_vlm.data.media.images import decode_image
from megatron_vlm.files import write_output
from megatron_vlm.generation.generate import generate, reply_text
from megatron_vlm.generation.prompt import encode_prompt, stop_tokens
from megatron_vlm.models.adapters.model import merge
from megatron_vlm.models.hf import Source, open_source
from megatron_vlm.models.opened import open_model
from megatron_vlm.models.publishing import export_model
from megatron_vlm.models.vlm import VLMModel
from megatron_vlm.overrides import to_yaml
from megatron_vlm.parallel import setup
from megatron_vlm.run_folder import with_own_start
from megatron_vlm.training import checkpoint
from megatron_vlm.training.optimizer import build_optimizer
from megatron_vlm.training.step import data_parallel


def open_run(config: RunConfig, raw_pixels: bool = False) -> tuple[list[VLMModel], Source]:
    """Join the processes and load the run's latest checkpoint, or a Hugging Face one without a run folder.

    The model is in the layout of the configuration, and takes raw pixels if asked to. Raises
    FileNotFoundError if the run has no checkpoint.
    """
    is_run = config.run_dir != MISSING
    if is_run and run_folder.latest_checkpoint(config.run_dir) is None:
        raise FileNotFoundError(
            f"{config.run_dir}: no complete checkpoint in this run folder; train it first"
        )
    config = with_own_start(config)
    setup.init_distributed(config.parallel, config.train.seed)
    tied = checkpoint.saved(config.run_dir).tied if is_run else None
    source = open_source(config.model.hf_path, tied, config.data)
    chunks = open_model(config, source, resumes=is_run, raw_pixels=raw_pixels)
    if is_run:
        checkpoint.load_latest(config.run_dir, chunks)
    return chunks, source


def import_run(config: RunConfig) -> None:
    """Write the HF checkpoint as the run folder's checkpoint of step 0, from which training starts."""
    setup.init_distributed(config.parallel, config.train.seed)
    lock = checkpoint.claim(config.run_dir, config.model.hf_path)
    if checkpoint.saved(config.run_dir).path:
        raise FileExistsError(f"{config.run_dir} already holds a checkpoint; import into another run folder")
    source = open_source(config.model.hf_path, data=config.data)
    chunks = open_model(config, source, raw_pixels=False, run_dir=config.run_dir)
    model = data_parallel(chunks, config)
    optimizer, scheduler = build_optimizer(model, config)
    checkpoint.save(config.run_dir, 0, model, optimizer, scheduler)
    if setup.is_first_rank():  # as in training: export and other commands read it
        run_folder.atomic_write(Path(config.run_dir, "config.yaml"), to_yaml(config))
    lock.close()
    setup.shutdown()


def export_run(config: RunConfig, output: str | Path, adapter: bool = False) -> None:
    """Write the latest checkpoint as an HF folder, see `models.weights.export_hf`; adapters are merged.

    With `adapter`, write the adapters alone, as peft does, see `models.adapters.save_adapters`.
    """
    chunks, source = open_run(config)
    for chunk in chunks if config.adapter.used and not adapter else ():
        merge(chunk)
    step = checkpoint.saved(config.run_dir).step
    export_model(chunks, output, with_own_start(config), source, step, adapters_alone=adapter)
    setup.shutdown()


def generate_from_run(
    config: RunConfig, question: str, images: list[bytes], max_new_tokens: int = 64, **sampling
) -> list[str]:
    """The answers of a model, as `open_run` opens it; `<image>` in the question stands for each image.

    Raises ValueError if question and images do not match.
    """
    try:
        messages = parse_turns([{"role": "user", "content": question}])
        messages = place_media(messages, images=len(images))
    except BadSample as bad:
        raise ValueError(f"question: {bad.detail}; give one image for each <image>") from bad
    return answers(config, [messages], [images], max_new_tokens, **sampling)[0]


def answers(
    config: RunConfig,
    conversations: list[list[dict]],
    images: list[list[bytes]],
    max_new_tokens: int,
    **sampling,
) -> list[list[str]]:
    """A model's answers to each conversation of HF messages, the same on every rank.

    `sampling` are arguments of `generate`; without any, there is one greedy answer to each.
    """
    chunks, source = open_run(config)
    prompts = [
        encode_prompt(source.processor, messages, files, source.needs)
        for messages, files in zip(conversations, images, strict=True)
    ]
    stop = stop_tokens(source.folder, source.description.hf_config)
    replies = generate(chunks, prompts, max_new_tokens, stop=stop, **sampling)
    setup.shutdown()
    spoken = grounding().Boxes(source.processor, config.data, source.needs.box_format).tokens
    return [[reply_text(source.processor, answer.reply, spoken) for answer in of_one] for of_one in replies]


def draw_answer(config: RunConfig, answer: str, image: bytes, output: str | Path) -> list[str]:
    """Draw the boxes of a model's answer on its image, as a PNG; a line about each, in pixels of the image.

    Raises ValueError if nothing tells how the model writes boxes.
    """
    source = open_source(config.model.hf_path, data=config.data)
    picture = decode_image(image)
    try:
        boxes = grounding().Boxes(source.processor, config.data, source.needs.box_format)
        shapes = boxes.parse(answer, picture.size)
    except BadSample as bad:
        raise ValueError(f"--draw: {bad.detail}; set data.box_format for the run") from bad
    file = io.BytesIO()
    mark = PngInfo()
    mark.add_text("Software", "megatron_vlm")  # as `files.check_output` looks for it
    grounding().draw(picture, shapes).save(file, "PNG", pnginfo=mark)
    write_output(output, file.getvalue())
    rounded = [([round(number, 1) for number in shape.numbers], shape.label or "") for shape in shapes]
    return [f"{numbers} {label}".strip() for numbers, label in rounded] or ["the answer has no box"]
