"""Arguments of `compile` besides a model and a strategy: a program that was captured before."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.cluster.failure.rank_watch import RankWatch
from hydragraph.cluster.launch import apart
from hydragraph.engine.api import _given
from hydragraph.engine.collective_call import CollectiveCalls, collective
from hydragraph.engine.compiled_model import hash_of, tensor_names
from hydragraph.runtime.deterministic_sums import Deterministic
from tests.models import captured, llama, sequences
from tests.own_models import small
from tests.thorough import thorough

STRATEGY = hg.Strategy.parse("<tp1,pp1>", layers=2)


class Calls(CollectiveCalls):
    @collective("evaluate")
    def evaluate(self, inside: Callable[[], object]) -> object:
        return inside()

    @collective("step")
    def step(self) -> str:
        return "stepped"


def test_two_threads_call_one_after_the_other() -> None:
    calls = Calls(RankWatch(None, 0, 1))
    assert calls.evaluate(calls.step) == "stepped"
    with ThreadPoolExecutor(1) as other:
        with pytest.raises(ValueError, match="step: another thread is in evaluate; make one call at a time"):
            calls.evaluate(lambda: other.submit(calls.step).result())
        assert other.submit(calls.step).result() == "stepped"


@thorough
def test_a_program_is_not_captured_again() -> None:
    program, model = captured("llama")
    with mock.patch("hydragraph.engine.api.capture", side_effect=AssertionError("it was captured before")):
        found = hg.compile(model, STRATEGY, program=program)
    wanted = hg.compile(llama(layers=2), STRATEGY)
    batch = sequences([9, 4])
    assert found.evaluate(batch).loss == wanted.evaluate(batch).loss


def test_devices_are_measured_in_the_mode_of_a_deterministic_run() -> None:
    with mock.patch.object(Deterministic, "begin") as begins:

        def measured(*_: object, **__: object) -> None:
            begins.assert_called_once_with(torch.device("cpu"), "eager")
            raise TimeoutError

        program, model = captured("llama")
        plan = mock.patch("hydragraph.engine.api.plan_automatically", side_effect=measured)
        with plan, pytest.raises(TimeoutError):
            hg.compile(model, "auto", device="cpu", program=program, deterministic=True)


@pytest.mark.parametrize(("joining", "elastic", "ranks"), [(False, False, 1), (True, False, None), (False, True, None)])
def test_a_compiled_folder_is_read_by_any_number_of_ranks_of_an_elastic_run(
    joining: bool, elastic: bool, ranks: int | None
) -> None:
    """A rank that joins is alone while it compiles, and a run may begin with fewer ranks."""
    source: Any = mock.Mock(check="off")
    with mock.patch("hydragraph.engine.api.here", return_value=object() if elastic else None):
        _, library, _ = _given(source, None, "compiled", apart("cpu"), False, joining)
    source.loaded.assert_called_once_with("compiled", ranks, False)
    assert library is source.loaded.return_value


def test_an_old_gpu_is_refused_before_a_step() -> None:
    refusal = hg.Unsupported("too old", where="varlen_attention", remedy="use newer GPUs")
    program, model = captured("llama")
    with mock.patch("hydragraph.engine.api.check_gpu", side_effect=refusal), pytest.raises(hg.Unsupported, match="old"):
        hg.compile(model, STRATEGY, device="cpu", program=program)


def of_other_layers() -> nn.Module:
    return llama(layers=3)


def of_another_epsilon() -> nn.Module:
    model = llama(layers=2)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-3  # pyrefly: ignore[bad-argument-type]
    return model


def of_another_activation() -> nn.Module:
    model = llama(layers=2)
    model.model.layers[1].mlp.act_fn = nn.GELU()
    return model


def of_another_config() -> nn.Module:
    model = llama(layers=2)
    model.config.rope_parameters["rope_theta"] = 5e4
    return model


def of_another_scale() -> nn.Module:
    model = llama(layers=2)
    model.model.layers[1].self_attn.scaling = 0.3  # which does not print
    return model


@pytest.mark.parametrize(
    "other", [of_another_scale, of_other_layers, of_another_epsilon, of_another_activation, of_another_config]
)
def test_the_program_of_another_model_is_refused(other: object) -> None:
    program, _ = captured("llama")
    with pytest.raises(ValueError, match="a model other than this LlamaForCausalLM; pass this model to `capture`"):
        hg.compile(other(), STRATEGY, program=program)


def test_what_capture_was_told_is_not_told_again() -> None:
    program, model = captured("llama")
    with pytest.raises(
        ValueError, match=r"'program' determines 'dtype' \(torch.float32\) and 'example'; pass these only to"
    ):
        hg.compile(model, STRATEGY, dtype=torch.bfloat16, program=program)
    with pytest.raises(ValueError, match=r"was captured with another loss=, .*; pass that loss, or no loss=, to"):
        hg.compile(model, STRATEGY, loss=lambda outputs, batch: outputs.logits.sum(), program=program)


class OnGpu(Tensor):
    """A tensor that NumPy cannot read before a copy to the CPU."""

    def cpu(self) -> Tensor:  # pyrefly: ignore[bad-override]
        return self.as_subclass(Tensor)

    def numpy(self) -> object:  # pyrefly: ignore[bad-override]
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def test_a_model_on_a_gpu_is_compiled() -> None:
    model = small()
    wanted = hash_of(model.state_dict())
    model.out.weight = nn.Parameter(model.out.weight.detach().as_subclass(OnGpu))
    assert hash_of(model.state_dict()) == wanted


class Noted(nn.Embedding):
    def get_extra_state(self) -> dict[str, int]:
        return {"note": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"note": 3}


def test_extra_state_is_left_out() -> None:
    model = small()
    model.tokens.__class__ = Noted
    model.register_buffer("tied", model.norm.weight.detach())
    model.register_buffer("also", model.get_buffer("tied"))
    assert model.state_dict().keys() - tensor_names(model).keys() == {"tokens._extra_state"}


class Smoothed(nn.Module):
    weights: Tensor

    def __init__(self, smoothing: float, weight: float) -> None:
        super().__init__()
        self.smoothing = smoothing
        self.register_buffer("weights", torch.full((101,), weight))

    def forward(self, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        targets = batch["labels"][0]
        return F.cross_entropy(logits[0], targets, self.weights, label_smoothing=self.smoothing, reduction="sum")


def with_losses_that_differ() -> list[str]:
    """Return the error of ranks whose losses have other attributes, or other buffers."""
    rank, said = torch.distributed.get_rank(), []
    for loss in (Smoothed(0.1 * rank, 1.0), Smoothed(0.0, 1.0 + rank)):
        with pytest.raises(ValueError, match="ranks differ in") as refused:
            hg.compile(small(), hg.Strategy.parse("2*<tp1,pp1>", 1), loss=loss, check="off", device="cpu")
        said.append(str(refused.value).removeprefix("ranks differ in ").partition(":")[0])
    return said


def test_ranks_with_different_losses_share_no_program() -> None:
    assert hg.launch(with_losses_that_differ, 2) == [["head or loss", "buffers of the model or the loss"]] * 2
