"""Training configs: what YAML gives, what is refused, and overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hydragraph.spec.home import Home
from hydragraph.train.config import TrainConfig
from hydragraph.train.config_overrides import differences
from tests.train.plain import settings

DEMO = Path(__file__).parents[2] / "examples" / "demo.yaml"


def write(folder: Path, changes: dict[str, Any]) -> Path:
    data = settings(folder)
    for path, value in changes.items():
        at, *keys = data, *path.split(".")
        for key in keys[:-1]:
            at = at.setdefault(key, {})
        at[keys[-1]] = value
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def test_saved_config_reads_back_as_its_equal(tmp_path: Path) -> None:
    config = TrainConfig.load(write(tmp_path, {"optimizer.betas": [0.8, 0.9]}))
    config.save(tmp_path / "resolved.yaml")
    assert TrainConfig.load(tmp_path / "resolved.yaml") == config
    resolved = yaml.safe_load((tmp_path / "resolved.yaml").read_text())
    assert resolved["seed"] == 0, "defaults are written out"
    assert resolved["data"]["text_field"] == "text"


def test_documents_are_held_out_by_default_only_if_the_run_evaluates_on_them(tmp_path: Path) -> None:
    file = write(tmp_path, {"data.heldout": None})
    sets = "data.evaluation={other: {paths: [other.txt]}}"
    assert TrainConfig.load(file).held_out == 0.01
    assert TrainConfig.load(file, ["evaluate_every=0"]).held_out == 0.0
    assert TrainConfig.load(file, [sets]).held_out == 0.0
    assert TrainConfig.load(file, ["evaluate_every=0", "data.heldout=0.1"]).held_out == 0.1


def test_yaml_takes_off_for_false(tmp_path: Path) -> None:
    config = TrainConfig.load(write(tmp_path, {}), ["check=off"])
    assert config.check == "off"
    config.save(tmp_path / "resolved.yaml")
    assert TrainConfig.load(tmp_path / "resolved.yaml") == config
    assert TrainConfig.load(write(tmp_path, {"check": False})) == config
    with pytest.raises(ValueError, match="'check' is 'sometimes'"):
        TrainConfig.load(write(tmp_path, {"check": "sometimes"}))


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("optimiser", {}, "did you mean 'optimizer'"),
        ("optimizer.lrr", 1, "optimizer: unknown field 'lrr'"),
        ("optimizer.lr", -1, "optimizer: 'lr' is -1"),
        ("optimizer.betas", [0.9, 1.0], "optimizer: 'betas' is 1.0"),
        ("schedule.decay", "step", "schedule: 'decay' is 'step': use 'cosine'"),
        ("schedule.min_lr_ratio", 1.5, "schedule: 'min_lr_ratio' is 1.5"),
        ("steps", 0, "'steps' is 0"),
        ("steps", True, "'steps' is True"),
        ("seed", 2**64, "'seed' is 18446744073709551616: give a seed below"),
        ("check", [], "'check' is []: use"),
        ("callbacks", "", "'callbacks' is ''"),
        ("output", "  ", "'output' is '  ': give a non-empty string"),
        ("strategies", [], "'strategies' is "),
        ("strategies", 3, "'strategies' is "),
        ("data.paths", "texts", "data: 'paths' is 'texts'"),
        ("data.heldout", 1.0, "data: 'heldout' is 1.0"),
        ("data.heldout", 0.0, "evaluate_every needs held-out documents"),
        ("data.max_length", 97, "data.max_length is 97"),
        ("dtype", "float16", "'dtype' is 'float16': use 'float32' or 'bfloat16'"),
        ("backend", "fast", "'backend' is 'fast': use 'inductor' or 'eager'"),
        ("model.path", "somewhere", "model: give 'architecture'"),
        ("model.config", [1], "model: 'config' is"),
        ("max_grad_norm", float("nan"), "'max_grad_norm' is nan"),
        ("max_grad_norm", 0.0, "max_grad_norm is 0: use null for no clipping"),
        ("label_smoothing", 1.0, "'label_smoothing' is 1.0: give a number of at least 0 and below 1"),
        (
            "plan",
            {"cluster": "c.yaml", "health": "h.yaml"},
            "plan: 'health' is 'h.yaml', which needs 'cluster' and 'profile'",
        ),
        (
            "plan",
            {"cluster": "c.yaml", "profile": "p.json"},
            "plan: 'cluster' is 'c.yaml', but has no effect without 'choose': set 'choose: true'",
        ),
        ("home", {"shares": [1, -1]}, "home: shares: rank 1 has -1"),
        ("home", {"share": [1, 1]}, "home: unknown field 'share': did you mean 'shares'"),
        ("home", "3,1 copies=3", "home '3,1 copies=3': 'copies' is 3"),
        ("home", 1, "home: expected a mapping with shares, copies, buckets, nodes"),
    ],
)
def test_errors_name_the_field(tmp_path: Path, field: str, value: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=r"config\.yaml") as caught:
        TrainConfig.load(write(tmp_path, {field: value}))
    assert sentence in str(caught.value)


def test_fields_of_one_corpus_are_refused_beside_a_mixture(tmp_path: Path) -> None:
    mixture = [{"paths": ["a.jsonl"]}, {"paths": ["b.jsonl"], "format": "chat"}]
    mixed = {"data.paths": [], "data.mixture": mixture}
    for name, value in {"format": "chat", "suffixes": [".md"], "messages_field": "said", "max_samples": 3}.items():
        with pytest.raises(ValueError, match=f"data: {name} does not apply to a mixture: set {name} in its corpora"):
            TrainConfig.load(write(tmp_path, {**mixed, f"data.{name}": value}))
    pairs = TrainConfig.load(write(tmp_path, {**mixed, "data.mixture": mixture[:1], "objective": "dpo"}))
    pairs.save(tmp_path / "resolved.yaml")
    assert TrainConfig.load(tmp_path / "resolved.yaml") == pairs


def test_overrides_replace_fields_of_every_depth(tmp_path: Path) -> None:
    texts = ["optimizer.lr=1e-3", "model.config.hidden_size=64", "steps=9", "max_grad_norm=null", "output=a=b"]
    before = TrainConfig.load(write(tmp_path, {}))
    config = TrainConfig.load(write(tmp_path, {}), [*texts, 'strategies=["<tp1,pp2>"]'])
    assert (config.optimizer.lr, config.steps, config.max_grad_norm, config.output) == (1e-3, 9, None, "a=b")
    assert config.model.config is not None
    assert before.model.config is not None
    assert (config.model.config["hidden_size"], before.model.config["hidden_size"]) == (64, 16)
    assert config.model.config["num_hidden_layers"] == 2
    assert config.strategies == ("<tp1,pp2>",)


def test_overrides_are_checked_together_and_the_guilty_one_is_named(tmp_path: Path) -> None:
    by_epochs = write(tmp_path, {"epochs": 2, "steps": None})
    for texts in (["steps=3", "epochs=null"], ["epochs=null", "steps=3"], ["steps=3", "epochs=0"]):
        config = TrainConfig.load(by_epochs, texts)
        assert (config.steps, config.epochs) == (3, None)
    with pytest.raises(ValueError, match=r"^override 'optimizer.rate=1': .*unknown field 'rate'"):
        TrainConfig.load(by_epochs, ["steps=3", "optimizer.rate=1", "epochs=null", "seed=4"])
    with pytest.raises(ValueError, match=r"^override 'steps=3': "):
        TrainConfig.load(by_epochs, ["epochs=2", "steps=3"])


def test_an_override_replaces_the_same_quantity_in_other_units(tmp_path: Path) -> None:
    by_epochs = write(tmp_path, {"epochs": 2, "steps": None, "schedule": {"warmup": 2}})
    config = TrainConfig.load(by_epochs, ["seed=4", "steps=3", "schedule.warmup_ratio=0.5"])
    assert (config.steps, config.epochs, config.schedule.warmup, config.schedule.warmup_ratio) == (3, None, 0, 0.5)
    assert TrainConfig.load(by_epochs, ["steps=0"]).epochs == 2
    config = TrainConfig.load(write(tmp_path, {"steps": 6, "schedule": {"warmup_ratio": 0.5}}), ["epochs=1.5"])
    assert (config.steps, config.epochs, config.schedule.warmup_ratio) == (0, 1.5, 0.5)


def test_settings_that_are_derived_follow_an_override(tmp_path: Path) -> None:
    twice = write(tmp_path, {"elastic": {"copies": 2}, "home": "2,1", "ranks": 2})
    assert TrainConfig.load(twice).home == Home([2, 1], 2)
    assert TrainConfig.load(twice, ["elastic.copies=1"]).home == Home([2, 1], 1)
    assert TrainConfig.load(twice, ["home.shares=[1,1]", "elastic.copies=1"]).home == Home([1, 1], 1)
    planned = TrainConfig.load(write(tmp_path, {"strategies": "auto", "plan": {"cluster": "c.yaml"}}))
    assert planned.plan.choose
    chosen = write(tmp_path, {"strategies": "auto"})
    assert TrainConfig.load(chosen).plan.choose
    assert not TrainConfig.load(chosen, ['strategies=["<tp1,pp1>"]']).plan.choose
    pairs = write(tmp_path, {"objective": "dpo"})
    assert TrainConfig.load(pairs, ["objective.dpo.beta=0.2"]).data.format == "preference"
    assert TrainConfig.load(pairs, ["objective=null"]).data.format == "auto"


def test_settings_that_are_derived_follow_an_override_of_a_saved_config(tmp_path: Path) -> None:
    saved = tmp_path / "resolved.yaml"
    given = {"elastic": {"copies": 2}, "home": "2,1", "ranks": 2, "strategies": "auto", "objective": "dpo"}
    config = TrainConfig.load(write(tmp_path, given))
    config.save(saved)
    assert TrainConfig.load(saved) == config
    changed = TrainConfig.load(saved, ["elastic.copies=1", 'strategies=["<tp1,pp1>"]', "objective=null"])
    assert changed.home == Home([2, 1], 1)
    assert not changed.plan.choose
    assert changed.data.format == "auto"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("steps", "write section.field=value"),
        (".steps=1", "write section.field=value"),
        ("steps=-1", "'steps' is -1"),
        ("optimizer.rate=1", "optimizer: unknown field 'rate'"),
        ("steps.more=1", "steps is 6, which has no fields"),
        ("steps=[1", "not readable as YAML"),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^override") as caught:
        TrainConfig.load(write(tmp_path, {}), [text])
    assert sentence in str(caught.value)


def test_a_home_is_a_text_or_a_mapping(tmp_path: Path) -> None:
    assert TrainConfig.load(write(tmp_path, {})).home == Home(rule="auto")
    text = TrainConfig.load(write(tmp_path, {"home": "3,1 copies=2 embed=1,1"}))
    mapping = TrainConfig.load(write(tmp_path, {"home": {"shares": [3, 1], "copies": 2, "buckets": {"embed": [1, 1]}}}))
    assert text == mapping
    assert text.home == Home([3, 1], 2, {"embed": [1, 1]})
    text.save(tmp_path / "resolved.yaml")
    assert TrainConfig.load(tmp_path / "resolved.yaml") == text
    assert TrainConfig.load(write(tmp_path, {}), ["home=equal layer.0=1,0", "home.copies=2"]).home == Home(
        copies=2, buckets={"layer.0": [1, 0]}
    )
    assert differences(text, TrainConfig.load(write(tmp_path, {"home": "3,1"}))) != []


def test_differences_name_every_field_that_changed(tmp_path: Path) -> None:
    before = TrainConfig.load(write(tmp_path, {}))
    texts = ["steps=7", "model.config.hidden_size=32", "optimizer.eps=1e-6", 'strategies=["<tp1,pp1>"]', "grace_s=5"]
    after = TrainConfig.load(write(tmp_path, {}), texts)
    assert differences(before, before) == []
    found = differences(before, after)
    assert [text.split(" ")[0] for text in found] == [
        "model.config.hidden_size",
        "strategies",
        "steps",
        "optimizer.eps",
        "grace_s",
    ]
    assert found[0] == f"model.config.hidden_size {before.model.config['hidden_size']} -> 32"
    one, other = (
        TrainConfig.load(write(tmp_path, {}), [f"data.evaluation={{{name}: {{paths: [x]}}}}"]) for name in "ab"
    )
    assert differences(one, other) == ["data.evaluation.a removed", "data.evaluation.b added"]
    assert found[3:] == ["optimizer.eps none -> 1e-06", "grace_s 30.0 -> 5"]


def test_the_demo_is_a_config_for_four_ranks() -> None:
    config = TrainConfig.load(DEMO)
    assert config.ranks == 4
    assert len(set(config.strategies)) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"elastic.replan": True},
            "elastic.replan needs measured costs: set 'strategies: auto' without plan.cluster, or",
        ),
        (
            {"elastic.replan": True, "strategies": ["auto"], "plan": {"cluster": "c.yaml", "choose": True}},
            "elastic.replan needs measured costs: set 'strategies: auto' without plan.cluster, or",
        ),
        ({"elastic.dry_run": True}, "elastic.dry_run has no effect without elastic.replan"),
        ({"elastic.monitor": "yes please"}, "elastic: 'monitor' is 'yes please'"),
        ({"elastic.enter": 1.05}, "elastic: 'enter' is 1.05, 'leave' is 1.1: give 1 < leave < enter"),
    ],
)
def test_what_a_run_does_about_slow_ranks_is_checked(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig.load(write(tmp_path, changes))


def test_replanning_watches_too(tmp_path: Path) -> None:
    plan = {"choose": True, "profile": "profile.json"}
    assert TrainConfig.load(write(tmp_path, {"elastic.replan": True, "plan": plan})).watches
    assert not TrainConfig.load(write(tmp_path, {})).watches
