"""Checks that torch's private operators are as expected, or says in one line what differs."""

from itertools import zip_longest
from typing import Any

import torch


def difference(operators: dict[str, str], library: Any = torch.ops.aten) -> str | None:
    """Names the first operator that torch has with another argument, or has not; None if all are as given."""
    for name, arguments in operators.items():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(library, packet, None), overload or "default", None)
        expected_names = arguments.split()
        schema_arguments = operator._schema.arguments if operator else ()
        actual_names = [
            argument.name
            for argument in schema_arguments
            if argument.name in expected_names or not argument.has_default_value()
        ]
        for ours, other in zip_longest(expected_names, actual_names, fillvalue="nothing"):
            if ours != other:
                where = f"{library.name}.{name} of torch {torch.__version__}"
                return f"{where} has {other} where {ours} is given"
    return None


def check(operators: dict[str, str], library: Any = torch.ops.aten) -> None:
    """Raises ImportError that says which private operator is another one in this torch."""
    if changed := difference(operators, library):
        raise ImportError(f"{changed}; torch 2.11 to 2.15 work.")
