"""Find the classes of transformers that a rank's function will import, by reading its code."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from unittest import mock

import pytest
import transformers

from hydragraph.cluster.processes.preloaded_imports import classes_named_in, import_named
from tests import models

ahead = importlib.import_module("benchmarks.ahead")


def helper() -> object:
    from transformers import MistralConfig

    return MistralConfig


def direct() -> object:
    from transformers.models.llama import LlamaForCausalLM

    return LlamaForCausalLM


def by_attribute() -> object:
    import transformers

    return transformers.OPTConfig


def through_another() -> object:
    return [direct() for _ in range(2)], helper()


def of_another_module() -> object:
    return models.gpt2(layers=1)


def unrelated() -> object:
    from collections import OrderedDict

    return OrderedDict


def closing_over(function: Callable[[], object]) -> Callable[[], object]:
    def inner() -> object:
        return function()

    return inner


class Runner:
    def run(self) -> object:
        return helper()


@pytest.mark.parametrize(
    ("function", "classes"),
    [
        (direct, {"LlamaForCausalLM"}),
        (by_attribute, {"OPTConfig"}),
        (through_another, {"LlamaForCausalLM", "MistralConfig"}),
        (functools.partial(direct), {"LlamaForCausalLM"}),
        (closing_over(helper), {"MistralConfig"}),
        (Runner().run, {"MistralConfig"}),
        (of_another_module, set()),
        (lambda: ahead._small(None), {"LlamaConfig", "LlamaForCausalLM"}),
        (unrelated, set()),
        (print, set()),
        (lambda: through_another(), {"LlamaForCausalLM", "MistralConfig"}),
    ],
)
def test_classes_that_code_names(function: Callable[..., object], classes: set[str]) -> None:
    assert classes_named_in(function) == classes


def test_what_another_environment_has_installed_is_a_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "__file__", "/usr/lib/python3/dist-packages/ahead.py")
    assert classes_named_in(lambda: ahead._small(None)) == set()


def test_recursion_ends() -> None:
    def again() -> object:
        return again() or helper()

    assert classes_named_in(again, again) == {"MistralConfig"}


def test_what_is_named_is_imported_and_what_is_not_there_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with mock.patch.dict(sys.modules):
        del sys.modules["transformers"]
        import_named([])
        assert "transformers" not in sys.modules
    module = "transformers.models.ctrl.configuration_ctrl"
    monkeypatch.delitem(sys.modules, module, raising=False)  # as tests of families may have imported it
    monkeypatch.delitem(vars(transformers), "CTRLConfig", raising=False)
    import_named(["CTRLConfig", "ANoSuchThing"])
    assert module in sys.modules
