"""The examples of fine-tuning run on a tiny model: LoRA on chats, all weights on pairs, and texts by mixture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hydragraph.data import tokenizer
from hydragraph.data.chat import CHATML
from tests.commands.tiny import run
from tests.thorough import first, thorough

EXAMPLES = Path(__file__).parents[1] / "examples"
FEW = "adapter.lora.targets=[q_proj, down_proj]"  # the examples say all-linear, which takes longer to trace
WORDS = "what is one two three four five six and it"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in bfloat16, with a tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("base")
    encoder = tokenizer.train_bpe([WORDS], 320, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.save(encoder, folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = LlamaConfig(**sizes, vocab_size=encoder.get_vocab_size(), bos_token_id=0, eos_token_id=0)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def train(name: str, folder: Path, *sets: str) -> list[dict[str, Any]]:
    changes = [f"output={folder / 'run'}", "data.max_length=96", "data.tokens_per_step=192", "device=cpu", *sets]
    done = run("train", EXAMPLES / name, *(f"--set={change}" for change in changes))
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def alone(*sets: str) -> tuple[str, ...]:
    """One rank, where the example says two."""
    return ("ranks=1", "strategies=<tp1,pp1>", *sets)


@pytest.mark.parametrize("ranks", first([1], [1, 2]))
def test_lora_on_chats_from_the_config(ranks: int, tmp_path: Path, base: Path) -> None:
    from peft import PeftModel

    data = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "what is one and two"}, {"role": "assistant", "content": "it is three"}]
    data.write_text((json.dumps({"messages": turns}) + "\n") * 24)
    settings = [
        f"model.path={base}",
        f'data.paths=["{data}"]',
        "optimizer.lr=1e-2",
        "checkpoint_every=4",
        "keep=20",
        "schedule.warmup=1",
        FEW,
    ]
    if ranks == 1:  # the example says two
        settings = [*alone(*settings)]
    history = train("finetune_chat_lora.yaml", tmp_path, *settings)
    assert history[-1]["loss"] < history[0]["loss"] - 0.3
    assert history[0]["tokens"] < 192 / 2, "what users say does not count"
    assert history[0]["tokens_per_s"] * history[0]["seconds"] > 192 / 2, "but it is computed"
    adapters = sorted(path.name for path in (tmp_path / "run" / "model").iterdir())
    assert "adapter_model.safetensors" in adapters
    assert "chat_template.jinja" in adapters
    merged, kept = tmp_path / "merged", tmp_path / "kept"
    assert run("export", tmp_path / "run", "--merged", "--to", merged).exit_code == 0
    assert run("export", tmp_path / "run", "--step", "4", "--to", kept).exit_code == 0
    whole: Any = AutoModelForCausalLM.from_pretrained(merged)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(plain, str(tmp_path / "run" / "model"))
    encoder = AutoTokenizer.from_pretrained(merged)
    ids: Any = encoder.apply_chat_template(turns[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    torch.testing.assert_close(whole(**ids).logits, adapted(**ids).logits, rtol=1e-4, atol=1e-5)
    said = whole.generate(**ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert said.shape[1] > ids["input_ids"].shape[1]
    assert "adapter_config.json" in {path.name for path in kept.iterdir()}


@thorough
def test_all_weights_of_a_bfloat16_directory_on_pairs(tmp_path: Path, base: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text((json.dumps({"prompt": "what is one and two", "completion": " it is three"}) + "\n") * 60)
    settings = [
        f"model.path={base}",
        f'data.paths=["{data}"]',
        "optimizer.lr=1e-2",
        "schedule.warmup=1",
    ]
    history = train("finetune_full.yaml", tmp_path, *alone(*settings))  # in bfloat16, as the example says
    assert history[-1]["loss"] < history[0]["loss"] - 1
    # The first loss is that of the model itself on the completion alone, told by transformers.
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    encoder = AutoTokenizer.from_pretrained(base)
    prompt, answer = encoder("what is one and two")["input_ids"], encoder(" it is three")["input_ids"]
    labels = torch.tensor([[-100] * len(prompt) + [*answer, 0]])
    expected = plain(input_ids=torch.tensor([[*prompt, *answer, 0]]), labels=labels).loss.item()
    assert history[0]["loss"] == pytest.approx(expected, rel=1e-2), "computed in bfloat16, which has 8 bits"
    to = tmp_path / "bf16"
    assert run("export", tmp_path / "run", "--dtype", "bfloat16", "--to", to).exit_code == 0
    again = AutoModelForCausalLM.from_pretrained(to)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    for name, weight in final.state_dict().items():
        assert torch.equal(weight.to(torch.bfloat16), again.state_dict()[name]), name


@thorough
def test_pretraining_goes_on_with_a_mixture_and_perplexity_of_each_set(tmp_path: Path, base: Path) -> None:
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(WORDS * 40)
        (tmp_path / f"{name}.txt").write_text(WORDS * 8)
    mixture = json.dumps([{"paths": [str(tmp_path / n)], "weight": w} for n, w in (("new", 4), ("old", 1))])
    sets = json.dumps({n: {"paths": [str(tmp_path / f"{n}.txt")]} for n in ("new", "old")})
    settings = [f"model.weights={base}", f"data.mixture={mixture}", f"data.evaluation={sets}", "steps=6"]
    settings += ["evaluate_every=3", "optimizer.lr=1e-2", "schedule.warmup=1"]
    history = train("continued_pretraining.yaml", tmp_path, *alone(*settings))
    evaluated = [step["eval_losses"] for step in history if step["eval_losses"]]
    assert [set(losses) for losses in evaluated] == [{"new", "old"}] * 2
    assert evaluated[1]["new"] < evaluated[0]["new"]


def test_what_cannot_be_exported_is_told(tmp_path: Path) -> None:
    for arguments, sentence in (
        ((tmp_path / "none", "--to", tmp_path / "to"), "is not a directory: name the output folder of a run"),
        ((tmp_path, "--to", tmp_path / "to"), "has no config.yaml, so it is not a run"),
        ((tmp_path, "--to", tmp_path / "to", "--step", "x"), "--step 'x': name a checkpoint"),
        ((tmp_path, "--to", tmp_path / "to", "--dtype", "int8"), "--dtype 'int8': use float32, bfloat16 or float16"),
    ):
        done = run("export", *arguments)
        assert done.exit_code == 2
        assert sentence in done.stderr


@thorough  # tests/train/test_paired_steps.py trains on pairs, without adapters
def test_preferences_from_the_config(tmp_path: Path, base: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    prompt = [{"role": "user", "content": "what is one and two"}]
    answers = {"chosen": "it is three", "rejected": "it is six"}
    pair = {"prompt": prompt, **{name: [{"role": "assistant", "content": text}] for name, text in answers.items()}}
    data.write_text((json.dumps(pair) + "\n") * 40)
    sets = alone(f"model.path={base}", f'data.paths=["{data}"]', "optimizer.lr=1e-2", "evaluate_every=0", "epochs=2")
    history = train("preferences.yaml", tmp_path, *sets, "data.heldout=0", "schedule.warmup=1", FEW)
    assert history[0]["pairs"]["accuracy"] == 0.5, "the model is the reference"
    assert history[-1]["pairs"]["accuracy"] == 1
    assert history[-1]["loss"] < history[0]["loss"] - 0.1
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").is_file()
