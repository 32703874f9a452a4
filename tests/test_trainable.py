"""What is frozen stays as it is, and all else trains as on one device: gradients, norms and weights over gloo."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.ir.program import Program
from tests import reference
from tests.adapted import LAYERS, MODELS
from tests.models import llama, sequences
from tests.ready import Ready
from tests.thorough import first, thorough

LENGTHS = [20, 7, 33, 1, 12]
STRATEGIES = ["<[0,1]x2,[2]x1>", "<[2]x1,[0]x1,[1]x1>", "<[1,0]x3s> + <[2]x3>", "<[2]x2,[1,0]x1sr>"]
CLIP, STEPS = 0.05, 4


@dataclass
class Run:
    """Observations of one rank."""

    gradients: list[dict[str, Tensor]]
    norms: list[float]
    optimised: list[str]
    before: dict[str, Tensor]
    weights: dict[str, Tensor]


def batches(count: int) -> list[list[Tensor]]:
    return [sequences(LENGTHS, seed=i) for i in range(count)]


def sgd(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, weight_decay=0.1)


def ready(model: str, strategies: list[str]) -> Ready:
    return Ready.of(MODELS[model](), strategies)


def train(prepared: Ready, strategies: list[str]) -> Run:
    optimised: list[str] = []

    def factory(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        optimised.extend(name for name, _ in named)
        return sgd(named)

    chosen = [hg.Strategy.parse(s, layers=LAYERS) for s in strategies]
    exe = prepared.executable(chosen[0], factory, max_grad_norm=CLIP)
    data, before = batches(STEPS), exe.full_state_dict()
    gradients = [exe.gradients(data[0], strategy=s) for s in chosen]
    norms = [exe.step(data[i], strategy=chosen[i % len(chosen)]).grad_norm for i in range(STEPS)]
    weights = exe.full_state_dict()
    exe.close()
    return Run(gradients, norms, optimised, before, weights)


@thorough
@pytest.mark.parametrize("strategies", first([STRATEGIES[2:]], [STRATEGIES[2:], STRATEGIES[:2]]), ids=["last", "first"])
@pytest.mark.parametrize("name", first(["unreached and unused"], MODELS))
def test_lopsided_strategies_equal_one_device(name: str, strategies: list[str]) -> None:
    runs = hg.launch(train, 3, strategies, prepare=partial(ready, name, strategies))
    model = MODELS[name]()
    wanted = reference.train(model, batches(STEPS), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), clip=CLIP)
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    assert all(list(dict.fromkeys(run.optimised)) == trainable for run in runs)
    for strategy, gradients in zip(strategies, runs[0].gradients, strict=True):
        assert gradients.keys() == wanted.gradients[0].keys()
        worst, ratio = reference.worst(gradients, wanted.gradients[0])
        assert ratio <= 1, f"{strategy}: gradient of {worst} is {ratio:.2f} times the tolerance off"
    norms = [float(torch.stack([g.norm() for g in step.values()]).norm()) for step in wanted.gradients]
    assert max(norms) > CLIP
    assert runs[0].norms == pytest.approx(norms, rel=1e-5)
    assert runs[0].weights.keys() == wanted.weights.keys()
    for key, weight in wanted.weights.items():
        torch.testing.assert_close(runs[0].weights[key], weight, rtol=1e-4, atol=1e-5, msg=key)
    still = {n for n, _ in model.named_parameters()} - wanted.gradients[0].keys()
    assert still
    assert all(torch.equal(runs[0].weights[n], runs[0].before[n]) for n in still)


def resume(prepared: Ready, path: str, strategy: str, saves: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Train two steps, save, train two more; or load and train the last two."""
    given = hg.Strategy.parse(strategy, LAYERS)
    exe = prepared.executable(given, lambda named: torch.optim.AdamW(named, lr=0.01, weight_decay=0.1))
    data = batches(4)
    if saves:
        for batch in data[:2]:
            exe.step(batch)
        exe.save(path)
    else:
        exe.load(path)
    losses, weights = [exe.step(batch).loss for batch in data[2:]], exe.full_state_dict()
    exe.close()
    return losses, weights


@thorough
@pytest.mark.parametrize("name", ["hand-written LoRA", "unreached and unused"])
def test_checkpoints_resume_on_another_number_of_ranks(name: str, tmp_path: Path) -> None:
    path, model = str(tmp_path / "saved"), MODELS[name]()
    one, two = "<[0,1]x3>", "<[1]x1,[0]x1,[2]x1>"
    saved = hg.launch(resume, 2, path, one, True, prepare=partial(ready, name, [one]))[0]
    resumed = hg.launch(resume, 3, path, two, False, prepare=partial(ready, name, [two]))[0]
    assert resumed[0] == pytest.approx(saved[0], rel=1e-5)
    for key, weight in saved[1].items():
        torch.testing.assert_close(resumed[1][key], weight, rtol=1e-3, atol=1e-4, msg=key)
    reader = torch.distributed.checkpoint.FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    parameters = dict(model.named_parameters())
    learns = hg.capture(model).learning
    moments = {key for key in stored if key.startswith("optimizer.exp_avg.")}
    assert moments == {f"optimizer.exp_avg.{n}" for n in learns}
    assert {n for n in stored if n in parameters} == set(parameters)


@thorough
@pytest.mark.parametrize("backend", first(["eager"], ["eager", "inductor"]))
@pytest.mark.parametrize(
    "name", first(["unreached and unused"], ["frozen lower layers", "norms alone", "unreached and unused"])
)
def test_alone_in_16_bits(name: str, backend: str) -> None:
    """Frozen weights are never decayed or rounded, even by the optimizer that writes 16-bit copies."""
    if backend == "inductor" and name != "frozen lower layers":
        pytest.skip("once is enough for a compiler")
    model = MODELS[name]()
    before = copy.deepcopy(model.state_dict())
    exe = hg.compile(
        model,
        hg.Strategy.parse("<tp1,pp1>", LAYERS),
        lambda named: hg.AdamW(named, lr=0.01, weight_decay=0.1),
        dtype=torch.bfloat16,
        device="cpu",
        backend=backend,
    )
    first = exe.step(batches(1)[0]).loss
    for _ in range(5):
        last = exe.step(batches(1)[0]).loss
    after = exe.full_state_dict()
    assert last < first
    assert {n for n in before if not torch.equal(before[n], after[n])} == exe.program.learning
    state = sum(t.numel() for values in exe.optimizer.state.values() for t in values.values() if t.dim())
    learning = sum(exe.program.parameters[n].size for n in exe.program.learning)
    assert state == 2 * learning == 2 * sum(g.numel() for g in exe.home.gradients.values())
    exe.close()


@cache
def untrained() -> tuple[nn.Module, Program]:
    """Return a model of which nothing is trained, with its program."""
    model = llama(layers=1).requires_grad_(False)
    return model, hg.capture(model)


def test_nothing_to_train_is_refused() -> None:
    (model, program), strategy = untrained(), "<tp1,pp1>"
    assert not any(p.trainable for p in program.parameters.values())
    with pytest.raises(hg.Unsupported, match="no parameter gets a gradient"):
        hg.compile(model, strategy, sgd, program=program, device="cpu").close()
    exe = hg.compile(model, strategy, program=program, device="cpu")
    assert exe.evaluate(batches(1)[0]).loss > 0
    assert exe.gradients(batches(1)[0]) == {}
    exe.close()


def test_a_program_captured_with_other_parameters_frozen_is_refused() -> None:
    _, program = untrained()
    with pytest.raises(ValueError, match="captured from a model other than this"):
        hg.compile(llama(layers=1), "<tp1,pp1>", program=program, device="cpu")
