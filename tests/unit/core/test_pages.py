"""Pages link to files that are there, and name files of the package that are there; so does the Makefile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_vlm.job.errors import BUG_CODE, SIGNALS, USERS_CODE
from megatron_vlm.job.stops import STOPPED_CODE
from megatron_vlm.job.watchdog import HANG_CODE
from site_hooks import first_sentence, for_site

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


def test_the_site_reads_pages_as_github_does():
    page = """# A title
Text with [a report](../../reports/demo.md#x), [a
file](../../Makefile) and [a page](../start/lora.md):
- an item
  that goes on
- another
<!-- a:begin -->
| a |
|---|
<!-- a:end -->
```
text
- no item, [no link](../../Makefile)
```
"""
    text = for_site(page, "how-to/page.md")
    links = "[a report](../reference/measured/demo.md#x), a\nfile (`Makefile`) and [a page](../start/lora.md)"
    assert text.startswith(
        f"# A title\nText with {links}:\n\n- an item\n  that goes on\n- another\n\n| a |\n"
    )
    assert text.endswith("```\ntext\n- no item, [no link](../../Makefile)\n```\n")
    assert first_sentence(text) == "Text with a report, a file (`Makefile`) and a page."


def test_the_navigation_of_the_site_has_every_page():
    """`make docs` refuses a page that mkdocs.yml does not list."""
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    reports = [f"reference/measured/{page.name}" for page in (ROOT / "reports").glob("*.md")]
    assert sorted(listed) == sorted([*pages, *reports])


def test_the_page_of_exit_codes_has_them_all():
    text = (ROOT / "docs/reference/exit-codes.md").read_text("utf-8")
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert codes == {0, BUG_CODE, USERS_CODE, HANG_CODE, STOPPED_CODE, *SIGNALS}
