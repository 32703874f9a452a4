"""What a newcomer passes by mistake is answered in one sentence: what, where, and what to write instead."""

# mypy: disable-error-code="arg-type, list-item"
from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

import hydragraph as hg
from tests.models import captured, llama

STRATEGY = hg.Strategy.parse("<tp1,pp1>", layers=2)


@cache
def executable() -> hg.Executable:
    program, model = captured("llama")
    return hg.compile(model, STRATEGY, torch.optim.AdamW, program=program)


def closed() -> hg.Executable:
    program, model = captured("llama")
    found = hg.compile(model, STRATEGY, torch.optim.AdamW, program=program)
    found.close()
    return found


def ready(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.25)


# What is passed -> what is said, as a regular expression; every sentence ends in a way out.
CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "a model's name": (lambda: hg.compile("gpt2", STRATEGY), "'gpt2'; pass transformers.AutoModel.*from_pretrained"),
    "no model": (lambda: hg.capture(None), "model is NoneType; pass a torch.nn.Module"),
    "a ready optimizer": (
        lambda: hg.compile(llama(layers=2), STRATEGY, ready(llama(layers=2))),
        r"optimizer SGD: .*; pass a function .*lambda parameters: torch.optim.SGD\(parameters, lr=0.25\)",
    ),
    "an optimizer's name": (lambda: hg.compile(llama(layers=2), STRATEGY, "adamw"), "optimizer: it is 'adamw'; pass"),
    "a wrong text": (lambda: hg.compile(llama(layers=2), "<tp1,pq1>"), r"(?s)<tp1,pq1>.*\^"),
    "a strategy of numbers": (lambda: hg.compile(llama(layers=2), [1, 1]), r"strategies are \[1, 1\]; pass a Strategy"),
    "no strategy": (lambda: hg.compile(llama(layers=2), None), "strategy is None; pass a Strategy"),
    "no text": (lambda: hg.Strategy.parse(None, 2), "text is None: give one such as"),
    "no profile": (
        lambda: hg.Profile.load("none.json"),
        "none.json: there is no such file; write .* profile",
    ),
    "a directory for a profile": (lambda: hg.Profile.load("."), ".: no profile, which is a JSON file; write one"),
    "no mini-batch": (lambda: executable().step(None), "mini-batch is None; pass a list of sequences"),
    "nothing": (lambda: executable().step([]), "no target token: give at least one sequence"),
    "one sequence": (lambda: executable().step([1, 2, 3]), r"input_ids is int \(1\).*; a mini-batch is a list of seq"),
    "text": (lambda: executable().step(["a sentence"]), r"input_ids is str \('a sentence'\); pass 1-D int64"),
    "halves": (lambda: executable().step([[1.5, 2.0]]), r"input_ids is list \(\[1.5, 2.0\]\); pass 1-D int64"),
    "a token too large": (
        lambda: executable().step([[1, 2], [3, 10**6]]),
        "sequence 1: input_ids is 1000000 at",
    ),
    "a step of another depth": (
        lambda: executable().step([[1, 2]], strategy="<tp1,pp3>"),
        "3 stages for 2 layers",
    ),
    "a step after the end": (lambda: closed().step([[1, 2]]), r"step: .*closed; call it before close\(\)"),
    "a save after the end": (lambda: closed().save("nowhere"), r"save: .*closed; call it before close\(\)"),
    "no function": (lambda: hg.launch("train", 2), r"the function is 'train': give one"),
    "ranks as text": (lambda: hg.launch(print, "2"), "ranks='?2'?: give a positive number"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_is_answered_in_a_sentence(case: str) -> None:
    call, sentence = CALLS[case]
    with pytest.raises((ValueError, TypeError, FileNotFoundError)) as told:
        call()
    assert re.search(sentence, str(told.value)), told.value


def test_what_people_pass_is_taken() -> None:
    texts = ["<tp1,pp1>", STRATEGY, "<tp1,pp1>"]
    program, model = captured("llama")
    found = hg.compile(model, texts, program=program)
    assert found.strategies == (STRATEGY,)
    tensors = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    wanted = found.evaluate(tensors).loss
    assert found.evaluate([[1, 2, 3], (4, 5)]).loss == wanted
    padded = {"input_ids": [[1, 2, 3], [4, 5, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]]}
    assert found.evaluate(padded, strategy="<tp1,pp1>").loss == wanted
