"""Config of a training run, as nested frozen dataclasses with the fields of the YAML file."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import yaml

from hydragraph.data.atomic_write import write_whole
from hydragraph.data.documents import FORMATS, OVERLONG, TRAIN_ON, FieldNames
from hydragraph.spec.elastic import Elastic
from hydragraph.spec.home import AUTO, Home
from hydragraph.spec.record import checked_record, flow_yaml, from_record, load_yaml, parse_yaml
from hydragraph.train.available_devices import RanksIfEqual, devices_here
from hydragraph.train.coming_from import remedies
from hydragraph.train.config_overrides import overridden, underived
from hydragraph.train.field_checks import (
    CheckedFields,
    Count,
    Fraction,
    Number,
    Part,
    Positive,
    Texts,
    check_choice,
    check_device,
    check_fields,
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
Dtype = Annotated[str, partial(check_choice, choices=DTYPES)]
AtLeastOne = Annotated[float, partial(check_number, least=1.0)]
AtLeastTwo = Annotated[int, partial(check_whole, least=2)]
_UNSET = cast("int", None)
_NAME_LETTERS = frozenset(string.ascii_letters + string.digits + "-_")


def _check_targets(name: str, value: object) -> object:
    return check_text(name, value) if isinstance(value, str) else check_texts(name, value)


def _check_betas(name: str, value: object) -> tuple[float, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name!r} is {value!r}: give a list of numbers, such as [0.9, 0.95]")
    if len(value) != 2:
        raise ValueError(f"{name!r} is {list(value)}: give two numbers, such as [0.9, 0.95]")
    for beta in value:
        check_fraction(name, beta)
    return tuple(value)


def _strategies(value: object) -> tuple[str, ...]:
    # One strategy may be given without a list.
    several = [value] if isinstance(value, (str, Mapping)) else value
    if isinstance(several, Sequence):
        several = [flow_yaml(item) if isinstance(item, Mapping) else item for item in several]
    return check_texts("strategies", several)


@dataclass(frozen=True)
class ModelConfig:
    """The Hugging Face model to train: a new model or one from a local directory.

    Attributes:
        architecture: name of a transformers class, such as LlamaForCausalLM, for a new model.
        config: with `architecture`, arguments of the config class; the vocabulary size and the end-of-text id default
            to the tokenizer's. With `path`, settings to change in the directory's config, such as {attention_dropout:
            0.0}.
        path: a local directory that `save_pretrained` wrote, instead of `architecture`.
        weights: a directory with safetensors files; each rank reads only its own part, so that no process loads the
            whole model. The model's class is `architecture`, or the class in the directory's config.
        dropout: train with the dropout probabilities of the model's config; false: train without them.
        trust_remote_code: run Python code from the model's directory, with all of your permissions.
    """

    architecture: str | None = None
    config: Mapping[str, Any] | None = None
    path: str | None = None
    weights: str | None = None
    dropout: bool = True
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.path is not None) == (self.architecture is not None or self.weights is not None):
            raise ValueError(
                "give 'architecture' to train a new model, 'path' to start from a directory, or 'weights' to start "
                "from a directory without loading the full model into one process"
            )
        if self.config is not None and not isinstance(self.config, Mapping):
            raise ValueError(f"'config' is {self.config!r}: give a mapping, such as {{hidden_size: 256}}")
        if self.config is not None and self.architecture is None and self.path is None:
            raise ValueError(
                "'config' cannot change a model from 'weights': give 'path' instead of 'weights', or also give "
                "'architecture' and a complete 'config'"
            )

    @property
    def directory(self) -> str | None:
        return self.path or self.weights

    @property
    def directory_field(self) -> str:
        return "model.path" if self.path is not None else "model.weights"


@dataclass(frozen=True)
class LoraConfig(CheckedFields):
    """Low-rank adapters from `peft`, trained while the model's own weights are frozen.

    Attributes:
        r: rank of the adapters' matrices.
        alpha: the adapters' output is multiplied by alpha / r.
        targets: layers that get adapters, given by the last part of their names, such as q_proj. "all-linear": all
            linear layers except the head; None: peft's default for the architecture.
        rslora: multiply the output by alpha / sqrt(r) instead.
        dropout: probability of dropping each input of an adapter.
        dora: also train one magnitude per row of each adapted weight.
        modules_to_save: layers that are trained fully and saved with the adapters.
    """

    r: Positive = 16
    alpha: Number = 32.0
    targets: Annotated[tuple[str, ...] | str, _check_targets] | None = None
    rslora: bool = False
    dropout: Fraction = 0.0
    dora: bool = False
    modules_to_save: Texts | None = None


@dataclass(frozen=True)
class AdapterConfig:
    """Adapters that are trained instead of the model's weights.

    Attributes:
        lora: low-rank adapters.
    """

    lora: LoraConfig = LoraConfig()


@dataclass(frozen=True)
class FilesConfig:
    """The files of a corpus.

    Attributes:
        paths: text, .jsonl, CSV, Parquet and Arrow files, directories with such files, and directories that `datasets`
            saved. Text, .jsonl and CSV files may be compressed (.gz, .zst). "python-stdlib" is the source code of
            Python's standard library.
        suffixes: suffixes of the files to read from a directory. None: read all record files (.jsonl, .parquet, ...),
            or all text files if the directory has none. If some record files are training splits, test and
            validation splits are skipped.
    """

    paths: Texts = ()
    suffixes: Texts | None = None


@dataclass(frozen=True)
class SourceConfig(CheckedFields, FieldNames, FilesConfig):
    """A corpus: its files and the format of its records.

    Attributes:
        max_samples: maximum number of documents to read; None: all.
    """

    format: Annotated[str, partial(check_choice, choices=FORMATS)] = "auto"
    max_samples: Positive | None = None


@dataclass(frozen=True)
class MixedConfig(SourceConfig):
    """One corpus of a mixture.

    Attributes:
        weight: relative share of this corpus in the training tokens.
    """

    weight: Number = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.weight:
            raise ValueError("'weight' is 0: remove the corpus, or give a weight above 0")


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """The training data, and how it is split into mini-batches.

    Attributes:
        mixture: list of corpora with weights, instead of `paths`.
        evaluation: corpora to evaluate on, by name.
        tokenizer: a tokenizer.json or its directory; None: the tokenizer of `model.path` or `model.weights`; without
            both, a new byte-level BPE tokenizer.
        vocab_size: vocabulary size of a new tokenizer.
        chat_template: a file with a Jinja template for conversations, the template itself, or "chatml"; None: the
            tokenizer's template.
        template_arguments: arguments of the chat template, such as {enable_thinking: false}; the `chat_template_kwargs`
            of a record take precedence.
        train_on: the messages of a conversation that count in the loss: "assistant" (all assistant messages), "last"
            (only the last assistant message) or "all". In completion data, only the completion counts.
        tokens_per_step: maximum number of tokens in a mini-batch.
        max_length: maximum number of tokens in a sequence.
        overlong: treatment of documents longer than `max_length`: "cut" (into several sequences), "drop", or "refuse"
            (stop with an error). For preference data, "cut" truncates a prompt with its answer to `max_length` tokens,
            and "drop" skips the pair.
        heldout: fraction of the training documents to hold out; None: 0.01 if the run evaluates and `evaluation` is not
            set, else 0.
        cache: directory for tokenizers and token files, which several runs can share; None: the run folder.
    """

    mixture: tuple[MixedConfig, ...] = ()
    evaluation: Mapping[str, SourceConfig] = field(default_factory=dict)
    tokenizer: str | None = None
    vocab_size: Positive = 8192
    chat_template: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    train_on: Annotated[str, partial(check_choice, choices=TRAIN_ON)] = "assistant"
    tokens_per_step: AtLeastTwo = 4096
    max_length: AtLeastTwo = 512
    overlong: Annotated[str, partial(check_choice, choices=OVERLONG)] = "cut"
    heldout: Fraction | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        if self.mixture:
            if self.paths:
                raise ValueError("give 'paths' or 'mixture', not both: each corpus of a mixture has its own 'paths'")
            object.__setattr__(self, "paths", ())
        check_fields(self, *(["paths"] if self.mixture else []))
        for source in fields(SourceConfig) if self.mixture else ():
            name = source.name
            value = getattr(self, name)
            if value != source.default and any(getattr(member, name) != value for member in self.mixture):
                raise ValueError(f"{name} does not apply to a mixture: set {name} in its corpora instead")
        for name, value in self.evaluation.items():
            if name in ("", "heldout") or not set(name) <= _NAME_LETTERS:
                raise ValueError(f"evaluation: name a set by letters, digits, - and _ (not heldout), not {name!r}")
            if not isinstance(value, SourceConfig):
                raise ValueError(f"evaluation.{name} is {value!r}: give a mapping with paths")
        if not isinstance(self.template_arguments, Mapping):
            raise ValueError(f"template_arguments is {self.template_arguments!r}: give a mapping")

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        return self.mixture or (self,)

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(source.weight for source in self.mixture) or (1.0,)


@dataclass(frozen=True)
class OptimizerConfig(CheckedFields):
    """An elementwise optimizer of torch.optim, and its settings (None: the optimizer's default).

    Attributes:
        name: name of the optimizer class, such as AdamW or SGD.
        lr: the peak learning rate.
        weight_decay: weight decay of matrices; biases and norm weights do not decay.
        betas, eps, momentum: arguments of the optimizer class.
    """

    name: str = "AdamW"
    lr: Number = 3e-4
    weight_decay: Number = 0.0
    betas: Annotated[tuple[float, ...], _check_betas] | None = None
    eps: Number | None = None
    momentum: Number | None = None


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate schedule.

    Attributes:
        warmup: number of steps over which the learning rate rises linearly to its peak.
        decay: decay of the learning rate after the warm-up: "cosine", "linear", "constant" (no decay), or "wsd"
            (warm-up, stable, decay), which keeps the peak rate and decays linearly at the end.
        min_lr_ratio: final learning rate, as a fraction of the peak.
        warmup_ratio: length of the warm-up as a fraction of all steps, instead of `warmup`.
        decay_ratio: with "wsd", length of the decay as a fraction of all steps; None: 0.1.
    """

    warmup: Count = 0
    decay: Annotated[str, partial(check_choice, choices=DECAYS)] = "cosine"
    min_lr_ratio: Part = 0.1
    warmup_ratio: Fraction | None = None
    decay_ratio: Part | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.warmup_ratio is not None and self.warmup:
            raise ValueError(f"'warmup' is {self.warmup}, warmup_ratio is {self.warmup_ratio}: give one of them")
        if self.decay_ratio is not None and self.decay != "wsd":
            raise ValueError(f"decay_ratio is {self.decay_ratio}: omit it, or set 'decay' to 'wsd', not {self.decay!r}")

    def warmup_of(self, steps: int) -> int:
        return self.warmup if self.warmup_ratio is None else math.ceil(self.warmup_ratio * steps)

    def stable_until(self, steps: int) -> int:
        """Return the last step at the peak learning rate, in a run of `steps` steps."""
        warmed = max(self.warmup_of(steps), 1)
        if self.decay != "wsd":
            return warmed
        ratio = 0.1 if self.decay_ratio is None else self.decay_ratio
        return max(steps - math.ceil(ratio * steps), warmed)


@dataclass(frozen=True)
class CheckpointConfig:
    """How checkpoints are written.

    Attributes:
        asynchronous: copy the state to CPU memory, and write it to disk while training continues.
        pieces: places near the ranks that also store the state, for a quick recovery after a rank is lost; null: save
            only to the run folder.
        every: number of steps between saves of the pieces.
    """

    asynchronous: bool = False
    pieces: PiecesConfig | None = None
    every: Positive = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if self.every != 1 and self.pieces is None:
            raise ValueError(
                f"'every' is {self.every}, but 'pieces' is not set: set 'pieces', or use checkpoint_every for the run "
                "folder"
            )


@dataclass(frozen=True)
class PlanConfig:
    """How the strategy of each step is chosen.

    Attributes:
        choose: run each step with the strategy that is expected to be fastest, instead of alternating.
        profile: a file that `hydragraph profile` wrote. None: costs come from the datasheets of the devices in
            `cluster`; without `cluster`, they are rough estimates.
        cluster: a cluster file, which lists the devices; a profile must cover all their types (`hg.Profile.merge`).
            None: all devices are of the profile's type.
        health: a file with slowdowns of ranks; needs `cluster` and `profile`. None: all devices are healthy.
        ahead: number of mini-batches planned in advance; 0: plan each mini-batch when its step begins.
        workers: number of planning processes.
        gain: use a single strategy if choosing a strategy for each step would save less than this fraction of the time.
        sample: number of mini-batches for which "auto" proposes strategies, and for which `gain` is estimated.
        patience_s: maximum seconds that a step waits for its plan; then, it uses a plan that is quick to compute.
    """

    choose: bool = False
    profile: str | None = None
    cluster: str | None = None
    health: str | None = None
    ahead: Count = 3
    workers: Positive = 1
    gain: Number = 0.02
    sample: Positive = 8
    patience_s: Number = 60.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.health is not None and None in (self.cluster, self.profile):
            raise ValueError(f"'health' is {self.health!r}, which needs 'cluster' and 'profile': set both")


@dataclass(frozen=True)
class ElasticConfig:
    """How a run reacts when ranks are lost, join or become slow.

    With `copies: 2`, `spares` or `min_ranks`, the run survives lost ranks: the other processes continue. It also
    survives them if `strategies: auto` measures the devices, or a launcher starts fewer processes than `ranks`.

    Attributes:
        copies: number of owners of each part of the state. 2: if a rank is lost, only the current step is repeated; 1:
            all ranks return to the newest checkpoint.
        spares: number of processes that wait to replace a lost rank.
        min_ranks: minimum number of ranks; with fewer, the run saves a checkpoint and ends. 0: a lost rank ends the
            run; null: 1 if another setting makes the run survive lost ranks.
        rejoin: start a new process to replace a lost rank; the process joins between two steps.
        monitor: measure the speed of every rank; `events.jsonl` lists slow ranks, with slowdowns and times.
        replan: plan again in the background when ranks become slow or step times differ from the expected times, and
            switch if the new plan saves time. Needs `strategies: auto` without `plan.cluster`, or `plan` with `choose`
            and a profile; implies `monitor`. null: true if `strategies: auto` measures the devices, else false.
        dry_run: only report when the run would switch plans or move state.
        enter: a rank counts as slow when it takes this many times as long as its peers.
        leave: a slow rank counts as recovered when it takes less than this many times as long as its peers.
    """

    copies: int = 1
    spares: Count = 0
    min_ranks: Count | None = None
    rejoin: bool = True
    monitor: bool = False
    replan: bool | None = None
    dry_run: bool = False
    enter: AtLeastOne = 1.3
    leave: AtLeastOne = 1.1

    def __post_init__(self) -> None:
        if self.copies not in (1, 2) or isinstance(self.copies, bool):
            raise ValueError(f"'copies' is {self.copies!r}: use 1, or 2 to give all state a second owner")
        check_fields(self)
        if not 1 < self.leave < self.enter:
            raise ValueError(f"'enter' is {self.enter}, 'leave' is {self.leave}: give 1 < leave < enter")

    @property
    def survives(self) -> bool:
        if self.min_ranks is not None:
            return self.min_ranks > 0
        return self.copies > 1 or self.spares > 0


@dataclass(frozen=True)
class TrainConfig:
    """The config of a training run.

    Attributes:
        model, data, optimizer, schedule, checkpoint, plan, elastic: see their classes.
        adapter: train only adapters, and save them in the format of `peft`; None: train all weights.
        callbacks: objects or classes, as "module:name". Rank 0 calls these methods, if they are defined:
            on_start(config), on_step(metrics), on_evaluate(metrics), on_checkpoint(step, path) and on_end(). "wandb"
            logs to Weights & Biases.
        objective: loss for pairs of a preferred and a rejected answer (`data.format: preference`): {dpo: {beta: 0.1}},
            {simpo: {...}} or {orpo: {...}}; a name alone selects the defaults. None: next-token prediction.
        strategies: one or more strategies (sets of pipelines), each as text such as "<tp2,pp1> + <tp1,pp2>", as the
            path of a YAML file, or as YAML. Steps alternate between the strategies; with `plan.choose`, each step uses
            the best one. "auto" measures the devices, or reads `plan.profile` or `plan.cluster`, and plans strategies
            for the devices and the data.
        home: how the weights and the optimizer state are divided among ranks: "auto" (chosen for the fastest exchange),
            "stages" (the ranks that compute a block own its state), "equal" (equal shares), a text such as "3,3,1,0
            copies=2", or {shares: [3, 3, 1, 0], copies: 2}.
        steps: number of mini-batches to train on; 0: train for `epochs`.
        epochs: number of passes over the data, instead of `steps`; 0: train for `steps`.
        ranks: number of processes on all machines, unless a launcher such as torchrun starts each of them. None:
            with `strategies: auto`, one per GPU, or one per machine without GPUs; with other strategies, 1.
        max_grad_norm: gradients with a larger global norm are scaled down to this norm; None: no clipping.
        label_smoothing: smoothing of the targets in training and evaluation, from 0 to below 1, as in
            `torch.nn.functional.cross_entropy`.
        dtype: dtype of the computation; weights and optimizer state are always float32.
        backend: "inductor" compiles the graphs, "eager" runs them operator by operator; None: Inductor on CUDA, eager
            elsewhere.
        device: "cpu" or "cuda"; None: a GPU if available.
        check: "auto" compares the captured graph of each kind of block with the model on short sequences before the
            first step; "full" compares every block; "off" skips the comparison.
        compiled: a folder that `hydragraph compile` wrote for this config; the run starts without tracing the model.
        trust: also load Inductor's compiled code from `compiled`; this code runs with all of your permissions.
        seed: random seed for the weights of a new model, the order of the data, and dropout.
        evaluate_every: evaluate on the held-out documents and on `data.evaluation` after every `evaluate_every` steps,
            and after the last step; 0: never.
        evaluate_per_epoch: instead of `evaluate_every`, the number of evaluations in each pass over the data, including
            one at its end.
        evaluate_batches: maximum number of mini-batches, of `data.tokens_per_step` tokens, to evaluate on each corpus.
        checkpoint_every: steps between checkpoints; 0: none. The run also saves after the last step; with `keep_best`,
            at each new lowest loss; and before the first step, if it survives lost ranks or saves pieces.
        checkpoint_per_epoch: instead of `checkpoint_every`, the number of checkpoints in each pass over the data.
        keep: number of newest checkpoints to keep.
        keep_best: also keep the checkpoint with the lowest loss on the held-out documents (if there are none, on the
            first corpus of `data.evaluation`), and export it as the run's `model`.
        patience: stop the run after this number of consecutive evaluations without a lower loss; None: never.
        min_improvement: smallest decrease of the loss that counts as an improvement for `patience`.
        grace_s: after a request to stop (SIGTERM, Ctrl-C), maximum seconds for finishing the current step and saving.
        progress_s: if ranks wait and no rank makes progress for this many seconds, all ranks fail with a report.
        deterministic: compute bit-identical results for any number of ranks, any pipelines and any home, even if ranks
            are lost; this is slower.
        push_dtype: dtype in which gradients are sent to the owners of the state, float32 or bfloat16; owners add them
            in fp32.
        output: the run folder.
    """

    model: ModelConfig
    data: DataConfig
    strategies: tuple[str, ...]
    steps: int = 0
    epochs: float | None = None
    ranks: Positive = _UNSET
    home: Home = AUTO
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    plan: PlanConfig = PlanConfig()
    adapter: AdapterConfig | None = None
    objective: ObjectiveConfig | None = None
    callbacks: tuple[str, ...] = ()
    elastic: ElasticConfig = ElasticConfig()
    max_grad_norm: Number | None = 1.0
    label_smoothing: Fraction = 0.0
    dtype: Dtype = "float32"
    backend: Annotated[str, partial(check_choice, choices=BACKENDS)] | None = None
    device: Annotated[str, check_device] | None = None
    check: Annotated[str, partial(check_choice, choices=CHECKS)] = "auto"
    compiled: str | None = None
    trust: bool = False
    seed: Count = 0
    evaluate_every: Count = 0
    evaluate_per_epoch: Count = 0
    evaluate_batches: Positive = 4
    checkpoint_every: Count = 0
    checkpoint_per_epoch: Count = 0
    keep: Positive = 2
    keep_best: bool = False
    patience: Positive | None = None
    min_improvement: Number = 0.0
    grace_s: Annotated[float, partial(check_number, least=0.1)] = Elastic.grace_s
    progress_s: AtLeastOne = Elastic.progress_s
    deterministic: bool = False
    push_dtype: Dtype = "float32"
    output: str = "runs/train"

    def __post_init__(self) -> None:
        self._set("strategies", _strategies(self.strategies))
        if self.ranks is _UNSET:
            supervised = self.elastic.min_ranks != 0 and (self.measures or self.elastic.survives)
            self._set("ranks", devices_here(self.device, supervised).ranks if self.automatic else 1)
        if isinstance(self.epochs, int | float) and self.epochs == 0 and self.epochs is not False:
            # `epochs: 0` means that `steps` determines the run's length
            self._set("epochs", None)
        # YAML reads `off` as False
        if isinstance(self.check, bool) and not self.check:
            self._set("check", "off")
        check_fields(self)
        self._check_length()
        self._check_evaluations()
        self._check_determinism()
        self._check_data()
        self._check_ranks()
        # YAML may yield None or a list
        callbacks: object = self.callbacks
        self._set("callbacks", () if callbacks in (None, (), []) else check_texts("callbacks", callbacks))
        if self.max_grad_norm == 0:
            raise ValueError("max_grad_norm is 0: use null for no clipping")
        if self.seed >= 2**63:
            raise ValueError(f"'seed' is {self.seed}: give a seed below 2**63")
        if self.adapter is not None and self.model.weights is not None:
            raise ValueError("'adapter' needs the full model in memory: set model.path instead of model.weights")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_length(self) -> None:
        if self.epochs is None:
            if self.steps == 0 and not isinstance(self.steps, bool):
                raise ValueError("'steps' is 0: give a whole number of at least 1, or set 'epochs'")
            check_whole("steps", self.steps, 1)
            return
        check_number("epochs", self.epochs)
        if self.steps:
            raise ValueError(
                f"'epochs' is {self.epochs!r}, 'steps' is {self.steps!r}: give one of them and 0 for the other"
            )

    def _check_evaluations(self) -> None:
        for what in ("evaluate", "checkpoint"):
            every = getattr(self, f"{what}_every")
            per_epoch = getattr(self, f"{what}_per_epoch")
            if every and per_epoch:
                raise ValueError(f"{what}_every is {every}, {what}_per_epoch is {per_epoch}: give one of them")
        for name, setting in (("keep_best", self.keep_best), ("patience", self.patience)):
            if setting and not self.evaluates:
                raise ValueError(f"{name} needs evaluations: set evaluate_every or evaluate_per_epoch")
        if self.min_improvement and self.patience is None:
            raise ValueError("min_improvement has no effect without 'patience': set both or neither")
        if self.evaluates and not self.held_out and not self.data.evaluation:
            name = "evaluate_every" if self.evaluate_every else "evaluate_per_epoch"
            raise ValueError(f"{name} needs held-out documents: set data.heldout above 0, or data.evaluation")

    def _check_determinism(self) -> None:
        if self.deterministic and self.backend == "inductor":
            raise ValueError(
                "'deterministic' needs backend 'eager': the code of 'inductor' depends on the sizes of earlier batches"
            )
        if self.deterministic and self.backend is None:
            self._set("backend", "eager")
        if self.deterministic and self.push_dtype != "float32":
            raise ValueError(f"push_dtype is {self.push_dtype}, which is not deterministic: leave push_dtype out")

    def _check_data(self) -> None:
        """Check that sequences fit into a mini-batch; with an objective, set every corpus's format to "preference"."""
        data = self.data
        if data.max_length > data.tokens_per_step:
            raise ValueError(
                f"data.max_length is {data.max_length}, but a sequence must fit into a mini-batch, and "
                f"data.tokens_per_step is only {data.tokens_per_step}: raise data.tokens_per_step or lower "
                "data.max_length"
            )
        if self.objective is None:
            return
        if self.label_smoothing:
            raise ValueError(
                "label_smoothing has no effect with an objective: leave label_smoothing out; for DPO, set "
                "objective.dpo.label_smoothing"
            )
        for source in (data, *data.sources, *data.evaluation.values()):
            if source.format not in ("auto", "preference"):
                raise ValueError(
                    f"data.format is {source.format}, but the objective compares two answers: leave data.format "
                    "out, and give records with the fields prompt, chosen and rejected"
                )
        if 2 * data.max_length > data.tokens_per_step:
            raise ValueError(
                f"both answers of a pair must fit into a mini-batch, but data.max_length is {data.max_length}, and "
                f"data.tokens_per_step is {data.tokens_per_step}: set tokens_per_step to at least {2 * data.max_length}"
            )
        mixture = tuple(replace(source, format="preference") for source in data.mixture)
        evaluation = {name: replace(source, format="preference") for name, source in data.evaluation.items()}
        self._set("data", replace(data, format="preference", mixture=mixture, evaluation=evaluation))

    def _check_ranks(self) -> None:
        elastic = self.elastic
        if elastic.copies > self.home.copies:
            self._set("home", replace(self.home, copies=elastic.copies))
        if not isinstance(self.ranks, RanksIfEqual) and (elastic.min_ranks or 0) > self.ranks > 1:
            raise ValueError(f"elastic.min_ranks is {elastic.min_ranks}, but 'ranks' is {self.ranks}: lower min_ranks")
        if self.automatic and len(self.strategies) > 1:
            raise ValueError("'strategies: auto' cannot be combined with other strategies: remove 'auto' or the others")
        if self.automatic and not self.plan.choose:
            self._set("plan", replace(self.plan, choose=True))
        if self.plan.cluster is not None and not self.plan.choose:
            raise ValueError(
                f"plan: 'cluster' is {self.plan.cluster!r}, but has no effect without 'choose': set 'choose: true'"
            )
        if elastic.replan and not self.measures and (not self.plan.choose or self.plan.profile is None):
            raise ValueError(
                "elastic.replan needs measured costs: set 'strategies: auto' without plan.cluster, or 'plan: {choose: "
                "true, profile: profile.json}' with a file that hydragraph profile wrote"
            )
        if elastic.dry_run and not self.replans:
            raise ValueError(
                "elastic.dry_run has no effect without elastic.replan: also set elastic.replan, or leave dry_run out"
            )

    @property
    def evaluates(self) -> bool:
        return self.evaluate_every > 0 or self.evaluate_per_epoch > 0

    @property
    def held_out(self) -> float:
        default = 0.01 if self.evaluates and not self.data.evaluation else 0.0
        return default if self.data.heldout is None else self.data.heldout

    @property
    def automatic(self) -> bool:
        return "auto" in self.strategies

    @property
    def replans(self) -> bool:
        return self.measures if self.elastic.replan is None else self.elastic.replan

    @property
    def measures(self) -> bool:
        return self.automatic and self.plan.profile is None and self.plan.cluster is None

    @property
    def watches(self) -> bool:
        return self.elastic.monitor or self.replans

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
        """Read a YAML file, and apply overrides such as "optimizer.lr=1e-3"."""
        data = load_yaml(path)
        return overridden(checked_record(cls, data, path, "the config", remedies()), data, overrides)

    @classmethod
    def parse(cls, text: str, overrides: Sequence[str] = ()) -> TrainConfig:
        """Read a config from YAML text, and apply overrides like `load`."""
        data = parse_yaml(text)
        return overridden(from_record(cls, data, name="the config", hints=remedies()), data, overrides)

    def save(self, path: str | Path) -> None:
        """Write every field, defaults included, as YAML for `load`."""
        text = yaml.safe_dump(underived(self), sort_keys=False, default_flow_style=None, width=120)
        write_whole(Path(path), text)
