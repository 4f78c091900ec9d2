"""The folder that a run publishes: a model or its adapters, with processor and model card."""

import json
from pathlib import Path

from torch.nn import Module

from megatron_vlm import __version__
from megatron_vlm.config import RunConfig
from megatron_vlm.models.adapters.files import save_adapters
from megatron_vlm.models.hf import Source
from megatron_vlm.models.weights.exporting import export_hf

CARD = """\
---
{metadata}
---
# {name}
{kind} of `{base}`, trained with megatron_vlm {version}. The license of the base model applies.

| | |
|---|---|
| steps | {steps} |
| samples a step | {batch} |
| objective | {objective} |
| learning rate | {lr} |

## Use
```python
from transformers import AutoModelForImageTextToText, AutoProcessor

{load}
```
"""


def export_model(
    chunks: list[Module],
    output: str | Path,
    config: RunConfig,
    source: Source,
    step: int,
    adapters_alone: bool = False,
) -> None:
    """Write the model, or its adapters alone as peft does, with the processor's files and a README.md.

    Collective.

    Raises:
        FileExistsError: `output` exists.
        OSError: It cannot be written.
    """
    card = model_card(config, step, adapters_alone)
    if adapters_alone:
        base = config.model.hf_path
        save_adapters(chunks, output, config.adapter, base, source.own_template, source.folder, card)
    else:
        export_hf(chunks, output, source.folder, source.weight_map, source.own_template, card=card)


def model_card(config: RunConfig, step: int, adapters_alone: bool) -> str:
    """Return the README.md of an export, in the hub's form.

    A folder's path is private: of a base model on disk, the card has its last name.
    """
    base = config.model.hf_path
    is_on_disk = Path(base).expanduser().exists()
    name = Path(base).name if is_on_disk else base
    tags = ["megatron-vlm", *(["lora"] if config.adapter.used else [])]
    # what the hub reads, between the lines of ---
    metadata = [
        *([] if is_on_disk else [f"base_model: {json.dumps(base)}"]),
        f"library_name: {'peft' if adapters_alone else 'transformers'}",
        "pipeline_tag: image-text-to-text",
        f"tags: {json.dumps(tags)}",
    ]
    # the lines of Python that load the export; peft puts adapters onto the base model
    model = f'model = AutoModelForImageTextToText.from_pretrained("{name if adapters_alone else "."}")'
    load = [model, 'processor = AutoProcessor.from_pretrained(".")']
    if adapters_alone:
        load = [
            "from peft import PeftModel",
            "",
            model,
            'model = PeftModel.from_pretrained(model, ".")',
            load[1],
        ]
    return CARD.format(
        metadata="\n".join(metadata),
        name=config.name,
        kind="Adapters" if adapters_alone else "A fine-tuning",
        base=name,
        version=__version__,
        steps=step,
        batch=config.train.global_batch_size,
        objective=Path(config.train.objective).name,
        lr=f"{config.optimizer.lr:g}",
        load="\n".join(load),
    )
