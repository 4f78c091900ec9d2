"""One change of a tiny checkpoint's config.json: is it refused, or are we what Transformers is?

Runs inside the process that `test_configs.py` starts, which goes through all changes of a family.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parity
import torch
from huggingface_hub.errors import StrictDataclassError

from megatron_vlm.config import ParallelConfig

REMOVED = "(removed)"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
# What Transformers raises on configs that it cannot run
ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
ERRORS += (StrictDataclassError,)
MOVED = 1e-3  # logits that a change does not only round
LOUDER = 5.0  # random weights are so small that attention sees everything alike, and no position would matter


@dataclass(frozen=True)
class Cell:
    """A change: `{"text_config.hidden_act": "relu"}`, or REMOVED; tried on `rows`, see `parity.INPUTS`."""

    change: dict[str, Any]
    rows: tuple[str, ...] = ("it", "t")
    same_weights: bool = False  # and the same token ids: those of the unchanged checkpoint
    name: str = ""

    def __post_init__(self) -> None:
        change = ", ".join(f"{key}={json.dumps(value)}" for key, value in self.change.items())
        object.__setattr__(self, "name", self.name or change)


class Swapped:
    """A processor whose output has other token ids, as a changed config.json wants them. What it made for an
    earlier change is in `made`, by what it was asked for."""

    def __init__(self, processor: Any, swaps: dict[int, int], made: dict[bytes, dict]):
        self._processor, self._made = processor, made
        self._swaps = swaps | {new: old for old, new in swaps.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def __call__(self, **kwargs: Any) -> dict:
        asked = pickle.dumps(kwargs)
        if asked not in self._made:
            self._made[asked] = dict(self._processor(**kwargs))
        output = dict(self._made[asked])
        ids = output["input_ids"]
        output["input_ids"] = ids.clone().apply_(lambda token: self._swaps.get(token, token))
        return output


def changed(config: dict, change: dict[str, Any]) -> dict:
    config = json.loads(json.dumps(config))
    for path, value in change.items():
        *sections, key = path.split(".")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
        if value == REMOVED:
            del place[key]
    return config


def verdicts(
    source: str,
    work: str,
    cells: list[Cell],
    layouts: list[ParallelConfig],
    of_keys: Sequence[tuple[list[Cell], bool]] = (),
) -> list[dict]:
    """Of every cell: refused, equal (in all layouts), wrong, crash (ours) or fails (Transformers', of what we
    do not refuse), and why.

    `effect` is how far the change moves Transformers' logits, infinity where shapes differ. `of_keys` has the
    changes of each key, and whether the key may leave logits as they are: they are tried as well, one after
    another, until the key is seen to matter.
    """
    from transformers import AutoProcessor

    from megatron_vlm.parallel import setup

    if not torch.distributed.is_initialized():
        setup.init_distributed(layouts[0], seed=1)
    if torch.distributed.get_rank() == 0:  # Transformers saves on the first rank only
        shutil.copytree(source, work)
    torch.distributed.barrier()
    tried = _Tried(Path(source), Path(work), AutoProcessor.from_pretrained(source), layouts)
    rows = {cell.name: tried.row(cell) for cell in cells}
    for changes, without_a_trace in of_keys:
        for cell in changes:
            if any(shows_a_key(rows[each.name], without_a_trace) for each in changes if each.name in rows):
                break
            rows[cell.name] = rows.get(cell.name) or tried.row(cell)
    return list(rows.values())


def shows_a_key(row: dict, without_a_trace: bool = False) -> bool:
    return row["verdict"] == "equal" and (without_a_trace or row["effect"] > MOVED)


class _Tried:
    def __init__(self, source: Path, work: Path, processor: Any, layouts: list[ParallelConfig]):
        self.source, self.work, self.processor, self.layouts = source, work, processor, layouts
        self.config = json.loads((source / CONFIG).read_text())
        self.made: dict[bytes, dict] = {}
        self.logits: dict[tuple, torch.Tensor] = {}  # (rows, weights) -> those of the unchanged checkpoint

    def row(self, cell: Cell) -> dict:
        return {"name": cell.name, "keys": list(cell.change)} | self.verdict(cell)

    def verdict(self, cell: Cell) -> dict:
        from megatron_vlm.models.families import describe

        kind = (cell.rows, cell.same_weights)
        if kind not in self.logits and cell.change:
            self.verdict(Cell({}, *kind))
        config = changed(self.config, cell.change)
        hf_config = self._load(config)
        if isinstance(hf_config, Exception):
            return {"verdict": "refused", "why": repr(hf_config)}  # by its class, so by us: `hf.as_hf_config`
        try:
            describe(hf_config)
        except ValueError as error:
            return {"verdict": "refused", "why": str(error)}
        try:
            model = self._with_weights(hf_config, cell)
            self._write_config(config)
            case = self._case(cell, model)
        except ERRORS as error:
            return {"verdict": "fails", "why": repr(error)}
        return self._compare(cell, case)

    def _load(self, config: dict) -> Any:
        from transformers import AutoConfig

        self._write_config(config)
        try:
            return AutoConfig.from_pretrained(self.work)
        except ERRORS as error:
            return error

    def _write_config(self, config: dict) -> None:
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            (self.work / CONFIG).write_text(json.dumps(config))
        torch.distributed.barrier()

    def _with_weights(self, hf_config: Any, cell: Cell) -> torch.nn.Module | None:
        """Transformers' model whose weights are now in the folder; None: those of the unchanged one are."""
        from tiny.checkpoints import random_model

        if cell.same_weights:
            if torch.distributed.get_rank() == 0:
                shutil.copy(self.source / WEIGHTS, self.work / WEIGHTS)
            return None
        model = random_model(hf_config, 0, torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith(("_proj", "proj.weight", "qkv.weight", "gate.weight")):
                    weight.mul_(LOUDER)
        model.save_pretrained(self.work)
        return model.eval()

    def _case(self, cell: Cell, model: torch.nn.Module | None) -> dict:
        """`parity.case_for` with token ids as the changed config wants them."""
        swaps = {
            self.config[key]: value
            for key, value in cell.change.items()
            if key in self.config and key.endswith(("_token_id", "_token_index")) and not cell.same_weights
        }
        reference = parity.Reference(self.work, Swapped(self.processor, swaps, self.made), model)
        return reference.case(list(cell.rows))

    def _compare(self, cell: Cell, case: dict) -> dict:
        from megatron_vlm.parallel import setup

        logits = case["logits"]
        base = self.logits.setdefault((cell.rows, cell.same_weights), logits)
        same = logits.shape == base.shape
        result = {"effect": (logits - base).abs().max().item() if same else float("inf")}
        for layout in self.layouts:
            setup.reset_layout(layout, seed=1)
            try:
                found = parity.compare(layout, str(self.work), case)
            except ERRORS as error:
                return result | {"verdict": "crash", "why": repr(error)}
            result |= {"verdict": "equal" if found["passed"] else "wrong", "why": str(found)}
            if not found["passed"]:
                return result
        return result
