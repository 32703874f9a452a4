"""LoRA by an unmodified `peft`: cut where its base is, trained as on one device, saved as peft does, resumed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hydragraph as hg
from hydragraph.frontend.peft_adapters import switchable_parameters
from hydragraph.passes.check_strategy import check_strategy
from tests import reference
from tests.models import llama, sequences
from tests.ready import Ready
from tests.thorough import thorough

peft = pytest.importorskip("peft")

LAYERS, STEPS = 2, 2
LENGTHS = [20, 7, 33, 1, 12]
STRATEGIES = ["<[0,1]x1,[2]x1>", "<[2]x1,[0,1]x1s>"]
PLAIN = ["<[1,0]x2>"]
KINDS: dict[str, dict[str, Any]] = {
    "few": {"target_modules": ["q_proj", "down_proj"]},
    "plain": {},
    "rank-stabilised": {"use_rslora": True, "r": 16, "target_modules": "all-linear"},
    "DoRA": {"use_dora": True, "r": 16, "target_modules": ["q_proj", "down_proj"]},
    "DoRA everywhere": {"use_dora": True, "r": 4, "target_modules": "all-linear"},
    "with a head of its own": {"modules_to_save": ["lm_head"], "bias": "lora_only"},
}
IA3 = "IA3"  # scales of the columns of some weights, and of the inputs of others


TRAINED = [*(kind for kind in KINDS if kind != "DoRA everywhere"), IA3]


def adapted(kind: str = "plain", several: bool = False) -> nn.Module:
    """Return a small Llama with adapters that already do something."""
    torch.manual_seed(0)
    if kind == IA3:
        config = peft.IA3Config(
            task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
        )
        model = peft.get_peft_model(llama(layers=LAYERS), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "ia3_l" in name:
                    parameter.uniform_(0.5, 1.5)
        return model
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"], **KINDS[kind]}
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
    model = peft.get_peft_model(llama(layers=LAYERS), config)
    if several:
        model.add_adapter("second", peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, r=2))
        model.base_model.set_adapter(["default", "second"])
    return model


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1)


def batches() -> list[list[Tensor]]:
    return [sequences(LENGTHS, seed=i) for i in range(STEPS)]


def ready(strategies: list[str], kind: str, several: bool = False) -> Ready:
    return Ready.of(adapted(kind, several), strategies)


@dataclass
class Run:
    """Observations of one rank."""

    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    handed: dict[str, Tensor]
    scores: list[Tensor]


def train(prepared: Ready, strategies: list[str], path: str, plain: bool = False) -> Run:
    """On every rank: gradients, training, saving; of plain adapters also the scores without them."""
    chosen = [hg.Strategy.parse(s, layers=LAYERS) for s in strategies]
    exe = prepared.executable(chosen[0], sgd)
    scores = scored_without(exe) if plain else []
    gradients = [exe.gradients(batches()[0], strategy=s) for s in chosen]
    for i, batch in enumerate(batches()):
        exe.step(batch, strategy=chosen[i % len(chosen)])
    weights = exe.full_state_dict()
    handed = dict(exe.weights(to=(1,))) if plain else {}
    exe.save_pretrained(f"{path}/adapter")
    exe.save_pretrained(f"{path}/merged", merged=True)
    exe.close()
    return Run(gradients, weights, handed, scores)


def plain_ready() -> Ready:
    return ready(PLAIN, "few").with_scores(False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Run]:
    """Return what every rank saw of plain adapters."""
    return hg.launch(train, 2, PLAIN, str(folder), True, prepare=plain_ready)


def test_blocks_agree_on_shards_of_adapters_as_wide_as_their_layers() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 51,
        "num_attention_heads": 2,
        "head_dim": 8,
        "vocab_size": 101,
    }
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
    program = hg.capture(peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear")))
    rules = {name.rpartition("layers.0.")[2]: p.rule for name, p in program.parameters.items()}
    assert rules["mlp.up_proj.base_layer.weight"] == rules["mlp.up_proj.lora_B.default.weight"] is not None
    assert rules["mlp.up_proj.lora_A.default.weight"] is None


def test_lora_trains_as_on_one_device_and_peft_reads_it(plain: list[Run], folder: Path) -> None:
    check(adapted("few"), plain[0], folder)


def test_adapters_are_handed_to_the_ranks_that_ask_as_save_pretrained_writes_them(
    plain: list[Run], folder: Path
) -> None:
    written = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert not plain[0].handed
    assert plain[1].handed.keys() == written.keys()
    assert all(torch.equal(plain[1].handed[name], tensor) for name, tensor in written.items())


@thorough
@pytest.mark.parametrize(("kind", "several"), [*((kind, False) for kind in TRAINED if kind != "few"), ("plain", True)])
def test_other_adapters_train_as_on_one_device_and_peft_reads_them(kind: str, several: bool, tmp_path: Path) -> None:
    strategies = STRATEGIES[:1] if kind != IA3 else ["<[2]x1,[1]x1r>"]  # its scales are not cut
    runs = hg.launch(train, 3, strategies, str(tmp_path), prepare=partial(ready, strategies, kind, several))
    check(adapted(kind, several), runs[0], tmp_path, several)


def check(model: nn.Module, run: Run, path: Path, several: bool = False) -> None:
    """Compare a run with one device, and its files with its weights."""
    wanted = reference.train(model, batches(), sgd)
    for gradients in run.gradients:
        assert gradients.keys() == wanted.gradients[0].keys()
        worst, ratio = reference.worst(gradients, wanted.gradients[0])
        assert ratio <= 1, f"gradient of {worst} is {ratio:.2f} times the tolerance off"
    for key, weight in wanted.weights.items():
        torch.testing.assert_close(run.weights[key], weight, rtol=1e-4, atol=1e-5, msg=key)
    check_files(model, run.weights, path, several)


def check_files(model: nn.Module, weights: dict[str, Tensor], path: Path, several: bool) -> None:
    """Load what was saved with peft and transformers alone, and compare what the models compute."""
    from transformers import AutoModelForCausalLM

    model.load_state_dict(weights)
    ids = batches()[0][0][None]
    expected = model(input_ids=ids).logits
    again = peft.PeftModel.from_pretrained(llama(layers=LAYERS), str(path / "adapter"))
    if several:
        again.load_adapter(str(path / "adapter" / "second"), "second")
        again.base_model.set_adapter(["default", "second"])
    torch.testing.assert_close(again(input_ids=ids).logits, expected)
    merged = AutoModelForCausalLM.from_pretrained(path / "merged")
    torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    stored = load_file(path / "adapter" / "adapter_model.safetensors")
    assert all("lora_" in name or "lm_head" in name or "ia3_l" in name for name in stored)


@thorough
def test_adapters_are_cut_where_their_base_is() -> None:
    program = hg.capture(adapted())
    rules = {name.split("layers.0.")[1]: p.rule for name, p in program.parameters.items() if "layers.0." in name}
    for module, heads in (("self_attn.q_proj", 4), ("self_attn.v_proj", 2)):
        assert rules[f"{module}.base_layer.weight"] == rules[f"{module}.lora_B.default.weight"]
        assert rules[f"{module}.base_layer.weight"].segments == (heads,)
        assert rules[f"{module}.lora_A.default.weight"] is None
    assert rules["mlp.down_proj.base_layer.weight"] == rules["mlp.down_proj.lora_A.default.weight"]
    assert rules["mlp.down_proj.lora_B.default.weight"] is None
    assert {n for n, p in program.parameters.items() if p.trainable} == {n for n in program.parameters if "lora_" in n}
    assert {b.name for b in program.buckets if b.learns} == {"layer.0", "layer.1"}


def resume(prepared: Ready, path: str, strategy: str, saves: bool) -> list[float]:
    exe = prepared.executable(hg.Strategy.parse(strategy, LAYERS), lambda named: hg.AdamW(named, lr=0.01))
    if saves:
        exe.step(batches()[0])
        exe.save(path)
    else:
        exe.load(path)
    losses = [exe.step(batch).loss for batch in batches()[1:]]
    exe.close()
    return losses


@thorough
def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    one, two, path = "<[0,1]x2>", "<[1]x1,[0]x1>", str(tmp_path / "saved")
    saved = hg.launch(resume, 3, path, one, True, prepare=partial(ready, [one], "plain"))[0]
    resumed = hg.launch(resume, 2, path, two, False, prepare=partial(ready, [two], "plain"))[0]
    assert resumed == pytest.approx(saved, rel=1e-5)


@thorough
def test_an_inactive_adapter_is_kept_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(task_type="CAUSAL_LM", r=2))
    program = hg.capture(model)
    assert [r.levelname for r in caplog.records if "no block uses" in r.getMessage()] == ["WARNING"]
    assert {p.name for p in program.buckets[-1].parameters} == {n for n in program.parameters if ".second." in n}
    assert program.buckets[-1].blocks == ()


@thorough
def test_dora_is_refused_where_its_norms_need_whole_weights() -> None:
    program = hg.capture(adapted("DoRA everywhere"))
    with pytest.raises(hg.Unsupported, match="which has no sharding rule; use stages with one device each"):
        check_strategy(program, hg.Strategy.parse("<tp2,pp1>", LAYERS), 2)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "the peft method PROMPT_TUNING"),
        (peft.LoraConfig(task_type="CAUSAL_LM", trainable_token_indices=[1, 2]), "LoRA with trainable_token_indices"),
    ],
)
def test_what_is_refused_is_named(config: Any, what: str) -> None:
    with pytest.raises(hg.Unsupported, match=what):
        hg.capture(peft.get_peft_model(llama(layers=LAYERS), config))


def scored_without(exe: hg.Executable) -> list[Tensor]:
    """Return scores with adapters, without them, and with them again."""
    found = [exe.score(batches()[0])]
    with exe.adapter_off():
        found.append(exe.score(batches()[0]))
        with pytest.raises(ValueError, match=r"step: adapters are off; leave `with exe.adapter_off\(\)`"):
            exe.step(batches()[0])
    found.append(exe.score(batches()[0]))
    return found


def test_scores_without_adapters_are_those_of_the_base(plain: list[Run]) -> None:
    base = hg.compile(llama(layers=LAYERS), "<tp1,pp1>")
    wanted = base.score(batches()[0])
    with pytest.raises(hg.Unsupported, match=r"adapter_off: the model has no adapters; compile the reference model"):
        base.adapter_off().__enter__()
    base.close()
    for before, off, after in (run.scores for run in plain):
        torch.testing.assert_close(off, wanted, rtol=1e-5, atol=1e-6)
        assert torch.equal(before, after)
        assert not torch.allclose(before, off)


def test_adapters_that_change_other_parameters_cannot_be_switched_off() -> None:
    with pytest.raises(hg.Unsupported, match=r"training also changes .*lora_magnitude_vector.* second executable"):
        switchable_parameters(adapted("DoRA"))
