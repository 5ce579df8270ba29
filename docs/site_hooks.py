"""README, CONTRIBUTING and the benchmarks' README as pages of the site, without copies of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "benchmarks.md": "benchmarks/README.md",
}
"""Page -> the document at the root that it is."""


def on_files(files: Any, config: Any) -> Any:
    """mkdocs asks for the pages: ``files`` of the folder, by ``config``, get those of the root."""
    from mkdocs.structure.files import File

    for page, document in PAGES.items():
        path = ROOT / document
        text = linked(path.read_text(), path.parent)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """mkdocs asks for the text of ``page``: ``markdown`` with ``linked`` links; by ``config`` and
    ``files`` nothing differs."""
    return linked(markdown, ROOT / "docs")


def linked(text: str, folder: Path) -> str:
    """``text``, a document of ``folder``, with links that hold on the site: to pages, and for files
    that are no pages their path alone."""

    def link(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        path, _, anchor = target.partition("#")
        if not path or "://" in target:
            return match[0]
        found = (folder / path).resolve().relative_to(ROOT).as_posix()
        for page, document in PAGES.items():
            if found == document:
                return f"[{words}]({page}{'#' + anchor if anchor else ''})"
        if found.startswith("docs/"):
            return f"[{words}]({target.replace(path, found.removeprefix('docs/'))})"
        return f"{words} (`{found}`)" if f"{words}" != found else f"`{found}`"

    return re.sub(r"\[([^\]]+)\]\(([^)]+)\)", link, text)
