"""Damaged or incomplete checkpoints, and those of another model, are named and not loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hydragraph.checkpoint import save_and_load
from hydragraph.checkpoint.manifest import Damaged, is_whole
from hydragraph.cluster.communicators import Groups
from hydragraph.ir.parameter import Bucket, Parameter
from hydragraph.kernels.adamw import AdamW
from hydragraph.version import __version__
from tests.runtime.homes import ALONE, MODEL, Model, Named, make, sgd


def test_a_corrupt_byte_is_found_in_every_file(made: Path, groups: Groups) -> None:
    manifest = json.loads((made / "complete.json").read_text())
    assert set(manifest["files"]) == {path.name for path in made.iterdir()} - {"complete.json"}
    assert manifest["versions"] == {"torch": torch.__version__, "hydragraph": __version__}
    home, optimizer = make(ALONE)
    for name, expected in manifest["files"].items():
        content = (made / name).read_bytes()
        broken = bytearray(content)
        broken[len(broken) // 2] ^= 1
        (made / name).write_bytes(broken)
        with pytest.raises(ValueError, match=f"{name} is corrupt: SHA-256 .*expected {expected['sha256']}: restore"):
            save_and_load.load(made, home, optimizer, groups)
        assert is_whole(made)  # hashes are not compared
        (made / name).write_bytes(content[:-1])
        assert not is_whole(made)
        with pytest.raises(ValueError, match=f"{name} has {len(content) - 1} bytes, expected {len(content)}"):
            save_and_load.load(made, home, optimizer, groups)
        (made / name).unlink()
        with pytest.raises(ValueError, match=rf"{name} is missing \(expected"):
            save_and_load.load(made, home, optimizer, groups)
        (made / name).write_bytes(content)
    assert all(torch.equal(home.parameters[n], make(ALONE)[0].parameters[n]) for n in home.parameters)  # untouched
    assert save_and_load.load(made, home, optimizer, groups) == {"step": 7}


def test_an_incomplete_checkpoint_is_refused(made: Path, groups: Groups) -> None:
    home, optimizer = make(ALONE)
    with pytest.raises(ValueError, match=r"no-such has no complete.json"):
        save_and_load.load(made.parent / "no-such", home, optimizer, groups)
    (made / "complete.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match=r"complete.json is damaged"):
        save_and_load.load(made, home, optimizer, groups)
    (made / "complete.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match=r"has format 99, but this version of hydragraph reads 1"):
        save_and_load.load(made, home, optimizer, groups)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "..", "sub/file"])
def test_a_forged_manifest_names_no_files_elsewhere(name: str, made: Path, groups: Groups) -> None:
    manifest = json.loads((made / "complete.json").read_text())
    forged = {**manifest, "files": {**manifest["files"], name: {"bytes": 1, "sha256": ""}}}
    (made / "complete.json").write_text(json.dumps(forged))
    with pytest.raises(Damaged, match=r"complete\.json is damaged .* is not a file of this checkpoint"):
        save_and_load.load(made, *make(ALONE), groups)
    del manifest["files"][".metadata"]
    (made / "complete.json").write_text(json.dumps(manifest))
    with pytest.raises(Damaged, match=r"\.metadata is not listed"):
        save_and_load.load(made, *make(ALONE), groups)


def test_another_model_or_optimizer_is_refused(made: Path, groups: Groups) -> None:
    wider = Model((*MODEL.buckets[:2], Bucket("tiny", (Parameter("tiny", (3,)),), ("head",))))
    with pytest.raises(ValueError, match=r"tiny is \[2\] in the checkpoint and \[3\] in the model"):
        save_and_load.load(made, *make(ALONE, model=wider), groups)
    renamed = Model((*MODEL.buckets[:2], Bucket("tiny", (Parameter("small", (2,)),), ("head",))))
    with pytest.raises(ValueError, match=r"tiny is \[2\] .*missing in the model; small is missing in the checkpoint"):
        save_and_load.load(made, *make(ALONE, model=renamed), groups)
    with pytest.raises(ValueError, match="saved with AdamW, not SGD"):
        save_and_load.load(made, *make(ALONE, sgd), groups)
    with pytest.raises(
        ValueError, match=r"and this optimizer has 1; parameters in different groups: \['layer.0.norm'\]"
    ):
        save_and_load.load(made, *make(ALONE, torch.optim.AdamW), groups)


def plain_adamw(named: Named) -> torch.optim.Optimizer:
    groups = [{"params": [p for p in named if ("norm" in p[0]) == norm]} for norm in (False, True)]
    return AdamW(groups)


@pytest.mark.parametrize(
    ("factory", "said"), [(plain_adamw, "has amsgrad=True"), (torch.optim.AdamW, "parameter groups")]
)
def test_a_refused_optimizer_leaves_the_weights(
    factory: Callable[[Named], torch.optim.Optimizer], said: str, made: Path, groups: Groups
) -> None:
    home, optimizer = make(ALONE, factory, seed=7)
    before = {name: weights.clone() for name, weights in home.weights.items()}
    with pytest.raises(ValueError, match=said):
        save_and_load.load(made, home, optimizer, groups)
    assert all(torch.equal(before[name], weights) for name, weights in home.weights.items())
