"""Metrics of every step, for JSON lines and TensorBoard."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hydragraph.checkpoint.disk_errors import file_errors
from hydragraph.data.atomic_write import write_whole
from hydragraph.train.stragglers.run_events import RunEvent, complete_lines

_SCALARS = (
    *("loss", "grad_norm", "lr", "tokens_per_s", "eval_loss", "exposed_pull_s", "exposed_push_s", "exposed_p2p_s"),
    *("planning_s", "planning_hidden_s", "expected_s", "peak_memory_bytes", "mfu"),
)


@dataclass(frozen=True)
class Metrics:
    """Metrics of one training step.

    Attributes:
        loss: mean over targets (with an objective, over pairs), before the update.
        grad_norm: global norm before clipping.
        tokens: number of targets in the mini-batch.
        tokens_per_s: all tokens per second, including non-targets.
        eval_loss: loss after the update, on held-out documents or else the first set of `data.evaluation`.
        exposed_pull_s, exposed_push_s, exposed_p2p_s: mean seconds that ranks waited for weights, gradients and
            activations.
        planning_s, planning_hidden_s: seconds of planning that delayed the step, and that overlapped with training.
        expected_s: predicted step time; 0 without a profile.
        eval_data: digest of the data and settings that determine `eval_loss`.
        eval_losses: loss on each evaluation set ("heldout" and the sets of `data.evaluation`).
        mfu: model FLOPs utilization; None: unknown.
        pairs: `PairReport.pairs`, if an objective is set.
        time: UTC time of logging; "" in files of earlier versions.
        comparison: text that compares expected and measured step times, once per plan.
        plan: explanation of the plan, on a session's first step with `strategies: auto`.
        smoothed: whether labels are smoothed, so that losses have no perplexity.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float
    seconds: float
    strategy: str
    sequences: int
    micro_batches: tuple[int, ...]
    eval_loss: float | None = None
    padding: int = 0
    exposed_pull_s: float = 0.0
    exposed_push_s: float = 0.0
    exposed_p2p_s: float = 0.0
    planning_s: float = 0.0
    planning_hidden_s: float = 0.0
    expected_s: float = 0.0
    peak_memory_bytes: int = 0
    mfu: float | None = None
    eval_data: str = ""
    eval_losses: Mapping[str, float] = field(default_factory=dict)
    pairs: Mapping[str, float] = field(default_factory=dict)
    eval_pairs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    time: str = ""
    plan: tuple[str, ...] = ()
    smoothed: bool = False
    comparison: str = ""

    @property
    def processed(self) -> int:
        """Number of tokens, including non-targets."""
        return round(self.tokens_per_s * self.seconds)

    @property
    def loss_unit(self) -> str:
        return "per pair" if self.pairs else "nats per token"

    @property
    def evaluated(self) -> str:
        return "held out" if "heldout" in self.eval_losses else next(iter(self.eval_losses), "held out")

    @property
    def perplexities(self) -> dict[str, float]:
        return (
            {} if self.pairs or self.smoothed else {name: perplexity(loss) for name, loss in self.eval_losses.items()}
        )

    @property
    def by_set(self) -> dict[str, float]:
        by_name = {f"eval/{name}": loss for name, loss in self.eval_losses.items()}
        by_name |= {f"perplexity/{name}": value for name, value in self.perplexities.items()}
        by_name |= {f"pairs/{name}": value for name, value in self.pairs.items()}
        for name, figures in self.eval_pairs.items():
            by_name |= {f"eval_{name}/{figure}": value for figure, value in figures.items()}
        return by_name


def perplexity(loss: float) -> float:
    return math.inf if loss >= 700 else math.exp(loss)


def read_metrics(path: Path) -> list[Metrics]:
    return [_parse(line, place) for line, place in complete_lines(path)]


def _await_later_name(events: Path) -> None:
    """Wait until a new file "events.out.tfevents.<second>.<host>.<pid>.<n>" would sort last.

    TensorBoard expects a restarted run's events in the last file.
    """
    begun = [path.name.split(".")[3] for path in events.glob("events.out.tfevents.*")]
    newest = max((int(second) for second in begun if second.isdecimal()), default=0)
    # Do not wait if `newest` is in the future
    while newest == int(time.time()):
        time.sleep(0.05)


class MetricsLog:
    """Context manager that writes the metrics of every step.

    Args:
        after: last step whose metrics are kept.

    Attributes:
        history: metrics of all sessions.
    """

    def __init__(self, path: Path, tensorboard: Path | None, after: int) -> None:
        self.history = [metrics for metrics in read_metrics(path) if metrics.step <= after]
        self.written = False
        write_whole(path, "".join(map(_line, self.history)))
        self._path = path
        self._file = path.open("a", encoding="utf-8")
        self._tensorboard: Any = None
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            _await_later_name(tensorboard)
            self._tensorboard = SummaryWriter(str(tensorboard), purge_step=after + 1)

    def __enter__(self) -> MetricsLog:
        return self

    @property
    def closed(self) -> bool:
        return self._file.closed

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if self._tensorboard is None:
            return
        try:
            # Fails if the run's folder is gone
            self._tensorboard.close()
        except OSError:
            if kind is None:
                # An error that ended the run takes precedence
                raise

    def write(self, metrics: Metrics) -> None:
        """Write a step's metrics; raise OSError if the disk is full or the file was replaced."""
        self.history.append(metrics)
        self.written = True
        # Writing into a deleted file would lose the metrics silently.
        if not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
            raise FileNotFoundError(errno.ENOENT, "the file was replaced during the run", str(self._path))
        with file_errors(self._path.parent, self._path):
            self._file.write(_line(metrics))
            self._file.flush()
        if self._tensorboard is None:
            return
        for name, value in ({name: getattr(metrics, name) for name in _SCALARS} | metrics.by_set).items():
            if value is not None:
                self._tensorboard.add_scalar(name, value, metrics.step)

    def mark(self, event: RunEvent) -> None:
        if self._tensorboard is None:
            return
        self._tensorboard.add_text(f"ranks/{event.title}", event.why, event.step)
        scalars: dict[str, float] = {}
        if event.event == "resumed":
            scalars = {"count": len(event.ranks), "pause_s": event.seconds}
            scalars |= {"lost_steps": event.lost_steps, "moved_bytes": event.moved_bytes}
        if event.event in ("straggler", "recovered"):
            scalars = {f"rate_of_{rank}": event.rates.get(rank, 1.0) for rank in event.ranks}
        for name, value in scalars.items():
            self._tensorboard.add_scalar(f"ranks/{name}", value, event.step)


def strategy_names(metrics: Sequence[Metrics]) -> dict[str, str]:
    texts = list(dict.fromkeys(m.strategy for m in metrics))
    short = [text.partition("@")[0] for text in texts]
    return {text: name if short.count(name) == 1 else text for text, name in zip(texts, short, strict=True)}


def peak_memory(device: torch.device) -> int:
    """Return this process's peak memory, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux reports kilobytes
    return peak if sys.platform == "darwin" else peak * 1024


def tensorboard_installed() -> bool:
    return find_spec("tensorboard") is not None


def _line(metrics: Metrics) -> str:
    record = asdict(metrics)
    for values in (record, record["eval_losses"]):
        # JSON has no NaN
        values.update({name: None for name, value in values.items() if value != value})
    return json.dumps(record) + "\n"


def _parse(line: str, place: str) -> Metrics:
    try:
        record = json.loads(line)
        # Name of `comparison` in earlier versions' files.
        if "beside" in record:
            record["comparison"] = record["beside"]
        values: dict[str, Any] = {field.name: record[field.name] for field in fields(Metrics) if field.name in record}
        losses = values.get("eval_losses", {})
        values["eval_losses"] = {name: math.nan if loss is None else loss for name, loss in losses.items()}
        if losses and values.get("eval_loss") is None:
            values["eval_loss"] = math.nan
        values |= {name: tuple(values.get(name, ())) for name in ("micro_batches", "plan")}
        return Metrics(**values)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{place}: not a line of metrics ({error}): delete the line, or the run folder") from None
