"""Pages link to files that are there, and name files of the package that are there; so does the Makefile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "reports").glob("*.md")]
FOLDERS = [ROOT / name for name in ("src", "tests", "tools", "tiny", "examples")]
FILES = [str(path) for folder in FOLDERS for path in folder.rglob("*.py")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    named = re.findall(r"`([a-z_0-9/]+\.py)`", text)
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in FILES)] == []


def test_tests_that_the_makefile_names_are_there():
    """`make test-oldest` would not begin without them, and would run nothing of a file of long tests."""
    named = re.findall(r"\b(tests/\S*test_\w+\.py)(?:::(\w+))?", (ROOT / "Makefile").read_text("utf-8"))
    assert len(named) > 5
    for path, test in named:
        text = (ROOT / path).read_text("utf-8")
        assert f"\ndef {test or 'test_'}" in text and "\npytestmark" not in text, (path, test)
