"""Hugging Face directories: every rank reads its own part, bit for bit, and what does not fit is refused by all."""

from __future__ import annotations

import functools
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BertForMaskedLM, BertForNextSentencePrediction, BertForPreTraining

import hydragraph as hg
from hydragraph.checkpoint.weights import pretrained
from hydragraph.checkpoint.weights.pretrained import TensorNames
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import join
from hydragraph.engine.compiled_model import tensor_names
from hydragraph.frontend.capture import capture
from hydragraph.frontend.meta_initialiser import initial_buffers
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.program import Program
from hydragraph.runtime.home_state import HomeState
from hydragraph.spec.home import EQUAL
from tests.models import MODELS, bert
from tests.runtime.homes import Model
from tests.thorough import first, only

KINDS: dict[str, Callable[[], nn.Module]] = {n: MODELS[n] for n in ("llama", "gpt2", "qwen3", "gemma", "mixtral")} | {
    "bert": bert
}
RANKS = 3


def meta(model: Any) -> nn.Module:
    """Return the same model without weights."""
    with torch.device("meta"):
        made: nn.Module = type(model)(model.config).eval()
    return made


@functools.cache
def program_of(kind: str) -> Program:
    """Return the program of a kind; a capture takes a second."""
    return capture(KINDS.get(kind, MODELS.get(kind))())


def compiled(kind: str, model: Any) -> hg.Executable:
    strategy = hg.Strategy.parse("<tp1,pp1>", layers=model.config.num_hidden_layers)
    return hg.Executable(meta(model), program_of(kind), strategy, None, join("cpu"))


# Directories.


@dataclass(frozen=True)
class Saved:
    """A directory, and the model that it holds."""

    path: Path
    model: nn.Module


def save(root: Path, kind: str, form: str) -> Saved:
    """Write a model as one file, as several, or in bf16."""
    model, path = KINDS[kind](), root / f"{kind}-{form}"
    if form == "bf16":
        model = model.bfloat16()
    model.save_pretrained(path, max_shard_size="20KB" if form == "several" else "5GB")
    return Saved(path, model.float())


class Directories(dict[tuple[str, str], Saved]):
    """Directories by kind and form, each written when it is first asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, key: tuple[str, str]) -> Saved:
        self[key] = save(self.root, *key)
        return self[key]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    return Directories(tmp_path_factory.mktemp("models"))


# What ranks do.


class Counted:
    """A file of safetensors that counts the bytes read from its tensors."""

    def __init__(self, opened: Any, counts: list[int]) -> None:
        self.opened, self.counts = opened, counts

    def keys(self) -> Any:
        return self.opened.keys()

    def get_slice(self, key: str) -> Any:
        return CountedSlice(self.opened.get_slice(key), self.counts)


class CountedSlice:
    def __init__(self, part: Any, counts: list[int]) -> None:
        self.get_shape, self.get_dtype, self.part, self.counts = part.get_shape, part.get_dtype, part, counts

    def __getitem__(self, index: Any) -> Tensor:
        found: Tensor = self.part[index]
        self.counts.append(found.numel() * found.element_size())
        return found


@contextmanager
def counting() -> Iterator[list[int]]:
    """Count the bytes of all slices read inside; anything that reads a whole tensor fails."""
    counts: list[int] = []
    real = safetensors.safe_open

    @contextmanager
    def opens(*arguments: Any, **options: Any) -> Iterator[Counted]:
        with real(*arguments, **options) as opened:
            yield Counted(opened, counts)

    with mock.patch.object(safetensors, "safe_open", opens):
        yield counts


@dataclass(frozen=True)
class Loaded:
    """What a rank has: its shard of every parameter in canonical order, the buffers, and how many bytes it read."""

    shards: dict[str, Tensor]
    buffers: dict[str, Tensor]
    bytes: int


Given = tuple[Path, Model, TensorNames, dict[str, Tensor]]


def load_all(given: list[Given]) -> list[Loaded]:
    """Load every directory into a new home state."""
    world, found = join("cpu"), []
    groups = Groups(world, timedelta(seconds=60))
    for path, buckets, names, buffers in given:
        layouts = HomeLayouts(EQUAL, world.ranks).by_name(buckets.buckets)
        home = HomeState.allocate(cast(Program, buckets), layouts, world.rank)
        with counting() as counts:
            pretrained.load(path, home, buffers, names, groups)
        found.append(Loaded({n: p.detach().clone() for n, p in home.parameters.items()}, buffers, sum(counts)))
    return found


CASES = [(kind, form) for kind in KINDS for form in ("one", "several")] + [("llama", "bf16")]
# Transposed weights, weights with two names, and weights merged from tensors in several files.
KEPT = [("gpt2", "one"), ("gemma", "several"), ("mixtral", "several"), ("llama", "bf16")]


class ByRank(dict[tuple[str, str], list[Loaded]]):
    """What each rank has of a directory: of those kept, or else of all the others, from one launch."""

    def __init__(self, directories: Directories) -> None:
        super().__init__()
        self.directories = directories

    def __missing__(self, key: tuple[str, str]) -> list[Loaded]:
        keys = KEPT if key in KEPT else [case for case in CASES if case not in KEPT]
        found = hg.launch(load_all, RANKS, [self.given(*each) for each in keys])
        self.update({each: [loaded[i] for loaded in found] for i, each in enumerate(keys)})
        return self[key]

    def given(self, kind: str, form: str) -> Given:
        saved = self.directories[kind, form]
        empty = meta(saved.model)
        names = TensorNames.of(empty, tensor_names(empty))
        return saved.path, Model(tuple(program_of(kind).buckets)), names, initial_buffers(empty)


@pytest.fixture(scope="module")
def by_rank(directories: Directories) -> ByRank:
    return ByRank(directories)


@only("llama-bf16")
@pytest.mark.parametrize(
    ("kind", "form"), first([("llama", "one"), ("gemma", "several"), ("mixtral", "several"), ("llama", "bf16")], CASES)
)
def test_alone_the_weights_are_the_directorys_bit_for_bit(kind: str, form: str, directories: Directories) -> None:
    saved = directories[kind, form]
    exe = compiled(kind, saved.model)
    with counting() as counts:
        exe.load_pretrained(saved.path)
    assert sum(counts) == stored_bytes(saved.path)
    assert_holds(exe, saved.model)


@pytest.mark.parametrize(("kind", "form"), first(KEPT, CASES))
def test_the_ranks_together_hold_the_directory_bit_for_bit(
    kind: str, form: str, directories: Directories, by_rank: ByRank
) -> None:
    expected, ranks = dict(directories[kind, form].model.named_parameters()), by_rank[kind, form]
    assert ranks[0].shards.keys() == expected.keys()
    for name, parameter in program_of(kind).parameters.items():
        # A bucket's canonical order goes through the ranks in turn.
        found = parameter.natural(torch.cat([each.shards[name] for each in ranks]))
        assert torch.equal(found, expected[name]), name


@pytest.mark.parametrize(("kind", "form"), first(KEPT, CASES))
def test_a_rank_reads_its_part_only(kind: str, form: str, directories: Directories, by_rank: ByRank) -> None:
    path = directories[kind, form].path
    assert (len(list(path.glob("*.safetensors"))) > 1) == (form == "several")
    counts, total = [each.bytes for each in by_rank[kind, form]], stored_bytes(path)
    assert sum(counts) == total  # every byte is read once, by its owner
    assert max(counts) < 1.1 * total / RANKS


def stored_bytes(path: Path) -> int:
    return sum(t.numel() * t.element_size() for f in path.glob("*.safetensors") for t in load_file(f).values())


def assert_holds(exe: hg.Executable, model: nn.Module) -> None:
    state, expected = exe.full_state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert state[name].dtype == torch.float32
        assert torch.equal(state[name], tensor), name


def test_a_file_of_the_base_model_fits_the_model_with_a_head_where_it_ties(tmp_path: Path) -> None:
    model: Any = MODELS["gpt2"]()
    model.transformer.save_pretrained(tmp_path)
    assert "wte.weight" in load_file(tmp_path / "model.safetensors")
    exe = compiled("gpt2", model)
    exe.load_pretrained(tmp_path)
    assert_holds(exe, model)


def test_names_and_buffers_of_older_versions_are_converted(tmp_path: Path) -> None:
    model = bert()
    state = {n: t.clone() for n, t in model.state_dict().items() if not n.startswith("cls.predictions.decoder")}
    renamed = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for n, t in state.items()
    }
    assert renamed.keys() != state.keys()
    renamed["bert.embeddings.position_ids"] = torch.arange(256)[None]
    save_file(renamed, tmp_path / "model.safetensors")
    exe = compiled("bert", model)
    exe.load_pretrained(tmp_path)
    assert_holds(exe, model)


def test_heads_that_only_other_classes_have_are_left_unread_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = bert()
    whole = BertForPreTraining(model.config).eval()
    whole.save_pretrained(tmp_path)
    assert {"bert.pooler.dense.weight", "cls.seq_relationship.weight"} <= load_file(
        tmp_path / "model.safetensors"
    ).keys()
    exe = compiled("bert", model)
    with counting() as counts, caplog.at_level(logging.WARNING, "hydragraph"):
        exe.load_pretrained(tmp_path)
    (warning,) = caplog.messages
    assert warning == (
        f"pretrained {tmp_path}: skipped weights that the model does not have: bert.pooler.dense, cls.seq_relationship"
    )
    heads = (whole.bert.pooler, whole.cls.seq_relationship)
    assert sum(counts) == stored_bytes(tmp_path) - sum(4 * p.numel() for head in heads for p in head.parameters())
    assert_holds(exe, BertForMaskedLM.from_pretrained(tmp_path))


def test_a_head_does_not_excuse_what_is_missing_or_of_another_depth(tmp_path: Path) -> None:
    model: Any = bert()
    exe = compiled("bert", model)
    BertForPreTraining(bert(layers=2).config).save_pretrained(tmp_path / "deep")  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(
        ValueError, match=r"unknown to the model: bert\.encoder\.layer\.1\..* and 13 more: build the model"
    ):
        exe.load_pretrained(tmp_path / "deep")
    BertForNextSentencePrediction(model.config).save_pretrained(tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"missing in the files: cls\.predictions\.[^;]*: build the model that the files"
    ):
        exe.load_pretrained(tmp_path / "other")


class Own(nn.Module):
    """A module that is none of transformers', with a persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 11)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids) * self.scale.sum()
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def test_a_module_of_ones_own_and_its_buffers(tmp_path: Path) -> None:
    model = Own()
    ids = torch.arange(5)[None]
    exe = hg.compile(
        model, hg.Strategy.parse("<tp1,pp1>", layers=2), example={"input_ids": ids, "labels": ids}, device="cpu"
    )
    state = {n: torch.randn_like(t) for n, t in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    exe.load_pretrained(tmp_path)
    found = exe.full_state_dict()
    assert all(torch.equal(found[n], t) for n, t in state.items())


# What is refused.


Change = Callable[[dict[str, Tensor]], None]


def rewrite(path: Path, change: Change) -> None:
    state = load_file(path / "model.safetensors")
    change(state)
    save_file(state, path / "model.safetensors")


def truncate(path: Path) -> None:
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-8])


def break_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    (path / "model.safetensors").unlink()


def index_of(places: dict[str, str]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / "model.safetensors").rename(path / "part.safetensors")
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    return change


def pickle(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def lose(path: Path) -> None:
    (path / "model.safetensors").unlink()


def drop(state: dict[str, Tensor]) -> None:
    del state["model.norm.weight"]


def add(state: dict[str, Tensor]) -> None:
    state |= {f"model.more.{i}": torch.zeros(2) for i in range(5)}


def widen(state: dict[str, Tensor]) -> None:
    state["model.norm.weight"] = torch.zeros(65)


def quantise(state: dict[str, Tensor]) -> None:
    state["model.norm.weight"] = torch.zeros(64, dtype=torch.int8)


def untie(state: dict[str, Tensor]) -> None:
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + 1


def tie(state: dict[str, Tensor]) -> None:
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()


def in_file(change: Change) -> Callable[[Path], None]:
    return lambda path: rewrite(path, change)


REFUSALS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "missing": (
        in_file(drop),
        "ValueError",
        "missing in the files: model.norm.weight: build the model that the files belong to (GemmaForCausalLM, with",
    ),
    "unknown": (
        in_file(add),
        "ValueError",
        "unknown to the model: model.more.0, model.more.1, model.more.2 and 2 more: build the model that the files"
        " belong to (GemmaForCausalLM, with the directory's config); or drop the tensors with your class's"
        " from_pretrained, then save_pretrained",
    ),
    "shape": (in_file(widen), "ValueError", "model.norm.weight is [65] in model.safetensors and [64] in the model"),
    "quantised": (in_file(quantise), "Unsupported", "model.norm.weight is stored as I8; dequantize"),
    "untied": (in_file(untie), "ValueError", "differ, but the model ties them: set tie_word_embeddings to false"),
    "tied": (in_file(tie), "", ""),  # both names, one value
    "truncated": (truncate, "ValueError", "is damaged or incomplete"),
    "index": (break_index, "ValueError", "model.safetensors.index.json is damaged"),
    "no file": (
        index_of({"model.norm.weight": "other.safetensors"}),
        "ValueError",
        "are missing (other.safetensors): copy the directory again",
    ),
    "no key": (
        index_of({"model.gone.weight": "part.safetensors"}),
        "ValueError",
        "lists tensors that no file has (model.gone.weight in part.safetensors): copy all files",
    ),
    "pickled": (pickle, "Unsupported", "the weights are pickle files (.bin)"),
    "nothing": (lose, "ValueError", "has neither model.safetensors nor model.safetensors.index.json"),
}


def outcome(work: Callable[[], object]) -> tuple[str, str]:
    try:
        work()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def refuse_all(model: nn.Module, folders: dict[str, Path]) -> tuple[list[tuple[str, str]], list[bool]]:
    """Load what cannot be loaded, and say which attempts left this rank's weights as they were; then what can be."""
    exe = compiled("gemma", model)
    exe.full_state_dict()  # initial weights, because what is uninitialised may be NaN
    outcomes, untouched = [], []
    for path in folders.values():
        before = {n: w.clone() for n, w in exe.home.weights.items()}
        outcomes.append(outcome(functools.partial(exe.load_pretrained, path)))
        untouched.append(all(torch.equal(before[n], w) for n, w in exe.home.weights.items()))
    real = Path.is_file
    with mock.patch.object(Path, "is_file", lambda path: exe.rank != 1 and real(path)):  # a host without the files
        outcomes.append(outcome(functools.partial(exe.load_pretrained, folders["tied"])))
    exe.load_pretrained(folders["tied"])
    state = exe.full_state_dict()
    untouched.append(all(torch.equal(state[n], t) for n, t in model.state_dict().items()) if state else True)
    exe.close()
    return outcomes, untouched


def test_every_rank_says_what_does_not_fit(directories: Directories, tmp_path: Path) -> None:
    saved = directories["gemma", "one"]
    folders = {name: tmp_path / name for name in REFUSALS}
    for name, (change, _, _) in REFUSALS.items():
        shutil.copytree(saved.path, folders[name])
        change(folders[name])
    by_rank = hg.launch(refuse_all, 2, saved.model, folders)
    for place, (name, (_, kind, said)) in enumerate(REFUSALS.items()):
        found = [outcomes[place] for outcomes, _ in by_rank]
        # A rank that did not look itself tells what another found.
        assert {k for k, _ in found} <= {kind, "ValueError" if kind else ""}, (name, found)
        assert kind in {k for k, _ in found}, (name, found)
        assert all(said in text for _, text in found), (name, found)
        assert all(str(folders[name]) in text for _, text in found if text)
        if name not in ("tied", "untied"):  # which is known only once both are read
            assert all(untouched[place] for _, untouched in by_rank), name
    assert ["has neither" in outcomes[-1][1] for outcomes, _ in by_rank] == [True, True]
    assert all(untouched[-1] for _, untouched in by_rank), "a load that succeeds"


def test_tensors_that_transformers_computes_are_refused_with_a_remedy_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = MODELS["mixtral"]()
    model.save_pretrained(tmp_path / "original")
    model.save_pretrained(tmp_path / "remedy", save_original_format=False)
    monkeypatch.setattr(pretrained, "assemble", lambda *_: None)  # as if it did more than lay them side by side
    exe = compiled("mixtral", model)
    said = r"experts\.0\.w1\.weight .*MergeModulelist, Concatenate\).*; .*original_format"
    with pytest.raises(hg.Unsupported, match=said):
        exe.load_pretrained(tmp_path / "original")
    exe.load_pretrained(tmp_path / "remedy")
    assert_holds(exe, model)
