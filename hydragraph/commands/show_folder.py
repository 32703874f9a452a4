"""Reader of the folders that `hydragraph compile` writes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from textwrap import wrap

from hydragraph.commands.compile_ahead import StrategyRecord
from hydragraph.commands.compile_files import SUMMARY, Summary
from hydragraph.cost.compiled_blocks import CompiledBlocks
from hydragraph.frontend.compiled_folder.load import CompiledFolder, read_graphs
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.program import Program
from hydragraph.ir.shared_programs import SharedPrograms
from hydragraph.ir.shared_programs_text import runs_text
from hydragraph.passes.pipeline import shared_programs
from hydragraph.passes.variants import Variants
from hydragraph.report.number_text import aligned, bytes_text, counts_text
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy

WIDTH = 100  # printed columns
ROWS = 24


@dataclass(frozen=True)
class ShownStrategy:
    """Strategy of a compiled folder; files are read on demand."""

    record: StrategyRecord
    whole: ShownFolder

    @property
    def name(self) -> str:
        return self.record.strategy

    @property
    def folder(self) -> Path:
        return self.whole.path / "strategies" / self.record.folder

    @cached_property
    def strategy(self) -> Strategy:
        try:
            return Strategy.load(self.folder / "strategy.yaml")
        except FileNotFoundError:
            raise ValueError(
                f"{self.folder}: strategy.yaml is missing: write the folder again with hydragraph compile"
            ) from None

    @cached_property
    def programs(self) -> SharedPrograms:
        ranks = self.whole.summary.ranks
        return shared_programs(self.whole.program.outline, self.strategy, self.record.micro_batches, ranks=ranks)


@dataclass(frozen=True)
class ShownFolder:
    """Compiled folder: summary, graphs (read on demand), and strategies that compiled."""

    path: Path
    summary: Summary

    @classmethod
    def open(cls, path: Path) -> ShownFolder:
        """Open a folder; raise a ValueError unless `hydragraph compile` wrote it."""
        if not (path / SUMMARY).is_file():
            raise ValueError(f"{path} contains no {SUMMARY}: pass a folder that hydragraph compile --output wrote")
        return cls(path, Summary.load(path))

    @cached_property
    def strategies(self) -> tuple[ShownStrategy, ...]:
        return tuple(ShownStrategy(record, self) for record in self.summary.strategies if not record.problem)

    @cached_property
    def _graphs(self) -> CompiledFolder:
        return read_graphs(self.path)

    @property
    def program(self) -> Program:
        return self._graphs.program

    @cached_property
    def variants(self) -> Variants:
        inductor = self.summary.backend == "inductor"
        return Variants(self.program, fused_head=inductor, added=not inductor, library=self._graphs)

    @cached_property
    def blocks(self) -> CompiledBlocks:
        return CompiledBlocks(self.program, self.variants.get)

    @cached_property
    def homes(self) -> HomeLayouts:
        return HomeLayouts(Home.parse(self.summary.home), self.summary.ranks)

    def chosen(self, texts: Sequence[str]) -> tuple[ShownStrategy, ...]:
        """Return the strategies that `texts` name by text, fingerprint, folder or number; by default, all.

        Raises:
            ValueError: the folder has no such strategy.
        """
        return tuple(self.strategy(text) for text in texts) if texts else self.strategies

    def strategy(self, text: str) -> ShownStrategy:
        for number, shown in enumerate(self.strategies, start=1):
            # A name is text and fingerprint, joined by "@".
            name, _, fingerprint = shown.name.rpartition("@")
            if text in (shown.name, name, fingerprint, shown.record.folder, str(number)) or self._same(shown, text):
                return shown
        names = [shown.name.rpartition("@")[0] for shown in self.strategies]
        raise ValueError(unknown("strategy", text, names, f"{self.path} has"))

    def _same(self, each: ShownStrategy, text: str) -> bool:
        try:
            return Strategy.parse(text, self.summary.layers) == each.strategy
        except ValueError:
            return False

    def check_rank(self, rank: int | None) -> None:
        if rank is not None and not 0 <= rank < self.summary.ranks:
            raise ValueError(f"--rank {rank} does not exist: give a rank from 0 to {self.summary.ranks - 1}")


def unknown(what: str, text: str, names: Sequence[str], where: str) -> str:
    near = get_close_matches(text, names, n=3, cutoff=0.5) or [name for name in names if text and text in name][:3]
    if near:
        return f"no {what} {text!r}: did you mean {' or '.join(map(repr, near))}?"
    first = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"no {what} {text!r}: {where} {first}"


def overview(folder: ShownFolder) -> Iterator[str]:
    summary = folder.summary
    yield (
        f"{summary.model}: {summary.layers} layers, {summary.parameters / 1e6:,.4g} M parameters in {summary.dtype}, "
        f"compiled for {summary.ranks} ranks"
    )
    yield f"hydragraph {summary.hydragraph}, PyTorch {summary.torch}, {summary.backend} on {summary.device}"
    yield f"{len(summary.variants)} graphs in graphs/, program.txt, and the ranks' programs in strategies/:"
    for record in summary.strategies:
        if record.problem:
            yield f"     {record.strategy}: does not fit: {record.problem}"
    for number, strategy in enumerate(folder.strategies, start=1):
        record = strategy.record
        count = len(list(strategy.folder.glob("program_*.txt")))
        kinds = "one kind of rank" if count == 1 else f"{count} kinds of rank"
        yield f"  {number}. {record.strategy}"
        yield (
            f"     {counts_text(record.micro_batches)} micro-batches, {record.instructions:,} instructions, {kinds}; "
            f"pulls {bytes_text(record.pull_bytes)}, pushes {bytes_text(record.push_bytes)}"
        )
    yield "For details, pass --rank N, --parameter NAME, --memory, --traffic, --schedule or --diff OTHER."
    yield "--strategy chooses a strategy by number, text or fingerprint."


def shortened(lines: Sequence[str], rows: int = ROWS, more: str = "") -> Iterator[str]:
    yield from lines[:rows]
    if len(lines) > rows:
        yield f"  ... and {len(lines) - rows:,} more{more}"


def wrapped(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        if len(line) <= WIDTH:
            yield line
        else:
            yield from wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def ranks_text(ranks: Sequence[int], most: int = 40) -> str:
    """Return "rank 3", "ranks 0-7,16", or, if long, "ranks 0..511 (256 of them)"."""
    text = runs_text(ranks)
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {text}" if len(text) <= most else f"{word} {ranks[0]}..{ranks[-1]} ({len(ranks)} of them)"


def table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    return [f"  {line}" for line in aligned(rows, left)]
