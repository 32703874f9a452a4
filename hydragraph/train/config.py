"""A training run as nested frozen dataclasses that YAML mirrors field for field (`examples/demo.yaml` is one)."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from hydragraph.data.documents import FORMATS, OVERLONG, TRAIN_ON, Fields
from hydragraph.spec.home import AUTO, Home
from hydragraph.spec.record import flow_yaml, from_record, load_record, parse_yaml, to_record
from hydragraph.train.atomic_write import write_whole
from hydragraph.train.coming_from import HERE
from hydragraph.train.field_checks import (
    check_choice,
    check_fraction,
    check_number,
    check_text,
    check_texts,
    check_whole,
)
from hydragraph.train.objective_config import ObjectiveConfig
from hydragraph.train.pieces_config import PiecesConfig

DECAYS = ("cosine", "linear", "constant", "wsd")
DTYPES = ("float32", "bfloat16")
BACKENDS = ("inductor", "eager")
CHECKS = ("auto", "full", "off")
# Two fields that say the same in other units: an override of one replaces the other.
_ALTERNATIVES = (
    ("steps", "epochs"),
    ("schedule.warmup", "schedule.warmup_ratio"),
    ("evaluate_every", "evaluate_per_epoch"),
    ("checkpoint_every", "checkpoint_per_epoch"),
)
_NAME_LETTERS = frozenset(string.ascii_letters + string.digits + "-_")


def _strategies(value: object) -> tuple[str, ...]:
    """Return strategies as texts; one that is written out as YAML becomes that YAML on one line."""
    several = [value] if isinstance(value, str | Mapping) else value
    if isinstance(several, Sequence):
        several = [flow_yaml(item) if isinstance(item, Mapping) else item for item in several]
    return check_texts("strategies", several)


@dataclass(frozen=True)
class ModelConfig:
    """The Hugging Face model to train: a new one, or the contents of a local directory.

    Attributes:
        architecture: a class of transformers, such as LlamaForCausalLM.
        config: arguments of its config class; the vocabulary and the end-of-text id default to the tokenizer's. With
            `path`, only the settings to change in the directory's config, such as {attention_dropout: 0.0}.
        path: a local directory that `save_pretrained` wrote, instead of an architecture.
        weights: a directory with safetensors files. Each rank reads only its own part, so that no process holds the
            whole model. The model is `architecture`, or the one that the directory describes.
        dropout: whether to train with the dropout of the model's config.
        trust_remote_code: whether to run Python code in the model's directory; it has all of your permissions.
    """

    architecture: str | None = None
    config: Mapping[str, Any] | None = None
    path: str | None = None
    weights: str | None = None
    dropout: bool = True
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dropout, bool):
            raise ValueError(f"dropout is {self.dropout!r}: give true or false; rates are in the model's config")
        if not isinstance(self.trust_remote_code, bool):
            raise ValueError(f"trust_remote_code is {self.trust_remote_code!r}: give true or false")
        check_text("architecture", self.architecture, optional=True)
        check_text("path", self.path, optional=True)
        check_text("weights", self.weights, optional=True)
        if (self.path is not None) == (self.architecture is not None or self.weights is not None):
            raise ValueError(
                "give either architecture, to train a new model, or path, to continue from a directory, or weights, "
                "to do so without ever holding it whole"
            )
        if self.config is not None and not isinstance(self.config, Mapping):
            raise ValueError(f"config is {self.config!r}: give a mapping, such as {{hidden_size: 256}}")
        if self.config is not None and self.architecture is None and self.path is None:
            raise ValueError(
                "config cannot change the model in weights: name the directory with path, or give architecture and the "
                "whole config"
            )

    @property
    def directory(self) -> str | None:
        """The local directory that the model starts from."""
        return self.path or self.weights


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters by `peft`: small matrices that are trained while the model's own weights are frozen.

    Attributes:
        r: rank of the matrices.
        alpha: the adapters' output is scaled by alpha / r.
        targets: layers with adapters, by the last part of their names; "all-linear": all except the head; None:
            peft's choice for the architecture.
        rslora: scale by alpha / sqrt(r) instead.
        dropout: probability of dropping each input of an adapter.
        dora: also train the magnitudes of the weights' rows.
        modules_to_save: layers that are trained fully and saved with the adapters.
    """

    r: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] | str | None = None
    rslora: bool = False
    dropout: float = 0.0
    dora: bool = False
    modules_to_save: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_whole("r", self.r, 1)
        check_number("alpha", self.alpha)
        check_fraction("dropout", self.dropout)
        if isinstance(self.targets, str):
            check_text("targets", self.targets)
        elif self.targets is not None:
            object.__setattr__(self, "targets", check_texts("targets", self.targets))
        if self.modules_to_save is not None:
            object.__setattr__(self, "modules_to_save", check_texts("modules_to_save", self.modules_to_save))
        for name in ("rslora", "dora"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}: give true or false")


@dataclass(frozen=True)
class AdapterConfig:
    """Adapters that are trained instead of the model's weights.

    Attributes:
        lora: low-rank adapters.
    """

    lora: LoraConfig = LoraConfig()


@dataclass(frozen=True)
class SourceConfig:
    """A corpus: its files and the format of its records.

    Attributes:
        paths: files and directories of text, .jsonl, CSV, Parquet or Arrow, and directories that `datasets` saved.
            Text, .jsonl and CSV may be compressed (.gz, .zst). "python-stdlib" is this Python's standard library.
        suffixes: suffixes of the files to read from a directory; None: all files.
        format: contents of .jsonl objects and of rows of tables: "text", "chat" (messages), "completion" (a prompt and
            its completion), "alpaca" (instruction, input, output, system, history), "tokens" (input_ids, and labels
            that may be -100) or "preference" (a prompt, a chosen and a rejected answer; for `objective`); "auto"
            decides by the first record of each file.
        text_field: the field of a .jsonl object, or the column of a table, with the text.
        messages_field: the field with a conversation, a list of {role, content}.
        tools_field: the field with the tools of a conversation.
        prompt_field: the field with a prompt; the loss leaves its tokens out.
        completion_field: the field with the completion of the prompt.
        chosen_field: the field with the preferred answer to the prompt.
        rejected_field: the field with the other answer.
        max_samples: read at most this number of documents; None: all.
    """

    paths: tuple[str, ...] = ()
    suffixes: tuple[str, ...] | None = None
    format: str = "auto"
    text_field: str = "text"
    messages_field: str = "messages"
    tools_field: str = "tools"
    prompt_field: str = "prompt"
    completion_field: str = "completion"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    max_samples: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", check_texts("paths", self.paths))
        if self.suffixes is not None:
            object.__setattr__(self, "suffixes", check_texts("suffixes", self.suffixes))
        if self.max_samples is not None:
            check_whole("max_samples", self.max_samples, 1)
        check_choice("format", self.format, FORMATS)
        for name in (own.name for own in fields(SourceConfig) if own.name.endswith("_field")):
            check_text(name, getattr(self, name))

    @property
    def fields(self) -> Fields:
        """The names of a record's fields."""
        return Fields(
            self.format,
            self.text_field,
            self.messages_field,
            self.tools_field,
            self.prompt_field,
            self.completion_field,
            self.chosen_field,
            self.rejected_field,
        )


@dataclass(frozen=True)
class MixedConfig(SourceConfig):
    """A corpus of a mixture.

    Attributes:
        weight: relative share of its tokens in training.
    """

    weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("weight", self.weight)
        if not self.weight:
            raise ValueError("weight is 0: leave the corpus out, or give it a weight above 0")


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """The training data, and how it becomes mini-batches.

    Attributes:
        mixture: several corpora, each with a weight, instead of `paths` and its related fields.
        evaluation: corpora to evaluate on, by name. If given, no training documents are held out by default.
        tokenizer: a tokenizer.json or a directory with one; None: the tokenizer of `model.path` or `model.weights`, or
            else a new byte-level BPE.
        vocab_size: number of tokens of a new tokenizer.
        chat_template: the file of a Jinja template for conversations, the template itself, or "chatml"; None: the
            tokenizer's own.
        template_arguments: arguments of the template, such as {enable_thinking: false}; a record's own
            `chat_template_kwargs` take precedence.
        train_on: the tokens of a conversation in the loss: "assistant" (all messages of the assistant), "last" (only
            its last message) or "all". With a prompt and a completion, the loss covers the completion.
        tokens_per_step: most tokens of a mini-batch.
        max_length: tokens of the longest sequence.
        overlong: "cut" longer documents into sequences, "drop" them, or "refuse" to train. Of answers to compare, "cut"
            keeps the first `max_length` tokens, prompt included, and "drop" leaves out the pair.
        heldout: fraction of the documents held out for evaluation; None: 0.01, or 0 if `evaluation` is given.
        cache: directory for tokenizers and token files, which are found again by a key of the corpus; None: the run
            folder.
    """

    mixture: tuple[MixedConfig, ...] = ()
    evaluation: Mapping[str, SourceConfig] = field(default_factory=dict)
    tokenizer: str | None = None
    vocab_size: int = 8192
    chat_template: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    train_on: str = "assistant"
    tokens_per_step: int = 4096
    max_length: int = 512
    overlong: str = "cut"
    heldout: float | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        if self.mixture:
            if self.paths:
                raise ValueError("give paths, or a mixture of several corpora, each with paths of its own")
            if self.max_samples is not None:
                raise ValueError("max_samples beside a mixture: give it to the corpora of the mixture")
            object.__setattr__(self, "paths", ())
        else:
            super().__post_init__()
        for name, value in self.evaluation.items():
            if not name or not set(name) <= _NAME_LETTERS:
                raise ValueError(f"evaluation: the name {name!r}: use letters, digits, - and _")
            if not isinstance(value, SourceConfig):
                raise ValueError(f"evaluation.{name} is {value!r}: give it paths")
        for name in ("tokenizer", "cache", "chat_template"):
            check_text(name, getattr(self, name), optional=True)
        if not isinstance(self.template_arguments, Mapping):
            raise ValueError(f"template_arguments is {self.template_arguments!r}: give a mapping")
        check_choice("train_on", self.train_on, TRAIN_ON)
        check_choice("overlong", self.overlong, OVERLONG)
        for name, least in (("vocab_size", 1), ("tokens_per_step", 2), ("max_length", 2)):
            check_whole(name, getattr(self, name), least)
        if self.heldout is not None:
            check_fraction("heldout", self.heldout)

    @property
    def held_out(self) -> float:
        """The fraction of the documents kept for evaluation."""
        if self.heldout is None:
            return 0.0 if self.evaluation else 0.01
        return self.heldout

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The corpora to train on."""
        return self.mixture or (self,)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each corpus."""
        return tuple(source.weight for source in self.mixture) or (1.0,)


@dataclass(frozen=True)
class OptimizerConfig:
    """An elementwise class of torch.optim and its settings; None leaves a setting at the class's own default.

    Attributes:
        name: name of the class, such as AdamW or SGD.
        lr: the peak learning rate.
        weight_decay: for matrices only: biases and norm weights, which have one dimension, do not decay.
        betas, eps, momentum: arguments of the class.
    """

    name: str = "AdamW"
    lr: float = 3e-4
    weight_decay: float = 0.0
    betas: tuple[float, ...] | None = None
    eps: float | None = None
    momentum: float | None = None

    def __post_init__(self) -> None:
        check_text("name", self.name)
        check_number("lr", self.lr)
        check_number("weight_decay", self.weight_decay)
        if self.betas is not None:
            if isinstance(self.betas, str) or not isinstance(self.betas, Sequence):
                raise ValueError(f"betas is {self.betas!r}: give a list of numbers, such as [0.9, 0.95]")
            object.__setattr__(self, "betas", tuple(self.betas))
            if len(self.betas) != 2:
                raise ValueError(f"betas is {list(self.betas)}: give two numbers, such as [0.9, 0.95]")
            for beta in self.betas:
                check_fraction("betas", beta)
        for name in ("eps", "momentum"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the steps.

    Attributes:
        warmup: number of steps in which it rises linearly to its peak.
        decay: its decrease after the warm-up: "cosine", "linear", "constant" (none), or "wsd" (warm-up, stable,
            decay), which stays at the peak and falls linearly at the end.
        min_lr_ratio: its last value as a fraction of the peak.
        warmup_ratio: length of the warm-up as a fraction of all steps, instead of `warmup`.
        decay_ratio: length of the decay of "wsd" as a fraction of all steps; None: 0.1.
    """

    warmup: int = 0
    decay: str = "cosine"
    min_lr_ratio: float = 0.1
    warmup_ratio: float | None = None
    decay_ratio: float | None = None

    def __post_init__(self) -> None:
        check_whole("warmup", self.warmup, 0)
        if self.warmup_ratio is not None:
            check_fraction("warmup_ratio", self.warmup_ratio)
            if self.warmup:
                raise ValueError(f"warmup is {self.warmup}, warmup_ratio is {self.warmup_ratio}: give one of them")
        check_choice("decay", self.decay, DECAYS)
        if self.decay_ratio is not None:
            check_fraction("decay_ratio", self.decay_ratio, one=True)
            if self.decay != "wsd":
                raise ValueError(f"decay_ratio is {self.decay_ratio}, decay is {self.decay!r}: set decay to wsd")
        check_fraction("min_lr_ratio", self.min_lr_ratio, one=True)

    def warmup_of(self, steps: int) -> int:
        """Return the steps of the warm-up in a run of `steps`."""
        return self.warmup if self.warmup_ratio is None else math.ceil(self.warmup_ratio * steps)

    def stable_until(self, steps: int) -> int:
        """Return the last step at the peak in a run of `steps`; from there on the rate falls."""
        warmed = max(self.warmup_of(steps), 1)
        if self.decay != "wsd":
            return warmed
        ratio = 0.1 if self.decay_ratio is None else self.decay_ratio
        return max(steps - math.ceil(ratio * steps), warmed)


@dataclass(frozen=True)
class CheckpointConfig:
    """How checkpoints are written.

    Attributes:
        asynchronous: copy the state to CPU memory and write it during training, instead of waiting for the disk.
        pieces: further places, near the ranks, for a quick recovery from losses; null: only the run folder.
        every: steps between checkpoints in pieces.
    """

    asynchronous: bool = False
    pieces: PiecesConfig | None = None
    every: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.asynchronous, bool):
            raise ValueError(f"asynchronous is {self.asynchronous!r}: give true or false")
        check_whole("every", self.every, 1)
        if self.every != 1 and self.pieces is None:
            raise ValueError(
                f"every is {self.every}, and counts the steps between checkpoints in pieces: also give pieces, or set "
                "checkpoint_every for those in the run folder"
            )


@dataclass(frozen=True)
class PlanConfig:
    """The choice of a strategy for each step.

    Attributes:
        choose: run each step under the strategy that is expected to finish it first, instead of taking turns.
        profile: a file that `hydragraph profile` wrote; None: strategies are compared by rough costs.
        cluster: the cluster file of devices of several types, all of which the profile must contain
            (`hg.Profile.merge`); None: all devices are like the measured one.
        health: the file of slowdowns; it needs a cluster. None: all devices are healthy.
        ahead: number of mini-batches that are planned in advance; 0: each is planned when its step begins.
        workers: number of planning processes.
        gain: keep a single strategy if choosing would save less than this fraction of its time.
        sample: number of mini-batches that decide this, and for which "auto" proposes strategies.
        patience_s: seconds that a step waits for its plan before it uses a quick one.
    """

    choose: bool = False
    profile: str | None = None
    cluster: str | None = None
    health: str | None = None
    ahead: int = 3
    workers: int = 1
    gain: float = 0.02
    sample: int = 8
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        if not isinstance(self.choose, bool):
            raise ValueError(f"choose is {self.choose!r}: give true or false")
        for name in ("profile", "cluster", "health"):
            check_text(name, getattr(self, name), optional=True)
        for name, needed in (("cluster", "profile"), ("health", "cluster")):
            if getattr(self, name) is not None and getattr(self, needed) is None:
                raise ValueError(f"{name} is {getattr(self, name)!r} without a {needed}: also give the {needed}")
        if self.cluster is not None and not self.choose:
            raise ValueError(f"cluster is {self.cluster!r}: set choose: true, which assigns sequences by it")
        check_whole("ahead", self.ahead, 0)
        check_whole("workers", self.workers, 1)
        check_whole("sample", self.sample, 1)
        check_number("gain", self.gain)
        check_number("patience_s", self.patience_s)


@dataclass(frozen=True)
class ElasticConfig:
    """How a run reacts to ranks that are lost, join, or are slower than others.

    With any of `copies: 2`, `spares` or `min_ranks`, the run survives lost ranks: the other processes continue.

    Attributes:
        copies: 2: every part of the state has a second owner, so that a lost rank costs only the current step; 1: all
            ranks then return to the newest checkpoint.
        spares: number of processes that wait to replace a lost rank.
        min_ranks: with fewer ranks the run saves and ends; null: 1 if another key makes the run survive losses.
        rejoin: start a process to replace a lost one; it joins between two steps.
        monitor: measure every rank, and write to `events.jsonl` which are slow, by how much and since when.
        replan: plan again in the background when ranks become slow or steps take other times than expected, and switch
            if the new plan pays off; needs `strategies: auto`, or `plan` with `choose` and a profile, and implies
            `monitor`. null: true where `strategies: auto` measures the devices, else false.
        dry_run: report decisions without switching.
        enter, leave: a rank counts as slow from `enter` times the time of its peers, until it is below `leave` times.
    """

    copies: int = 1
    spares: int = 0
    min_ranks: int | None = None
    rejoin: bool = True
    monitor: bool = False
    replan: bool | None = None
    dry_run: bool = False
    enter: float = 1.3
    leave: float = 1.1

    def __post_init__(self) -> None:
        if self.copies not in (1, 2) or isinstance(self.copies, bool):
            raise ValueError(f"copies is {self.copies!r}: use 1, or 2 for a second owner of everything")
        check_whole("spares", self.spares, 0)
        if self.min_ranks is not None:
            check_whole("min_ranks", self.min_ranks, 1)
        for name in ("rejoin", "monitor", "replan", "dry_run"):
            if not isinstance(getattr(self, name), bool) and not (name == "replan" and self.replan is None):
                raise ValueError(f"{name} is {getattr(self, name)!r}: give true or false")
        for name in ("enter", "leave"):
            check_number(name, getattr(self, name), 1.0)
        if not 1 < self.leave < self.enter:
            raise ValueError(f"enter is {self.enter}, leave is {self.leave}: give 1 < leave < enter")

    @property
    def survives(self) -> bool:
        """Whether the run continues when ranks are lost."""
        return self.copies > 1 or self.spares > 0 or self.min_ranks is not None


@dataclass(frozen=True)
class TrainConfig:
    """A whole run.

    Attributes:
        model, data, optimizer, schedule, checkpoint, plan, elastic: see their classes.
        adapter: train adapters only, and write them as `peft` does; None: train all weights.
        callbacks: objects or classes, as "module:name", with any of on_step(metrics), on_evaluate(metrics) and
            on_checkpoint(step, path), called on rank 0. "wandb" logs to Weights & Biases.
        objective: train on pairs of a preferred and a rejected answer (`data.format: preference`): {dpo: {beta: 0.1}},
            {simpo: {...}} or {orpo: {...}}, or their names alone; None: predict the next token.
        strategies: texts such as "<tp2,pp1> + <tp1,pp2>", paths of YAML files, or the YAML itself. Steps take turns
            among them, or use the best for each step (`plan.choose`). "auto" measures the devices, or reads the
            measurements in `plan.profile`, and plans for them and the data.
        home: the owners of the weights and the optimizer's state: "auto" (the ranks that exchange least for the
            strategies), "stages" (those that compute a block), "equal" (equal shares), a text such as
            "3,3,1,0 copies=2", or {shares: [3, 3, 1, 0], copies: 2}.
        steps: number of mini-batches to train on; 0: given by `epochs`.
        epochs: number of passes over the data, instead of `steps`; 0: given by `steps`.
        ranks: number of local processes to start, unless a launcher such as torchrun has started them.
        max_grad_norm: gradients with a larger global norm are scaled down to this norm; None: never.
        label_smoothing: share of every target that all tokens of the vocabulary get, from 0 to below 1, as in
            `torch.nn.functional.cross_entropy` and the Trainer's `label_smoothing_factor`; evaluations use it too.
        dtype: dtype of the computation; weights and optimizer state are always float32.
        backend: "inductor" compiles the graphs, "eager" runs them operator by operator; None: Inductor on CUDA, eager
            elsewhere.
        device: "cpu" or "cuda"; None: a GPU where there is one.
        check: "auto" compares the captured graphs with the model on short sequences before the first step, each kind of
            block once; "full" compares every block; "off" (which YAML reads as false) compares none.
        compiled: a folder that `hydragraph compile` wrote for this config; the run starts from it without tracing.
        trust: also load Inductor's code from that folder, which runs with all of your permissions.
        seed: seed of a new model's weights, of the order of the data and of dropout.
        evaluate_every: steps between evaluations on the held-out documents and on `data.evaluation`; the last step
            also evaluates. 0: never.
        evaluate_per_epoch: number of evaluations in each pass over the data, evenly spaced, the last one at its end;
            instead of `evaluate_every`.
        evaluate_batches: number of mini-batches of `data.tokens_per_step` that an evaluation reads of each corpus.
        checkpoint_every: steps between checkpoints; the last step also writes one. 0: only the last step.
        checkpoint_per_epoch: number of checkpoints in each pass over the data; instead of `checkpoint_every`.
        keep: number of checkpoints to keep, the newest ones.
        keep_best: save after each evaluation with the lowest loss so far, keep that checkpoint too, and write the
            run's `model` from it. The loss is that on the held-out documents, or else on the first corpus of
            `data.evaluation`.
        patience: end the run after this number of evaluations in a row without a lower loss; None: train to the end.
        min_improvement: an evaluation loss counts as lower for `patience` if it is lower by more than this.
        grace_s: seconds that a run has to finish its step and save when it is asked to stop (SIGTERM, Ctrl-C).
        progress_s: if ranks wait for this number of seconds while none makes progress, all fail with a report.
        deterministic: compute the same bits for any ranks, pipelines and homes, even if ranks are lost; slower.
        push_dtype: dtype of gradients on the way to their owners, which add them in fp32: float32 or bfloat16.
        output: the run folder.
    """

    model: ModelConfig
    data: DataConfig
    strategies: tuple[str, ...]
    steps: int = 0
    epochs: float | None = None
    ranks: int = 1
    home: Home = AUTO
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    plan: PlanConfig = PlanConfig()
    adapter: AdapterConfig | None = None
    objective: ObjectiveConfig | None = None
    callbacks: tuple[str, ...] = ()
    elastic: ElasticConfig = ElasticConfig()
    max_grad_norm: float | None = 1.0
    label_smoothing: float = 0.0
    dtype: str = "float32"
    backend: str | None = None
    device: str | None = None
    check: str = "auto"
    compiled: str | None = None
    trust: bool = False
    seed: int = 0
    evaluate_every: int = 0
    evaluate_per_epoch: int = 0
    evaluate_batches: int = 4
    checkpoint_every: int = 0
    checkpoint_per_epoch: int = 0
    keep: int = 2
    keep_best: bool = False
    patience: int | None = None
    min_improvement: float = 0.0
    grace_s: float = 30.0
    progress_s: float = 600.0
    deterministic: bool = False
    push_dtype: str = "float32"
    output: str = "runs/train"

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategies", _strategies(self.strategies))
        if isinstance(self.epochs, int | float) and self.epochs == 0 and self.epochs is not False:
            object.__setattr__(self, "epochs", None)  # 0 says, as for steps, that the other one counts
        if self.epochs is None:
            if self.steps == 0 and not isinstance(self.steps, bool):
                raise ValueError("steps is 0: give a whole number of at least 1, or epochs")
            check_whole("steps", self.steps, 1)
        else:
            check_number("epochs", self.epochs)
            if self.steps:
                raise ValueError(
                    f"epochs is {self.epochs!r}, steps is {self.steps!r}: give one of them and 0 for the other"
                )
        for name in ("ranks", "evaluate_batches", "keep"):
            check_whole(name, getattr(self, name), 1)
        for name in ("seed", "evaluate_every", "evaluate_per_epoch", "checkpoint_every", "checkpoint_per_epoch"):
            check_whole(name, getattr(self, name), 0)
        for what in ("evaluate", "checkpoint"):
            every, per_epoch = getattr(self, f"{what}_every"), getattr(self, f"{what}_per_epoch")
            if every and per_epoch:
                raise ValueError(f"{what}_every is {every}, {what}_per_epoch is {per_epoch}: give one of them")
        _check_best(self)
        if self.seed >= 2**63:
            raise ValueError(f"seed is {self.seed}: give one below 2 to the power of 63")
        if self.max_grad_norm is not None:
            check_number("max_grad_norm", self.max_grad_norm)
        check_fraction("label_smoothing", self.label_smoothing)
        check_number("grace_s", self.grace_s, 0.1)
        check_number("progress_s", self.progress_s, 1.0)
        check_choice("dtype", self.dtype, DTYPES)
        if self.backend is not None:
            check_choice("backend", self.backend, BACKENDS)
        check_text("device", self.device, optional=True)
        if isinstance(self.check, bool) and not self.check:  # YAML reads `off` as False
            object.__setattr__(self, "check", "off")
        check_choice("check", self.check, CHECKS)
        check_text("compiled", self.compiled, optional=True)
        if not isinstance(self.trust, bool):
            raise ValueError(f"trust is {self.trust!r}: give true or false")
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"deterministic is {self.deterministic!r}: give true or false")
        if self.deterministic and self.backend == "inductor":
            raise ValueError('deterministic: code by Inductor depends on the sizes it has seen: set backend to "eager"')
        check_choice("push_dtype", self.push_dtype, DTYPES)
        if self.deterministic and self.push_dtype != "float32":
            raise ValueError(f"push_dtype is {self.push_dtype}: it rounds sums, so leave it out with deterministic")
        check_text("output", self.output)
        if self.elastic.copies > self.home.copies:
            object.__setattr__(self, "home", replace(self.home, copies=self.elastic.copies))
        if self.elastic.min_ranks is not None and self.elastic.min_ranks > self.ranks > 1:
            raise ValueError(f"elastic.min_ranks is {self.elastic.min_ranks}, and ranks {self.ranks}: give fewer")
        if self.callbacks is None or self.callbacks in ((), []):
            object.__setattr__(self, "callbacks", ())
        else:
            object.__setattr__(self, "callbacks", check_texts("callbacks", self.callbacks))
        if self.adapter is not None and self.model.weights is not None:
            raise ValueError(
                "adapter: adapters need the model in memory: name its directory with model.path, not model.weights"
            )
        if self.data.max_length > self.data.tokens_per_step:
            raise ValueError(
                f"data.max_length is {self.data.max_length}, but data.tokens_per_step is only "
                f"{self.data.tokens_per_step}: a whole sequence must fit into a mini-batch"
            )
        if self.objective is not None:
            _check_pairs(self)
            object.__setattr__(self, "data", _of_pairs(self.data))
        if self.automatic and len(self.strategies) > 1:
            raise ValueError("strategies: auto stands alone: leave out the others, or name only strategies")
        if self.automatic and not self.plan.choose:
            object.__setattr__(self, "plan", replace(self.plan, choose=True))
        if self.elastic.replan and not self.automatic and (not self.plan.choose or self.plan.profile is None):
            raise ValueError(
                "elastic.replan needs strategies: auto, or plan: {choose: true, profile: profile.json} (a file that "
                "hydragraph profile writes): plans are priced by what was measured"
            )
        if self.elastic.dry_run and not self.replans:
            raise ValueError("elastic: dry_run has no effect without replan: also set replan, or leave dry_run out")
        if self.evaluates and not self.data.held_out and not self.data.evaluation:
            name = "evaluate_every" if self.evaluate_every else "evaluate_per_epoch"
            raise ValueError(f"{name} needs held-out documents: set data.heldout above 0, or data.evaluation")

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates."""
        return self.evaluate_every > 0 or self.evaluate_per_epoch > 0

    @property
    def automatic(self) -> bool:
        """Whether strategies are proposed for the data."""
        return "auto" in self.strategies

    @property
    def replans(self) -> bool:
        """Whether the run plans again when ranks become slow, or when steps take other times than expected."""
        measures = self.automatic and self.plan.profile is None
        return measures if self.elastic.replan is None else self.elastic.replan

    @property
    def watches(self) -> bool:
        """Whether the run measures how fast every rank is."""
        return self.elastic.monitor or self.replans

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
        """Read a YAML file; each override, such as "optimizer.lr=1e-3", replaces one of its fields.

        The file is checked as it is, and once more with all overrides.

        Raises:
            ValueError: naming the field that is unknown, missing or wrong.
        """
        return _overridden(load_record(cls, path, "the config", HERE), overrides)

    @classmethod
    def parse(cls, text: str, overrides: Sequence[str] = ()) -> TrainConfig:
        """Read YAML text, as `load` does a file.

        Raises:
            ValueError: naming the field that is unknown, missing or wrong.
        """
        return _overridden(from_record(cls, parse_yaml(text), name="the config", hints=HERE), overrides)

    def save(self, path: str | Path) -> None:
        """Write every field, defaults included, as the YAML file that `load` reads back as an equal config."""
        data = _plain(asdict(self))
        text = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120)
        write_whole(Path(path), text)


def _check_pairs(config: TrainConfig) -> None:
    """Check what differs with a loss of pairs of answers."""
    data = config.data
    if config.label_smoothing:
        raise ValueError(
            "label_smoothing is of cross-entropy: with an objective leave it out; DPO has objective.dpo.label_smoothing"
        )
    for source in (data, *data.sources, *data.evaluation.values()):
        if source.format not in ("auto", "preference"):
            raise ValueError(
                f"data.format is {source.format}, and the objective compares two answers: leave format out, and give "
                "records with a prompt, chosen and rejected"
            )
    if 2 * data.max_length > data.tokens_per_step:
        raise ValueError(
            f"data.max_length is {data.max_length}, and data.tokens_per_step {data.tokens_per_step}: both answers of a "
            f"pair must fit into a mini-batch: set tokens_per_step to at least {2 * data.max_length}"
        )


def _of_pairs(data: DataConfig) -> DataConfig:
    """Return a run's data, read as pairs of answers."""
    return replace(
        data,
        format="preference",
        mixture=tuple(replace(source, format="preference") for source in data.mixture),
        evaluation={name: replace(source, format="preference") for name, source in data.evaluation.items()},
    )


def _check_best(config: TrainConfig) -> None:
    """Check the settings about the lowest evaluation loss."""
    if not isinstance(config.keep_best, bool):
        raise ValueError(f"keep_best is {config.keep_best!r}: give true or false")
    if config.patience is not None:
        check_whole("patience", config.patience, 1)
    check_number("min_improvement", config.min_improvement)
    for name, given in (("keep_best", config.keep_best), ("patience", config.patience)):
        if given and not config.evaluates:
            raise ValueError(f"{name} needs evaluations: set evaluate_every or evaluate_per_epoch")
    if config.min_improvement and config.patience is None:
        raise ValueError("min_improvement has no effect without patience: also set patience, or leave it out")


def differences(before: TrainConfig, after: TrainConfig) -> list[str]:
    """Return every field that differs, such as "optimizer.lr 0.001 -> 0.01"."""
    old, new = (dict(_fields("", _plain(asdict(config)))) for config in (before, after))
    names = [*old, *(name for name in new if name not in old)]
    return [f"{n} {_short(old.get(n))} -> {_short(new.get(n))}" for n in names if old.get(n) != new.get(n)]


def _fields(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _fields(f"{prefix}.{name}" if prefix else str(name), item)
    else:
        yield prefix, value


def _short(value: object) -> str:
    return "none" if value is None else json.dumps(value)


def _overridden(config: TrainConfig, texts: Sequence[str]) -> TrainConfig:
    """Return the config with every "section.field=value" applied, values read as in YAML, and then checked as a whole.

    A value for `steps` also removes `epochs`, and the reverse, unless the overrides give both.
    """
    data = to_record(config)
    names = {text.partition("=")[0].strip() for text in texts}
    failures: list[str] = []  # what stands against the config after each override
    for text in texts:
        path, equals, value = text.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ValueError(f"override {text!r}: write section.field=value, such as optimizer.lr=1e-3")
        read = _value(text, value)
        if read and (other := _alternative(".".join(keys))) and other not in names:
            _remove(data, other.split("."))
        if _put(data, keys, read):
            # A field of something that an earlier override wrote short, such as a home: its long form has fields.
            with suppress(ValueError):
                data = to_record(from_record(TrainConfig, data))
            if hurdle := _put(data, keys, read):
                raise ValueError(f"override {text!r}: {hurdle}, which has no fields")
        try:
            config = from_record(TrainConfig, data, name="the config", hints=HERE)
            failures.append("")
        except ValueError as error:
            failures.append(str(error))
    if failures and failures[-1]:
        guilty = texts[failures.index(failures[-1])]  # the first override that fails
        raise ValueError(f"override {guilty!r}: {failures[-1]}")
    return config


def _alternative(name: str) -> str | None:
    """Return the field that an override of this one replaces."""
    pairs = dict([*_ALTERNATIVES, *((second, first) for first, second in _ALTERNATIVES)])
    return pairs.get(name)


def _remove(data: dict[str, Any], keys: Sequence[str]) -> None:
    """Remove the entry data[keys[0]][keys[1]]..., if it exists."""
    at: Any = data
    for key in keys[:-1]:
        at = at.get(key)
        if not isinstance(at, dict):
            return
    at.pop(keys[-1], None)


def _put(data: dict[str, Any], keys: Sequence[str], value: object) -> str:
    """Set data[keys[0]][keys[1]]... to a value; return what is on the way and has no fields, such as "steps is 6"."""
    at = data
    for i, key in enumerate(keys[:-1]):
        inner = at.get(key)
        if not isinstance(inner, Mapping | None):
            return f"{'.'.join(keys[: i + 1])} is {inner!r}"
        at[key] = dict(inner or {})
        at = at[key]
    at[keys[-1]] = value
    return ""


def _value(text: str, value: str) -> object:
    try:
        return json.loads(value)  # JSON first: PyYAML takes 1e-3 for text
    except json.JSONDecodeError:
        pass
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"override {text!r}: the value is not readable as YAML: {error}") from None


def _plain(value: Any) -> Any:
    """Return a value with lists for tuples, as YAML knows it."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
