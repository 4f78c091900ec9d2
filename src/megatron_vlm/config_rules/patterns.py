"""Regular expressions that users and files of strangers give: checked, and run with a limit of time."""

import re
import time
from collections.abc import Iterable

from megatron_vlm.config import ConfigError

SECONDS = 2.0  # of a processor, for one pattern and all names of a model; a usual one takes milliseconds


def problem(pattern: str) -> str | None:
    """Why it is no regular expression that can be used; None if it is one."""
    import regex

    try:
        re.compile(pattern)  # as peft does; what it takes, the other takes, too
        regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        return str(error)
    return None


def matching(pattern: str, texts: Iterable[str], how: str = "fullmatch") -> dict[str, re.Match]:
    """The texts that the pattern fits by this function of `re`, with what it found.

    Raises ConfigError if that takes too long: Python's `re` cannot be stopped, `regex` can.
    """
    import regex

    test = getattr(regex, how)
    ends = time.process_time() + SECONDS
    matches = {}
    for text in texts:
        try:
            if match := test(pattern, text, timeout=max(ends - time.process_time(), 1e-3)):
                matches[text] = match
        except TimeoutError as error:
            raise ConfigError(
                f"the pattern {pattern} was not done with {text} after {SECONDS:g} s; "
                "write it without repeats inside of repeats, or give a list of names."
            ) from error
    return matches
