"""Mistakes of a newcomer give an error of one sentence: what, where, and what to write instead.

Commands with mistakes, and their errors, are in bad_inputs.txt.
"""

# pyrefly: ignore-errors[bad-argument-type]
from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import hydragraph as hg
from hydragraph.commands import plan_devices
from hydragraph.spec.default_cluster import default_cluster
from tests.commands.tiny import run, write
from tests.models import captured, llama

H200 = default_cluster(1)
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


# Call -> regular expression for its error; every error ends with a remedy.
CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "a model's name": (lambda: hg.compile("gpt2", STRATEGY), "'gpt2'; pass transformers.AutoModel.*from_pretrained"),
    "no model": (lambda: hg.capture(None), "'model' is NoneType; pass a torch.nn.Module"),
    "a ready optimizer": (
        lambda: hg.compile(llama(layers=2), STRATEGY, ready(llama(layers=2))),
        r"optimizer SGD: .*; pass a function .*lambda parameters: torch.optim.SGD\(parameters, lr=0.25\)",
    ),
    "an optimizer's name": (
        lambda: hg.compile(llama(layers=2), STRATEGY, "adamw"),
        "optimizer: 'adamw' is not a function; pass",
    ),
    "a norm of 0": (
        lambda: hg.compile(llama(layers=2), STRATEGY, torch.optim.AdamW, max_grad_norm=0),
        "max_grad_norm is 0: give a number above 0, or None for no clipping",
    ),
    "a function without a result": (
        lambda: hg.compile(llama(layers=2), STRATEGY, lambda parameters: None),
        "optimizer: the function returned None; return an optimizer",
    ),
    "a profile's file": (
        lambda: hg.compile(llama(layers=2), STRATEGY, profile="profile.json"),
        "compile: 'profile' is 'profile.json': give Profile or Costs or Cluster or None",
    ),
    "lengths of one mini-batch": (
        lambda: hg.compile(llama(layers=2), STRATEGY, lengths=[3, 4]),
        r"compile: 'lengths' is \[3, 4\]: give Sequence",
    ),
    "a policy's fields": (
        lambda: hg.compile(llama(layers=2), STRATEGY, policy={"gain": 0.1}),
        "compile: 'policy' is {'gain': 0.1}: give Policy or None",
    ),
    "a model for a program": (
        lambda: hg.compile(llama(layers=2), STRATEGY, program=llama(layers=2)),
        "compile: 'program' is Llama.*: give Program or None",
    ),
    "a window as text": (
        lambda: hg.compile(llama(layers=2), STRATEGY, window="1GB"),
        "compile: 'window' is '1GB': give int or None",
    ),
    "no seconds": (
        lambda: hg.compile(llama(layers=2), STRATEGY, progress_s=0),
        "compile: 'progress_s' is 0: give seconds above 0",
    ),
    "an example as a list": (
        lambda: hg.capture(llama(layers=2), example=[1]),
        r"capture: 'example' is \[1\]: give Map",
    ),
    "one rank": (lambda: executable().weights(to=0), r"weights: 'to' is 0: give Sequence\[int\]"),
    "a folder for pieces": (lambda: executable().keep("x"), "keep: 'pieces' is 'x': give Pieces"),
    "no world": (lambda: executable().move(None, None, [0]), "move: 'world' is None: give World"),
    "one count": (lambda: hg.lower(captured("llama")[0], "<tp1,pp1>", 2), "lower: 'micro_batches' is 2: give Sequence"),
    "a cluster for costs": (lambda: hg.plan(H200, None), "plan: 'costs' is Cluster.*: give Costs"),
    "costs of a cluster": (lambda: hg.Costs(H200, H200), "Costs: 'profile' is Cluster.*: give Profile"),
    "a simulation of a cluster": (lambda: hg.simulate(H200, STRATEGY, None), "simulate: 'costs' is Cluster"),
    "too few devices": (
        lambda: hg.lower(captured("llama")[0], "<tp1,pp2>", [1]).simulate(H200),
        "2 rank programs on 1 devices: give one device per rank",
    ),
    "seconds as text": (lambda: hg.Elastic(grace_s="5"), "'grace_s' is '5': give float"),
    "half a worker": (lambda: hg.Policy(workers=1.5), "'workers' is 1.5: give int"),
    "an elastic launch": (lambda: hg.launch(print, 2, elastic=True), "launch: 'elastic' is True: give Elastic or None"),
    "a promise after the end": (
        lambda: closed().promise([[1, 2]]),
        r"promise: .*closed; call promise before close\(\)",
    ),
    "news after the end": (lambda: closed().announce([[1, 2]]), "announce: .*closed"),
    "a wrong text": (lambda: hg.compile(llama(layers=2), "<tp1,pq1>"), r"(?s)<tp1,pq1>.*\^"),
    "a strategy of numbers": (lambda: hg.compile(llama(layers=2), [1, 1]), r"'strategy' is \[1, 1\]; pass a Strategy"),
    "no strategy": (lambda: hg.compile(llama(layers=2), None), "'strategy' is None; pass a Strategy"),
    "no text": (lambda: hg.Strategy.parse(None, 2), "text is None: give a string such as"),
    "no profile": (
        lambda: hg.Profile.load("none.json"),
        "none.json does not exist; write .* profile",
    ),
    "a directory for a profile": (
        lambda: hg.Profile.load("."),
        ". is not a text file, but a profile is a JSON file: write one",
    ),
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
    "a step after the end": (lambda: closed().step([[1, 2]]), r"step: .*closed; call step before close\(\)"),
    "a save after the end": (lambda: closed().save("nowhere"), r"save: .*closed; call save before close\(\)"),
    "no function": (lambda: hg.launch("train", 2), r"'train' is not a function: give one"),
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
    hg.precompile(program, "<tp1,pp1>")
    hg.lower(program, "<tp1,pp1>", [1])
    found = hg.compile(model, texts, program=program)
    found.check("<tp1,pp1>", 1)
    assert found.strategies == (STRATEGY,)
    tensors = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    wanted = found.evaluate(tensors).loss
    assert found.evaluate([[1, 2, 3], (4, 5)]).loss == wanted
    padded = {"input_ids": [[1, 2, 3], [4, 5, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]]}
    assert found.evaluate(padded, strategy="<tp1,pp1>").loss == wanted


CLUSTER = """types: {h200: {flops_per_s: 9.89e14, memory_bytes: 141e9, memory_bytes_per_s: 4.8e12}}
nodes:
  - {type: h200, devices: 2, count: 2, inner: {bytes_per_s: 450e9, latency_s: 5e-6},
     outer: {bytes_per_s: 50e9, latency_s: 1e-5}}
"""
# The folder D of bad_inputs.txt.
ODD: dict[str, str | bytes] = {
    "text.txt": "some words of text\n" * 50,
    "one.txt": "x",
    "empty.txt": "",
    "chat.jsonl": '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n' * 20,
    "user.jsonl": '{"messages": [{"role": "user", "content": "hi"}]}\n',
    "bad.jsonl": "{'a': 1}\n",
    "numbers.jsonl": '{"ids": [1, 2]}\n',
    "table.parquet": "text",
    "table.csv": "text,id\nsome words\n",
    "text.txt.gz": b"\x1f\x8b",
    "picture.png": b"\x89PNG\r\n\x1a\n\x00\xff\xfe" * 20,
    "latin.txt": "12\ncaf\xe9\n".encode("latin-1"),
    "full/a.txt": "x",
    "half/summary.json": "{",
    "other/summary.json": "{}",
    "badmodel/config.json": "{",
    "strange/config.json": '{"model_type": "zork"}',
    "list.json": "[1]",
    "list.yaml": "- a\n- b\n",
    "empty.yaml": "",
    "bad.yaml": "a: [1\nb: :\n",
    "dup.yaml": "steps: 1\nsteps: 2\n",
    "tabs.yaml": "a:\n\tb: 1\n",
    "missing.yaml": "steps: 1\n",
    "utf16.yaml": "steps: 1".encode("utf-16"),
    "strategy.yaml": "pipelines: [{stage: []}]\n",
    "good.yaml": CLUSTER,
    "nodes.yaml": CLUSTER.partition("nodes")[0] + "nodes: []\n",
    "zork.yaml": CLUSTER.replace("type: h200", "type: zork"),
    "nocount.yaml": CLUSTER.replace("devices: 2", "devices: 0"),
    "gigabytes.yaml": CLUSTER.replace("141e9", "141"),
    "text_bytes.yaml": CLUSTER.replace("141e9", "141GB"),
    "many.yaml": CLUSTER.replace("devices: 2", "devices: 100000000"),
    "zeros.txt": "0\n0\n",
    "health.yaml": "0: 0.5\n",
    "rates.yaml": "rates: {0: 2}\n",
    "dead.yaml": "0: .inf\n1: .inf\n2: .inf\n3: .inf\n",
    "far.yaml": "9: 2.0\n",
}


def typed() -> Iterator[tuple[str, str, str]]:
    """Yield the heading, the command and the sentence of each pair of lines of bad_inputs.txt."""
    heading = command = ""
    for line in Path(__file__).with_name("bad_inputs.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            heading = line[2:]
        elif line.startswith("$ "):
            command = line[2:]
        elif line and command:
            yield heading, command, line
            command = ""


TYPED = tuple(typed())


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    (folder / "empty").mkdir()
    (folder / "self.yaml").symlink_to("self.yaml")
    for name, content in ODD.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.mark.parametrize(("heading", "command", "sentence"), TYPED, ids=[command for _, command, _ in TYPED])
def test_what_is_typed_is_answered_in_a_sentence(
    heading: str, command: str, sentence: str, odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(odd)  # a folder without the files that these commands name
    # Another process would compile graphs from the other end, on the core of another worker.
    monkeypatch.setattr(plan_devices, "compiled_by_two", lambda asked: nullcontext(lambda: False))
    config = write(tmp_path)

    def placed(text: str) -> str:
        return re.sub(r"\bD/", f"{odd}/", text).replace("CONFIG", str(config)).replace("RUN/", f"{tmp_path}/")

    told = run(*(placed(word) for word in shlex.split(command)))
    said = " ".join(told.stderr.replace("│", " ").split())
    pattern = ".*".join(map(re.escape, placed(sentence).split("...")))
    assert re.search(pattern, said), said
    assert told.exit_code == 2
    assert "Traceback" not in told.output
    assert "(a bug" not in told.output
    assert "hydragraph: " in said or "Error" in said, "of typer, or ours"
    if "only" not in heading:
        assert not list(tmp_path.rglob("*.bin")), "no data were read"


def test_so_many_mistakes_are_tried() -> None:
    commands = [command for _, command, _ in TYPED]
    assert len(set(commands)) == len(commands) >= 165
    verbs = {command.split()[0] for command in commands} - {"trainn"}
    assert verbs == {verb for verb in run("--help").stdout.split() if verb in verbs}, "each is a verb"
