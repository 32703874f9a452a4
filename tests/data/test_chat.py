"""Only what a model is to say is a target: held against masks that are written by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from hydragraph.data.chat import Encoder, Template
from hydragraph.data.documents import Completion, Conversation, Fields, texts_of
from tests.data.chats import BARE, BEGINS, MARKED, PLAIN, REWRITES, TOOLS, encoder

TOKENIZER = encoder()
END = int(TOKENIZER.token_to_id("<|endoftext|>") or 0)
TURNS = [
    {"role": "system", "content": "is it"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "what is it"},
    {"role": "user", "content": "🦎\r\n"},
    {"role": "assistant", "content": "日本 ünïcödé"},
]


def chat(turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> Conversation:
    document = Fields().document({"messages": turns, "tools": tools}, "chat", "here")
    assert isinstance(document, Conversation)
    return document


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return found


def oracle(pieces: list[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
    """Tokens of pieces of text that are encoded apart, each with whether it counts."""
    parts = [(ids(text), counts) for text, counts in pieces]
    return [i for part, _ in parts for i in part], [counts for part, counts in parts for _ in part]


def chatml(turns: list[dict[str, Any]], last: bool = False, newline: bool = False) -> list[tuple[str, bool]]:
    """ChatML by hand; `newline`: the line end behind an answer counts, too, as where a turn is what it adds."""
    pieces: list[tuple[str, bool]] = []
    final = max((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), default=-1)
    for i, turn in enumerate(turns):
        says = turn["role"] == "assistant" and (i == final or not last)
        pieces.append((f"<|im_start|>{turn['role']}\n", False))
        pieces += [(turn["content"] + "<|im_end|>", says), ("\n", says and newline)]
    return pieces


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_chatml_counts_what_the_assistant_says_and_its_end(template: str, last: bool) -> None:
    found = Encoder(TOKENIZER, END, Template(template, train_on="last" if last else "assistant")).encode(
        chat(TURNS), "here"
    )
    assert (found.ids, found.targets) == oracle(chatml(TURNS, last, newline=template is PLAIN))


words = st.text(st.sampled_from("ab é日🦎\n"), max_size=6)
turns = st.lists(st.tuples(words, words), min_size=1, max_size=4).map(
    lambda pairs: [
        turn for q, a in pairs for turn in ({"role": "user", "content": q}, {"role": "assistant", "content": a})
    ]
)


@given(turns)
def test_any_conversation_has_the_mask_of_the_oracle(said: list[dict[str, Any]]) -> None:
    for template in (MARKED, PLAIN):
        found = Encoder(TOKENIZER, END, Template(template)).encode(chat(said), "here")
        text = "".join(piece for piece, _ in chatml(said))
        assert found.ids == ids(text)
        assert found.targets is not None
        counts = [i for i, target in zip(found.ids, found.targets, strict=True) if target]
        answers = [turn["content"] for turn in said if turn["role"] == "assistant"]
        assert counts.count(TOKENIZER.token_to_id("<|im_end|>")) == len(answers)
        assert TOKENIZER.token_to_id("<|im_start|>") not in counts
        # A token may hold the end of a header and the beginning of an answer: then it counts.
        decoded = TOKENIZER.decode(counts, skip_special_tokens=False)
        assert [part.strip("\n") for part in decoded.split("<|im_end|>")[:-1]] == [a.strip("\n") for a in answers]


def test_all_tokens_count_if_that_is_asked_for() -> None:
    found = Encoder(TOKENIZER, END, Template(PLAIN, train_on="all")).encode(chat(TURNS[:2]), "here")
    assert found.targets == [True] * len(found.ids)


def test_a_template_that_rewrites_earlier_turns_is_refused_but_for_the_last() -> None:
    said = [TURNS[1], {"role": "assistant", "content": "think#say"}, TURNS[3], TURNS[4]]
    with pytest.raises(ValueError, match=r"here: the chat template writes messages\[1\] otherwise .*train_on to last"):
        Encoder(TOKENIZER, END, Template(REWRITES)).encode(chat(said), "here")
    found = Encoder(TOKENIZER, END, Template(REWRITES, train_on="last")).encode(chat(said), "here")
    written = [TURNS[1], {"role": "assistant", "content": "say"}, TURNS[3], TURNS[4]]
    assert (found.ids, found.targets) == oracle(chatml(written, last=True, newline=True))


def test_an_answer_that_its_template_does_not_end_is_ended() -> None:
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    found = Encoder(TOKENIZER, END, Template(BARE)).encode(chat(said), "here")
    assert found.ids[-1] == END
    assert found.targets is not None
    assert found.targets[-1]
    counted = [i for i, target in zip(found.ids, found.targets, strict=True) if target]
    assert TOKENIZER.decode(counted, skip_special_tokens=False).strip() == "there\n<|endoftext|>"


def test_the_token_that_begins_is_not_doubled() -> None:
    tokenizer = encoder()
    begin = int(tokenizer.token_to_id("<s>") or 0)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    found = Encoder(tokenizer, END, Template(BEGINS, {"bos_token": "<s>"})).encode(chat(TURNS), "here")
    assert (found.ids[0], found.ids.count(begin)) == (begin, 1)
    for prompt in ("hello", "<s>hello"):
        pair = Encoder(tokenizer, END).encode(Completion(prompt, " there"), "here")
        assert pair.ids == [begin, *ids("hello"), *ids(" there"), END]
        assert pair.targets == [False] * (1 + len(ids("hello"))) + [True] * (len(ids(" there")) + 1)


def test_a_completion_that_ends_itself_is_not_ended_twice() -> None:
    pair = Encoder(TOKENIZER, END).encode(Completion("hello", "there<|endoftext|>"), "here")
    assert list(pair.ids).count(END) == 1
    assert list(Encoder(TOKENIZER, END).encode("hello", "here").ids) == [*ids("hello"), END]


def test_tools_are_offered_and_called() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "what is it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "hello", "tool_call_id": "1"},
        {"role": "assistant", "content": "hello there"},
    ]
    found = Encoder(TOKENIZER, END, Template(TOOLS)).encode(chat(said, [tool]), "here")
    text = TOKENIZER.decode(list(found.ids), skip_special_tokens=False)
    assert '"parameters": {"type": "object"' in text
    assert '<call>{"name": "look", "arguments": {"at": "it"}}' in text, "arguments are no text in a text"
    assert found.targets is not None
    counted = TOKENIZER.decode(
        [i for i, t in zip(found.ids, found.targets, strict=True) if t], skip_special_tokens=False
    )
    assert counted == '<call>{"name": "look", "arguments": {"at": "it"}}<|im_end|>\nhello there<|im_end|>\n'


@pytest.mark.parametrize(
    ("said", "template", "sentence"),
    [
        (TURNS[:1], PLAIN, "here: no message of the assistant .*only of system.*leave it out"),
        (TURNS[:2], MARKED, "here: no message of the assistant .*only of system, user"),
        (
            TURNS,
            "{{ raise_exception('roles!') }}",
            r"here: the chat template refuses it \(roles!\)",
        ),
        (TURNS, "{% if %}", "here: the chat template refuses it"),
        (TURNS, "{% generation %}{% endgeneration %}x", "here: the chat template marks nothing"),
    ],
)
def test_what_cannot_be_learned_from_is_told(said: list[dict[str, Any]], template: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Encoder(TOKENIZER, END, Template(template)).encode(chat(said), "here")
    with pytest.raises(ValueError, match=r"here is a conversation, .* set data.chat_template to chatml"):
        Encoder(TOKENIZER, END).encode(chat(said), "here")


def test_what_is_written_in_a_document() -> None:
    assert texts_of("a") == ["a"]
    assert texts_of(Completion("a", "b")) == ["a", "b"]
    assert texts_of(chat(TURNS[1:3])) == ["hello", "what is it"]
