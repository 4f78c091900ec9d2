"""Write docs/reference/configs.md: what every family makes of the keys of config.json.

python tools/configs.py            write the page
python tools/configs.py --check    exit 1 when the page is not what the families declare
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from megatron_vlm.models.description import Description
from megatron_vlm.models.families import FAMILIES, describe
from megatron_vlm.models.family_parts.limits import (
    ANY,
    ASKED_FOR,
    COMMON,
    PARTS,
    ROPE,
    Limit,
    dotted,
    keys_read,
    limits_of,
    part_of,
)
from megatron_vlm.models.hf import as_hf_config
from megatron_vlm.recipes.published import CONFIGS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "configs.md"
HEAD = """# What is read of config.json

Written by `tools/configs.py` from what the families read of the published config.json of their recipes;
`make lint` compares.

A key is read, has no effect on what is trained, or must keep the default of Transformers' config class.
Which keys are read is recorded while a checkpoint is described. Any other value is refused before anything
is built: first all values outside the limits of this page in one message, then all keys that nobody reads.
Keys that are not fields of the class are ignored, as Transformers ignores them.
`tests/parity/models/test_configs.py` changes every key of a tiny checkpoint of each family: what is not
refused has Transformers' logits and gradients, in the newest Transformers; every field of the oldest
supported one is accounted for as well. Not so tried are the sizes of patches and merges, which change only
together with a processor.

- Dropout of every kind must be 0: random numbers would differ from Transformers' under every layout.
- `pad_token_id`: the embedding of the padding token gets no gradient where it stands in the text, as in
  Transformers. A checkpoint that pads with a token of its text keeps that token's embedding as it is. Its
  output weight is trained, where both are one. Name another `pad_token_id` in config.json to train it.
- `deepstack_visual_indexes` beyond the tower's depth give no features, and features beyond the last layer
  of the language model are left out.
- Multi-token prediction (Qwen3.5's `mtp.*`; GLM's layer number `num_hidden_layers`, the one after the last)
  is not trained, and Transformers drops it. An export has it bit for bit as the source has, so that an engine
  can still predict several tokens at once.
- `output_router_logits` adds the experts' balance to the loss, weighed by `router_aux_loss_coef`. With one
  layer of experts its gradient is Transformers'. With several it differs on purpose: here it is the mean of
  the layers' own balances. Transformers first adds up all layers by the number of the expert. A busy expert 3
  of one layer is then made up for by an idle expert 3 of the next. `model.load_balancing`
  goes over both keys, 0 switches it off.
- `rope_type` "dynamic" is the default rule up to `max_position_embeddings` tokens. A run with a greater
  `data.seq_length` is refused, and so is a longer document or answer: Transformers' frequencies would depend
  on the longest row of a batch.
- `mrope_interleaved` is not read, as in Transformers: Qwen3-VL always interleaves, the other families
  never do.

## All families

`*` stands for the top level, text_config and vision_config.
"""


def page() -> str:
    rules = {f"rope_parameters.{key}": limit for key, limit in ROPE.items()}
    everywhere = {f"*.{key}": limit for key, limit in ASKED_FOR.items()}
    for name in PARTS:
        everywhere |= {dotted(name, key): limit for key, limit in COMMON[name].items()}
    everywhere |= {f"text_config.{key}": limit for key, limit in rules.items()}
    return HEAD + _table(everywhere) + "".join(_family(*each) for each in sorted(_published().items()))


def _published() -> dict[str, list[Description]]:
    """Model type -> descriptions of the published checkpoints that recipes name."""
    published: dict[str, list[Description]] = {name: [] for name in FAMILIES}
    for file in sorted(CONFIGS.glob("*.json")):
        config = json.loads(file.read_text())
        published[config["model_type"]].append(describe(as_hf_config(config, file)))
    return published


def _family(model_type: str, checkpoints: list[Description]) -> str:
    own: dict[str, Limit] = {}
    unread: set[str] = set()
    for description in checkpoints:
        for name in PARTS:
            own |= {dotted(name, key): limit for key, limit in description.limits[name].items()}
        rope = description.rope_limits.items()
        own |= {f"text_config.rope_parameters.{key}": limit for key, limit in rope}
        unread |= {*_unread(description)}
    fixed = ", ".join(f"`{key}`" for key in sorted(unread))
    lines = [f"\n## {model_type}\n", _table(own), f"\nNot read: {fixed}.\n" if fixed else ""]
    return "".join(lines) if checkpoints else f"{lines[0]}\nNo recipe names a published checkpoint.\n"


def _unread(description: Description) -> Iterator[str]:
    reads = keys_read(description)
    for name in PARTS:
        known = limits_of(description, name).keys() | PARTS
        for key in [each.name for each in fields(part_of(description.hf_config, name))]:
            if key not in known and dotted(name, key) not in reads:
                yield dotted(name, key)


def _table(limits: dict[str, Limit]) -> str:
    """A table with a row for all keys that share the words of their limit, or more rows if they are many."""
    rows: dict[str, list[str]] = {}
    for key, limit in limits.items():
        if limit is not ANY:
            rows.setdefault(limit.words, []).append(f"`{key}`")
    lines = []
    for words, keys in rows.items():
        parts = textwrap.wrap(", ".join(sorted(keys)), max(150 - len(words), 50), break_long_words=False)
        lines += [f"| {part.rstrip(',')} | {words} |" for part in parts]
    return "\n".join(["", "| keys | supported values |", "|---|---|", *lines, ""]) if lines else ""


def main() -> None:
    new = page()
    if "--check" not in sys.argv:
        PAGE.write_text(new, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != new:
        sys.exit(f"{PAGE.name} does not show what the families declare; run tools/configs.py")


if __name__ == "__main__":
    main()
