"""Pages in HTML: one look, nothing fetched from elsewhere, and every text that comes from files escaped."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

STYLE = """\
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
.totals { display: flex; flex-wrap: wrap; gap: 2rem; }
.totals b { display: block; }
td, th { padding: .2rem .8rem; border: 1px solid #8885; text-align: left; overflow-wrap: anywhere; }
"""


def render(
    template: str,
    filters: Mapping[str, Callable] = MappingProxyType({}),
    parts: Mapping[str, str] = MappingProxyType({}),
    **values: Any,
) -> str:
    """The page that a jinja template makes of the values; `style` is the look that all pages share. It may
    include the `parts` by their names.

    Each value is escaped where it stands; the template's filter `tojson` makes data for a script of it.
    """
    import jinja2  # only who writes a page needs it

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=jinja2.DictLoader(parts)
    )
    environment.filters |= filters or {}
    return environment.from_string(template).render(style=STYLE, **values)
