"""FSDP2 on the mini-batches of a hydragraph config: the rival of benchmarks/everything.py, started once per rank.

    RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29501 \\
        python benchmarks/sharded.py config.yaml --output runs/sharded --until 10

It is FSDP2 as a careful engineer uses it on a slow link: weights are gathered once a step and gradients reduced once a
step, however many micro-batches a rank has (no resharding in between, synchronisation only in the last backward).
Sequences are packed, attend only to themselves, and are divided by the given speeds so that ranks finish together;
layers recompute if requested. It writes `metrics.jsonl` as hydragraph does, saves a checkpoint at regular steps and at
SIGTERM, and resumes from the newest one on any number of ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.step import packed_batch
from hydragraph.data.mini_batches import Drawn
from hydragraph.frontend import huggingface
from hydragraph.frontend.packed_inputs import token_cross_entropy
from hydragraph.train.config import TrainConfig
from hydragraph.train.data import mini_batches, open_tokens, prepare
from hydragraph.train.model import build_model
from hydragraph.train.optimizer import learning_rate

ATTENTION = 1 / 2000  # of a token's other work, per token that it attends to


def shares(lengths: Sequence[int], speeds: Sequence[float]) -> list[list[int]]:
    """Give each rank sequences, the longest first and each to the rank that then ends first; return their numbers."""
    work = [n + ATTENTION * n * n for n in lengths]
    given: list[list[int]] = [[] for _ in speeds]
    busy = [0.0] * len(speeds)
    for i in sorted(range(len(lengths)), key=lambda i: -work[i]):
        rank = min(range(len(speeds)), key=lambda r: (busy[r] + work[i]) / speeds[r])
        given[rank].append(i)
        busy[rank] += work[i]
    return given


def micro_batches(mine: Sequence[int], lengths: Sequence[int], most: int) -> list[list[int]]:
    """Pack a rank's sequences into as few micro-batches as first fit finds, none with more tokens than `most`."""
    found: list[list[int]] = []
    for i in mine:
        room = next((each for each in found if sum(lengths[j] for j in each) + lengths[i] <= most), None)
        if room is None:
            found.append([i])
        else:
            room.append(i)
    return found


class Rival:
    """One rank of FSDP2.

    Args:
        config: whose model and data these are.
        recompute: whether layers recompute.
        speeds: of the ranks.
    """

    def __init__(self, config: TrainConfig, recompute: bool, speeds: Sequence[float]) -> None:
        tokens = open_tokens(config, prepare(config))
        self._config, self._speeds = config, speeds
        self._batches = mini_batches(config, tokens)
        self.model = build_model(config.model, tokens.vocabulary, tokens.end_of_text, config.seed)
        huggingface.use_packed_attention(self.model)
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        layers: Any = self.model.model.layers
        for layer in layers:
            if recompute:
                checkpoint(layer)
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.optimizer.lr, weight_decay=0.0)
        self.done = 0

    def step(self) -> tuple[float, int]:
        """Train on the next mini-batch; return the mean loss of its targets, and how many these are."""
        drawn: list[Drawn] = next(self._batches)
        lengths = self._batches.lengths
        ranks, rank = dist.get_world_size(), dist.get_rank()
        mine = shares(lengths, self._speeds)[rank]
        # Where there are few sequences a rank may have none; it takes part in the collectives with one that counts not.
        chosen = micro_batches(mine, lengths, self._config.data.max_length) or [[0]]
        targets = sum(n - 1 for n in lengths)
        assert isinstance(self.model, FSDPModule)
        total = torch.zeros(())
        for number, each in enumerate(chosen):
            last = number == len(chosen) - 1
            self.model.set_requires_gradient_sync(last)
            self.model.set_reshard_after_backward(last)
            self.model.set_is_last_backward(last)
            batch = packed_batch([_ids(drawn[i]) for i in each])
            loss = token_cross_entropy(huggingface.caller(self.model)(self.model, batch), batch) / targets
            loss = loss if mine else 0 * loss
            (loss * ranks).backward()  # which averages over ranks
            total += loss.detach()
        self.done += 1
        rate = learning_rate(self.done, self._config.steps, self._config.optimizer.lr, self._config.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return float(total), targets

    def save(self, folder: Path) -> None:
        """Write a checkpoint, whole or not at all."""
        partial = folder / "partial"
        if not dist.get_rank():
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=partial)
        dist.barrier()
        if not dist.get_rank():
            partial.rename(folder / f"step-{self.done}")
            for old in sorted(_checkpoints(folder))[:-2]:
                shutil.rmtree(folder / f"step-{old}")

    def load(self, folder: Path) -> None:
        """Go on from the newest checkpoint, if there is one."""
        dist.barrier()
        self.done = max(_checkpoints(folder), default=0)
        if self.done:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            state: dict[str, Any] = {"model": model, "optimizer": optimizer}
            dcp.load(state, checkpoint_id=folder / f"step-{self.done}")
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
        for _ in range(self.done):
            self._batches.skip()


def _ids(drawn: Drawn) -> Tensor:
    assert isinstance(drawn, Tensor), "every token is a target"
    return drawn


def _checkpoints(folder: Path) -> Iterator[int]:
    return (int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def train(config: TrainConfig, output: Path, until: int, recompute: bool, speeds: Sequence[float]) -> None:
    """Train until a step, or until SIGTERM to any rank."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    rival = Rival(config, recompute, speeds)
    checkpoints = output / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    rival.load(checkpoints)
    log = output / "metrics.jsonl"
    with contextlib.ExitStack() as stack:
        file = None
        if not dist.get_rank():
            kept = [line for line in log.read_text().splitlines() if line] if log.is_file() else []
            log.write_text("".join(f"{line}\n" for line in kept[: rival.done]))
            file = stack.enter_context(log.open("a"))
        while rival.done < until:
            loss, targets = rival.step()
            if file is not None:
                now = datetime.now(UTC).isoformat(timespec="milliseconds")
                told = {"step": rival.done, "loss": loss, "tokens": targets, "time": now}
                file.write(json.dumps(told) + "\n")
                file.flush()
                print(f"step {rival.done} of {until}: loss {loss:.4f}, {targets} tokens", flush=True)
            stop = torch.tensor(float(bool(asked)))
            dist.all_reduce(stop)
            if stop or rival.done == until or rival.done % config.checkpoint_every == 0:
                rival.save(checkpoints)
            if stop:
                break


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--until", type=int, required=True, help="step")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--speeds", default="", help="of the ranks, such as 2,2,1,1; default: equal")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    speeds = [float(s) for s in given.speeds.split(",") if s] or [1.0] * int(os.environ["WORLD_SIZE"])
    try:
        train(TrainConfig.load(given.config), given.output, given.until, given.recompute, speeds)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
