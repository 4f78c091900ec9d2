"""Inputs of a user: what is being read when an error comes, and values of another type than expected."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_vlm.messages import shorten


def reading(source: str) -> Callable[[Callable], Callable]:
    """Decorate a function that reads an input: an error from inside is then about that, and no bug.

    `source` is an argument of the function or an attribute of one (`self.path`), or else words that name it.
    The innermost of such functions knows best. `job.errors.explain` reads the mark.
    """
    name, _, attributes = source.partition(".")

    def decorated(function: Callable) -> Callable:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def reads(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if getattr(error, "reading", None) is None:
                    value = signature.bind(*args, **kwargs).arguments.get(name, source)
                    error.reading = attrgetter(attributes)(value) if attributes else value
                raise

        return reads

    return decorated


def check_number(name: str, value: Any, holds: Callable[[Any], bool], expected: str) -> None:
    """Raise ValueError, which says what is `expected`, unless `value` is a number that passes `holds`."""
    try:
        is_right = holds(value)
    except TypeError:  # a text, None
        is_right = False
    if not is_right:
        raise ValueError(f"{name} is {value!r}; give {expected}.")


def odd_fields(
    content: Mapping[str, Any], types: Mapping[str, Any], positive: Iterable[str] = ()
) -> Iterator[str]:
    """Yield a message for each field that is there and not of its type, such as `dict[str, int | None]`.

    One of the `positive` fields may neither be nor, as a list, hold a number of zero or less.
    """
    for name in positive:
        value = content.get(name)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not number > 0:
                yield f"{name} is {shorten(repr(value))}, expected more than 0"
                break
    for name in filter(content.__contains__, types):
        hint = types[name]
        try:
            TypeAdapter(hint).validate_python(content[name], strict=True)
        except ValidationError:
            expected = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            yield f"{name} is {shorten(repr(content[name]))}, expected {expected}"
