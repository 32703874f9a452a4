"""When the check runs, what it says, and what it remembers."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.engine import api
from hydragraph.frontend.capture import capture
from hydragraph.frontend.check import check_once, passed_checks
from hydragraph.frontend.check.narrow_model import CheckedModel
from hydragraph.passes import graph_passes
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StagePart
from tests.models import captured, llama, randomised
from tests.own_models import Own, weighted
from tests.thorough import thorough


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_once, "AUTO", "auto")


@thorough
@pytest.mark.usefixtures("auto")
def test_capture_checks_and_remembers(caplog: pytest.LogCaptureFixture, cache: Path) -> None:
    model = llama(layers=2)
    with caplog.at_level(logging.INFO, "hydragraph.frontend.check"):
        hg.capture(model)
        assert "checked LlamaForCausalLM: embed, head and 2 of 2 blocks" in caplog.messages[0]
        hg.capture(llama(layers=2))
        assert caplog.messages[1].endswith("(in an earlier run)")
    folder = cache / "hydragraph" / "checks"
    assert len(list(folder.iterdir())) == 1
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


@thorough
@pytest.mark.usefixtures("auto")
def test_off_checks_nothing_and_other_words_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hydragraph.frontend.check"):
        hg.capture(llama(layers=2), check="off")
        hg.capture(llama(layers=2), check=False)  # as YAML reads `off`
    assert not caplog.messages
    with pytest.raises(ValueError, match="'check' is 'on'"):
        check_once.mode_of("on")


def test_a_folder_that_cannot_be_written_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    program, model = captured("llama")
    assert check_once.check_here(CheckedModel(model, program), "full").startswith("checked LlamaForCausalLM")
    # A stage of one rank runs the variants that were compiled for the check.
    monkeypatch.delattr(graph_passes, "differentiate")
    for block in program.blocks:
        assert Variants(program, added=True).get(block, StagePart()).gradients is not None


@thorough
def test_a_fingerprint_tells_apart_what_may_differ() -> None:
    program, model = captured("llama")
    own = randomised(Own())
    subject = CheckedModel(model, program)
    keys = [passed_checks.fingerprint(subject, "auto"), passed_checks.fingerprint(subject, "full")]
    keys.append(passed_checks.fingerprint(CheckedModel(own, capture(own)), "auto"))
    own.secret = 3.0  # pyrefly: ignore[bad-argument-type]
    keys.append(passed_checks.fingerprint(CheckedModel(own, capture(own)), "auto"))
    weights = {"weight": torch.zeros(1, 4)}
    keys.append(
        passed_checks.fingerprint(CheckedModel(own, capture(own, loss=weighted, example=weights), weighted), "auto")
    )
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert passed_checks.fingerprint(subject, "auto") == keys[0]


def test_nothing_is_remembered_of_what_cannot_be_told() -> None:
    program, model = captured("llama")

    def closing(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        return weighted(outputs, batch) * model.training

    assert passed_checks.fingerprint(CheckedModel(model, program, closing), "auto") is None
    hooked = llama(layers=2)
    hooked.register_forward_hook(lambda *_: None)
    assert passed_checks.fingerprint(CheckedModel(hooked, program), "auto") is None


class Doubled(Own):
    """Twice what its graph is made to say below."""

    factor = 1.0

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        return super().forward(input_ids, position_ids, cu_seqlens) * type(self).factor


def compiled() -> str:
    """On every rank: compile a model whose forward changes after it was captured; return the error."""
    check_once.AUTO = "auto"
    usual = check_once.check_here

    def changed(subject: CheckedModel, asked: str | bool) -> Any:
        Doubled.factor = 2.0
        return usual(subject, asked)

    vars(api)["check_here"] = changed
    model: nn.Module = randomised(Doubled())
    with pytest.raises(hg.Unsupported) as error:
        hg.compile(model, hg.Strategy.parse("<[0]x2> + <[1]x2>", layers=2), device="cpu")
    return str(error.value)


@thorough
def test_one_rank_tells_the_others() -> None:
    errors = hg.launch(compiled, 2)
    assert errors[0] == errors[1]
    assert "Doubled" in errors[0]
