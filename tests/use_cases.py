"""Uses of an executable drawn at random: an optimizer, forms of data, and what a user does between the steps.

A case is a function of its seed alone. The same optimizer, data and actions are applied to a plain model in PyTorch. An
executable must end with the same losses and weights, or refuse by `hydragraph.Unsupported` or a `ValueError`; `outcome`
says which, and anything else is a finding.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.frontend.mini_batch import DivideBy
from tests.models import randomised
from tests.own_models import Own

STEPS = 4
SETTINGS = {"gain": 1.0}  # a global that the model's forward reads
Named = list[tuple[str, nn.Parameter]]


class Model(Own):
    """A causal model whose forward reads an attribute, an entry of a dict, and a global."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.gain = 1.0
        self.options = {"gain": 1.0}

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return logits [1, T, 101]."""
        scale = self.gain * self.options["gain"] * SETTINGS["gain"]
        return super().forward(input_ids, position_ids, cu_seqlens) * scale


@dataclass
class Loss:
    """A cross-entropy times a factor that the user may change."""

    factor: float = 1.0

    def __call__(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        """Return the sum over the targets."""
        logits = outputs[0].float()
        return self.factor * F.cross_entropy(logits, batch["labels"][0], ignore_index=-100, reduction="sum")


@dataclass
class User:
    """What a training script holds: of plain PyTorch, or of an executable if there is one.

    Attributes:
        folder: for an executable's checkpoint.
        saved: a plain model's checkpoint, or whether there is one in the folder.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss
    exe: hg.Executable | None = None
    folder: str = ""
    schedulers: list[torch.optim.lr_scheduler.LRScheduler] = field(default_factory=list)
    saved: Any = None


class OwnStep(torch.optim.SGD):
    """Half of an update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update by half of the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(0.5 * group["lr"] * parameter.grad)


def _without_decay(named: Named, chosen: Callable[[str, nn.Parameter], bool]) -> list[dict[str, Any]]:
    decayed = [p for n, p in named if not chosen(n, p)]
    return [{"params": decayed}, {"params": [p for n, p in named if chosen(n, p)], "weight_decay": 0.0}]


_BIASES: Callable[[Named], Any] = lambda named: _without_decay(named, lambda n, p: n.endswith("bias"))  # noqa: E731
_VECTORS: Callable[[Named], Any] = lambda named: _without_decay(named, lambda n, p: p.ndim < 2)  # noqa: E731
OPTIMIZERS: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "SGD": lambda named: torch.optim.SGD(named, lr=0.1),
    "momentum": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "dampened": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9, dampening=0.5),
    "maximize": lambda named: torch.optim.SGD(named, lr=0.01, maximize=True),
    "without names": lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    "AdamW": lambda named: torch.optim.AdamW(named, lr=1e-2, eps=1e-4),
    "amsgrad": lambda named: torch.optim.Adam(named, lr=1e-2, eps=1e-4, amsgrad=True, weight_decay=0.1),
    "foreach": lambda named: torch.optim.AdamW(named, lr=1e-2, eps=1e-4, foreach=True),
    "hydragraph's AdamW": lambda named: hg.AdamW(named, lr=1e-2, eps=1e-4),
    "RMSprop": lambda named: torch.optim.RMSprop(named, lr=1e-3, eps=1e-3, centered=True, momentum=0.5),
    "Adagrad": lambda named: torch.optim.Adagrad(named, lr=1e-2, eps=1e-3),
    "Adamax": lambda named: torch.optim.Adamax(named, lr=1e-2, eps=1e-3),
    "NAdam": lambda named: torch.optim.NAdam(named, lr=1e-2, eps=1e-3),
    "ASGD": lambda named: torch.optim.ASGD(named, lr=1e-1),
    "biases do not decay": lambda named: torch.optim.AdamW(_BIASES(named), lr=1e-2, eps=1e-4, weight_decay=0.5),
    "vectors do not decay": lambda named: torch.optim.AdamW(_VECTORS(named), lr=1e-2, eps=1e-4, weight_decay=0.5),
    "half of the parameters": lambda named: torch.optim.SGD(named[::2], lr=0.1),
    "own step": lambda named: OwnStep(named, lr=0.1),
    "LBFGS": lambda named: torch.optim.LBFGS([p for _, p in named], lr=0.1),
    "Adafactor": lambda named: torch.optim.Adafactor([p for _, p in named], lr=0.1),
}


PLAIN = {"hydragraph's AdamW": OPTIMIZERS["AdamW"]}  # ours takes flat shards only


def _each_group(user: User, **values: Callable[[float], float]) -> None:
    for group in user.optimizer.param_groups:
        for name, change in values.items():
            if name in group:
                group[name] = change(group[name])


def _schedule(user: User) -> None:
    user.schedulers.append(torch.optim.lr_scheduler.StepLR(user.optimizer, 1, 0.5))


def _edit(user: User) -> None:
    with torch.no_grad():
        next(user.model.parameters()).mul_(0.5)


def _replace(user: User) -> None:
    user.model.out.bias = nn.Parameter(user.model.out.bias.detach() + 0.5)
    if user.exe is None:
        user.optimizer.param_groups[0]["params"] = list(user.model.parameters())


def _load(user: User) -> None:
    user.model.load_state_dict({name: 0.5 * tensor for name, tensor in user.model.state_dict().items()})


def _load_trained(user: User) -> None:
    if user.exe is not None and (trained := user.exe.full_state_dict()):  # on rank 0
        user.model.load_state_dict(trained)


def _look(user: User) -> None:
    if user.exe is not None:
        user.exe.evaluate(drawn(1))
        user.exe.gradients(drawn(2))
        user.exe.score(drawn(3))


def _save(user: User) -> None:
    if user.exe is None:
        user.saved = copy.deepcopy((user.model.state_dict(), user.optimizer.state_dict()))
    else:
        user.saved = user.folder
        user.exe.save(Path(user.folder) / "checkpoint")


def _restore(user: User) -> None:
    if user.saved is None:
        return
    if user.exe is None:
        user.model.load_state_dict(user.saved[0])
        user.optimizer.load_state_dict(user.saved[1])
    else:
        user.exe.load(Path(user.folder) / "checkpoint")


def _ignore(*_: object) -> None:
    pass


# Actions between two steps. The first ones must take effect; most of the others must be refused.
ACTIONS: dict[str, Callable[[User], object]] = {
    "nothing": _ignore,
    "lower the learning rate": lambda u: _each_group(u, lr=lambda x: x * 0.5),
    "change the weight decay": lambda u: _each_group(u, weight_decay=lambda x: x + 0.1),
    "schedule": _schedule,
    "look": _look,
    "save": _save,
    "load what was saved": _restore,
    "load trained weights": _load_trained,
    "eval": lambda u: u.model.eval(),
    "train": lambda u: u.model.train(),
    "zero_grad": lambda u: u.optimizer.zero_grad(),
    "freeze": lambda u: u.model.out.weight.requires_grad_(False),
    "freeze all": lambda u: u.model.requires_grad_(False),
    "edit a weight": _edit,
    "replace a weight": _replace,
    "load other weights": _load,
    "edit through data": lambda u: next(u.model.parameters()).data.mul_(0.5),
    "an attribute": lambda u: setattr(u.model, "gain", 2.0),
    "an entry": lambda u: u.model.options.update(gain=2.0),
    "a global": lambda u: SETTINGS.update(gain=2.0),
    "the loss": lambda u: setattr(u.loss, "factor", 3.0),
    "a forward hook": lambda u: u.model.out.register_forward_hook(lambda m, i, o: 2 * o),
    "a gradient hook": lambda u: u.model.out.bias.register_hook(lambda g: 2 * g),
    "a step hook": lambda u: u.optimizer.register_step_pre_hook(_ignore),
    "another forward": lambda u: setattr(u.model.norm, "forward", lambda x: 2 * x),
    "another module": lambda u: setattr(u.model, "norm", nn.Identity()),
}
_FOLLOWED = 11
FORMS = ("tensors", "lists", "numpy", "int32", "labels", "padded")
STRATEGIES = ("<tp1,pp1>", "<[0]x1> + <[1]x1>", "<[1,0]x1s>")
DIVISORS: tuple[DivideBy, ...] = ("targets", "sequences", 50)


def drawn(seed: int) -> list[Tensor]:
    """Draw the ids of a mini-batch."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 12, (4,), generator=generator).tolist()
    return [torch.randint(0, 101, (length,), generator=generator) for length in lengths]


def in_form(sequences: list[Tensor], form: str) -> Any:
    """Return a mini-batch as a user may pass it; under "labels" the first two tokens are not trained."""
    if form == "lists":
        return [ids.tolist() for ids in sequences]
    if form == "numpy":
        return [ids.numpy() for ids in sequences]
    if form == "int32":
        return [ids.int() for ids in sequences]
    if form == "labels":
        return [{"input_ids": ids, "labels": _labels(ids)} for ids in sequences]
    if form == "padded":
        padded = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in sequences], batch_first=True)
        return [{"input_ids": padded, "attention_mask": mask}]
    return sequences


def _labels(ids: Tensor) -> Tensor:
    return torch.where(torch.arange(len(ids)) < min(2, len(ids) - 1), -100, ids)


@dataclass(frozen=True)
class UseCase:
    """A run of several steps, with actions between them.

    Attributes:
        strategy: on one rank or two.
        clip: limit of the gradients' norm.
        steps: for each step: form of the data, divisor, and the action before it.
    """

    seed: int
    strategy: str
    optimizer: str
    clip: float | None
    steps: tuple[tuple[str, DivideBy, str], ...]


def draw(seed: int) -> UseCase:
    """Draw a case: most actions are followed, and at most one is not."""
    draws = random.Random(seed)
    names = list(ACTIONS)
    actions = [draws.choice(names[:_FOLLOWED]) for _ in range(STEPS)]
    if draws.random() < 0.5:
        actions[draws.randrange(1, STEPS)] = draws.choice(names[_FOLLOWED:])
    steps = tuple((draws.choice(FORMS), draws.choice(DIVISORS), action) for action in actions)
    strategy = draws.choice(STRATEGIES[1:]) if draws.random() < 0.2 else STRATEGIES[0]  # starting ranks takes seconds
    return UseCase(seed, strategy, draws.choice(list(OPTIMIZERS)), draws.choice([None, 0.5]), steps)


def _plain_step(user: User, sequences: list[Tensor], form: str, divide_by: DivideBy, clip: float | None) -> float:
    labels = [(_labels(ids) if form == "labels" else ids)[1:] for ids in sequences]
    targets = sum(int((each != -100).sum()) for each in labels)
    divisor = {"targets": targets, "sequences": len(sequences)}.get(str(divide_by), divide_by)
    total = torch.zeros(())
    for ids, targeted in zip(sequences, labels, strict=True):
        bounds = torch.tensor([0, len(ids)], dtype=torch.int32)
        logits = user.model(ids[None], torch.arange(len(ids))[None], bounds)
        batch = {"labels": torch.cat([targeted, targeted.new_full((1,), -100)])[None]}
        total = total + user.loss(logits, batch) / float(divisor)
    user.optimizer.zero_grad()
    total.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(user.model.parameters(), clip)
    user.optimizer.step()
    return total.item()


def _run(case: UseCase, user: User, step: Callable[[list[Tensor], str, DivideBy], float]) -> list[float]:
    losses = []
    for number, (form, divide_by, action) in enumerate(case.steps):
        ACTIONS[action](user)
        losses.append(step(drawn(100 * case.seed + number), form, divide_by))
        for scheduler in user.schedulers:
            scheduler.step()
    return losses


def _compiled(case: UseCase, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of an executable and, on rank 0, its final weights; on each rank."""
    SETTINGS.update(gain=1.0)
    model, loss = randomised(Model()), Loss()
    exe = hg.compile(
        model, case.strategy, OPTIMIZERS[case.optimizer], loss=loss, max_grad_norm=case.clip, device="cpu", check="auto"
    )
    assert exe.optimizer is not None
    user = User(model, exe.optimizer, loss, exe, folder)
    losses = _run(case, user, lambda ids, form, by: exe.step(in_form(ids, form), divide_by=by).loss)
    weights = exe.full_state_dict()
    exe.close()
    return losses, weights


def outcome(case: UseCase) -> str:
    """Return "right", "refused: ..." or "WRONG: ..."; any other error is wrong too."""
    factory = OPTIMIZERS[case.optimizer]
    plain = randomised(Model())
    start = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    try:
        with tempfile.TemporaryDirectory() as folder:
            if case.strategy == STRATEGIES[0]:
                losses, weights = _compiled(case, folder)
            else:
                losses, weights = hg.launch(_compiled, 2, case, folder)[0]
    except (hg.Unsupported, ValueError) as refused:
        return f"refused: {refused}"
    except Exception as error:
        return f"WRONG: {case}: {type(error).__name__}: {error}"
    SETTINGS.update(gain=1.0)
    user = User(plain, PLAIN.get(case.optimizer, factory)(list(plain.named_parameters())), Loss())
    expected = _run(case, user, lambda ids, form, by: _plain_step(user, ids, form, by, case.clip))
    if not _near(losses, expected):
        return f"WRONG: {case}: losses {losses} for {expected}"
    wanted = plain.state_dict()
    moved = _norm(wanted[n] - start[n] for n in wanted)
    off = _norm(weights[n] - wanted[n] for n in wanted)
    return (
        "right" if off <= 1e-2 * moved + 1e-6 else f"WRONG: {case}: weights are off by {off / moved:.2g} of their way"
    )


def _near(found: list[float], expected: list[float]) -> bool:
    return all(abs(a - b) <= 1e-3 * abs(b) for a, b in zip(found, expected, strict=True))


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm())
