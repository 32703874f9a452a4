"""`hydragraph show DIR --diff OTHER`: print differences between folders or strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from pathlib import Path

from hydragraph.commands.show_folder import ShownFolder, ShownStrategy, ranks_text, shortened
from hydragraph.ir.rank_program import RankProgram
from hydragraph.report.number_text import bytes_text, counts_text

_SETTINGS = (
    *("model", "dtype", "layers", "parameters", "fingerprint"),
    *("ranks", "backend", "device", "hydragraph", "torch", "home"),
)
# Maximum lines to compare one by one
_LONG = 4000


def folder_diff(one: ShownFolder, other: ShownFolder) -> Iterator[str]:
    graphs = _files(one.path / "graphs", other.path / "graphs", "graphs", "*.py")
    differences = [*_settings(one, other), *graphs, *_strategies(one, other)]
    yield f"{one.path} -> {other.path}"
    yield from shortened(differences or ["  no differences in model, graphs, strategies and programs"], rows=60)


def _settings(one: ShownFolder, other: ShownFolder) -> Iterator[str]:
    titles = {"fingerprint": "program's fingerprint", "torch": "PyTorch"}
    for name in _SETTINGS:
        before = getattr(one.summary, name)
        after = getattr(other.summary, name)
        if before != after:
            yield f"  {titles.get(name, name)}: {before} -> {after}"
    if (one.path / "program.txt").read_bytes() != (other.path / "program.txt").read_bytes():
        yield "  program.txt differs: the captured models differ"


def _files(one: Path, other: Path, kind: str, pattern: str) -> Iterator[str]:
    before, after = ({file.name: file for file in path.glob(pattern)} for path in (one, other))
    for what, names in (("gone", before.keys() - after.keys()), ("new", after.keys() - before.keys())):
        if names:
            yield f"  {kind} {what}: {', '.join(sorted(names)[:6])}" + " ..." * (len(names) > 6)
    for name in sorted(before.keys() & after.keys()):
        change = _lines_changed(before[name].read_text(encoding="utf-8"), after[name].read_text(encoding="utf-8"))
        if change:
            yield f"  {one.name}/{name}: {change}"


def _lines_changed(before: str, after: str) -> str:
    if before == after:
        return ""
    one = before.splitlines()
    two = after.splitlines()
    if max(len(one), len(two)) > _LONG:
        return f"{len(one):,} lines -> {len(two):,}, not compared line by line"
    # Lines outside matching blocks were added or removed.
    kept = sum(block.size for block in SequenceMatcher(None, one, two, autojunk=False).get_matching_blocks())
    return f"{len(two) - kept} lines added, {len(one) - kept} removed"


def _strategies(one: ShownFolder, other: ShownFolder) -> Iterator[str]:
    before, after = ({strategy.name: strategy for strategy in folder.strategies} for folder in (one, other))
    yield from (f"  strategy gone: {name}" for name in before if name not in after)
    yield from (f"  strategy new: {name}" for name in after if name not in before)
    for name in before:
        if name in after:
            programs = _files(before[name].folder, after[name].folder, "programs", "*.txt")
            differences = [*_facts(before[name], after[name]), *programs]
            if differences:
                yield f"  under {name}"
                yield from (f"  {line}" for line in differences)


def strategy_diff(one: ShownStrategy, other: ShownStrategy) -> Iterator[str]:
    yield f"{one.name} -> {other.name}"
    differences = [*_facts(one, other), *_places(one, other)]
    yield from shortened(differences or ["  no differences in placement, micro-batches and programs"], rows=40)


def _facts(one: ShownStrategy, other: ShownStrategy) -> Iterator[str]:
    facts: dict[str, Callable[[ShownStrategy], object]] = {
        "pipelines": lambda each: len(each.strategy.pipelines),
        "schedule": lambda each: each.strategy.schedule,
        "micro-batches": lambda each: counts_text(each.record.micro_batches),
        "ranks that compute": lambda each: len(each.strategy.devices),
        "kinds of stage": lambda each: ", ".join(sorted({stage.kind.text for stage in each.strategy.stages})),
        "instructions of all ranks": lambda each: f"{each.record.instructions:,}",
        "pulled": lambda each: bytes_text(each.record.pull_bytes),
        "pushed": lambda each: bytes_text(each.record.push_bytes),
    }
    for name, fact in facts.items():
        before = fact(one)
        after = fact(other)
        if before != after:
            yield f"  {name}: {before} -> {after}"
    needed = set(one.record.variants)
    other_needed = set(other.record.variants)
    for what, names in (("no longer needed", needed - other_needed), ("needed now", other_needed - needed)):
        if names:
            yield f"  graphs {what}: {', '.join(sorted(names))}"


def _places(one: ShownStrategy, other: ShownStrategy) -> Iterator[str]:
    # groups: text of a change -> its ranks.
    groups: dict[str, list[int]] = {}
    for rank, (one_header, other_header) in enumerate(zip(one.programs.headers, other.programs.headers, strict=False)):
        before = _place(one_header)
        after = _place(other_header)
        if before != after:
            groups.setdefault(f"{before} -> {after}", []).append(rank)
        elif one.programs[rank].instructions != other.programs[rank].instructions:
            groups.setdefault(f"still {before}, but a different program", []).append(rank)
    for change, ranks in groups.items():
        yield f"  {ranks_text(ranks)}: {change}"


def _place(header: RankProgram) -> str:
    if not header.roles:
        return "idle"
    stages = " + ".join(f"stage {role.stage}" for role in header.roles)
    layers = " + ".join(
        f"layer {first}" if last - first == 1 else f"layers {first}-{last - 1}" for first, last in header.layers
    )
    return f"{stages}, {layers}, tp {len(header.tp)}"
