"""Readers of the planner's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydragraph.cost.corrections import Corrections
from hydragraph.cost.measured_profile import Profile, Scheme
from hydragraph.data.json_object import read_object
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.health import Health
from hydragraph.spec.record import read_text
from hydragraph.spec.strategy_text import parse_strategy
from hydragraph.train.config import PlanConfig

if TYPE_CHECKING:
    from hydragraph.cost.costs import Costs


@dataclass(frozen=True)
class CostFiles:
    profile: Profile | None = None
    corrections: Corrections | None = None
    lengths: list[int] | None = None

    @classmethod
    def read(cls, profile: str | None, corrections: Path | None, lengths: Path | None = None) -> CostFiles:
        return cls(
            None if profile is None else read_profile(profile),
            read_corrections(corrections),
            None if lengths is None else read_lengths(lengths),
        )


def read_profile(text: str) -> Profile:
    """Read a profile; "constants.json#name" is an entry of a constants file."""
    path, _, name = text.partition("#")
    content = read_object(Path(path), "write a profile with hydragraph profile")
    if "profiles" not in content:
        return Profile.load(path)
    entries: dict[str, Any] = {entry["name"]: entry for entry in content["profiles"]}
    if name not in entries:
        raise ValueError(f"--profile {text}: name one of the file's entries, as in {path}#{next(iter(entries), '')}")
    return Profile.from_constants(entries[name])


def read_costs(plan: PlanConfig, ranks: int) -> Profile | Costs | Cluster | None:
    """Read a profile, a cluster's measured costs, or a cluster without costs.

    Raise ValueError if a file is invalid or does not match the run.
    """
    profile = None if plan.profile is None else read_profile(plan.profile)
    if plan.cluster is None:
        return profile
    cluster = Cluster.load(plan.cluster)
    if len(cluster.devices) != ranks:
        raise ValueError(
            f"plan.cluster {plan.cluster}: the file has {len(cluster.devices)} devices, but the run has {ranks} ranks: "
            "list one device per rank, in the order of ranks"
        )
    if profile is None:
        return cluster
    health = None if plan.health is None else Health.load(plan.health)
    # This import loads numba
    from hydragraph.cost.costs import Costs

    try:
        return Costs(profile, cluster, health)
    except ValueError as error:
        raise ValueError(f"plan.cluster {plan.cluster}: {error}") from None


def read_corrections(path: Path | None) -> Corrections | None:
    return None if path is None else Corrections.load(path)


def read_lengths(path: Path) -> list[int]:
    """Read positive lengths from a token file, or a text file with one per line."""
    with path.open("rb") as file:
        binary = b"\0" in file.read(256)
    if binary:
        from hydragraph.data.token_file import TokenFile

        lengths = [int(n) for n in TokenFile.open(path).lengths if n]
    else:
        lengths = _written_lengths(path)
    if not lengths:
        raise ValueError(f"{path} contains only empty sequences: give lengths above 0")
    return lengths


def _written_lengths(path: Path) -> list[int]:
    lines = read_text(path, "write one length per line").split()
    for number, line in enumerate(lines, start=1):
        if not line.isdecimal():
            raise ValueError(f"{path}, entry {number}: {line!r} is not a number of tokens: write one length per line")
    if not lines:
        raise ValueError(f"{path} is empty; write the length of one sequence per line")
    return [int(line) for line in lines if int(line)]


def read_candidates(texts: Sequence[str]) -> list[list[Scheme]]:
    """Read strategies with regular pipelines, such as "2*<tp4,pp1> + <tp2,pp2>"."""
    candidates = []
    for i, text in enumerate(texts):
        if "[" in text:
            raise ValueError(f"--strategy {i}: {text!r} is not supported: write regular pipelines, as in <tp4,pp2>")
        try:
            # Schemes do not depend on the number of layers
            pipelines, _ = parse_strategy(text, layers=1024)
        except ValueError as error:
            raise ValueError(f"--strategy {i}: {error}") from error
        candidates.append([(p.stages[0].tp, len(p.stages)) for p in pipelines])
    return candidates
