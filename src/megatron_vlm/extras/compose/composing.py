"""A composed checkpoint: Transformers' model of both configs, with the tensors of both checkpoints."""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
)

from megatron_vlm.config import ConfigError
from megatron_vlm.extras.compose.classes import COMPOSED, composed_config, part_config
from megatron_vlm.extras.compose.sources import ROLES, TOWERS, Choices, Component
from megatron_vlm.extras.compose.tokens import (
    RoleToken,
    assign,
    chat_template,
    grown_rows,
    open_tokenizer,
    refuse_changed,
    to_backend,
)
from megatron_vlm.files import atomic_directory, atomic_write, need_room, read_text
from megatron_vlm.inputs import attribute_errors_to
from megatron_vlm.messages import aligned, readable_size
from megatron_vlm.models.weights.files import HFCheckpoint
from megatron_vlm.supported import GENERATION_FILE

TOWER = "model.vision_tower."
PROJECTOR = "model.multi_modal_projector."
TEXT = "model.language_model."
EMBEDDING = f"{TEXT}embed_tokens.weight"
HEAD = "lm_head.weight"
# how files spell where the names of the tensors of a tower and of a language model begin
SPELLINGS = {TOWER: r"^(model\.)?(vision_tower\.|vision_model\.)(vision_model\.)?", TEXT: r"^model\."}
POOLING = f"{TOWER}head."  # which no composed model uses
ROWS = 4096  # rows of the embedding that are widened at a time


@dataclass(frozen=True)
class ComposePlan:
    """The checkpoint that will be written."""

    model: PreTrainedModel  # without values
    tensors: dict[str, Tensor]  # by name in the model; those of the sources are views of mapped files
    tokenizer: Any
    tokens: list[RoleToken]
    rows_before: int
    generation: dict[str, Any]
    processor: ProcessorMixin

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def table(self) -> str:
        """Return a line for each special token, and how many rows the embedding gets."""
        lines = [("role", "what it is for", "token", "id", "how it came", "its row")]
        for token in self.tokens:
            row = "is there" if token.id < self.rows_before else "new"
            lines.append((token.role, ROLES[token.role], token.token, str(token.id), token.how, row))
        config = self.model.config
        vision = config.vision_config
        language = config.text_config
        rows = language.vocab_size
        layers = "embedding" if config.tie_word_embeddings else "embedding and output layer"
        added = sum(token.how == "added" for token in self.tokens)
        grows = f"{self.rows_before} → {rows} rows" if rows > self.rows_before else f"{rows} rows, as before"
        summary = (
            f"{type(self.model).__name__}: {vision.model_type} of width {vision.hidden_size}, "
            f"{language.model_type} of width {language.hidden_size}, {len(self.tensors)} tensors, "
            f"{readable_size(self.nbytes)}"
        )
        return "\n".join([summary, *aligned(lines), f"{added} tokens are added; {layers}: {grows}"])


@attribute_errors_to("language.folder")
def plan(
    tower: Component,
    language: Component,
    token_names: dict[str, str],
    choices: Choices,
    new_rows: str = "mean",
    vocab_multiple: int | None = None,
    template: str | None = None,
    seed: int = 0,
) -> ComposePlan:
    """Plan the checkpoint; of the weights, only the embedding is read. Raises ConfigError."""
    model_type = TOWERS[tower.config["model_type"]]
    composed = COMPOSED[model_type]
    vision = part_config(tower)
    text = part_config(language)
    rows = text.vocab_size

    # the tokenizer decides how many rows the embedding needs
    tokenizer = open_tokenizer(language.folder)
    tokens = assign(tokenizer, composed.roles, token_names)
    by_role = {token.role: token for token in tokens}
    vocab_size = grown_rows(tokenizer, tokens, rows, vocab_multiple)

    tensors = _stored_tensors(tower.folder, language.folder)
    embedding = tensors[EMBEDDING]
    if text.tie_word_embeddings:
        head = tensors.setdefault(HEAD, embedding)
        is_equal = head.shape == embedding.shape and torch.equal(embedding, head.to(embedding.dtype))
        text.tie_word_embeddings = is_equal

    # the tensors must fit the model of both configs before rows are added
    keys, settings = composed.keys(vision, by_role, choices)
    config = composed_config(model_type, vision, text, keys, str(embedding.dtype).removeprefix("torch."))
    model = _fit_model(config, tensors, seed, tower, language)
    text.vocab_size = vocab_size
    text.pad_token_id = by_role["pad"].id
    if text.tie_word_embeddings:
        del tensors[HEAD]
    for name in {EMBEDDING, HEAD} & tensors.keys():
        tensors[name] = _grow(name, tensors[name], vocab_size, new_rows, seed)
    return ComposePlan(
        model=model,
        tensors=tensors,
        tokenizer=tokenizer,
        tokens=tokens,
        rows_before=rows,
        generation=_generation_config(language, by_role),
        processor=composed.processor(
            image_processor=composed.images(tower, vision, choices),
            tokenizer=to_backend(tokenizer, tokens),
            chat_template=_template(tokenizer, by_role, template),
            **settings,
        ),
    )


def _stored_tensors(tower: Path, language: Path) -> dict[str, Tensor]:
    """The tensors of both checkpoints by their names in the composed model; of a whole model, its tower's.

    Raises ConfigError if there is no embedding.
    """
    stored = _map_tensors(tower, TOWER)
    of_tower = {key: tensor for key, tensor in stored.items() if key.startswith(TOWER)}
    of_tower = of_tower or {TOWER + key: tensor for key, tensor in stored.items()}
    tensors = {key: tensor for key, tensor in of_tower.items() if not key.startswith(POOLING)}
    tensors |= _map_tensors(language, TEXT)
    if EMBEDDING not in tensors:
        raise ConfigError(
            f"--language-model {language}: its weights lack an embedding; give the checkpoint of a "
            "whole language model."
        )
    return tensors


def _map_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint as views of its files, by their names in the composed model."""
    checkpoint = HFCheckpoint(folder, ((SPELLINGS[prefix], prefix),))
    return {key: checkpoint.slices(key)[...] for key in checkpoint.files}


def _fit_model(
    config: PreTrainedConfig, tensors: dict[str, Tensor], seed: int, *sources: Component
) -> PreTrainedModel:
    """The model of a config, without values; its projector is added to the tensors.

    Raises ConfigError, with torch's words, unless it has these tensors, in these shapes.
    """
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
    for name, like in model.state_dict().items():
        if name.startswith(PROJECTOR):
            tensors[name] = _start(name, like.shape, tensors[EMBEDDING], seed)
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        folders = " and ".join(str(source.folder) for source in sources)
        raise ConfigError(
            f"the weights in {folders} are not what config.json there asks for: {reason[:500]}; put "
            "config.json and weights of the same model into one folder."
        ) from error
    return model


def _row_moments(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and mean square (D,) of each column, in fp64."""
    sum_D = sum(part.double().sum(0) for part in matrix.split(ROWS))
    square_D = sum(part.double().square().sum(0) for part in matrix.split(ROWS))
    return sum_D / len(matrix), square_D / len(matrix)


def _grow(name: str, matrix: Tensor, rows: int, new_rows: str, seed: int) -> Tensor:
    """The matrix with so many rows: new ones are the mean of the present ones, or drawn around it."""
    if rows == len(matrix):
        return matrix
    mean_D, square_D = _row_moments(matrix)
    new = mean_D.expand(rows - len(matrix), -1)
    if new_rows == "normal":
        new = new + (square_D - mean_D.square()).clamp(min=0).sqrt() * _normal(name, new.shape, seed)
    return torch.cat([matrix, new.to(matrix.dtype)])


def _start(name: str, shape: torch.Size, embedding: Tensor, seed: int) -> Tensor:
    """A tensor of the projector: norms and biases as always, linears that keep the scale of their input,
    but for the last one, which brings it to the scale of the language model's embedding."""
    if len(shape) == 1:
        start = torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
    else:
        is_last = name == f"{PROJECTOR}linear_2.weight"
        scale = _row_moments(embedding)[1].mean().sqrt().item() if is_last else 1.0
        start = _normal(name, shape, seed) * (scale / math.sqrt(shape[1]))
    return start.to(embedding.dtype)


def _normal(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Standard normal values that depend on the seed and on the tensor's name alone."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7])))


def _template(tokenizer: Any, by_role: dict[str, RoleToken], template: str | None) -> str:
    """The chat template of the user, or one in the style of the tokenizer's. Raises ConfigError if it does
    not write an image where one stands."""
    image = by_role["image"].token
    if template is None:
        template = chat_template(tokenizer, image, by_role["end_of_turn"].token)
    content = [{"type": "text", "text": "a"}, {"type": "image"}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": content[:1]}]
    try:
        text = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False)
    except (TemplateError, TypeError) as error:
        problem = f"it cannot be read, or refuses a question about an image ({error})"
    else:
        if text.count(image) == 1:
            return template
        problem = f"it writes {text.count(image)} times {image} for one image"
    raise ConfigError(f"--chat-template: {problem}; correct it, or leave the option out.")


def _generation_config(language: Component, by_role: dict[str, RoleToken]) -> dict[str, Any]:
    """The language model's as it stands, also with settings that Transformers would refuse to save; it ends
    replies at the end of a turn, too."""
    file = language.folder / GENERATION_FILE
    if file.is_file():
        config = json.loads(read_text(file))
    else:
        config = GenerationConfig.from_model_config(part_config(language)).to_diff_dict()
    ends = config.get("eos_token_id")
    if not isinstance(ends, list):
        ends = [] if ends is None else [ends]
    ends = list(dict.fromkeys([*ends, by_role["end_of_turn"].id]))
    return config | {"eos_token_id": ends, "pad_token_id": by_role["pad"].id}


def write(plan: ComposePlan, output: Path, shard_size: str = "4GB") -> None:
    """Write the checkpoint; the processor is read again, as users will. Raises as `atomic_directory`."""
    config = plan.model.config
    dtype = config.dtype
    with atomic_directory(output) as aside:
        need_room(output, plan.nbytes)
        plan.model.save_pretrained(aside, state_dict=dict(plan.tensors), max_shard_size=shard_size)
        config.dtype = dtype  # saving takes that of the tower
        config.save_pretrained(aside)
        atomic_write(aside / GENERATION_FILE, json.dumps(plan.generation, indent=2) + "\n")
        plan.processor.save_pretrained(aside)
        processor = AutoProcessor.from_pretrained(aside, trust_remote_code=False)
        refuse_changed(plan.tokenizer, processor.tokenizer)
