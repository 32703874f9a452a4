"""The pages of the documentation as what can be run of them: fenced blocks, and what each is for.

A reader copies what a block says, so a block is one of these:

    ```bash                   commands, run one page after another's in a directory of the page's own
    ```python                 a script; blocks that no commands part are one script
    ```yaml title="run.yaml"  a file of that name in the directory (python, json and text, too)
    ```yaml                   a part of a config, a strategy or a cluster, read as such
    ```                       anything else: what is printed, drawings

`<!-- not run: WHY -->` before a block keeps it from being run; its options and fields are still checked.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    sorted(str(p.relative_to(ROOT)) for p in (*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "SECURITY.md"))
)

_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]+) -->\n+)?^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page, line: where it stands.
        language: the first word after the fence; "" where there is none.
        title: the file that it is the content of; "" where it is none.
        text: without the fences.
        why_not: why it is not run; "" where it is.
    """

    page: str
    line: int
    language: str
    title: str
    text: str
    why_not: str = ""

    @property
    def place(self) -> str:
        """Where it stands, as editors open it."""
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether following the page runs it."""
        return self.language in ("bash", "python") and not self.title and not self.why_not


def blocks(page: str) -> list[Block]:
    """Return a page's fenced blocks, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return list(_blocks(page, text))


def _blocks(page: str, text: str) -> Iterator[Block]:
    for found in _FENCE.finditer(text):
        language, _, attributes = found["info"].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', attributes)
        line = text.count("\n", 0, found.start("info")) + 1
        indent = found["indent"]
        body = "".join(part.removeprefix(indent) for part in found["text"].splitlines(keepends=True))
        yield Block(page, line, language, title[1] if title else "", body, found["why"] or "")


def commands(block: Block) -> list[str]:
    """Return the command lines of a block of shell commands: comments left out, continued lines joined."""
    lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
    return [stripped for line in lines if (stripped := re.sub(r"(^|\s)#.*", "", line).strip())]


def follow(page: str, directory: Path, python: str = sys.executable, timeout_s: float = 900) -> str:
    """Do what a page says, from its first block to its last, and return what that printed.

    Args:
        page: of `PAGES`.
        directory: where: new files land there.
        python: the interpreter; the commands in its folder, such as `hydragraph`, are found first.
        timeout_s: for each block.

    Raises:
        AssertionError: a block failed; what it printed is shown.
    """
    environment = {**os.environ, "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}
    if python != sys.executable:
        environment.pop("PYTHONPATH", None)  # another environment has its own hydragraph
    printed = ""
    for number, (kind, text, place) in enumerate(_steps(blocks(page))):
        if kind == "file":
            path = directory / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            continue
        script = directory / f"block_{number}.{'py' if kind == 'python' else 'sh'}"
        script.write_text(text, encoding="utf-8")
        command = [python, str(script)] if kind == "python" else ["bash", "-euo", "pipefail", str(script)]
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        printed += done.stdout
        assert done.returncode == 0, f"{place} ended with {done.returncode}:\n{done.stdout[-4000:]}"
    return printed


def _steps(page: list[Block]) -> Iterator[tuple[str, str, str]]:
    """Yield ("file", text, name) and ("bash" or "python", text, place); adjacent scripts are one."""
    script: list[Block] = []

    def whole() -> Iterator[tuple[str, str, str]]:
        if script:
            yield "python", "\n".join(part.text for part in script), script[0].place
            script.clear()

    for block in page:
        if block.title:
            yield "file", block.text, block.title
        elif block.runs and block.language == "python":
            script.append(block)
        elif block.runs:
            yield from whole()
            yield "bash", block.text, block.place
    yield from whole()
