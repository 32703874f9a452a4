"""What a run finds when it starts from a folder: the same bits, what is stale, and what is missing."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.frontend import capture as frontend
from hydragraph.frontend.compiled_folder import load as loading
from hydragraph.frontend.compiled_folder import manifest
from hydragraph.frontend.compiled_folder.load import load
from hydragraph.frontend.compiled_folder.manifest import Refused
from hydragraph.ir.program import Program
from hydragraph.passes import graph_passes, joint
from hydragraph.passes import variants as kept
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StageKind
from tests.adapted import hand_written_lora
from tests.frontend.compiled_folder.folders import edit, rehash, written, written_for_one_rank
from tests.frontend.compiled_folder.struck import outcome, struck
from tests.models import captured, dropping_gpt2, gemma, gpt2, llama, mixtral, phi3, qwen3, randomised, sequences
from tests.own_models import small
from tests.thorough import first, only

# Run in turn; in the second strategy the last rank has the last stage, which the first strategy does not have.
SWITCHED = ("<[0,1]x2s>", "<[0]x1r,[1]x1>")
SWITCHED_DEEPER = ("<[0,1]x3s>", "<[0]x1r,[1]x2>")
# Strategies that do not cut experts.
SWITCHED_WHOLE = ("<[0]x1r,[1]x1>", "<[1]x1,[0]x1r>", "<[0]x1r,[1]x1>")
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: gpt2(layers=2),
    "dropout": lambda: dropping_gpt2(2),
    "phi3": phi3,
    "qwen3": qwen3,
    "gemma": gemma,
    "mixtral": mixtral,
    "an uneven width": lambda: llama(layers=2, width=99),
    "a head that ranks share": lambda: llama(layers=2, kv=1),
    "frozen layers": lambda: partly_frozen(llama(layers=2)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compiled") / "folder"
    written_for_one_rank(path)
    return path


def partly_frozen(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".0." not in name and "embed" not in name)
    return model


def model_of(name: str) -> nn.Module:
    if name == "lora":
        return hand_written_lora()
    if name == "small":
        return randomised(small(layers=2))
    return FAMILIES[name]() if name in FAMILIES else llama(layers=2)


def switched(name: str) -> tuple[str, ...]:
    return {"lora": SWITCHED_DEEPER, "mixtral": SWITCHED_WHOLE}.get(name, SWITCHED)


def trained(name: str, folder: Path | None, dtype: torch.dtype, program: Program | None = None) -> dict[str, Tensor]:
    """Train a step under each strategy in turn, and return rank 0's weights."""
    model = model_of(name)
    strategies = switched(name)
    factory = lambda named: torch.optim.AdamW(named, lr=1e-2)  # noqa: E731
    executable = hg.compile(
        model, strategies[0], factory, dtype=dtype, device="cpu", program=program, compiled=folder, check="off"
    )
    for step, strategy in enumerate(strategies):
        executable.step(sequences([7, 5, 11], seed=step), strategy)
    weights = executable.full_state_dict()
    executable.close()
    return weights


def _never(*_args: object, **_options: object) -> None:
    raise AssertionError("something was traced")


def from_folder(name: str, dtype: torch.dtype, folder: Path) -> dict[str, Tensor]:
    """On every rank: train from a folder in a process that cannot trace."""
    frontend.capture = _never  # pyrefly: ignore[bad-assignment]
    vars(joint)["trace_joint"] = _never
    vars(graph_passes)["shard"] = _never
    return trained(name, folder, dtype)


def as_traced(name: str, dtype: torch.dtype, variants: Variants) -> dict[str, Tensor]:
    """On every rank: train from what was traced before the ranks started."""
    return trained(name, None, dtype, variants.program)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("small", torch.float32),
        *(
            pytest.param(name, torch.bfloat16, marks=pytest.mark.thorough)
            for name in ("llama", "lora", "mixtral", "an uneven width")
        ),
        *(pytest.param(name, torch.float32, marks=pytest.mark.thorough) for name in ("llama", "lora", *FAMILIES)),
    ],
)
def test_ranks_that_start_from_a_folder_train_the_same_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = model_of(name)
    variants = written(tmp_path, model, hg.capture(model, dtype=dtype), *switched(name), ranks=2)
    read = hg.launch(from_folder, 2, name, dtype, tmp_path)[0]
    found = hg.launch(as_traced, 2, name, dtype, variants)[0]
    assert read.keys() == found.keys()
    assert all(torch.equal(read[key], found[key]) for key in found)
    assert any(not torch.equal(read[key], value) for key, value in model.state_dict().items())


def test_capture_reads_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend, "capture", _never)
    program = hg.capture(llama(layers=2), compiled=folder)
    assert program.fingerprint == captured("llama")[0].fingerprint


def test_a_degree_that_is_missing_is_compiled_and_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiled = load(folder)
    variants = Variants(compiled.program, library=compiled)
    kept._shared.clear()
    with caplog.at_level(logging.WARNING, "hydragraph"):
        for part in StageKind(2).parts():
            variants.get(compiled.program.blocks[0], part)
        variants.get(compiled.program.blocks[-1], part)
    assert caplog.messages == [f"compiled folder {folder} has no graphs for <tp2>: they are compiled now"]


@pytest.mark.parametrize("name", ["torch", "transformers", "python", "hydragraph"])
def test_another_version_is_refused(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = manifest.version_of
    monkeypatch.setattr(loading, "version_of", lambda asked: "99.1" if asked == name else here(asked))
    said = re.escape(f"the folder needs {name} {here(name)}, but this machine has 99.1; write the folder again")
    with pytest.raises(Refused, match=said):
        load(folder)


def test_other_code_of_hydragraph_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "own_code", lambda: "0" * 64)
    with pytest.raises(Refused, match="hydragraph's files that generate graphs have changed"):
        load(folder)


def test_another_model_dtype_or_number_of_ranks_is_refused(folder: Path) -> None:
    strategy = hg.Strategy.parse("<[0]x2>", layers=2)
    with pytest.raises(Refused, match="from another model: intermediate_size is 104, but was 102"):
        hg.compile(llama(layers=2, width=104), strategy, device="cpu", compiled=folder)
    with pytest.raises(Refused, match=r"computes in torch\.float32, but 'dtype' is torch\.bfloat16; pass dtype="):
        hg.compile(llama(layers=2), strategy, dtype=torch.bfloat16, device="cpu", compiled=folder)
    with pytest.raises(Refused, match=r"compiled for 1 ranks, but this run has 3; .*--ranks 3"):
        load(folder, ranks=3)
    with pytest.raises(ValueError, match="program= and compiled= were both given"):
        hg.compile(llama(layers=2), strategy, device="cpu", compiled=folder, program=captured("llama")[0])


def _first_layer(folder: Path) -> None:
    """Read a folder's program, and the variant of its first layer."""
    compiled = load(folder)
    spec = Variants(compiled.program, added=True).spec(compiled.program.blocks[1], StageKind(1).parts()[0])
    compiled.variant(spec)


@pytest.mark.parametrize(
    ("file", "change", "why"),
    [
        ("program.json", lambda data: data.update(dtype="float64"), "the fingerprint is"),
        ("program.json", lambda data: data.update(more=1), "expected the fields"),
        ("program.json", lambda data: data["blocks"].pop(1), "name at least one block"),
        ("program.json", lambda data: data["blocks"][1].update(template="x"), "the template x is missing"),
        ("program.json", lambda data: data["parameters"].pop(), "the parameter .* is missing"),
        ("program.json", lambda data: data["buckets"].pop(), "do not contain every parameter exactly once"),
        ("program.json", lambda data: data["parameters"][0].update(shape=[0, 4]), "has no elements"),
        ("program.json", lambda data: data["templates"][0]["graph"]["graphs"][0].pop(0), "not an earlier node"),
        ("graphs/layer.0.tp1.json", lambda data: data.update(outputs=2), "a different number of values"),
        ("graphs/layer.0.tp1.json", lambda data: data["inputs"].reverse(), "the inputs differ from"),
        ("graphs/layer.0.tp1.json", lambda data: data["needs"].append("loot"), "the backward must not take loot"),
        ("graphs/layer.0.tp1.json", lambda data: data["gradients"].pop(), "a different number of gradients"),
        ("graphs/layer.0.tp1.json", lambda data: data["graphs"]["hints"].__setitem__(0, 0), "at least 2"),
        ("graphs/layer.0.tp1.json", lambda data: data["kinds"].popitem(), "kinds: expected the fields"),
        (
            "graphs/layer.0.tp1.json",
            lambda data: data["graphs"]["graphs"][0][0][5][3].__setitem__(0, 63),
            "a rank's shard is",
        ),
        (
            "graphs/layer.0.tp1.json",
            lambda data: data["graphs"]["graphs"][1][-2].__setitem__(2, "os.system"),
            "os.system",
        ),
    ],
)
def test_data_that_was_changed_and_signed_anew_is_refused(
    folder: Path, file: str, change: object, why: str, tmp_path: Path
) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(folder, copied)
    edit(copied, file, change)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(Refused, match=why):
        _first_layer(copied)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Tensor]:
    return outcome(folder)


@only("1", "2", "3")
@pytest.mark.parametrize("seed", first(range(6), range(120)))
def test_a_full_check_believes_nothing_that_a_folder_says(folder: Path, expected: dict[str, Tensor], seed: int) -> None:
    found = struck(folder, seed, expected)
    assert found == "the same" or found.startswith("refused"), found


def test_a_full_check_names_the_folder_whose_graphs_compute_something_else(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(folder, copied)

    def double(data: dict[str, Any]) -> None:
        next(node for node in data["graphs"]["graphs"][0] if node[2] == "aten::rsqrt.default")[2] = "aten::exp.default"

    edit(copied, "graphs/layer.0.tp1.json", double)
    with pytest.raises(
        hg.Unsupported, match=f"layer.0 in stages of kind <tp1> in compiled folder {copied}.*write the folder again"
    ):
        outcome(copied)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(outcome(copied, check="auto"), outcome(folder))  # check="auto" trusts the folder


def test_a_pickle_is_no_program(tmp_path: Path) -> None:
    written_for_one_rank(tmp_path)
    (tmp_path / "program.json").write_bytes(b"\x80\x04\x95\x00")
    rehash(tmp_path)
    with pytest.raises(Refused, match=r"program\.json"):
        load(tmp_path)
