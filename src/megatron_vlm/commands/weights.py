"""The command `show-weights`: which tensors of a checkpoint make which parameter, as one table."""

from os.path import commonprefix
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_vlm.messages import printable

if TYPE_CHECKING:
    from megatron_vlm.models.weights.rules import Rule

PARALLEL = {None: "replicated", 0: "column", 1: "row"}  # by the axis of a weight that ranks divide


def show_weights(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder or hub name; config.json is enough.")],
) -> None:
    """Print which tensors of a checkpoint make which parameter.

    The table also says what each rank holds of it. `*` is any number, `**` the rest of a name. Where tensors
    have several rows, checkpoints store either.
    """
    from megatron_vlm.models.hf import look_at

    description, _ = look_at(model)
    rows = [("Hugging Face", "Megatron", "parallel", "transform")]
    rows += [
        (_join_pieces(rule.hf), rule.param, _parallel(rule), _transform(rule)) for rule in description.rules
    ]
    rows += [(key, "", "not read", reason) for key, reason in description.carried_keys.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        typer.echo(printable("  ".join(cells).rstrip(), 1000))


def _join_pieces(names: tuple[str, ...]) -> str:
    """The names as one, with what differs in braces: `self_attn.{q,k,v}_proj.weight`."""
    if len(names) == 1:
        return names[0]
    start = commonprefix(names)
    ends = [name[len(start) :] for name in names]
    end = commonprefix([text[::-1] for text in ends])[::-1]
    return f"{start}{{{','.join(text.removesuffix(end) for text in ends)}}}{end}"


def _parallel(rule: "Rule") -> str:
    return "experts" if ".mlp.experts." in rule.param else PARALLEL[rule.operation.axis]


def _transform(rule: "Rule") -> str:
    plain = type(rule.operation).__name__ in ("Whole", "Cut")
    notes = [] if plain else [str(rule.operation)]
    if rule.rows:
        notes.append(f"{rule.rows} fused" if rule.block is None else f"block {rule.block} of {rule.rows}")
    return ", ".join(notes if rule.export else [*notes, "a copy"])
