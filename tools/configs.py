"""Write docs/configs.md: what every family makes of the keys of config.json.

python tools/configs.py            write the page
python tools/configs.py --check    exit 1 when the page is not what the families declare
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from transformers import CONFIG_MAPPING

from megatron_vlm.models.description import Description
from megatron_vlm.models.families import FAMILIES, load
from megatron_vlm.models.family_parts.keys import ANY, ASKED_FOR, NAMES, NO_EFFECT, Section, as_json

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configs.md"
HEAD = """# What is read of config.json

Written by `tools/configs.py` from what the families declare (`models/families/*.py`); `make lint`
compares.

A key is read, has no effect on what is trained, or must keep the default of Transformers' config class.
Any other value is refused before anything is built, all such keys in one message. Keys that are no fields
of the class are ignored, as Transformers ignores them. `tests/models/test_configs.py` changes every key of a
tiny checkpoint of each family: what is not refused has Transformers' logits and gradients, in the newest
Transformers; every field of the oldest supported one is accounted for as well. Not so tried are the sizes of
patches and merges, which change only together with a processor.

- Dropout of every kind must be 0: random numbers would differ from Transformers' under every layout.
- `pad_token_id`: the embedding of the padding token gets no gradient where it stands in the text, as in
  Transformers. A checkpoint that pads with a token of its text keeps that token's embedding as it is (its
  output weight, where both are one, is trained). Name another `pad_token_id` in config.json to train it.
- `deepstack_visual_indexes` beyond the tower's depth give no features, and features beyond the last layer
  of the language model are left out.
- Multi-token prediction (Qwen3.5's `mtp.*`; GLM's layer number `num_hidden_layers`, the one after the last)
  is not trained, and Transformers drops it. An export has it bit for bit as the source has, so that an engine
  can still predict several tokens at once.
- `output_router_logits` adds the experts' balance to the loss, weighed by `router_aux_loss_coef`. With one
  layer of experts its gradient is Transformers'. With several it differs on purpose: here it is the mean of
  the layers' own balances; Transformers first adds up all layers by the number of the expert, as if a busy
  expert 3 of one layer were made up for by an idle expert 3 of the next, and no pipeline stage could take a
  gradient before all had counted. `model.load_balancing` goes over both keys, 0 switches it off.
- `rope_type` "dynamic" is the default rule up to `max_position_embeddings` tokens. A run with a greater
  `data.seq_length` is refused, and so is a longer document or answer: Transformers' frequencies would depend
  on the longest row of a batch.
- `mrope_interleaved` is not read, as in Transformers: Qwen3-VL always interleaves, the other families
  never do.

In every section these have no effect: {no_effect}. These, fields or not, must have one value:
{asked_for}.
"""


def page() -> str:
    listed = ", ".join(f"`{key}`" for key in sorted(NO_EFFECT))
    fixed = ", ".join(f"`{key}` {values.words}" for key, values in sorted(ASKED_FOR.items()) if values != ANY)
    *head, keys = HEAD.format(no_effect=listed, asked_for=fixed).split("\n\n")
    parts = ["\n\n".join([*head, textwrap.fill(keys, 120)]) + "\n"]
    return "\n".join([*parts, *(_family(load(model_type)) for model_type in sorted(FAMILIES))])


def _family(family: type[Description]) -> str:
    sections = zip(NAMES, family.sections, strict=True)
    written = [_section(name, section) for name, choices in sections for section in choices]
    return f"## {family.model_type}\n" + "".join(written)


def _section(name: str, section: Section) -> str:
    rule = {f"rope_parameters.{key}": values for key, values in section.rope.items()}
    reads = {key: values for key, values in (section.reads | rule).items() if key not in ASKED_FOR}
    plain = sorted(key for key, values in reads.items() if values == ANY)
    limited: dict[str, list[str]] = {}
    for key, values in sorted(reads.items()):
        if values != ANY:
            limited.setdefault(values.words, []).append(key)
    default = CONFIG_MAPPING[section.model_types[0]]()
    lines = [f"\n### {name or 'top level'}: {' or '.join(section.model_types)}\n"]
    lines.append(f"- read: {_keys(plain)}")
    lines += [f"- {_keys(keys)}: {words}" for words, keys in limited.items()]
    if section.no_effect:
        lines.append(f"- no effect: {_keys(sorted(section.no_effect))}")
    fixed = [f"`{key}` {as_json(value)}" for key, value in sorted(section.fixed(default).items())]
    lines.append(f"- refused unless: {', '.join(fixed)}")
    return "\n".join(_wrapped(line) for line in lines) + "\n"


def _wrapped(line: str) -> str:
    return textwrap.fill(line, 120, subsequent_indent="  ") if line.startswith("- ") else line


def _keys(keys: list[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def main() -> None:
    new = page()
    if "--check" not in sys.argv:
        PAGE.write_text(new, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != new:
        sys.exit(f"{PAGE.name} does not show what the families declare; run tools/configs.py")


if __name__ == "__main__":
    main()
