"""Records become texts, pairs and conversations, or give a one-sentence error with their place."""

from __future__ import annotations

from typing import Any

import pytest

from hydragraph.data.documents import (
    PLAIN,
    AlpacaRecord,
    Completion,
    Conversation,
    FieldNames,
    Preference,
    TokenIds,
)

HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def test_the_fields_say_what_a_record_holds() -> None:
    assert PLAIN.format_of(["text", "id"], "f:1") == "text"
    assert PLAIN.format_of(["messages", "prompt"], "f:1") == "chat"
    assert PLAIN.format_of(["prompt", "completion"], "f:1") == "completion"
    assert (
        FieldNames(prompt_field="question", completion_field="answer").format_of(["question", "answer"], "f:1")
        == "completion"
    )
    assert FieldNames(format="chat").format_of(["text", "messages"], "f:1") == "chat"
    with pytest.raises(ValueError, match=r"f:1: the fields .* fit the formats text and chat: set format"):
        PLAIN.format_of(["text", "messages"], "f:1")
    with pytest.raises(ValueError, match=r"f:1: no field 'messages': set messages_field to one of \['chat'\]"):
        FieldNames(format="chat").format_of(["chat"], "f:1")


def test_conversations_are_written_as_templates_read_them() -> None:
    said = [
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": [{"type": "text", "text": "h"}, {"type": "text", "text": "o"}], "weight": None},
    ]
    document = FieldNames(messages_field="conversations").document({"conversations": said}, "chat", "f:1")
    assert document == Conversation(({"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}))
    pair = {"prompt": HI[:1], "completion": HI[1:]}
    assert PLAIN.document(pair, "completion", "f:1") == Conversation(({**HI[0], "weight": 0}, HI[1]))
    assert PLAIN.document({"prompt": "a", "completion": "b"}, "completion", "f:1") == Completion("a", "b")
    written = PLAIN.document({"messages": '[{"role": "user", "content": "hi"}]', "tools": "[]"}, "chat", "f:1")
    assert written == Conversation(({"role": "user", "content": "hi"},))


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "f:3: 'messages' is empty: give a list of messages"),
        (None, "f:3: 'messages' is a NoneType"),
        ("hi", "f:3: 'messages' is not valid JSON"),
        (7, "f:3: 'messages' is an int"),
        (["hi"], r"f:3: messages\[0\] is a str: give a mapping with role and content"),
        ([{"content": "hi"}], r"f:3: messages\[0\] has no role; its fields are \['content'\]"),
        ([{"role": "", "content": "hi"}], r"f:3: messages\[0\] has no role"),
        ([*HI, {"role": "user"}], r"f:3: messages\[2\]: a message of user has neither content"),
        ([{"role": "user", "content": 7}], r"f:3: messages\[0\]: the content is an int: give a text"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "a part of type image: give only text"),
        ([CALL], r"f:3: messages\[0\]: the arguments of f are not JSON"),
        ([{"role": "assistant", "tool_calls": [{}]}], "a tool call has no function name"),
        ([{"role": "assistant", "tool_calls": "f()"}], "tool_calls is a str"),
    ],
)
def test_a_malformed_conversation_is_told(messages: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        PLAIN.document({"messages": messages}, "chat", "f:3")


@pytest.mark.parametrize(
    ("record", "format", "sentence"),
    [
        (
            {"text": "a"},
            "chat",
            r"f:3: no field 'messages', which an earlier record of this file has; the fields are \['text'\]: give all",
        ),
        ({"messages": HI}, "text", "f:3: 'messages' is a conversation: set messages_field to 'messages'"),
        ({"conversations": HI}, "text", "set messages_field to 'conversations'"),
        ({"prompt": "a"}, "completion", "f:3: no field 'completion'"),
        ({"prompt": "a", "completion": ""}, "completion", "'completion' is empty: remove the record"),
        ({"prompt": "a", "completion": " \n"}, "completion", "'completion' is empty: remove the record"),
        ({"instruction": "a", "output": " "}, "alpaca", "'output' is empty: remove the record"),
        ({"prompt": "a", "completion": HI}, "completion", "give two texts, or two lists"),
        ({"messages": HI, "tools": "x"}, "chat", "'tools' is not valid JSON"),
        ({"messages": HI, "tools": {"a": 1}}, "chat", "'tools' is not a list of tools"),
        ({}, "text", "nor any other text field: write"),
    ],
)
def test_a_record_of_another_kind_is_told(record: dict[str, Any], format: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        PLAIN.document(record, format, "f:3")


def test_a_blank_text_is_no_document() -> None:
    assert [PLAIN.document({"text": text}, "text", "f:1") for text in (None, "", "\n ", " a")] == [
        None,
        None,
        None,
        " a",
    ]


def test_sharegpt_as_others_write_it() -> None:
    said = [
        {"from": "human", "value": "Q"},
        {"from": "function_call", "value": "{}"},
        {"from": "observation", "value": "42"},
        {"from": "chatgpt", "value": "A"},
    ]
    document = FieldNames(messages_field="conversations").document(
        {"conversations": said, "system": "S"}, "chat", "f:1"
    )
    assert isinstance(document, Conversation)
    assert [(turn["role"], turn["content"]) for turn in document.messages] == [
        ("system", "S"),
        ("user", "Q"),
        ("assistant", "{}"),
        ("tool", "42"),
        ("assistant", "A"),
    ]


def test_roles_are_those_of_templates_however_they_are_written() -> None:
    said = [{"role": role, "content": "x"} for role in ("System", "human", "AI", "User", "model", "developer")]
    document = PLAIN.document({"messages": said}, "chat", "f:1")
    assert isinstance(document, Conversation)
    roles = [turn["role"] for turn in document.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant", "developer"]


def test_weights_and_template_arguments_are_kept() -> None:
    said = [HI[0], {**HI[1], "weight": 0}, {**HI[1], "train": False}, {**HI[1], "weight": 1, "training": True}]
    document = PLAIN.document({"messages": said, "chat_template_kwargs": {"think": False, "no": None}}, "chat", "f:1")
    assert isinstance(document, Conversation)
    assert [turn.get("weight") for turn in document.messages] == [None, 0, 0, None]
    assert document.arguments == {"think": False}
    silent = {"role": "assistant", "content": " "}
    document = PLAIN.document({"messages": [silent, {**silent, "reasoning": "r"}]}, "chat", "f:1")
    assert document == Conversation(({**silent, "weight": 0}, {**silent, "reasoning": "r"}))
    alpaca = PLAIN.document({"instruction": "I", "output": "A", "history": [["q", ""]]}, "alpaca", "f:1")
    assert isinstance(alpaca, AlpacaRecord)
    assert alpaca.messages[1]["weight"] == 0
    with pytest.raises(ValueError, match=r"f:1: messages\[0\]: the weight is 0.5: give 1, or 0"):
        PLAIN.document({"messages": [{**HI[1], "weight": 0.5}]}, "chat", "f:1")


def test_alpaca_has_an_input_a_system_message_and_a_history() -> None:
    record = {"instruction": "I", "input": "C", "output": "A", "system": "S", "history": [["q", "a"]], "id": 1}
    assert PLAIN.format_of(record, "f:1") == "alpaca"
    assert PLAIN.unread(record, "alpaca") == ["id"]
    document = PLAIN.document(record, "alpaca", "f:1")
    assert isinstance(document, AlpacaRecord)
    assert [turn["content"] for turn in document.messages] == ["S", "q", "a", "I\nC", "A"]
    dolly = PLAIN.document({"instruction": "I", "context": "C", "response": "A"}, "alpaca", "f:1")
    assert isinstance(dolly, AlpacaRecord)
    assert [turn["content"] for turn in dolly.messages] == ["I\nC", "A"]
    with pytest.raises(ValueError, match="f:1: 'history' has"):
        PLAIN.document({**record, "history": ["q"]}, "alpaca", "f:1")


def test_token_ids_have_labels_at_their_own_places() -> None:
    record = {"input_ids": [1, 2, 3, 0], "labels": [-100, 2, 3, -100], "attention_mask": [1, 1, 1, 0]}
    assert PLAIN.format_of(record, "f:1") == "tokens"
    assert PLAIN.document(record, "tokens", "f:1") == TokenIds((1, 2, 3), (False, True, True))
    assert PLAIN.document({"input_ids": [1, 2]}, "tokens", "f:1") == TokenIds((1, 2))
    for change, sentence in (
        ({"labels": [2, 3, 0, -100]}, r"labels\[0\] is 2, but input_ids\[0\] is 1"),
        ({"labels": [1]}, "'labels' has 1 entries, but 'input_ids' has 4"),
        ({"input_ids": "1 2"}, "'input_ids' is not a list of whole numbers"),
    ):
        with pytest.raises(ValueError, match=sentence):
            PLAIN.document({**record, **change}, "tokens", "f:1")


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"query": "Q", "response": "A"}, "set prompt_field to 'query' and completion_field to 'response'"),
        ({"input": "Q", "output": "A"}, "set prompt_field to 'input' and completion_field to 'output'"),
    ],
)
def test_other_names_of_fields_are_told(record: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        PLAIN.document(record, "text", "f:3")


Answer = Completion | Conversation
USER, YES, NO = (
    {"role": role, "content": text} for role, text in (("user", "Q"), ("assistant", "A"), ("assistant", "B"))
)
SYSTEM = {"role": "system", "content": "S"}


def untrained(*messages: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return tuple({**message, "weight": 0} for message in messages)


@pytest.mark.parametrize(
    ("record", "chosen", "rejected"),
    [
        (
            {"prompt": "Q", "chosen": "A", "rejected": "B"},
            AlpacaRecord((*untrained(USER), YES), (), {}, Completion("Q", "A")),
            AlpacaRecord((*untrained(USER), NO), (), {}, Completion("Q", "B")),
        ),
        (
            {"chosen": "\n\nHuman: hi\n\nAssistant: yes", "rejected": "\n\nHuman: hi\n\nAssistant: yet no"},
            Completion("\n\nHuman: hi\n\nAssistant:", " yes"),
            Completion("\n\nHuman: hi\n\nAssistant:", " yet no"),
        ),
        (
            {"chosen": "Human: hi Assistant: yes", "rejected": "Human: hi Assistant: yes, sure"},
            Completion("Human: hi Assistant:", " yes"),
            Completion("Human: hi Assistant:", " yes, sure"),
        ),
        *(
            (record, Conversation((*untrained(USER), YES)), Conversation((*untrained(USER), NO)))
            for record in (
                {"chosen": [USER, YES], "rejected": [USER, NO]},
                {"prompt": "Q", "messages": [USER, YES], "chosen": [USER, YES], "rejected": [USER, NO]},
                {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
                {"prompt": [USER], "chosen": "A", "rejected": "B"},
                {"prompt": "Q", "chosen": [YES], "rejected": [NO]},
                {
                    "conversations": [{"from": "human", "value": "Q"}],
                    "chosen": {"from": "gpt", "value": "A"},
                    "rejected": {"from": "gpt", "value": "B"},
                },
            )
        ),
        (
            {"system": "S", "prompt": "Q", "chosen": [YES], "rejected": [NO]},
            Conversation((*untrained(SYSTEM, USER), YES)),
            Conversation((*untrained(SYSTEM, USER), NO)),
        ),
        (
            {"system": "S", "prompt": "Q", "chosen": "A", "rejected": "B"},
            AlpacaRecord((*untrained(SYSTEM, USER), YES), (), {}, Completion("S\n\nQ", "A")),
            AlpacaRecord((*untrained(SYSTEM, USER), NO), (), {}, Completion("S\n\nQ", "B")),
        ),
        (
            {"chosen": [USER, YES, USER, YES], "rejected": [USER, YES, USER, NO]},
            Conversation((*untrained(USER, YES, USER), YES)),
            Conversation((*untrained(USER, YES, USER), NO)),
        ),
    ],
)
def test_pairs_of_answers(record: dict[str, Any], chosen: Answer, rejected: Answer) -> None:
    if "messages" not in record:
        assert PLAIN.format_of(record.keys(), "f") == "preference"
    assert PLAIN.document(record, "preference", "f:3") == Preference(chosen, rejected)


def test_a_pair_for_an_instruction() -> None:
    pair = PLAIN.document({"instruction": "Q", "input": "", "chosen": "A", "rejected": "B"}, "preference", "f:3")
    assert isinstance(pair, Preference)
    assert isinstance(pair.chosen, AlpacaRecord)
    assert pair.chosen.messages == (*untrained(USER), YES)
    assert pair.chosen.completion.completion == "A"


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (
            {"prompt": "Q", "chosen": "A"},
            r"f:3: there is no rejected answer \('rejected' is None\): remove the pair",
        ),
        ({"prompt": "Q", "chosen": "", "rejected": "B"}, "there is no chosen answer"),
        ({"prompt": "Q", "chosen": " ", "rejected": "B"}, "there is no chosen answer"),
        ({"prompt": "Q", "chosen": 1, "rejected": 2}, "'chosen' is an int: give a text, or a list of messages"),
        ({"prompt": "Q", "chosen": [], "rejected": [NO]}, "there is no chosen answer"),
        (
            {"question": "Q", "chosen": "A b", "rejected": "A c"},
            "the pair has no prompt: .*set prompt_field to 'question'",
        ),
        (
            {"chosen": "A", "rejected": "B"},
            "the pair has no prompt: add a field 'prompt', or begin both answers with the prompt",
        ),
        ({"chosen": [YES], "rejected": [NO]}, "the pair has no prompt"),
        ({"prompt": "Q", "chosen": "A", "rejected": [NO]}, "only one of 'chosen' and 'rejected' is a text"),
    ],
)
def test_pairs_that_lack_something_are_named(record: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        PLAIN.document(record, "preference", "f:3")


def test_other_names_of_answers() -> None:
    fields = FieldNames(format="preference", prompt_field="question", chosen_field="good", rejected_field="bad")
    assert fields.format_of(["question", "good", "bad"], "f") == "preference"
    pair = fields.document({"question": "Q", "good": "A", "bad": "B"}, "preference", "f:1")
    assert pair == PLAIN.document({"prompt": "Q", "chosen": "A", "rejected": "B"}, "preference", "f:1")
    with pytest.raises(ValueError, match="no field 'bad': set rejected_field to one of"):
        fields.format_of(["question", "good"], "f")
    with pytest.raises(
        ValueError, match=r"no field 'good': set chosen_field and rejected_field to two of \['a', 'b'\], or"
    ):
        fields.format_of(["a", "b"], "f")
    with pytest.raises(ValueError, match="no field 'good': give records with two answers"):
        fields.format_of(["messages"], "f")
