"""A composed checkpoint, planned from the headers of its sources and then written, whole or not at all."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers.utils.logging import set_verbosity_error

from megatron_vlm.compose.classes import (
    COMPOSED,
    Choices,
    Composed,
    composed_config,
    expected_shapes,
    part_config,
)
from megatron_vlm.compose.sources import ROLES, TOWERS, Part
from megatron_vlm.compose.templates import chat_template
from megatron_vlm.compose.tensors import Writer, dtype_name, is_tied, open_weights, sources_of
from megatron_vlm.compose.tokens import ADDED, RoleToken, assign, grown_rows, refuse_beyond
from megatron_vlm.config import ConfigError
from megatron_vlm.messages import printable, readable_size

# attributes of the tokenizer where processors look for its tokens
TOKENIZER_NAMES = {"image": "image_token", "image_start": "image_start_token", "image_end": "image_end_token"}


@dataclass(frozen=True)
class Plan:
    """What will be written."""

    composed: Composed
    tower: Part
    language: Part
    tokenizer: Any
    tokens: list[RoleToken]
    rows_before: int
    config: PreTrainedConfig
    writer: Writer
    template: str
    choices: Choices

    def table(self) -> str:
        """A line for each special token, and how many rows the embedding gets."""
        lines = [("role", "what it is for", "token", "id", "how it came", "its row")]
        for each in self.tokens:
            row = "is there" if each.id < self.rows_before else "new"
            lines.append((each.role, ROLES[each.role], printable(each.token), str(each.id), each.how, row))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        rows, added = self.config.text_config.vocab_size, sum(each.how == ADDED for each in self.tokens)
        grows = f"{self.rows_before} → {rows} rows" if rows > self.rows_before else f"{rows} rows, as before"
        text.append(f"{added} tokens are added; embedding{'' if self.tied else ' and output layer'}: {grows}")
        return "\n".join([f"{self.composed.architecture}: {self.what}", *text])

    @property
    def tied(self) -> bool:
        return self.config.tie_word_embeddings

    @property
    def what(self) -> str:
        vision, text = self.config.vision_config, self.config.text_config
        return (
            f"{vision.model_type} of width {vision.hidden_size}, {text.model_type} of width "
            f"{text.hidden_size}, {len(self.writer.stored)} tensors, {readable_size(self.writer.nbytes)}"
        )


def plan(
    tower: Part,
    language: Part,
    named: dict[str, str],
    choices: Choices,
    new_rows: str = "mean",
    vocab_multiple: int | None = None,
    template: str | None = None,
    seed: int = 0,
) -> Plan:
    """What would be written, by the headers of the weights and the tokenizer. Raises ConfigError."""
    composed = COMPOSED[TOWERS[tower.config["model_type"]]]
    asks_for_ties = bool(part_config(language).tie_word_embeddings)
    tokenizer = _tokenizer(language.folder)
    weights = open_weights(language, is_tower=False)
    tied = is_tied(weights, asks_for_ties)
    rows = weights.shape("model.embed_tokens.weight")[0]
    tokens = assign(tokenizer, composed.roles, named)
    refuse_beyond(tokenizer, tokens, rows)
    by_role = {each.role: each for each in tokens}
    changes = {
        "tie_word_embeddings": tied,
        "vocab_size": grown_rows(tokens, rows, vocab_multiple),
        "pad_token_id": by_role["pad"].id,
    }
    dtype = dtype_name(weights.stored("model.embed_tokens.weight").dtype)
    config = composed_config(composed, tower, language, changes, by_role["image"].id, dtype, choices)
    shapes = expected_shapes(config)
    sources = sources_of(shapes, open_weights(tower, is_tower=True), weights, tied)
    return Plan(
        composed,
        tower,
        language,
        tokenizer,
        tokens,
        rows,
        config,
        Writer(shapes, sources, new_rows, seed),
        template
        or chat_template(tokenizer.get_vocab(), by_role["image"].token, by_role["end_of_turn"].token),
        choices,
    )


def write(plan: Plan, output: Path) -> None:
    """Write the checkpoint aside, and name it `output` when it is whole. Raises ConfigError if the disk is
    too full, and leaves nothing behind if anything goes wrong."""
    aside = output.with_name(output.name + ".partial")
    output.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(output.parent).free
    if free < plan.writer.nbytes:
        raise ConfigError(
            f"{printable(output)} takes {readable_size(plan.writer.nbytes)}, and {readable_size(free)} are "
            "free on its disk; make room, or give a folder on another disk."
        )
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        _write_words(plan, aside)
        plan.writer.write(aside, {name: plan.composed.hub_name(name) for name in plan.writer.stored})
        plan.config.save_pretrained(aside)
        aside.rename(output)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _write_words(plan: Plan, folder: Path) -> None:
    """Tokenizer, processor, chat template and generation config; checked by reading the tokenizer again."""
    tokens = {each.role: each.token for each in plan.tokens}
    plan.tokenizer.chat_template = None  # the processor's is the only one
    plan.tokenizer.save_pretrained(folder)
    names = {TOKENIZER_NAMES[role]: token for role, token in tokens.items() if role in TOKENIZER_NAMES}
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **names)
    processor = plan.composed.processor(plan.tower, tokenizer, tokens, plan.template, plan.choices)
    processor.save_pretrained(folder)
    again = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    changed = [each for each in plan.tokens if again.convert_tokens_to_ids(each.token) != each.id]
    if changed:
        raise ConfigError(
            f"Transformers reads {changed[0].token!r} from its own files as another id than {changed[0].id}; "
            f"give another token: --token {changed[0].role}=TOKEN."
        )
    _generation_config(plan).save_pretrained(folder)


def _generation_config(plan: Plan) -> GenerationConfig:
    """The language model's, which ends replies at the end of a turn, too."""
    file = plan.language.folder / "generation_config.json"
    if file.is_file():
        config = GenerationConfig.from_pretrained(plan.language.folder)
    else:
        config = GenerationConfig.from_model_config(part_config(plan.language))
    by_role = {each.role: each.id for each in plan.tokens}
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = [end for end in ends if end is not None]
    config.eos_token_id = list(dict.fromkeys([*ends, by_role["end_of_turn"]]))
    config.pad_token_id = by_role["pad"]
    return config


def _tokenizer(folder: Path) -> Any:
    set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, json.JSONDecodeError) as error:
        reason = printable(str(error).strip().partition("\n")[0])
        raise ConfigError(
            f"--language-model {printable(folder)}: Transformers cannot read its tokenizer ({reason}); "
            "download it again."
        ) from error
