"""Only what a model is to say is a target: held against masks that are written by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, processors

from hydragraph.data.chat import DocumentEncoder
from hydragraph.data.chat import chatml as chatml_for
from hydragraph.data.documents import AlpacaRecord, Completion, Conversation, FieldNames, TokenIds, texts_of
from hydragraph.data.template import ChatTemplate
from hydragraph.data.tokenizer import train_bpe
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
    document = FieldNames().document({"messages": turns, "tools": tools}, "chat", "here")
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
    """ChatML by hand; `newline`: the line end after an answer also counts, as if a turn were all that it adds."""
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
    found = DocumentEncoder(TOKENIZER, END, ChatTemplate(template, train_on="last" if last else "assistant")).encode(
        chat(TURNS), "here"
    )
    assert (found.ids, found.targets) == oracle(chatml(TURNS, last, newline=template is PLAIN))


words = st.text(st.sampled_from("ab é日🦎\n"), max_size=6)
turns = st.lists(st.tuples(words, words.filter(str.strip)), min_size=1, max_size=4).map(
    lambda pairs: [
        turn for q, a in pairs for turn in ({"role": "user", "content": q}, {"role": "assistant", "content": a})
    ]
)


@given(turns)
def test_any_conversation_has_the_mask_of_the_oracle(said: list[dict[str, Any]]) -> None:
    for template in (MARKED, PLAIN):
        found = DocumentEncoder(TOKENIZER, END, ChatTemplate(template)).encode(chat(said), "here")
        text = "".join(piece for piece, _ in chatml(said))
        assert found.ids == ids(text)
        assert found.targets is not None
        counts = [i for i, target in zip(found.ids, found.targets, strict=True) if target]
        answers = [turn["content"] for turn in said if turn["role"] == "assistant"]
        assert sum(i == TOKENIZER.token_to_id("<|im_end|>") for i in counts) == len(answers)
        assert TOKENIZER.token_to_id("<|im_start|>") not in counts
        # A token may hold the end of a header and the beginning of an answer: then it counts.
        decoded = TOKENIZER.decode(counts, skip_special_tokens=False)
        assert [part.strip("\n") for part in decoded.split("<|im_end|>")[:-1]] == [a.strip("\n") for a in answers]


def test_all_tokens_count_if_that_is_asked_for() -> None:
    found = DocumentEncoder(TOKENIZER, END, ChatTemplate(PLAIN, train_on="all")).encode(chat(TURNS[:2]), "here")
    assert found.targets == [True] * len(found.ids)


def test_a_turn_that_is_rewritten_is_learned_as_the_whole_conversation_has_it() -> None:
    said = [TURNS[1], {"role": "assistant", "content": "think#say"}, TURNS[3], TURNS[4]]
    written = [TURNS[1], {"role": "assistant", "content": "say"}, TURNS[3], TURNS[4]]
    for last in (False, True):
        template = ChatTemplate(REWRITES, train_on="last" if last else "assistant")
        found = DocumentEncoder(TOKENIZER, END, template).encode(chat(said), "here")
        assert (found.ids, found.targets) == oracle(chatml(written, last=last, newline=True))


@pytest.mark.parametrize("train_on", ["assistant", "all"])
@pytest.mark.parametrize("trim", [None, False, True])
def test_tokens_of_blanks_are_targets_whatever_the_post_processor_trims(trim: bool | None, train_on: str) -> None:
    tokenizer = encoder()
    if trim is not None:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "if a:\n        x\n   é🦎 \n    z"}]
    found = DocumentEncoder(tokenizer, END, ChatTemplate(MARKED, train_on=train_on)).encode(chat(said), "here")
    pieces = chatml(said) if train_on == "assistant" else [(text, True) for text, _ in chatml(said)]
    assert (found.ids, found.targets) == oracle(pieces)


def test_a_base_model_learns_its_own_end_token() -> None:
    special = ("</s>",)
    tokenizer = train_bpe(["user assistant"], 300, special)
    said = [turn for turn in TURNS if turn["role"] != "system"]
    found = DocumentEncoder(tokenizer, 0, ChatTemplate(chatml_for(special, "</s>"))).encode(chat(said), "here")
    assert found.targets is not None
    assert found.ids[-1] == 0
    ends = [target for i, target in zip(found.ids, found.targets, strict=True) if i == 0]
    assert ends == [False, True, False, True]
    assert chatml_for(["<|im_end|>"], "</s>") == MARKED
    of_a_file = DocumentEncoder(tokenizer, 0, ChatTemplate(PLAIN)).encode(chat(said), "here")
    assert of_a_file.targets is not None
    assert (of_a_file.ids[-1], of_a_file.targets[-1]) == (0, True)


def test_texts_begin_as_the_tokenizer_begins_them() -> None:
    tokenizer = encoder()
    begin = int(tokenizer.token_to_id("<s>") or 0)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    encode = DocumentEncoder(tokenizer, END).encode
    assert encode("hello", "here").ids == encode("<s>hello", "here").ids == [begin, *ids("hello"), END]
    batch = DocumentEncoder(tokenizer, END).encode_texts(["hello", "<s>hello"])
    assert [document.ids for document in batch] == [[begin, *ids("hello"), END]] * 2


@pytest.mark.parametrize(
    ("added", "begin"),
    [("[A] <b> $A", ["[A]", "<b>"]), ("</s> $A", ["</s>"]), ("$A </s>", []), ("<b> $A </s>", ["<b>"])],
)
def test_all_tokens_that_a_tokenizer_adds_before_a_text_are_kept(added: str, begin: list[str]) -> None:
    tokenizer = encoder()
    tokenizer.add_special_tokens(["[A]", "<b>", "</s>"])
    special = [(name, int(tokenizer.token_to_id(name) or 0)) for name in ("[A]", "<b>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=added, special_tokens=special)
    end = dict(special)["</s>"]
    found = DocumentEncoder(tokenizer, end).encode("hello", "here")
    assert found.ids == [*(dict(special)[name] for name in begin), *ids("hello"), end]


def test_token_ids_are_taken_as_they_are() -> None:
    encode = DocumentEncoder(TOKENIZER, END).encode
    found = encode(TokenIds((1, 2), (False, True)), "here")
    assert (found.ids, found.targets) == ([1, 2], [False, True])
    with pytest.raises(ValueError, match=r"here: the tokenizer has no id 9999, only 0 to \d+:"):
        encode(TokenIds((9999,)), "here")


def test_alpaca_is_a_conversation_only_where_there_is_a_template() -> None:
    record = {"instruction": "what", "input": "it", "output": "hello"}
    document = FieldNames().document(record, "alpaca", "here")
    assert isinstance(document, AlpacaRecord)
    plain = DocumentEncoder(TOKENIZER, END).encode(document, "here")
    text = TOKENIZER.decode(list(plain.ids), skip_special_tokens=False)
    assert text.startswith("Below is an instruction")
    assert text.endswith("### Instruction:\nwhat\n\n### Input:\nit\n\n### Response:\nhello<|endoftext|>")
    chatted = DocumentEncoder(TOKENIZER, END, ChatTemplate(MARKED)).encode(document, "here")
    said = [{"role": "user", "content": "what\nit"}, {"role": "assistant", "content": "hello"}]
    assert (chatted.ids, chatted.targets) == oracle(chatml(said))


def test_an_answer_that_its_template_does_not_end_is_ended() -> None:
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    found = DocumentEncoder(TOKENIZER, END, ChatTemplate(BARE)).encode(chat(said), "here")
    assert found.ids[-1] == END
    assert found.targets is not None
    assert found.targets[-1]
    counted = [i for i, target in zip(found.ids, found.targets, strict=True) if target]
    assert TOKENIZER.decode(counted, skip_special_tokens=False).strip() == "there\n<|endoftext|>"


def test_the_token_that_begins_is_not_doubled() -> None:
    tokenizer = encoder()
    begin = int(tokenizer.token_to_id("<s>") or 0)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    found = DocumentEncoder(tokenizer, END, ChatTemplate(BEGINS, {"bos_token": "<s>"})).encode(chat(TURNS), "here")
    assert (found.ids[0], found.ids.count(begin)) == (begin, 1)
    for prompt in ("hello", "<s>hello"):
        pair = DocumentEncoder(tokenizer, END).encode(Completion(prompt, " there"), "here")
        assert pair.ids == [begin, *ids("hello"), *ids(" there"), END]
        assert pair.targets == [False] * (1 + len(ids("hello"))) + [True] * (len(ids(" there")) + 1)


def test_completions_get_no_space_from_tokenizers_that_add_one_before_texts() -> None:
    tokenizer = Tokenizer(models.BPE({"▁": 0, "a": 1, ":": 2, "b": 3, "▁b": 4, "\n": 5, "</s>": 6}, [("▁", "b")]))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    for prompt, completion, answer in (("a:", " b", [4]), ("a:", "b", [3]), ("a: ", "b", [3])):
        pair = DocumentEncoder(tokenizer, 6).encode(Completion(prompt, completion), "here")
        before = [0, 1, 2, 0][: len(prompt) + 1]
        assert (pair.ids, pair.targets) == ([*before, *answer, 6], [False] * len(before) + [True, True])


def test_a_document_that_ends_itself_is_not_ended_twice() -> None:
    pair = DocumentEncoder(TOKENIZER, END).encode(Completion("hello", "there<|endoftext|>"), "here")
    assert list(pair.ids).count(END) == 1
    for text in ("hello", "hello<|endoftext|>"):
        assert list(DocumentEncoder(TOKENIZER, END).encode(text, "here").ids) == [*ids("hello"), END]


def test_tools_are_offered_and_called() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "what is it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "hello", "tool_call_id": "1"},
        {"role": "assistant", "content": "hello there"},
    ]
    found = DocumentEncoder(TOKENIZER, END, ChatTemplate(TOOLS)).encode(chat(said, [tool]), "here")
    text = TOKENIZER.decode(list(found.ids), skip_special_tokens=False)
    assert '"parameters": {"type": "object"' in text
    assert '<call>{"name": "look", "arguments": {"at": "it"}}' in text, "arguments are JSON, not quoted text"
    assert found.targets is not None
    counted = TOKENIZER.decode(
        [i for i, t in zip(found.ids, found.targets, strict=True) if t], skip_special_tokens=False
    )
    assert counted == '<call>{"name": "look", "arguments": {"at": "it"}}<|im_end|>\nhello there<|im_end|>\n'


@pytest.mark.parametrize(
    ("said", "template", "sentence"),
    [
        (TURNS[:1], PLAIN, "here: no assistant message .*only system.*remove the conversation"),
        (TURNS[:2], MARKED, "here: no assistant message .*only system, user"),
        (
            TURNS,
            "{{ raise_exception('roles!') }}",
            r"here: the chat template rejects the conversation \(roles!\)",
        ),
        (TURNS, "{% if %}", "here: the chat template rejects the conversation"),
        (TURNS, "{% generation %}{% endgeneration %}x", "here: the chat template marks no text"),
    ],
)
def test_what_cannot_be_learned_from_is_told(said: list[dict[str, Any]], template: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        DocumentEncoder(TOKENIZER, END, ChatTemplate(template)).encode(chat(said), "here")
    with pytest.raises(ValueError, match=r"here is a conversation, .* set data.chat_template to 'chatml'"):
        DocumentEncoder(TOKENIZER, END).encode(chat(said), "here")


def test_what_is_written_in_a_document() -> None:
    assert texts_of("a") == ["a"]
    assert texts_of(Completion("a", "b")) == ["a", "b"]
    assert texts_of(chat(TURNS[1:3])) == ["hello", "what is it"]
