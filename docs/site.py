"""Pages of the documentation site from files outside of docs/; the README is its first page.

The notebook's page shows its cells without outputs; a test executes the notebook.

Links in the sources work on GitHub; this module rewrites them to pages of the site.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "examples/first_steps.ipynb": "notebook.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK = re.compile(r"(!?\[(?:[^\]\[]|\[[^\]]*\])*\])\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of files outside of docs/."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source.endswith(".ipynb"):
            text = cells(text)
        files.append(File.generated(config, page, content=site_links(text, source)))
    return files


def cells(notebook: str) -> str:
    """Return a notebook as Markdown: its texts, and its code in blocks."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page to pages of the site."""
    if page.file.src_uri in PAGES.values():
        return markdown
    return site_links(markdown, f"docs/{page.file.src_uri}")


def site_links(text: str, source: str) -> str:
    """Return a page with links to pages of the site; other targets are named without a link.

    Args:
        text: text of the page, in Markdown.
        source: path of the page in the repository.
    """

    page = PAGES.get(source, source.removeprefix("docs/"))

    def to_site(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path not in PAGES and not path.startswith("docs/"):
            return f"`{path}`"
        on_site = PAGES.get(path, path.removeprefix("docs/"))
        return f"{label}({posixpath.relpath(on_site, posixpath.dirname(page))}{anchor})"

    return _LINK.sub(to_site, text)
