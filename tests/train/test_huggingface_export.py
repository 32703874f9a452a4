"""Every tensor that `hydragraph export` writes is the checkpoint's, for every family that trains, in every dtype.

The checkpoints are made from models in this process: nothing is captured, and no rank is started.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
import yaml
from peft.tuners.lora import Linear
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import hydragraph as hg
from hydragraph.checkpoint import save_and_load
from hydragraph.data import tokenizer
from hydragraph.data.chat import CHATML
from hydragraph.engine.compiled_model import tensor_names
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.parameter import Bucket, Parameter
from hydragraph.ir.program import Program
from hydragraph.runtime.home_state import HomeState
from hydragraph.spec.home import EQUAL
from hydragraph.spec.record import from_record
from hydragraph.train.config import ModelConfig, TrainConfig
from hydragraph.train.huggingface_export import export, export_checkpoint
from hydragraph.train.loop import train
from hydragraph.train.model import adapted, skeleton
from hydragraph.train.run_folder import Begin, RunFolder
from tests.data.chats import encoder
from tests.frontend.families import NAMES, SIZES, build, documented  # pyrefly: ignore[implicit-reexport]
from tests.runtime.homes import ALONE, Model, groups_of
from tests.thorough import first, thorough
from tests.train.plain import Watched, settings

TRAINED = [family for family, row in documented()[1].items() if row.split(" | ")[2] == "yes"]
TRAINED.remove("mllama")  # transformers has no AutoModelForCausalLM for the config of its text model
# Tied heads, trained buffers, experts in pieces, tensors in fp32, and buffers that no initialiser sets.
KEPT = ["apertus", "deepseek_v3", "gpt2", "gpt_bigcode", "hunyuan_v1_moe", "mixtral"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LORA = {"lora": {"r": 2, "alpha": 6.0, "targets": "all-linear"}}


def stored(directory: Path) -> dict[str, Tensor]:
    return {key: tensor for file in directory.glob("*.safetensors") for key, tensor in load_file(file).items()}


def trained(model: nn.Module) -> Any:
    """Change every weight and every persistent buffer of a model, as training does."""
    changed = copy.deepcopy(model).eval()
    generator = torch.Generator().manual_seed(5)
    kept = set(tensor_names(changed).values())
    with torch.no_grad():
        for name, tensor in (*changed.named_parameters(), *changed.named_buffers()):
            if name in kept and tensor.is_floating_point():
                tensor.add_(0.1 + 0.1 * torch.randn(tensor.shape, generator=generator))
    return changed


def run_of(model: nn.Module, base: nn.Module, path: Path, **changes: Any) -> RunFolder:
    """Write the folder of a run that began with `base`, and whose only checkpoint has the tensors of `model`."""
    cast(Any, base).save_pretrained(path / "base")
    folder = RunFolder(path / "run")
    folder.path.mkdir()
    config = {**settings(path), "model": {"path": str(path / "base")}, "output": str(folder.path), **changes}
    folder.config.write_text(yaml.safe_dump(config))
    tokenizer.save(encoder(), folder.tokenizer)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    parameters = tuple(Parameter(name, tuple(weight.shape)) for name, weight in weights.items())
    of_model = Model((Bucket("all", parameters, ("all",)),))
    home = HomeState.allocate(cast(Program, of_model), HomeLayouts(EQUAL, 1).by_name(of_model.buckets), 0)
    home.fill(weights)
    kept = set(tensor_names(model).values())
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    extra = {"steps": 1, "user": {}, save_and_load.BUFFERS: buffers}
    save_and_load.save(folder.place(1), home, None, extra, groups_of(ALONE))
    return folder


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("family", first(KEPT, TRAINED))
def test_what_is_exported_is_what_was_trained(family: str, tmp_path: Path) -> None:
    source, _ = build(family)
    model = trained(source)
    folder = run_of(model, source.bfloat16(), tmp_path)
    model.save_pretrained(tmp_path / "whole")
    for dtype in DTYPES:
        to = tmp_path / str(dtype)
        export_checkpoint(folder, None, to, dtype=dtype)
        files = stored(to)
        if dtype is torch.float32:
            assert_equal(files, stored(tmp_path / "whole"))  # a tied head is in neither
            continue
        # Also in the dtype, transformers alone decides what stays in fp32.
        expected = type(model).from_pretrained(tmp_path / "whole", dtype=dtype).state_dict()
        assert_equal(type(model).from_pretrained(to, dtype="auto").state_dict(), expected)
        config = json.loads((to / "config.json").read_text())
        assert config["dtype"] == str(dtype).removeprefix("torch.")
        assert {tensor.dtype for tensor in files.values() if tensor.is_floating_point()} <= {dtype, torch.float32}


def merged(model: Any) -> dict[str, Tensor]:
    """Return the state dict of a peft model's base with its adapters added, as peft computes it.

    Those of linear layers are compared with base + scale * B @ A.
    """
    state = copy.deepcopy(model).merge_and_unload().state_dict()
    for name, layer in model.base_model.model.named_modules():
        if isinstance(layer, Linear):
            base, scale = layer.base_layer, layer.scaling["default"]
            change = scale * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            expected = base.weight + (change.T if isinstance(base, Conv1D) else change)
            torch.testing.assert_close(state[f"{name}.weight"], expected.detach(), rtol=1e-5, atol=1e-6, msg=name)
    return state


@pytest.mark.parametrize("family", first(["gpt2", "llama"], TRAINED))
def test_merged_adapters_are_added_to_the_weights(family: str, tmp_path: Path) -> None:
    base, _ = build(family)
    config = from_record(TrainConfig, {**settings(tmp_path), "adapter": LORA, "output": "run"})
    source = adapted(copy.deepcopy(base), config.adapter, config.seed)
    model = trained(source)
    folder = run_of(model, base, tmp_path, adapter=LORA)
    export_checkpoint(folder, None, tmp_path / "adapters")
    kept = {key.replace(".default", ""): t for key, t in model.state_dict().items() if "lora_" in key}
    assert_equal(stored(tmp_path / "adapters"), kept)
    export_checkpoint(folder, None, tmp_path / "merged", merged=True)
    found = getattr(transformers, NAMES[family]).from_pretrained(tmp_path / "merged").state_dict()
    expected = merged(model)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-6, msg=key)


def test_a_trained_head_beside_adapters_is_exported_although_it_was_tied(tmp_path: Path) -> None:
    base, _ = build("gpt2")
    lora = {"lora": {**LORA["lora"], "modules_to_save": ["lm_head"]}}
    config = from_record(TrainConfig, {**settings(tmp_path), "adapter": lora})
    model = trained(adapted(copy.deepcopy(base), config.adapter, config.seed))
    folder = run_of(base, base, tmp_path)
    export(
        adapted(copy.deepcopy(base), config.adapter, config.seed), model.state_dict(), folder.tokenizer, tmp_path / "to"
    )
    (head,) = (tensor for name, tensor in model.named_parameters() if "modules_to_save" in name)
    (stored_head,) = (tensor for name, tensor in stored(tmp_path / "to").items() if "lm_head" in name)
    assert torch.equal(stored_head, head)


@pytest.mark.parametrize("adapters", [False, True])
def test_settings_for_generation_are_those_of_the_models_directory(adapters: bool, tmp_path: Path) -> None:
    base, _ = build("llama")
    model: Any = base
    model.generation_config = transformers.GenerationConfig(do_sample=True, temperature=0.3, eos_token_id=[1, 2])
    changes: dict[str, Any] = {"adapter": LORA} if adapters else {}
    config = from_record(TrainConfig, {**settings(tmp_path), **changes})
    folder = run_of(adapted(copy.deepcopy(base), config.adapter, 0), base, tmp_path, **changes)
    export_checkpoint(folder, None, tmp_path / "out", merged=adapters)
    files = [tmp_path / name / "generation_config.json" for name in ("base", "out")]
    assert files[0].read_text() == files[1].read_text()
    assert skeleton(ModelConfig(weights=str(tmp_path / "base")), 300).generation_config == model.generation_config
    (folder.tokenizer / "chat_template.jinja").write_text(CHATML)
    end = tokenizer.load(folder.tokenizer).token_to_id("<|im_end|>")
    export_checkpoint(folder, None, tmp_path / "chat", merged=adapters)
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "chat").eos_token_id == [1, 2, end]


@thorough
@pytest.mark.parametrize("family", KEPT)
def test_a_resumed_run_exports_the_model_that_it_wrote(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "vocab_size", encoder().get_vocab_size())
    model = trained(build(family)[0])
    model.bfloat16().save_pretrained(tmp_path / "base")
    tokenizer.save(encoder(), tmp_path / "base")
    folder = RunFolder(tmp_path / "run")
    for begin, steps in ("new", 1), ("resume", 2):
        given = {**settings(tmp_path), "model": {"path": str(tmp_path / "base")}, "output": str(folder.path)}
        given |= {"steps": steps, "evaluate_every": 0, "strategies": ["<tp1,pp1>"], "check": "off"}
        train(from_record(TrainConfig, given), cast(Begin, begin), hg.compile, Watched())
    export_checkpoint(folder, None, tmp_path / "out")
    assert_equal(stored(tmp_path / "out"), stored(folder.model))
    kept = set(tensor_names(model).values())
    buffers = {n: b for n, b in model.named_buffers() if n in kept}
    found = type(model).from_pretrained(tmp_path / "out").state_dict()
    assert_equal({name: found[name] for name in buffers}, {name: b.float() for name, b in buffers.items()})
