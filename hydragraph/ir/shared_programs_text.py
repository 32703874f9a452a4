"""Texts of shared programs, and their parser: one text per kind of program, and a table of ranks.

    program_0.txt   rank R of 8  strategy <tp2,pp2> + ...@7c1e00  pipeline P, stage 0: layers 0-1, tp 2 (ranks T), ...
                    p2p      send h2.0 -> rank A
    ranks.txt       rank  kind  P  T    peers
                    0     0     0  0-1  2

A rank's row gives its values of R, P, T, A, B, ... in its kind's text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

from hydragraph.ir.rank_program import RankProgram, Role, parse, to_text
from hydragraph.ir.shared_programs import Peers, SharedPrograms
from hydragraph.spec.home_text import consecutive

TABLE = "ranks.txt"
_LEGEND = """\
# {ranks} ranks run {kinds} kinds of program. Each kind has one text, with letters in place of the numbers that differ
# between its ranks; each row below gives one rank's numbers:
#   kind    the text is program_KIND.txt
#   P       the rank's pipeline: one number for each "pipeline P" in the text
#   T       all ranks of its stage, in tensor-parallel order
#   peers   the ranks that the text calls A, B, ...
# `hydragraph show DIR --rank R` prints a rank's full program."""
_COLUMNS = ("rank", "kind", "P", "T", "peers")
_NOBODY = "-"
_PEER = re.compile(r"(-> rank |<- rank |>)(\d+)\b")
_LETTERS = re.compile(r"(-> rank |<- rank |>)([A-Z]+)\b")
_RUN = re.compile(r"(\d+)(?:-(\d+))?")


def file_of(kind: int) -> str:
    return f"program_{kind}.txt"


def program_texts(programs: SharedPrograms) -> dict[str, str]:
    texts = {TABLE: _table(programs)}
    for kind, body in enumerate(programs.bodies):
        ranks = programs.of_kind(kind)
        header = replace(programs.headers[ranks[0]], instructions=body)
        count = f"{len(ranks)} ranks run" if len(ranks) > 1 else "1 rank runs"
        texts[file_of(kind)] = f"# Kind {kind}, which {count}: {runs_text(ranks)}. See {TABLE}.\n{_pattern(header)}"
    return texts


def read_programs(texts: Mapping[str, str]) -> SharedPrograms:
    """Parse the output of `program_texts`; a ValueError names the file and line."""
    rows = list(_rows(_text(texts, TABLE)))
    patterns = [_read_pattern(texts, kind) for kind in range(1 + max((kind for _, kind, *_ in rows), default=-1))]
    rank_parts = []
    for number, (line, kind, pipelines, tp, peers) in enumerate(rows):
        rank_parts.append((_header(patterns[kind], number, line, pipelines, tp), patterns[kind].instructions, peers))
    try:
        return SharedPrograms.gather(rank_parts)
    except ValueError as error:
        raise ValueError(f"{TABLE}: {error}") from None


def runs_text(numbers: Sequence[int]) -> str:
    """Return numbers as text with ranges, such as "0-7,12,14-15"."""
    runs = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in consecutive(numbers))
    return ",".join(runs) or _NOBODY


def _table(programs: SharedPrograms) -> str:
    rows = [_COLUMNS]
    for header, kind, peers in zip(programs.headers, programs.kinds, programs.peers, strict=True):
        pipelines = "+".join(str(role.pipeline) for role in header.roles) or _NOBODY
        rows.append((str(header.rank), str(kind), pipelines, runs_text(header.tp), ",".join(map(str, peers)) or "-"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    legend = _LEGEND.format(ranks=len(programs), kinds=len(programs.bodies))
    return "\n".join([legend, *lines]) + "\n"


def _pattern(program: RankProgram) -> str:
    header, _, body = to_text(program).partition("\n")
    head, strategy, place = re.split(r"  strategy (.*)  (?=idle|pipeline )", header, maxsplit=1)
    place = re.sub(r"pipeline \d+", "pipeline P", place)
    place = re.sub(r"\(ranks [\d ]+\)", "(ranks T)", place)
    head = re.sub(r"^rank \d+", "rank R", head)
    lettered = _PEER.sub(lambda match: match[1] + _letters(int(match[2])), body)
    return f"{head}  strategy {strategy}  {place}\n{lettered}"


def _read_pattern(texts: Mapping[str, str], kind: int) -> RankProgram:
    name = file_of(kind)
    text = _text(texts, name)
    degree = re.search(r", tp (\d+) \(ranks T\)", text)
    numbers = " ".join(map(str, range(int(degree[1])))) if degree else ""
    text = re.sub(r"^rank R of ", "rank 0 of ", text, count=1, flags=re.MULTILINE)
    text = _numbered_pipelines(text).replace("(ranks T)", f"(ranks {numbers})", 1)
    text = _LETTERS.sub(lambda match: match[1] + str(_number(match[2])), text)
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _numbered_pipelines(text: str) -> str:
    shared = count()
    one = re.search(r"layers [\d-]+ \+ ", text.partition("\n(")[0]) is not None
    return re.sub(r"pipeline P, stage", lambda _: f"pipeline {0 if one else next(shared)}, stage", text)


def _header(pattern: RankProgram, rank: int, line: int, pipelines: tuple[int, ...], tp: tuple[int, ...]) -> RankProgram:
    if len(pipelines) != len(pattern.roles) or len(tp) != len(pattern.tp):
        raise ValueError(
            f"{TABLE}, line {line}: expected {len(pattern.roles)} pipelines in column P and {len(pattern.tp)} ranks in "
            f"column T, as in the kind's text, found {len(pipelines)} pipelines and {len(tp)} ranks"
        )
    roles = tuple(
        Role(pipeline, role.stage, role.micro_batches) for pipeline, role in zip(pipelines, pattern.roles, strict=True)
    )
    return replace(pattern, rank=rank, roles=roles, tp=tp, instructions=())


_Row = tuple[int, int, tuple[int, ...], tuple[int, ...], Peers]


def _rows(text: str) -> Iterator[_Row]:
    expected = 0
    for line, raw in enumerate(text.splitlines(), start=1):
        cells = raw.partition("#")[0].split()
        if not cells or tuple(cells) == _COLUMNS:
            continue
        if len(cells) != len(_COLUMNS) or cells[0] != str(expected) or not cells[1].isdecimal():
            raise ValueError(
                f"{TABLE}, line {line}: expected rank {expected}, its kind, P, T and peers, found {raw.strip()!r}"
            )
        try:
            pipelines = tuple(n for part in cells[2].split("+") for n in _numbers(part))
            yield line, int(cells[1]), pipelines, _numbers(cells[3]), _numbers(cells[4])
        except ValueError as error:
            raise ValueError(f"{TABLE}, line {line}: {error}") from None
        expected += 1


def _numbers(text: str) -> tuple[int, ...]:
    if text == _NOBODY:
        return ()
    numbers: list[int] = []
    for part in text.split(","):
        match = _RUN.fullmatch(part)
        if match is None:
            raise ValueError(f"expected numbers such as 0-7,12, or - for none, found {text!r}")
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(numbers)


def _letters(number: int) -> str:
    letters = ""
    number += 1
    while number:
        number, place = divmod(number - 1, 26)
        letters = chr(ord("A") + place) + letters
    return letters


def _number(letters: str) -> int:
    number = 0
    for letter in letters:
        number = 26 * number + ord(letter) - ord("A") + 1
    return number - 1


def _text(texts: Mapping[str, str], name: str) -> str:
    if name not in texts:
        raise ValueError(f"{name} is missing")
    return texts[name]
