"""Trained spans of templates in the shapes that published ones have, held against masks written by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hydragraph.data.documents import Conversation, FieldNames, Preference
from hydragraph.data.template import ChatTemplate

MARKS = ("<|im_start|>", "<|im_end|>", "<|end|>", "<|start|>", "<|return|>", "<|user|>", "<|assistant|>", "<eos>")
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
START = "{{ '<|im_start|>' + m.role + '\n' }}"
END = "{{ '<|im_end|>\n' }}"
EACH = "{% for m in messages %}"

# Writes thoughts only in the last turn, and an empty one where there is none.
QWEN3 = (
    EACH + START + "{% if m.role == 'assistant' %}{% if loop.last %}{{ '<think>\n' + "
    "(m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '') "
    "+ '\n</think>\n\n' }}"
    "{% endif %}{{ m.content.split('</think>')[-1].strip() }}{% else %}{{ m.content }}{% endif %}"
    + END
    + "{% endfor %}"
    + PROMPT
)
# Ends the last turn with another token than others.
GPT_OSS = (
    EACH + "{{ '<|start|>' + m.role }}{% if m.role == 'assistant' %}{{ '<|channel|>final<|message|>' + m.content + "
    "('<|return|>' if loop.last and not add_generation_prompt else '<|end|>') }}"
    "{% else %}{{ '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# Ends every conversation with the end of text.
PHI3 = (
    EACH + "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# Asks for thoughts in the prompt to generate, and never writes them.
DEEPSEEK = (
    EACH + "{% if m.role == 'assistant' %}{{ '<|assistant|>' + m.content.split('</think>')[-1] + '<eos>' }}"
    "{% else %}{{ '<|user|>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
# Asks for thoughts, and writes an empty one in the last turn alone; system messages move to the front.
NEMOTRON = (
    "{{ '<|im_start|>system\n' }}"
    + EACH
    + "{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    + END
    + "{% for m in messages if m.role != 'system' %}"
    + START
    + "{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think></think>' }}{% endif %}{{ m.content }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# Ends a turn with the role of the next one, and writes an empty thought that the prompt does not have.
GLM = (
    EACH + "{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}{{ '\n<think></think>\n' + m.content }}"
    "{% else %}{{ '\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Closes an empty thought in the prompt, and writes none in earlier turns (Qwen 3.5).
CLOSED = (
    EACH + START + "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
)
BLOCKS = (
    EACH + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% generation %}{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
)
PARTS = (
    EACH
    + START
    + "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    + END
    + "{% endfor %}"
    + PROMPT
)
TALK = [("user", "Q"), ("assistant", "A"), ("user", "A"), ("assistant", "B")]


def chat(*turns: Any, **more: Any) -> Conversation:
    said = [{"role": turn[0], "content": turn[1]} if isinstance(turn, tuple) else turn for turn in turns]
    document = FieldNames().document({"messages": said, **more}, "chat", "here")
    assert isinstance(document, Conversation)
    return document


def trained(text: str, conversation: Conversation, train_on: str = "assistant") -> str:
    """The text of a conversation with [[ ]] around its trained spans."""
    written, spans = ChatTemplate(text, {"eos_token": "<eos>"}, train_on).spans(conversation, "here", MARKS)
    for start, end in reversed(spans):
        written = f"{written[:start]}[[{written[start:end]}]]{written[end:]}"
    return written


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            QWEN3,
            "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n[[A<|im_end|>\n]]<|im_start|>user\nA<|im_end|>\n"
            "<|im_start|>assistant\n[[<think>\n\n</think>\n\nB<|im_end|>\n]]",
        ),
        (
            GPT_OSS,
            "<|start|>user<|message|>Q<|end|><|start|>assistant[[<|channel|>final<|message|>A<|end|>]]"
            "<|start|>user<|message|>A<|end|><|start|>assistant[[<|channel|>final<|message|>B<|return|>]]",
        ),
        (
            PHI3,
            "<|user|>\nQ<|end|>\n<|assistant|>\n[[A<|end|>\n]]<|user|>\nA<|end|>\n<|assistant|>\n[[B<|end|>\n<eos>]]",
        ),
        (DEEPSEEK, "<|user|>Q<|assistant|>[[A<eos>]]<|user|>A<|assistant|>[[B<eos>]]"),
        (
            NEMOTRON,
            "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n[[A<|im_end|>\n]]"
            "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n<think>[[</think>B<|im_end|>\n]]",
        ),
        (
            PARTS,
            "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n[[A<|im_end|>\n]]<|im_start|>user\nA<|im_end|>\n"
            "<|im_start|>assistant\n[[B<|im_end|>\n]]",
        ),
        (
            GLM,
            "<|user|>\nQ<|assistant|>[[\n<think></think>\nA]]<|user|>\nA<|assistant|>[[\n<think></think>\nB]]",
        ),
        (
            CLOSED,
            "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n[[A<|im_end|>\n]]<|im_start|>user\nA<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n[[B<|im_end|>\n]]",
        ),
        (BLOCKS, "Q\n[[A]][[<|im_end|>]]A\n[[B]][[<|im_end|>]]"),
    ],
    ids=["qwen3", "gpt_oss", "phi3", "deepseek", "nemotron", "parts", "glm", "closed", "blocks"],
)
def test_turns_are_found_in_the_whole_text(template: str, expected: str) -> None:
    assert trained(template, chat(*TALK)) == expected
    first, second = expected.split("]]", 1)
    if template is not BLOCKS:
        assert trained(template, chat(*TALK), "last") == first.replace("[[", "") + second


def test_thoughts_are_learned_where_they_are_written() -> None:
    said = chat(("user", "Q"), ("assistant", "<think>why</think>A"), ("user", "R"), ("assistant", "<think>so</think>B"))
    text = trained(QWEN3, said)
    assert "[[A<|im_end|>\n]]" in text
    assert text.endswith("[[<think>\nso\n</think>\n\nB<|im_end|>\n]]")


def test_the_last_turn_may_have_several_marked_blocks() -> None:
    assert trained(BLOCKS, chat(*TALK), "last") == "Q\nA<|im_end|>A\n[[B]][[<|im_end|>]]"


@pytest.mark.parametrize("template", [BLOCKS, PHI3])
def test_an_answer_of_weight_0_is_not_trained(template: str) -> None:
    said = chat(("user", "Q"), {"role": "assistant", "content": "BAD", "weight": 0}, ("user", "R"), ("assistant", "A"))
    for train_on in ("assistant", "last"):
        text = trained(template, said, train_on)
        assert "[[BAD" not in text
        assert "[[A" in text
    everything = trained(template, said, "all") if template is PHI3 else "]]BAD<|end|>\n[["
    assert "]]BAD<|end|>\n[[" in everything
    with pytest.raises(ValueError, match="here: all assistant messages have weight 0"):
        trained(template, chat(("user", "Q"), {"role": "assistant", "content": "BAD", "weight": 0}))
    with pytest.raises(ValueError, match="here: the last assistant message has weight 0"):
        trained(template, chat(*TALK[:2], {"role": "assistant", "content": "BAD", "weight": 0}), "last")


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_only_the_answer_to_a_prompt_is_trained(train_on: str) -> None:
    *before, answer = [{"role": role, "content": content} for role, content in TALK]
    expected = trained(PHI3, chat(*TALK), "last")
    completion = FieldNames().document({"prompt": before, "completion": [answer]}, "completion", "here")
    assert isinstance(completion, Conversation)
    assert trained(PHI3, completion, train_on) == expected
    other = {"role": "assistant", "content": "C"}
    pair = FieldNames().document({"prompt": before, "chosen": [answer], "rejected": [other]}, "preference", "here")
    assert isinstance(pair, Preference)
    assert isinstance(pair.chosen, Conversation)
    assert trained(PHI3, pair.chosen, train_on) == expected


def test_first_messages_of_weight_0_are_left_out_with_their_headers() -> None:
    said = chat({"role": "system", "content": "S", "weight": 0}, *TALK[:2])
    assert trained(PHI3, said, "all") == "<|system|>\nS<|end|>\n[[<|user|>\nQ<|end|>\n<|assistant|>\nA<|end|>\n<eos>]]"
    with pytest.raises(ValueError, match="here: all messages have weight 0: remove the conversation"):
        trained(PHI3, chat({"role": "user", "content": "Q", "weight": 0}), "all")


def test_the_first_message_may_be_the_assistants() -> None:
    template = "{% if messages[0].role == 'system' %}{{ '!' }}{% endif %}" + PHI3
    expected = "<|assistant|>\n[[A<|end|>\n]]<|user|>\nQ<|end|>\n<|assistant|>\n[[B<|end|>\n<eos>]]"
    assert trained(template, chat(("assistant", "A"), ("user", "Q"), ("assistant", "B"))) == expected


def test_a_message_that_the_template_leaves_out_is_told() -> None:
    silent = EACH + "{% if m.role != 'system' %}" + START + "{{ m.content }}" + END + "{% endif %}{% endfor %}" + PROMPT
    with pytest.raises(ValueError, match=r"here: the chat template leaves out the content of messages\[0\] \(system\)"):
        trained(silent, chat(("system", "S"), *TALK))
    unmarked = EACH + "{{ m.content }}{% generation %}{{ '<|im_end|>' }}{% endgeneration %}{% endfor %}"
    with pytest.raises(ValueError, match=r"does not mark the content of messages\[1\] as generated"):
        trained(unmarked, chat(*TALK))


ARGUMENTS = '{"at":  1}'
CALLS = "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + ' ' + ARGUMENTS }}{% endfor %}"


@pytest.mark.parametrize("arguments", [ARGUMENTS, {"at": 1}])
@pytest.mark.parametrize(
    "written", ["call.function.arguments", "(call.function.arguments | string)", "(call.function.arguments | tojson)"]
)
def test_arguments_of_tools_are_given_as_the_template_takes_them(written: str, arguments: object) -> None:
    template = EACH + START + "{{ m.content }}" + CALLS.replace("ARGUMENTS", written) + END + "{% endfor %}" + PROMPT
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    said = chat(("user", "Q"), {"role": "assistant", "content": None, "tool_calls": [call]}, ("tool", "42"), TALK[1])
    kept = isinstance(arguments, str) and "tojson" not in written
    text = ARGUMENTS if kept else json.dumps({"at": 1})
    assert f"[[<call>f {text}<|im_end|>\n]]" in trained(template, said)
    with pytest.raises(ValueError, match=r"leaves out the tool calls of messages\[1\]"):
        trained(EACH + START + "{{ m.content }}" + END + "{% endfor %}" + PROMPT, said)


def test_a_record_may_have_arguments_for_its_template() -> None:
    template = EACH + START + "{{ m.content }}" + END + "{% endfor %}{{ mood }}" + PROMPT
    assert trained(template, chat(*TALK, chat_template_kwargs={"mood": "glad"})).endswith("glad]]")


def test_a_template_may_write_the_arguments_alone() -> None:
    template = EACH + START + "{{ m.content + (m.tool_calls[0].function.arguments if m.tool_calls else '') }}"
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = chat(("user", "Q"), {"role": "assistant", "content": None, "tool_calls": [call]}, TALK[1])
    assert "[[{}<|im_end|>\n]]" in trained(template + END + "{% endfor %}" + PROMPT, said)
