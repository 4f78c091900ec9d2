"""A composed checkpoint, planned from the headers of its sources and then written, whole or not at all."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoProcessor, GenerationConfig, PreTrainedConfig

from megatron_vlm.config import ConfigError
from megatron_vlm.extras.compose.classes import (
    COMPOSED,
    Choices,
    composed_config,
    expected_shapes,
    part_config,
)
from megatron_vlm.extras.compose.sources import ROLES, TOWERS, Component
from megatron_vlm.extras.compose.tensors import EMBEDDING_KEY, TOWER_PREFIX, Writer, is_tied, sources_of
from megatron_vlm.extras.compose.tokenizer import (
    begins_texts,
    chat_template,
    open_tokenizer,
    own_template,
    refuse_changed,
    save_tokenizer,
)
from megatron_vlm.extras.compose.tokens import ADDED, RoleToken, assign, grown_rows, refuse_beyond
from megatron_vlm.files import folder_aside, need_room, read_text, write_whole
from megatron_vlm.messages import aligned, join_lines, readable_size, reading
from megatron_vlm.models.weights.files import HFCheckpoint
from megatron_vlm.supported import GENERATION_FILE

# attributes of the tokenizer where processors look for its tokens
TOKENIZER_NAMES = {"image": "image_token", "image_start": "image_start_token", "image_end": "image_end_token"}


@dataclass(frozen=True)
class ComposePlan:
    """The checkpoint that will be written."""

    model_type: str
    tokenizer: Any
    tokens: list[RoleToken]
    rows_before: int
    config: PreTrainedConfig
    generation: dict[str, Any]
    writer: Writer
    template: str
    image_processor: Any
    settings: dict[str, Any]  # the processor's own

    def table(self) -> str:
        """A line for each special token, and how many rows the embedding gets."""
        lines = [("role", "what it is for", "token", "id", "how it came", "its row")]
        for each in self.tokens:
            row = "is there" if each.id < self.rows_before else "new"
            lines.append((each.role, ROLES[each.role], each.token, str(each.id), each.how, row))
        table = aligned(lines)
        vision = self.config.vision_config
        language = self.config.text_config
        rows = language.vocab_size
        layers = "embedding" if self.config.tie_word_embeddings else "embedding and output layer"
        added = sum(each.how == ADDED for each in self.tokens)
        grows = f"{self.rows_before} → {rows} rows" if rows > self.rows_before else f"{rows} rows, as before"
        table.append(f"{added} tokens are added; {layers}: {grows}")
        what = (
            f"{self.config.architectures[0]}: {vision.model_type} of width {vision.hidden_size}, "
            f"{language.model_type} of width {language.hidden_size}, {len(self.writer.stored)} tensors, "
            f"{readable_size(self.writer.nbytes)}"
        )
        return join_lines([what, *table])


@reading("language.folder")
def plan(
    tower: Component,
    language: Component,
    named: dict[str, str],
    choices: Choices,
    new_rows: str = "mean",
    vocab_multiple: int | None = None,
    template: str | None = None,
    seed: int = 0,
) -> ComposePlan:
    """Plans the checkpoint from the headers of the weights and the tokenizer. Raises ConfigError."""
    model_type = TOWERS[tower.config["model_type"]]
    composed = COMPOSED[model_type]
    text = part_config(language)
    tokenizer = open_tokenizer(language.folder)
    weights = HFCheckpoint(language.folder)
    tied = is_tied(weights, bool(text.tie_word_embeddings))
    rows = text.vocab_size
    tokens = assign(tokenizer, composed.roles, named)
    refuse_beyond(tokenizer, tokens, rows)
    by_role = {each.role: each for each in tokens}
    changes = {
        "tie_word_embeddings": tied,
        "vocab_size": grown_rows(tokens, rows, vocab_multiple),
        "pad_token_id": by_role["pad"].id,
    }
    dtype = str(weights.stored(EMBEDDING_KEY).dtype).removeprefix("torch.")
    vision = part_config(tower)
    keys, settings = composed.keys(vision, by_role, choices)
    config = composed_config(model_type, tower, language, changes, keys, dtype)
    shapes = expected_shapes(config)
    in_tower = HFCheckpoint(tower.folder, ((TOWER_PREFIX, ""),))  # by their names in the tower
    sources = sources_of(shapes, in_tower, weights, rows, tied)
    return ComposePlan(
        model_type=model_type,
        tokenizer=tokenizer,
        tokens=tokens,
        rows_before=rows,
        config=config,
        generation=_generation_config(language, by_role),
        writer=Writer(shapes, sources, new_rows, seed),
        template=_template(tokenizer, by_role, template),
        image_processor=composed.images(tower, vision, choices),
        settings=settings,
    )


def _template(tokenizer: Any, by_role: dict[str, RoleToken], given: str | None) -> str:
    """The chat template that is given, or one in the style of the tokenizer's. Raises ConfigError if it does
    not write an image where one stands."""
    image = by_role["image"].token
    end = by_role["end_of_turn"].token
    vocabulary = tokenizer.get_vocab()
    own = own_template(tokenizer)
    made = chat_template(lambda text: text in vocabulary or text in own, image, end, begins_texts(tokenizer))
    template = made if given is None else given
    content = [{"type": "text", "text": "a"}, {"type": "image"}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": content[:1]}]
    try:
        written = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False)
    except (TemplateError, TypeError) as error:
        problem = f"it cannot be read, or refuses a question about an image ({error})"
    else:
        problem = f"it writes {written.count(image)} times {image} for one image"
        if written.count(image) == 1:
            return template
    raise ConfigError(f"--chat-template: {problem}; correct it, or leave the option out.")


def write(plan: ComposePlan, output: Path) -> None:
    """Write the checkpoint. Raises as `files.folder_aside` and `files.need_room`."""
    with folder_aside(output) as aside:
        need_room(output, plan.writer.nbytes)
        plan.config.save_pretrained(aside)
        write_whole(aside / GENERATION_FILE, json.dumps(plan.generation, indent=2) + "\n")
        _write_vocabulary(plan, aside)
        plan.writer.write(aside, COMPOSED[plan.model_type].hub_names)


def _write_vocabulary(plan: ComposePlan, folder: Path) -> None:
    """Tokenizer, processor and chat template; then both are read again, as users will, and compared."""
    plan.tokenizer.chat_template = None  # the processor's is the only one
    tokens = {each.role: each.token for each in plan.tokens}
    names = {TOKENIZER_NAMES[role]: token for role, token in tokens.items() if role in TOKENIZER_NAMES}
    processor = COMPOSED[plan.model_type].processor(
        image_processor=plan.image_processor,
        tokenizer=save_tokenizer(plan.tokenizer, folder, names),
        chat_template=plan.template,
        **plan.settings,
    )
    processor.save_pretrained(folder)
    again = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    refuse_changed(plan.tokenizer, again.tokenizer)


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
