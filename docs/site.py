"""What the site takes from outside of docs/: the README is its first page, and these are pages of it, too.

Links are written as GitHub follows them; here they are made to lead to the site's own pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK = re.compile(r"(!?\[(?:[^\]\[]|\[[^\]]*\])*\])\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=site_links(text, source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead the links of a page to where they are on the site."""
    if page.file.src_uri in PAGES.values():
        return markdown
    return site_links(markdown, f"docs/{page.file.src_uri}")


def site_links(text: str, source: str) -> str:
    """Return a page with its links as the site has them; what is no page of it is named, without a link.

    Args:
        text: of the page, in Markdown.
        source: its path in the repository.
    """

    def to_site(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path in PAGES:
            return f"{label}({PAGES[path]}{anchor})"
        if path.startswith("docs/"):
            return f"{label}({path.removeprefix('docs/')}{anchor})"
        return f"`{path}`"

    return _LINK.sub(to_site, text)
