"""`hydragraph devices`: measure a run's devices and links."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydragraph.commands.launch_process import leads, on_ranks
from hydragraph.commands.options import CommonOptions, check_written, option, verb

if TYPE_CHECKING:
    from hydragraph.engine.discovery import DiscoveredCluster


@dataclass(frozen=True, kw_only=True)
class DevicesOptions(CommonOptions):
    ranks: int | None = option(
        "Number of local processes to start, one per device; default: one per GPU, or one without GPUs. "
        "Ignored under a launcher such as torchrun.",
        min=1,
    )
    device: str | None = option("cpu or cuda; default: cuda if the machine has a GPU.")
    output: Path | None = option("Write the measurements to this cluster file, for hydragraph plan.")


@verb
def devices_command(options: DevicesOptions) -> None:
    """Measure and print the devices of all ranks, their types, and the links between them.

    Training with `strategies: auto` makes the same measurements. Speeds are those of matrix products: small fp32 ones
    on CPUs, and large 16-bit ones on GPUs. The cluster file has the datasheet's speed for a GPU that nearly reaches it,
    and otherwise the measured speed with `efficiency: 1`.

    Example: hydragraph devices --ranks 4 --output cluster.yaml, then edit the file, and run hydragraph plan --cluster
    cluster.yaml --model run.yaml. On several machines: torchrun ... --no-python hydragraph devices.
    """
    output = options.output
    check_written("--output", output)
    import torch

    discovered = on_ranks(options.ranks or max(1, torch.cuda.device_count()), discover_rank, options.device)
    if not leads():
        return
    _print(discovered)
    if output is not None:
        discovered.cluster.save(output)
        print(f"wrote {output}: edit it, or run hydragraph plan --cluster {output} --model run.yaml")


def discover_rank(device: str | None) -> DiscoveredCluster:
    from contextlib import closing
    from datetime import timedelta

    from hydragraph.cluster.communicators import Groups
    from hydragraph.cluster.launch import join
    from hydragraph.engine.discovery import discover

    with closing(Groups(join(device), timedelta(minutes=10))) as groups:
        return discover(groups)


def _print(found: DiscoveredCluster) -> None:
    from rich.console import Console

    from hydragraph.commands.text_table import new_table

    headings = ("rank", "host", "type", "GFLOP/s", "memory GB", "GB/s of memory", "threads", "details")
    table = new_table("devices", headings, left=("host", "type", "details"))
    for rank, (report, name) in enumerate(zip(found.reports, found.types, strict=True)):
        flops = report.half_flops_per_s or report.flops_per_s
        rates = (flops / 1e9, report.memory_bytes / 1e9, report.memory_bytes_per_s / 1e9)
        threads = str(report.threads) if report.threads else ""
        table.add_row(str(rank), report.host, name, *(f"{rate:.3g}" for rate in rates), threads, report.details)
    Console().print(table)
    links = found.links
    for number, ways in enumerate(zip(links.inner, links.outbound, links.inbound, strict=True)):
        for where, link in zip(("within", "from", "to"), ways, strict=True):
            if link is not None:
                speed = f"{link.bytes_per_s / 1e9:.3g} GB/s, latency {1e6 * link.latency_s:.3g} us"
                cards = f", {links.cards[number]} network cards" if where == "from" else ""
                print(f"{where} node {number}: {speed}{cards}")
