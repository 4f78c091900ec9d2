"""Hooks of mkdocs.yml: pages that are written for GitHub become a site with llms.txt.

`reports/*.md` become pages of Reference. A link to another file of the repository becomes its path as code.
"""

from __future__ import annotations

import os.path
import re
from itertools import groupby
from operator import itemgetter
from pathlib import Path, PurePosixPath
from textwrap import shorten

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
MEASURED = "reference/measured"  # where pages of reports/ stand in the site
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
WIDEST = 200  # characters of a page's line in llms.txt
LIST = re.compile(r"(- |\d+\. )")

_pages: list[Page] = []  # in the order of the navigation


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for report in sorted((ROOT / "reports").glob("*.md")):
        files.append(File.generated(config, f"{MEASURED}/{report.name}", abs_src_path=str(report)))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    _pages[:] = nav.pages


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return for_site(markdown, page.file.src_uri)


def for_site(markdown: str, address: str) -> str:
    """Return the text of a page as Python-Markdown reads what GitHub reads.

    Marks of scripts go, and lists and tables get the empty line that they need before them.
    """
    lines: list[tuple[bool, str]] = []  # whether it is code, and the line
    is_code, before = False, ""
    for line in re.sub(r"<!-- \w+:(begin|end) -->", "", markdown).splitlines():
        is_code ^= line.startswith("```")
        is_list = LIST.match(line) and not LIST.match(before) and not before.startswith(" ")
        is_table = line.startswith("|") and not before.startswith("|")
        if before.strip() and (is_list or is_table) and not is_code:
            lines.append((False, ""))
        lines.append((is_code or line.startswith("    "), line))
        before = line
    blocks = [(code, "\n".join(line for _, line in block)) for code, block in groupby(lines, itemgetter(0))]
    return "\n".join(text if code else _relinked(text, address) for code, text in blocks) + "\n"


def _relinked(text: str, address: str) -> str:
    """Return a text whose links lead to pages of the site, or to none."""
    source = (
        f"docs/{address}" if not address.startswith(MEASURED) else f"reports/{PurePosixPath(address).name}"
    )

    def relinked(match: re.Match[str]) -> str:
        words, target, anchor = match.groups()
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        if path.startswith("docs/"):
            place = path.removeprefix("docs/")
        elif re.fullmatch(r"reports/[\w-]+\.md", path):
            place = f"{MEASURED}/{PurePosixPath(path).name}"
        else:
            return words if "`" in words else f"{words} (`{path}`)"
        return f"[{words}]({os.path.relpath(place, os.path.dirname(address))}{anchor or ''})"

    return LINK.sub(relinked, text)


def on_post_build(config: MkDocsConfig) -> None:
    """Write the texts of the pages beside them, llms.txt with a line for each, and llms-full.txt with all."""
    site = Path(config.site_dir)
    sections: dict[str, list[str]] = {}
    for page in _pages:
        section = page.ancestors[-1].title if page.ancestors else "Home"
        line = f"- [{page.title}]({page.file.src_uri}): {first_sentence(page.markdown)}"
        sections.setdefault(section, []).append(line)
        (site / page.file.src_uri).write_text(page.markdown, encoding="utf-8")
    parts = [f"# {config.site_name}", f"> {config.site_description}"]
    for section, lines in sections.items():
        parts += [f"## {section}", "\n".join(lines)]
    (site / "llms.txt").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    (site / "llms-full.txt").write_text("\n".join(page.markdown for page in _pages), encoding="utf-8")


def first_sentence(markdown: str) -> str:
    """Return the first sentence of a page below its title, without links."""
    paragraphs = re.sub(r"^#.*$", "\n", markdown, flags=re.MULTILINE).split("\n\n")
    prose = (part for part in paragraphs if not re.match(r"\n*([|<>!-]|```| {4}|$)", part))
    text = LINK.sub(r"\1", " ".join(next(prose, "").split()))
    return shorten(text.partition(". ")[0].rstrip(".:") + ".", WIDEST, placeholder=" …")
