"""The ways in which families write boxes. A new one is a file here and a name in `config.BoxFormat`."""

from importlib import import_module
from typing import get_args

from megatron_vlm.config import BoxFormat
from megatron_vlm.data.grounding.convention import Convention

CONVENTIONS: dict[str, Convention] = {
    name: import_module(f"{__name__}.{name}").CONVENTION for name in get_args(BoxFormat)
}
