"""Texts of shared programs: one text per kind, with letters in place of numbers that differ, and a table of ranks
(`_LEGEND`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hydragraph.ir.rank_program import RankProgram, to_text
from hydragraph.ir.shared_programs import SharedPrograms
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


def program_texts(programs: SharedPrograms) -> dict[str, str]:
    texts = {TABLE: _table(programs)}
    for kind, body in enumerate(programs.bodies):
        ranks = programs.of_kind(kind)
        header = replace(programs.headers[ranks[0]], instructions=body)
        count = f"{len(ranks)} ranks run" if len(ranks) > 1 else "1 rank runs"
        comment = f"# Kind {kind}, which {count}: {runs_text(ranks)}. See {TABLE}."
        texts[f"program_{kind}.txt"] = f"{comment}\n{_pattern(header)}"
    return texts


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


def _letters(number: int) -> str:
    # As in spreadsheets: 0 is A, 25 Z, 26 AA.
    letters = ""
    number += 1
    while number:
        number, place = divmod(number - 1, 26)
        letters = chr(ord("A") + place) + letters
    return letters
