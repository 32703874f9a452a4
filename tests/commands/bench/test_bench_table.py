"""Reports as CSV, JSON, Markdown and pictures."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hydragraph.commands.bench.bench_picture import write_picture
from hydragraph.commands.bench.bench_table import BenchReport, PictureBar, Target, shown, to_csv, to_markdown, to_table

REPORT = BenchReport(
    title="Kernels on a|b",
    columns=("kernel", "ms", "peak MB"),
    rows=(("copy", 1.23456, math.nan), ("a|b", 12345.6, 3.0)),
    notes=("A sentence.",),
    blocks=("1 2\n3 4",),
    targets=(Target.at_least("speed", 0.9, 0.95, "{:.2f}x"), Target.at_most("memory", 0.25, None, "{:.2f}x")),
    bars=(PictureBar("copy", "ours", 1.0), PictureBar("copy", "theirs", 2.0), PictureBar("add", "ours", 3.0)),
    unit="GB/s",
)

PAGE = """\
# Benchmarks

- one fact

## Targets, on one H200

| target | wanted | found | verdict |
|---|---|---|---|
| speed | >= 0.90x | 0.95x | met |
| memory | <= 0.25x | - | not measured |

## Kernels on a|b

| kernel | ms | peak MB |
|---|---|---|
| copy | 1.235 | - |
| a\\|b | 12,346 | 3 |

```
1 2
3 4
```

- A sentence.
"""


def test_the_page() -> None:
    assert to_markdown([REPORT], "Benchmarks", ["one fact"]) == PAGE


def test_csv_has_all_digits() -> None:
    assert to_csv(REPORT) == "kernel,ms,peak MB\ncopy,1.23456,nan\na|b,12345.6,3.0\n"


def test_json_is_read_back(tmp_path: Path) -> None:
    REPORT.save(tmp_path / "report.json")
    assert to_markdown([BenchReport.load(tmp_path / "report.json")], "Benchmarks", ["one fact"]) == PAGE
    assert BenchReport.load(tmp_path / "report.json").bars == REPORT.bars
    (tmp_path / "other.json").write_text('{"title": 1}')
    with pytest.raises(ValueError, match=r"other.json is not a benchmark report .*--json"):
        BenchReport.load(tmp_path / "other.json")


@pytest.mark.parametrize(("found", "least", "most"), [(1.0, "met", "met"), (1.1, "met", "MISSED"), (None, "-", "-")])
def test_verdicts(found: float | None, least: str, most: str) -> None:
    words = {"-": "not measured"}
    assert Target.at_least("x", 1.0, found).verdict == words.get(least, least)
    assert Target.at_most("x", 1.0, found).verdict == words.get(most, most)
    assert Target.at_least("x", 1.0, 0.9).verdict == "MISSED"


def test_cells() -> None:
    assert [shown(x) for x in ("a", 0.123456, 999.96, 1234.5, math.nan)] == ["a", "0.1235", "1000", "1,234", "-"]
    assert to_table(REPORT).row_count == 2


def test_a_picture(tmp_path: Path) -> None:
    write_picture(REPORT, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.partial"))
