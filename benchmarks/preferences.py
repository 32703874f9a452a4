"""DPO by hydragraph beside TRL's DPOTrainer: python benchmarks/preferences.py [--rounds 3] [--json FILE]

The same model, pairs of answers, mini-batches and optimizer on both sides, one process each, which take turns. TRL pads
the answers of a mini-batch to the longest one; hydragraph packs them, and computes their scores in a pass of its own.
Both know the reference's scores before the first step. It ends with an error if the losses differ.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

from rich.console import Console
from rich.table import Table

STEPS, PAIRS = 8, 16
BETA, RATE = 0.1, 1e-4
WORDS = 1000
AGREE = 1e-4  # of a loss; sums in another order
Result = dict[str, Any]


def main() -> None:
    """Train on both sides in turn, and print seconds per step, memory and the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the same as data")
    chosen = parser.parse_args()
    if find_spec("trl") is None:
        print("skipped: TRL is not installed (pip install trl)")
        return
    sides = {"hydragraph": by_hydragraph, "TRL": by_trl}
    results: dict[str, list[Result]] = {name: [] for name in sides}
    for _ in range(chosen.rounds):
        for name, side in sides.items():
            with ProcessPoolExecutor(1, get_context("spawn")) as process:  # its peak memory is its own
                results[name].append(process.submit(side).result())
    table = Table(title=f"DPO, {PAIRS} pairs per step, answers of 5 to 400 tokens, one process")
    for column in ("", "ms per step", "memory beyond the model's, MB", "first loss", "last loss"):
        table.add_column(column, justify="right")
    seconds = {name: statistics.median(s for each in found for s in each["seconds"]) for name, found in results.items()}
    memory = {name: statistics.median(each["bytes"] for each in found) for name, found in results.items()}
    for name, found in results.items():
        losses = found[0]["losses"]
        numbers = (f"{seconds[name] * 1e3:.0f}", f"{memory[name] / 1e6:.0f}", f"{losses[0]:.5f}", f"{losses[-1]:.5f}")
        table.add_row(name, *numbers)
    Console(width=120).print(table)
    apart = max(
        abs(ours - theirs)
        for ours, theirs in zip(results["hydragraph"][0]["losses"], results["TRL"][0]["losses"], strict=True)
    )
    faster, smaller = (of["TRL"] / of["hydragraph"] for of in (seconds, memory))
    print(f"TRL's time is {faster:.2f} of hydragraph's, its memory {smaller:.2f}; losses differ by at most {apart:.1e}")
    if chosen.json:
        ratios = {"seconds": faster, "memory": smaller, "losses_apart": apart}
        chosen.json.write_text(json.dumps({**ratios, "seconds_of": seconds, "bytes_of": memory}))
    if not apart <= AGREE:
        sys.exit("WRONG: the losses differ")


def drawn() -> list[tuple[str, str, str]]:
    """Return pairs as texts (prompt, chosen, rejected), most short and some long."""
    draw = random.Random(0)

    def words(median: int, most: int) -> str:
        count = min(max(round(median * math.exp(draw.gauss(0, 1))), 5), most)
        return " ".join(f"w{draw.randrange(WORDS)}" for _ in range(count))

    return [(words(20, 100), words(50, 400), words(50, 400)) for _ in range(STEPS * PAIRS)]


def tokenizer() -> Any:
    """Return a tokenizer with one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    named = {f"w{i}": i for i in range(WORDS)} | {"<eos>": WORDS, "<pad>": WORDS + 1}
    words = Tokenizer(models.WordLevel(named, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")


def model() -> Any:
    """Return a small model, the same on both sides."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=WORDS + 2, max_position_embeddings=1024))


def by_hydragraph() -> Result:
    """Train with hydragraph."""
    import torch

    import hydragraph as hg
    from hydragraph.train.objective_config import DpoConfig
    from hydragraph.train.paired_steps import PairedSteps
    from hydragraph.train.preference_objective import WEIGHTS, weighted_logprobs

    words = tokenizer()

    def sequence(prompt: str, answer: str) -> dict[str, Any]:
        before = torch.tensor(words(prompt)["input_ids"])
        after = torch.tensor([*words(answer)["input_ids"], words.eos_token_id])
        return {"input_ids": torch.cat([before, after]), "labels": torch.cat([torch.full_like(before, -100), after])}

    sequences = [sequence(prompt, answer) for prompt, *answers in drawn() for answer in answers]
    exe: Any = hg.compile(
        model(),
        "<tp1,pp1>",
        lambda named: torch.optim.AdamW(named, lr=RATE, weight_decay=0.0),
        loss=weighted_logprobs,
        example={WEIGHTS: torch.ones(1, 8)},
        max_grad_norm=1.0,
        device="cpu",
    )
    batches = [sequences[i : i + 2 * PAIRS] for i in range(0, len(sequences), 2 * PAIRS)]
    for batch in batches:
        for one, score in zip(batch, exe.score(batch), strict=True):
            one["reference"] = score
    steps = PairedSteps(exe, DpoConfig(BETA))
    before = resident()
    losses, seconds = [], []
    for batch in batches:
        began = time.perf_counter()
        losses.append(steps.step(batch, None).loss)
        seconds.append(time.perf_counter() - began)
    exe.close()
    return {"losses": losses, "seconds": seconds[1:], "bytes": peak() - before}


def by_trl() -> Result:
    """Train with TRL's DPOTrainer."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from datasets import Dataset, disable_progress_bars
    from torch.utils.data import SequentialSampler
    from transformers import PrinterCallback, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    disable_progress_bars()

    class InOrder(DPOTrainer):
        """Takes the pairs in their order."""

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset or self.train_dataset)

    class Timed(TrainerCallback):
        """Measures the steps."""

        def __init__(self) -> None:
            self.began = 0.0
            self.seconds: list[float] = []
            self.before = 0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.before = self.before or resident()
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.began)

    rows: Sequence[dict[str, str]] = [{"prompt": p, "chosen": f" {c}", "rejected": f" {r}"} for p, c, r in drawn()]
    with tempfile.TemporaryDirectory() as output:
        settings = DPOConfig(
            output_dir=output,
            per_device_train_batch_size=PAIRS,
            max_steps=STEPS,
            beta=BETA,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            weight_decay=0.0,
            precompute_ref_log_probs=True,
            gradient_checkpointing=False,
            max_length=1024,
            logging_steps=1,
            logging_strategy="steps",
            report_to="none",
            save_strategy="no",
            bf16=False,
            use_cpu=True,
            disable_tqdm=True,
        )
        timed = Timed()
        trainer = InOrder(
            model=model(),
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
            callbacks=[timed],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "seconds": timed.seconds[1:], "bytes": peak() - timed.before}


def resident() -> int:
    """Return this process's resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """Return the peak of this process's resident memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
