"""Changes of Python's state after a model was compiled are refused by name; ordinary uses between steps are not."""

from __future__ import annotations

import argparse
import collections
import contextlib
import contextvars
import functools
import gc
import logging
import multiprocessing
import operator
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import dropout
from transformers import LlamaForCausalLM, TrainerState

import hydragraph as hg
from hydragraph.errors import Unsupported
from hydragraph.frontend.compiled_state import CompiledState, _state
from tests.models import llama, sequences
from tests.own_models import Own
from tests.thorough import thorough

SCALE = 1.0
SETTINGS = {"floor": 0.0}


class Part(nn.Module):
    """A part with all that can be changed."""

    bias_scale = 1.0
    temp: float
    table: dict[str, float]

    def __init__(self) -> None:
        super().__init__()
        self.temp, self.table, self.steps_seen, self.act = 1.0, {"a": 1.0}, 0, F.silu
        self.options = argparse.Namespace(gain=1.0, unread=0)
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        """[T, 4] -> [T, 4]."""
        x = self.act(self.norm(self.linear(x))) * self.temp * self.table["a"] * self.bias_scale
        return x * self.options.gain * SCALE + self.shift + SETTINGS["floor"] + getattr(self, "extra", 0.0)


class Dropping(Part):
    """One that drops elements while it trains."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.dropout = p

    def forward(self, x: Tensor) -> Tensor:
        """[T, 4] -> [T, 4]."""
        return F.dropout(super().forward(x), self.dropout, self.training)


class Switching(Part):
    """One that computes something else while it trains."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, 4] -> [T, 4]."""
        return super().forward(x) if self.training else x


class Loss:
    """A loss with a number of its own; a counter that it does not read."""

    def __init__(self) -> None:
        self.beta, self.calls, self.seen = 0.1, 0, [1.0]

    def __call__(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        return self.scaled(outputs)

    def scaled(self, outputs: Tensor) -> Tensor:
        return outputs.sum() * self.beta * self.seen[0]


def model() -> nn.Sequential:
    return nn.Sequential(Part(), Part())


def set_global(name: str, value: object) -> None:
    globals()[name] = value


def edited(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(2)


def freed(parameter: Tensor) -> None:
    parameter.data = parameter.data * 2


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "an attribute": (lambda m: setattr(m[1], "temp", 2.0), "1: 'temp' was changed after hg.compile from 1.0 to 2.0"),
    "its type": (lambda m: setattr(m[1], "temp", 1), "'temp' .* from 1.0 to 1"),
    "an attribute removed": (lambda m: delattr(m[0], "temp"), "from 1.0 to nothing"),
    "an attribute added": (lambda m: setattr(m[0], "extra", 1.0), "'extra' .* from nothing to 1.0"),
    "an attribute added as another goes": (
        lambda m: (delattr(m[0], "steps_seen"), setattr(m[0], "extra", 1.0)),
        "'extra' .* from nothing to 1.0",
    ),
    "one that the class has": (lambda m: setattr(m[0], "bias_scale", 2.0), "'bias_scale'"),
    "a forward": (lambda m: setattr(m[0], "forward", lambda x: x), "'forward'"),
    "a container": (lambda m: m[0].table.update(a=2.0), r"'table' .* is \{'a': 2.0\} now"),
    "a function": (lambda m: setattr(m[0], "act", F.relu), "'act' .* is relu now"),
    "settings in an object": (lambda m: setattr(m[1].options, "gain", 2.0), "1.options: 'gain'"),
    "a setting of PyTorch's module": (lambda m: setattr(m[0].norm, "eps", 1e-3), "0.norm: 'eps'"),
    "frozen": (lambda m: m[0].requires_grad_(False), "0.linear.weight: requires_grad was True .* False"),
    "values": (lambda m: edited(m[1].linear.weight), "1.linear.weight: .* only values of full_state_dict"),
    "values through data": (lambda m: m[1].linear.weight.data.mul_(2), "1.linear.weight: the tensor was replaced"),
    "a buffer through data": (lambda m: m[0].shift.data.add_(1), "0.shift: the tensor was replaced or edited"),
    "data": (lambda m: freed(m[0].norm.bias), "0.norm.bias: the tensor was replaced or edited"),
    "a buffer": (lambda m: edited(m[0].shift), "0.shift: the tensor was replaced or edited"),
    "another parameter": (lambda m: setattr(m[0].linear, "bias", nn.Parameter(torch.zeros(4))), "0.linear.bias"),
    "a parameter more": (
        lambda m: m[0].register_parameter("w", nn.Parameter(torch.zeros(1))),
        "was added, removed or moved",
    ),
    "no bias": (lambda m: setattr(m[0].linear, "bias", None), "0.linear.bias: the tensor was removed"),
    "another class": (lambda m: setattr(m[0], "__class__", Switching), "0: the module's class or the class's forward"),
    "another order": (lambda m: m._modules.update({"0": m._modules.pop("0")}), "added, removed or moved"),
    "another module": (lambda m: setattr(m[0], "norm", nn.LayerNorm(4)), "the module 'norm' was replaced"),
    "a hook": (lambda m: m[1].register_forward_hook(print), r"1: a forward hook \(print\) was registered"),
    "a backward hook": (lambda m: m[0].norm.register_full_backward_hook(print), "0.norm: a backward hook"),
    "a hook on a gradient": (lambda m: m[0].linear.weight.register_hook(print), "0.linear.weight: a gradient hook"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_model_is_named_with_the_remedy(name: str) -> None:
    subject = model()
    state = CompiledState(subject, None, {"0.shift": torch.ones(4)})
    state.check()
    change, said = CHANGES[name]
    change(subject)
    with pytest.raises(Unsupported, match=rf"{said}.*; call hg.compile again"):
        state.check()


def test_globals_classes_and_global_hooks_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = model()
    state = CompiledState(subject, None, {})
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "SCALE", 2.0)
        with pytest.raises(Unsupported, match=r"globals of Part.forward: 'SCALE' .* from 1.0 to 2.0"):
            state.check()
    with monkeypatch.context() as patch:
        patch.setitem(SETTINGS, "floor", 1.0)
        with pytest.raises(Unsupported, match=r"globals of Part.forward: 'SETTINGS'"):
            state.check()
    with monkeypatch.context() as patch:
        patch.setattr(Part, "bias_scale", 2.0)
        with pytest.raises(Unsupported, match=r"class Part: 'bias_scale'"):
            state.check()
    with monkeypatch.context() as patch:
        patch.setattr(Part, "forward", nn.Identity.forward)
        with pytest.raises(Unsupported, match="class's forward was replaced"):
            state.check()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(Unsupported, match=r"global hooks"):
            state.check()
    finally:
        handle.remove()
    state.check()


def test_what_nothing_reads_and_what_training_has_is_no_change() -> None:
    subject, buffer = model(), torch.ones(4)
    state = CompiledState(subject, None, {"0.shift": buffer})
    subject[0].steps_seen += 1  # pyrefly: ignore[bad-argument-type]
    subject[0].options.unread = 5  # pyrefly: ignore[bad-argument-type]
    subject.remark = "mine"  # pyrefly: ignore[bad-argument-type]
    subject.eval()
    subject(torch.ones(3, 4)).sum().backward()
    trained = {name: value + 1 for name, value in subject.state_dict().items()}
    buffer.add_(1)
    state.hand_out(state.digests(trained))
    subject.load_state_dict(trained)
    state.check()
    subject.load_state_dict({n: v.clone() for n, v in trained.items()}, assign=True)
    state.check()
    assert state.changed_weights() == ""
    edited(subject[0].linear.weight)
    assert "0.linear.weight" in state.changed_weights()


@pytest.mark.parametrize(
    ("kind", "depends"),
    [
        (Part, False),
        (functools.partial(Dropping, 0.0), False),
        (functools.partial(Dropping, 0.5), True),
        (Switching, True),
        (functools.partial(nn.Dropout, 0.0), False),
        (functools.partial(nn.Dropout, 0.1), True),
        (functools.partial(nn.BatchNorm1d, 4), True),
        (functools.partial(nn.LayerNorm, 4), False),
    ],
)
def test_training_flags_count_where_something_depends_on_them(kind: Callable[[], nn.Module], depends: bool) -> None:
    subject = nn.Sequential(kind()).eval()
    state = CompiledState(subject, None, {})
    subject.train()
    if not depends:
        state.check()
        return
    with pytest.raises(
        Unsupported, match=r"0: the output of .* depends on `training`, which was False .* and is True now"
    ):
        state.check()
    drops = not isinstance(subject[0], Switching | nn.BatchNorm1d)
    with contextlib.nullcontext() if drops else pytest.raises(Unsupported, match="depends on `training`"):
        state.check(trains=False)
    subject.eval()
    state.check()


class Scaled(nn.LayerNorm):
    """A subclass whose own code reads nothing: what only the library's forward reads is compared as well."""


class Subclass(LlamaForCausalLM):
    """A transformers model with a method of the user's."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Return what the parent returns."""
        return super().forward(*arguments, **keywords)


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 if self.training else x


class AlwaysDropping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1, self.training)


class Named(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, 0.1, self.training)


def test_an_evaluation_refuses_code_that_reads_the_mode() -> None:
    with pytest.raises(Unsupported, match="evaluate: the code of the model or loss reads `training`"):
        CompiledState(Halved(), None, {}).refuse_evaluation()
    for model in (Halved().eval(), AlwaysDropping(), Named(), nn.Dropout(0.1)):
        CompiledState(model, None, {}).refuse_evaluation()


def test_what_only_the_code_of_a_base_class_reads_is_compared() -> None:
    scaled = Scaled(4)
    state = CompiledState(nn.Sequential(scaled), None, {})
    state.check()
    scaled.eps = 0.5
    with pytest.raises(Unsupported, match=r"'eps' was changed after hg.compile from 1e-05 to 0.5"):
        state.check()
    model = Subclass(llama().config)  # pyrefly: ignore[bad-argument-type]
    state = CompiledState(model, None, {})
    state.check()
    model.vocab_size = 7
    with pytest.raises(Unsupported, match=r"'vocab_size' was changed after hg.compile"):
        state.check()


def test_a_flag_that_only_a_base_class_reads_is_compared() -> None:
    norm = nn.Sequential(type("Norm", (nn.BatchNorm1d,), {})(4))
    state = CompiledState(norm.eval(), None, {})
    norm.train()
    with pytest.raises(Unsupported, match=r"depends on `training`, which was False at hg.compile and is True now"):
        state.check()


def test_what_a_loss_reads_is_compared() -> None:
    subject, loss = model(), Loss()
    for given in (loss, loss.scaled):
        state = CompiledState(subject, given, {})
        loss.calls += 1
        state.check()
        loss.beta /= 2
        with pytest.raises(Unsupported, match=r"loss: 'beta' was changed after hg.compile from"):
            state.check()
    state = CompiledState(subject, loss, {})
    loss.seen[0] = 2.0
    with pytest.raises(Unsupported, match=r"loss: 'seen' .* is \[2.0\] now"):
        state.check()
    options: Any = types.SimpleNamespace(x=1)
    state = CompiledState(subject, functools.partial(F.mse_loss, options), {})
    options.x = 2
    state.check()  # which PyTorch's code does not read


def test_variables_that_a_loss_closes_over_are_compared() -> None:
    beta, settings = 0.1, types.SimpleNamespace(gamma=1.0, other=0)

    def inner(outputs: Tensor) -> Tensor:
        return outputs.sum() * settings.gamma

    def loss(outputs: Tensor, _: object) -> Tensor:
        return inner(outputs) * beta

    state = CompiledState(model(), loss, {})
    settings.other = 1
    state.check()
    settings.gamma = 2.0
    with pytest.raises(Unsupported, match=r"'gamma' was changed after hg.compile from 1.0 to 2.0"):
        state.check()
    settings.gamma = 1.0
    beta = 0.2
    with pytest.raises(Unsupported, match=r"'beta' was changed after hg.compile from 0.1 to 0.2"):
        state.check()


def test_modules_of_a_loss_are_compared() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.beta = 0.1

        def forward(self, outputs: Tensor, _: object) -> Tensor:
            return outputs.sum() * self.beta

    loss = Module()
    state = CompiledState(model(), loss, {})
    loss.beta = 0.2
    with pytest.raises(Unsupported, match=r"loss: 'beta'"):
        state.check()


def test_weights_on_the_meta_device_may_come_later_and_a_model_is_not_kept_alive() -> None:
    with torch.device("meta"):
        subject = model()
    state = CompiledState(subject, functools.partial(lambda whole, outputs, _: whole(outputs).sum(), subject), {})
    subject.to_empty(device="cpu")
    edited(subject[0].linear.weight)
    subject[0].shift.zero_()
    state.check()
    subject.requires_grad_(False)
    with pytest.raises(Unsupported, match=r"requires_grad"):
        state.check()
    weak = weakref.ref(subject)
    del subject
    gc.collect()
    assert weak() is None
    state.check()


class Annealed:
    """Settings that a loss reads from elsewhere."""

    beta = 1.0

    def value(self) -> float:
        return self.beta * self.calls if hasattr(self, "calls") else self.beta


class OfAnnealed(Annealed):
    pass


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta, self.unread, self.inner = 1.0, 1.0, Annealed()

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * self.beta

    def loss(self, x: Tensor) -> Tensor:
        return x.sum() * self.inner.value()


@dataclass(slots=True)
class Slotted:
    beta: float = 1.0
    unread: float = 1.0


def read_directly(settings: Any) -> Any:
    return lambda x: x.sum() * settings.beta


def read_by_a_method(settings: Any) -> Any:
    return lambda x: x.sum() * settings.value()


def read_from_an_attribute(settings: Any) -> Any:
    return functools.partial(
        lambda holder, x: x.sum() * holder.settings.value(), types.SimpleNamespace(settings=settings)
    )


def read_from_an_own_attribute(settings: Any) -> Any:
    def loss(x: Tensor) -> Tensor:
        return x.sum() * loss.settings.beta

    loss.settings = settings
    return loss


def read_from_a_default(settings: Any) -> Any:
    return lambda x, given=settings: x.sum() * given.beta


def read_from_an_import(settings: Any) -> Any:
    sys.modules["settings_of_a_test"] = settings

    def loss(x: Tensor) -> Tensor:
        import settings_of_a_test as imported  # pyrefly: ignore[missing-import]

        return x.sum() * imported.beta

    return loss


def a_module() -> types.ModuleType:
    made: Any = types.ModuleType("settings_of_a_test")
    made.beta, made.unread = 1.0, 1.0
    return cast(types.ModuleType, made)


def a_class() -> type:
    return type("Settings", (OfAnnealed,), {"beta": 1.0})


@pytest.mark.parametrize(
    ("reads", "make", "where"),
    [
        (read_directly, a_class, "class Settings"),
        (read_directly, lambda: type("Settings", (OfAnnealed,), {}), "class Settings"),
        (read_directly, a_module, "module settings_of_a_test"),
        (read_from_an_import, a_module, "module settings_of_a_test"),
        (read_directly, Slotted, "variables of read_directly.<lambda>.settings"),
        (read_directly, Weighted, "variables of read_directly.<lambda>.settings"),
        (read_by_a_method, Annealed, "variables of read_by_a_method.<lambda>.settings"),
        (read_from_an_attribute, Annealed, "loss.argument 0.settings"),
        (read_from_an_own_attribute, Annealed, "attributes of read_from_an_own_attribute.loss.settings"),
        (read_from_an_own_attribute, a_class, "class Settings"),
        (read_from_a_default, Annealed, "defaults of read_from_a_default.<lambda>.given"),
        (lambda settings: settings.loss, lambda: Weighted(), "loss.inner"),
        (lambda settings: lambda x: settings(x), lambda: Weighted(), "variables of"),
    ],
)
def test_what_a_loss_reads_from_elsewhere_is_compared(reads: Any, make: Callable[[], Any], where: str) -> None:
    settings = make()
    loss = reads(settings)
    state = CompiledState(model(), loss, {})
    settings.unread = 2.0
    state.check()
    owner = settings.inner if where == "loss.inner" else settings
    owner.beta = 3.0
    with pytest.raises(Unsupported, match=rf"{where}.*: 'beta' was changed after hg.compile (from .* to|and is) 3.0"):
        state.check()


def test_the_class_attribute_of_an_object_and_a_replaced_default_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Annealed()
    loss: Any = lambda x, beta=1.0, *, gamma=1.0: x.sum() * beta * gamma * settings.beta  # noqa: E731
    state = CompiledState(model(), loss, {})
    state.check()
    with monkeypatch.context() as patch:
        patch.setattr(Annealed, "beta", 3.0)
        with pytest.raises(Unsupported, match=r"class Annealed: 'beta' .* from 1.0 to 3.0"):
            state.check()
    loss.__kwdefaults__ = {"gamma": 3.0}
    with pytest.raises(Unsupported, match=r"defaults of .*: 'gamma' .* from 1.0 to 3.0"):
        state.check()
    loss.__kwdefaults__, loss.__defaults__ = {"gamma": 1.0}, (3.0,)
    with pytest.raises(Unsupported, match=r"defaults of .*: 'beta' .* from 1.0 to 3.0"):
        state.check()


class Inherited(type):
    table: ClassVar = {"beta": 1.0}

    @property
    def beta(cls) -> float:
        return Inherited.table["beta"]


class OfInherited(metaclass=Inherited):
    pass


class Table(dict[str, float]):
    pass


LONG, DEEP, UNDER = [1.0] * 2000, {"a": {"b": {"c": {"d": {"e": {"f": 1.0}}}}}}, {"b": 1.0}
HELD = Annealed()


@pytest.mark.parametrize(
    ("read", "holder", "change"),
    [
        (lambda h: h[0].beta, [Annealed()], lambda h: setattr(h[0], "beta", 3.0)),
        (lambda h: h["a"][0].beta, {"a": (types.SimpleNamespace(beta=1.0),)}, lambda h: setattr(h["a"][0], "beta", 3)),
        (lambda h: h().beta, weakref.ref(HELD), lambda h: setattr(h(), "beta", 3.0)),
        (lambda h: h.beta, weakref.proxy(HELD), lambda h: setattr(h, "beta", 5.0)),
        (lambda h: h["b"], collections.UserDict(b=1.0), lambda h: h.update(b=3.0)),
        (lambda h: h["b"], types.MappingProxyType(UNDER), lambda h: UNDER.update(b=3.0)),
        (lambda h: h[0] / h[1], [1, 2.0], lambda h: operator.setitem(h, slice(2), [1.0, 2])),
        (lambda h: h[1500], LONG, lambda h: operator.setitem(h, 1500, 3.0)),
        (lambda h: h["a"]["b"]["c"]["d"]["e"]["f"], DEEP, lambda h: h["a"]["b"]["c"]["d"]["e"].update(f=3.0)),
        (lambda h: float(h), torch.ones(()), lambda h: h.fill_(3.0)),
        (lambda h: float(h.sum()), torch.ones(1 << 16), lambda h: h.data.mul_(3.0)),
        (lambda h: h[0].item(), [torch.ones(())], lambda h: h[0].fill_(3.0)),
        (lambda h: float(h[0]), np.ones(1), lambda h: h.fill(3.0)),
        (lambda h: h.beta, OfInherited, lambda h: Inherited.table.update(beta=3.0)),
        (lambda h: h["b"], Table(b=1.0), lambda h: h.update(b=3.0)),
        (lambda h: sum(h), UNDER.values(), lambda h: UNDER.update(b=5.0)),
        (lambda h: h("b"), UNDER.get, lambda h: UNDER.update(b=7.0)),
        (lambda h: h(), functools.partial(getattr, HELD, "beta"), lambda h: setattr(HELD, "beta", 7.0)),
        (lambda h: h(HELD), operator.attrgetter("beta"), lambda h: setattr(HELD, "beta", 9.0)),
        (lambda h: float(len(h)), weakref.WeakSet([HELD]), lambda h: h.clear()),
    ],
)
def test_values_inside_of_what_a_loss_reads_are_compared(
    read: Callable[[Any], float], holder: Any, change: Callable[[Any], object]
) -> None:
    def loss(x: Tensor) -> Tensor:
        return x.sum() * read(holder)

    state = CompiledState(model(), loss, {})
    state.check()
    change(holder)
    with pytest.raises(Unsupported, match=r"was changed after hg\.compile"):
        state.check()


@pytest.mark.parametrize(
    "wrap",
    [
        *(torch.no_grad(), torch.compiler.disable, contextlib.contextmanager),
        *(functools.cache, functools.singledispatch, functools.partialmethod, functools.cached_property),
    ],
)
def test_functions_that_a_library_wraps_are_followed(wrap: Any) -> None:
    settings = {"beta": 1.0}
    wrapped = wrap(lambda *_: settings["beta"])

    class Own:
        read = wrapped

    def loss(x: Tensor) -> Any:
        return Own().read

    state = CompiledState(model(), loss, {})
    settings["beta"] = 3.0
    with pytest.raises(Unsupported, match="'settings' was changed"):
        state.check()


def test_another_object_in_a_variable_of_a_loss_is_noticed() -> None:
    settings = Annealed()
    loss = lambda x: x.sum() * settings.beta  # noqa: E731
    state = CompiledState(model(), loss, {})
    settings = Annealed()
    with pytest.raises(Unsupported, match="'settings' was changed"):
        state.check()


def test_a_container_may_hold_itself() -> None:
    held: list[Any] = [1.0]
    held.append(held)
    loss = lambda x: x.sum() * held[0]  # noqa: E731
    state = CompiledState(model(), loss, {})
    held[0] = 2.0
    with pytest.raises(Unsupported, match="'held' was changed"):
        state.check()


class Noted:
    def __init__(self) -> None:
        self.act: nn.Module = nn.Sequential(nn.Dropout(0.5)).eval()
        self.state, self.scale = TrainerState(), torch.ones(())
        self.scale.factor = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return self.act(x).sum() * self.state.global_step * self.scale.factor


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda n: setattr(n, "act", nn.Identity()), "'act'"),
        (lambda n: n.act.train(), "loss.act.0: the output of Dropout depends"),
        (lambda n: n.act.register_forward_hook(print), "loss.act: a forward hook"),
        (lambda n: n.act.append(nn.Tanh()), "loss.act: .* was added"),
        (lambda n: setattr(n.state, "global_step", 3), "loss.state: 'global_step'"),
        (lambda n: setattr(n.state, "max_steps", 3), ""),
        (lambda n: setattr(n.scale, "factor", 3.0), "loss.scale: 'factor'"),
        (lambda n: setattr(Noted.__call__, "__code__", (lambda self, x: x.sum()).__code__), "'__code__'"),
    ],
)
def test_modules_library_objects_and_notes_on_tensors_are_compared(change: Any, said: str) -> None:
    noted, code = Noted(), Noted.__call__.__code__
    state = CompiledState(model(), noted, {})
    state.check()
    change(noted)
    with pytest.raises(Unsupported, match=said) if said else contextlib.nullcontext():
        state.check()
    Noted.__call__.__code__ = code


SGD = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
SCHEDULE = torch.optim.lr_scheduler.LambdaLR(SGD, float)
GET_LR, SHARED = SCHEDULE.get_last_lr, multiprocessing.Value("d", 1.0)
EVENT, GENERATOR = threading.Event(), torch.Generator()
VARIABLE = contextvars.ContextVar("variable", default=1.0)


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda x: x.sum() * SGD.param_groups[0]["lr"], "reads a torch.optim.sgd.SGD"),
        (lambda x, given=[SCHEDULE]: x * given[0].get_last_lr(), "LambdaLR"),
        (lambda x: x.sum() * GET_LR()[0], "LambdaLR"),
        (lambda x: x.sum() * VARIABLE.get(), "_contextvars.ContextVar"),
        (lambda x: x.sum() * SHARED.value, "multiprocessing.sharedctypes"),
        (lambda x: x.sum() * float(os.environ["BETA"]), r"<lambda>: .* environment variables"),
        (lambda x: x.sum() * EVENT.is_set(), "threading.Event"),
        (lambda x: x.sum() * torch.rand(1, generator=GENERATOR), "torch._C.Generator"),
        (lambda x: x.sum() * torch.initial_seed(), "settings of PyTorch"),
        (lambda x: x.sum() * float(Path("beta").read_text()), "a file"),
        (lambda x: x.sum() * len(open("beta").read()), "a file"),  # noqa: SIM115
        (lambda x: x.sum() * globals()["SCALE"], r"variables by globals\(\)"),
        (lambda x, given=os.environ: x.sum() * float(given["BETA"]), "os._Environ"),
    ],
)
def test_live_objects_that_a_loss_reads_are_refused(read: Any, name: str) -> None:
    with pytest.raises(Unsupported, match=rf"{name}.*; .*batch field"):
        CompiledState(model(), read, {})


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


@thorough
def test_an_executable_refuses_changes_and_goes_on_when_they_are_undone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    subject: Any = llama(layers=1)
    batch = sequences([9, 5], seed=1)
    exe = hg.compile(subject, "<tp1,pp1>", adamw, device="cpu", check="off")
    for _ in range(3):
        exe.step(batch)
        subject.eval()
        exe.evaluate(batch)
        subject.train()
    exe.save(tmp_path / "checkpoint")
    weights = exe.full_state_dict()
    subject.load_state_dict(weights)
    ids = batch[0][None]
    # The user's model and training compute alike, since it has the trained weights.
    expected = subject(input_ids=ids, labels=ids).loss.item()
    assert exe.evaluate(batch[:1]).loss == pytest.approx(expected, rel=1e-5)
    assert not caplog.records or all("save:" not in record.message for record in caplog.records)

    subject.loss_function = F.mse_loss
    for call in (exe.step, exe.evaluate, exe.gradients):
        with pytest.raises(Unsupported, match=r"_loss_function.* from nothing to mse_loss.*call hg.compile again"):
            call(batch)
    del subject._loss_function
    subject.config.rms_norm_eps = 1.0
    with pytest.raises(Unsupported, match=r"'rms_norm_eps'"):
        exe.step(batch)
    subject.config.rms_norm_eps = 1e-6
    exe.step(batch)
    edited(subject.lm_head.weight)
    with pytest.raises(Unsupported, match=r"lm_head.weight: the tensor was replaced or edited"):
        exe.step(batch)
    with caplog.at_level(logging.WARNING):
        exe.save(tmp_path / "after")
    assert "save: lm_head.weight: the tensor was replaced or edited" in caplog.text
    exe.close()


class Tempered:
    def __init__(self) -> None:
        self.beta, self.program = 1.0, None

    def __call__(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        each = F.cross_entropy(outputs[0], batch["labels"][0], ignore_index=-100, reduction="none")
        return each.sum() * self.beta


def test_a_loss_annealed_after_its_capture_is_refused() -> None:
    loss: Any = Tempered()
    given = functools.partial(hg.compile, strategy="<tp1,pp1>", device="cpu", check="off")
    loss.program = hg.capture(Own(layers=1), loss=loss, check="off")
    exe = given(Own(layers=1), program=loss.program, loss=loss)
    loss.beta = 0.5
    with pytest.raises(Unsupported, match=r"loss: 'beta' was changed after hg.compile from 1.0 to 0.5"):
        exe.evaluate(sequences([9, 5], seed=1))
    exe.close()
    for other in (loss, None):
        with pytest.raises(ValueError, match="captured with another loss=, or a value that the loss or model reads"):
            given(Own(layers=1), program=loss.program, loss=other)


def test_a_loss_annealed_between_steps_is_refused() -> None:
    loss, batch = Tempered(), sequences([9, 5], seed=1)
    exe = hg.compile(Own(layers=1), "<tp1,pp1>", adamw, loss=loss, device="cpu", check="off")
    exe.step(batch)
    loss.beta = 0.5
    with pytest.raises(Unsupported, match=r"loss: 'beta' was changed after hg.compile from 1.0 to 0.5.*batch fields"):
        exe.step(batch)
    exe.close()


def test_tensors_of_every_layout_have_a_state() -> None:
    numbers = torch.randn(4)
    kinds = {
        "sparse": torch.eye(3).to_sparse(),
        "sparse rows": torch.eye(3).to_sparse_csr(),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "negative": torch._neg_view(numbers),
        "quantized": torch.quantize_per_tensor(numbers, 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([numbers, numbers[:2]]),
        "empty": torch.empty(0),
        "8 bits": torch.zeros(3, dtype=torch.float8_e4m3fn),
    }
    assert {kind: _state(tensor) == _state(tensor) for kind, tensor in kinds.items()} == dict.fromkeys(kinds, True)
    before = _state(numbers)
    numbers.data[1] += 1
    assert _state(numbers) != before
