"""Conversion of records (JSON objects and table rows) to documents."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from hydragraph.errors import type_text

TRAIN_ON = ("assistant", "last", "all")
OVERLONG = ("cut", "drop", "refuse")

Messages = tuple[Mapping[str, Any], ...]
Format = Literal["text", "chat", "completion", "alpaca", "tokens", "preference"]
FORMATS = ("auto", *get_args(Format))

# Roles for speakers in ShareGPT and LLaMA-Factory.
_SPEAKERS = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "ai", "bot", "bard", "bing", "claude", "model", "function_call"), "assistant"),
    **dict.fromkeys(("function_response", "observation"), "tool"),
}
_ROLES = ("user", "assistant", "system", "tool")
_INSTRUCTION, _SYSTEM, _HISTORY = "instruction", "system", "history"
_INPUTS = ("input", "context")
_OUTPUTS = ("output", "response")
PAIRS = (("question", "answer"), ("prompt", "response"), ("query", "response"), ("input", "output"))
PROMPTS = ("question", "query", "input")
_TEMPLATE_ARGUMENTS = "chat_template_kwargs"
# LLaMA-Factory's field of messages before a pair of answers
_CONVERSATIONS = "conversations"
_IDS, _LABELS, _MASK = "input_ids", "labels", "attention_mask"
ASSISTANT = "assistant"
_NO_LABEL = -100
_UNTRAINED = ("weight", "train", "training")  # fields in which the value 0 excludes a message from training
# Message fields that are never reported as unread.
OF_MESSAGES = frozenset({"role", "content", "weight", "tool_calls", "tool_call_id", "name", "id"})

# Stanford's Alpaca prompt, for models without a chat template.
_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{}\n\n{}### Response:\n"
)


@dataclass(frozen=True)
class Completion:
    """A prompt, and a completion whose tokens are the targets."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template. Those with `weight` 0 are not trained on."""

    messages: Messages
    tools: tuple[Mapping[str, Any], ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        return [text for message in self.messages if isinstance(text := message.get("content"), str)]


@dataclass(frozen=True)
class AlpacaRecord(Conversation):
    """An Alpaca record; `completion` is for tokenizers without a chat template."""

    completion: Completion = Completion("", "")


@dataclass(frozen=True)
class TokenIds:
    """Token ids from another program.

    Attributes:
        targets: whether each token is a target; None: all.
    """

    ids: tuple[int, ...]
    targets: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class Preference:
    chosen: Completion | Conversation
    rejected: Completion | Conversation


Document = str | Completion | Conversation | TokenIds


@dataclass(frozen=True)
class FieldNames:
    """Format and field names of records, which are .jsonl objects or table rows.

    Attributes:
        format: contents of .jsonl objects and table rows: "text", "chat" (messages), "completion" (a prompt and its
            completion), "alpaca" (instruction, input, output, system, history), "tokens" (input_ids, and labels that
            may be -100) or "preference" (a prompt with a chosen and a rejected answer, for `objective`). "auto" detects
            the format from the first record of each file.
        text_field: the field or column that contains the text.
        messages_field: the field with a conversation, a list of {role, content}.
        tools_field: the field with a conversation's tools.
        prompt_field: the field with the prompt, whose tokens are not in the loss.
        completion_field: the field with the completion.
        chosen_field: the field with the preferred answer.
        rejected_field: the field with the rejected answer.
    """

    format: str = "auto"
    text_field: str = "text"
    messages_field: str = "messages"
    tools_field: str = "tools"
    prompt_field: str = "prompt"
    completion_field: str = "completion"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for format in get_args(Format) for name in self.read(format)))

    def read(self, format: Format) -> tuple[str, ...]:
        fields: dict[Format, tuple[str, ...]] = {
            "text": (self.text_field,),
            "chat": (self.messages_field, self.tools_field, _SYSTEM, _TEMPLATE_ARGUMENTS),
            "completion": (self.prompt_field, self.completion_field, self.tools_field, _TEMPLATE_ARGUMENTS),
            "alpaca": (_INSTRUCTION, *_INPUTS, *_OUTPUTS, _SYSTEM, _HISTORY, _TEMPLATE_ARGUMENTS),
            "tokens": (_IDS, _LABELS, _MASK),
            "preference": (
                *(self.prompt_field, self.chosen_field, self.rejected_field, self.messages_field, self.tools_field),
                *(_SYSTEM, _TEMPLATE_ARGUMENTS, _CONVERSATIONS, _INSTRUCTION, *_INPUTS, _HISTORY),
            ),
        }
        return fields[format]

    def unread(self, record: Mapping[str, Any], format: Format) -> list[str]:
        read = self.read(format)
        return [name for name, value in record.items() if name not in read and value not in (None, "", [], {})]

    def format_of(self, names: Collection[str], place: str, kind: str = "field") -> Format:
        needed: dict[Format, tuple[str, ...]] = {
            "text": (self.text_field,),
            "chat": (self.messages_field,),
            "completion": (self.prompt_field, self.completion_field),
            "alpaca": (_INSTRUCTION, next((name for name in _OUTPUTS if name in names), _OUTPUTS[0])),
            "tokens": (_IDS,),
            "preference": (self.chosen_field, self.rejected_field),
        }
        if self.format != "auto":
            chosen: Format = self.format  # pyrefly: ignore[bad-assignment]  # not "auto"
            missing = [name for name in needed[chosen] if name not in names]
            if missing:
                settings = {"text": "text_field", "chat": "messages_field", "completion": "prompt_field"}
                settings["preference"] = "chosen_field" if missing[0] == self.chosen_field else "rejected_field"
                remedy = (
                    f"set {settings[chosen]} to one of {list(names)}"
                    if chosen in settings
                    else f"choose another format for the {kind}s {list(names)}"
                )
                if chosen == "preference" and len(missing) == 2:
                    several = f"set chosen_field and rejected_field to two of {list(names)}, or "
                    remedy = f"{several if len(names) > 1 else ''}give records with two answers"
                raise ValueError(f"{place}: no {kind} {missing[0]!r}: {remedy}")
            return chosen
        # A record may fit several formats, such as "alpaca" and "completion".
        possible = [format for format, fields in needed.items() if all(name in names for name in fields)]
        # The user's fields take precedence.
        if "alpaca" in possible and "completion" in possible and self.prompt_field == _INSTRUCTION:
            possible.remove("alpaca")
        if len(possible) > 1:
            raise ValueError(
                f"{place}: the {kind}s {list(names)} fit the formats {' and '.join(possible)}: set format to one of "
                "them"
            )
        return possible[0] if possible else "text"

    def document(self, record: Mapping[str, Any], format: Format, place: str) -> Document | Preference | None:
        """Convert a record to a document, a pair of answers or, if its text is blank, None."""
        if format == "text":
            if self.text_field not in record:
                raise ValueError(self._no_text(record, place))
            text = _text(record[self.text_field], self.text_field, place)
            return text if text and text.strip() else None
        if format == "chat":
            said = _messages(_field(record, self.messages_field, place), self.messages_field, place)
            if said[0]["role"] != _SYSTEM:
                said = (*self._system(record), *said)
            return self._conversation(record, said, place)
        if format == "alpaca":
            return _instruction(record, place)
        if format == "tokens":
            return _token_ids(record, place)
        if format == "preference":
            return self._preference(record, place)
        prompt = _field(record, self.prompt_field, place)
        completion = _field(record, self.completion_field, place)
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion.strip():
                raise ValueError(f"{place}: {self.completion_field!r} is empty: remove the record")
            return Completion(prompt, completion)
        if isinstance(prompt, list) and isinstance(completion, list):
            before = _untrained(_messages(prompt, self.prompt_field, place))
            return self._conversation(record, (*before, *_messages(completion, self.completion_field, place)), place)
        raise ValueError(
            f"{place}: {self.prompt_field!r} is {type_text(prompt)}, and {self.completion_field!r} is "
            f"{type_text(completion)}: give two texts, or two lists of messages"
        )

    def _conversation(self, record: Mapping[str, Any], messages: Messages, place: str) -> Conversation:
        tools = _tools(record.get(self.tools_field), self.tools_field, place)
        return Conversation(messages, tools, _arguments(record, place))

    def _preference(self, record: Mapping[str, Any], place: str) -> Preference:
        chosen, rejected = (self._answer(record, name, place) for name in (self.chosen_field, self.rejected_field))
        if isinstance(chosen, str) and isinstance(rejected, str):
            return self._texts(record, chosen, rejected, place)
        if isinstance(chosen, str) or isinstance(rejected, str):
            raise ValueError(
                f"{place}: only one of {self.chosen_field!r} and {self.rejected_field!r} is a text: give two texts, or "
                "two lists of messages"
            )
        return Preference(*self._compared(record, chosen, rejected, place))

    def _compared(
        self, record: Mapping[str, Any], chosen: Messages, rejected: Messages, place: str
    ) -> list[Conversation]:
        before = self._before(record, place)
        system = self._system(record)
        if not before and chosen[0]["role"] == rejected[0]["role"] == ASSISTANT:
            raise ValueError(self._no_prompt(record, place))

        def whole(answer: Messages) -> Messages:
            said = (*before, *answer) if answer[0]["role"] == ASSISTANT else answer
            return said if said[0]["role"] == _SYSTEM else (*system, *said)

        # Both answers share a prompt, which is not trained on.
        untrained = _prompts_untrained(whole(chosen), whole(rejected))
        return [self._conversation(record, messages, place) for messages in untrained]

    def _answer(self, record: Mapping[str, Any], name: str, place: str) -> str | Messages:
        value = record.get(name)
        # A single message
        if isinstance(value, Mapping):
            value = [value]
        if not value or (isinstance(value, str) and not value.strip()):
            raise ValueError(f"{place}: there is no {name} answer ({name!r} is {value!r}): remove the pair")
        if not isinstance(value, (str, list)):
            raise ValueError(f"{place}: {name!r} is {type_text(value)}: give a text, or a list of messages")
        return value if isinstance(value, str) else _messages(value, name, place)

    def _texts(self, record: Mapping[str, Any], chosen: str, rejected: str, place: str) -> Preference:
        prompt = record.get(self.prompt_field)
        if record.get(_INSTRUCTION) and not prompt:
            return _of_instructions([{**record, _OUTPUTS[0]: text} for text in (chosen, rejected)], place)
        if not self._before(record, place):
            return self._prompt_within(record, chosen, rejected, place)
        said = [({"role": ASSISTANT, "content": text},) for text in (chosen, rejected)]
        pair = self._compared(record, said[0], said[1], place)
        if not isinstance(prompt, str):
            return Preference(*pair)
        system = "".join(f"{message['content']}\n\n" for message in self._system(record))
        plain = [Completion(system + prompt, text) for text in (chosen, rejected)]
        both = zip(pair, plain, strict=True)
        return Preference(*(AlpacaRecord(c.messages, c.tools, c.arguments, text) for c, text in both))

    def _prompt_within(self, record: Mapping[str, Any], chosen: str, rejected: str, place: str) -> Preference:
        # Without a prompt field, the prompt is what both answers begin with, up to its last blank.
        blanks = [blank.start() for blank in re.finditer(r"\s", chosen[: shared_length(chosen, rejected)])]
        if not blanks or not chosen[: blanks[-1]].strip() or any(record.get(name) for name in PROMPTS):
            raise ValueError(self._no_prompt(record, place))
        # The prompt ends before a space, which tokenizers join with the next word.
        at = blanks[-1]
        return Preference(*(Completion(text[:at], text[at:]) for text in (chosen, rejected)))

    def _no_prompt(self, record: Mapping[str, Any], place: str) -> str:
        other = next((name for name in PROMPTS if record.get(name)), None)
        remedy = f"or set prompt_field to {other!r}" if other else "or begin both answers with the prompt"
        return f"{place}: the pair has no prompt: add a field {self.prompt_field!r}, {remedy}"

    def _before(self, record: Mapping[str, Any], place: str) -> Messages:
        fields = (self.prompt_field, self.messages_field, _CONVERSATIONS)
        prompt = next((record[name] for name in fields if record.get(name)), None)
        if prompt is None:
            return ()
        if isinstance(prompt, str):
            return ({"role": "user", "content": prompt},)
        return _messages(prompt, self.prompt_field, place)

    def _system(self, record: Mapping[str, Any]) -> Messages:
        system = record.get(_SYSTEM)
        return ({"role": _SYSTEM, "content": system},) if isinstance(system, str) and system else ()

    def _no_text(self, record: Mapping[str, Any], place: str) -> str:
        lacks = f"{place}: no field {self.text_field!r}"
        if "conversations" in record:
            return f"{lacks}: set messages_field to 'conversations'"
        for prompt, completion in PAIRS:
            if prompt in record and completion in record:
                return f"{lacks}: set prompt_field to {prompt!r} and completion_field to {completion!r}"
        texts = sorted(name for name, value in record.items() if isinstance(value, str))
        if texts:
            return f"{lacks}: set text_field to one of {texts}"
        for name in record:
            _text(record[name], name, place)
        write = " or ".join(f"{{{json.dumps(name)}: ...}}" for name in (self.text_field, self.messages_field))
        return f"{lacks}, nor any other text field: write {write}"


PLAIN = FieldNames()


def _prompts_untrained(chosen: Messages, rejected: Messages) -> Iterator[Messages]:
    """Yield both conversations; the messages that both begin with get weight 0, except a last message."""
    most = min(len(chosen), len(rejected)) - 1
    shared = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    for messages in (chosen, rejected):
        yield (*_untrained(messages[:shared]), *messages[shared:])


def _untrained(messages: Messages) -> Messages:
    return tuple({**message, "weight": 0} for message in messages)


def _of_instructions(records: Sequence[Mapping[str, Any]], place: str) -> Preference:
    instructions = [_instruction(record, place) for record in records]
    untrained = _prompts_untrained(*(instruction.messages for instruction in instructions))
    return Preference(*(replace(i, messages=messages) for i, messages in zip(instructions, untrained, strict=True)))


def _instruction(record: Mapping[str, Any], place: str) -> AlpacaRecord:
    instruction = _text(_field(record, _INSTRUCTION, place), _INSTRUCTION, place) or ""
    name = next((name for name in _OUTPUTS if name in record), _OUTPUTS[0])
    output = _text(_field(record, name, place), name, place)
    if not output or not output.strip():
        raise ValueError(f"{place}: {name!r} is empty: remove the record")
    input_text = next((text for name in _INPUTS if (text := _text(record.get(name), name, place))), "")
    messages: list[Mapping[str, Any]] = []
    system = _text(record.get(_SYSTEM), _SYSTEM, place)
    if system:
        messages.append({"role": "system", "content": system})
    history = record.get(_HISTORY) or []
    for turn in history if isinstance(history, list) else [history]:
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise ValueError(f"{place}: {_HISTORY!r} has {turn!r}: give a list of [prompt, answer] pairs")
        messages += [{"role": "user", "content": turn[0]}, _message({"role": ASSISTANT, "content": turn[1]}, place)]
    messages.append({"role": "user", "content": "\n".join(text for text in (instruction, input_text) if text)})
    messages.append({"role": "assistant", "content": output})
    paired = ", paired with an input that provides further context" if input_text else ""
    prompt = _ALPACA.format(paired, instruction, f"### Input:\n{input_text}\n\n" if input_text else "")
    before = "".join(f"{message['content']}\n\n" for message in messages[:-2])
    return AlpacaRecord(tuple(messages), (), _arguments(record, place), Completion(before + prompt, output))


def _token_ids(record: Mapping[str, Any], place: str) -> TokenIds | None:
    ids = _field(record, _IDS, place)
    columns = {_IDS: ids, **{name: record[name] for name in (_LABELS, _MASK) if record.get(name) is not None}}
    for name, values in columns.items():
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise ValueError(f"{place}: {name!r} is not a list of whole numbers: give the ids of one document")
        if len(values) != len(ids):
            raise ValueError(
                f"{place}: {name!r} has {len(values)} entries, but {_IDS!r} has {len(ids)}: give equal lengths"
            )
    # kept: positions that the attention mask does not exclude
    kept = [i for i, present in enumerate(columns.get(_MASK, [1] * len(ids))) if present]
    labels = columns.get(_LABELS)
    if labels is not None:
        odd = next((i for i in kept if labels[i] not in (ids[i], _NO_LABEL)), None)
        if odd is not None:
            raise ValueError(
                f"{place}: {_LABELS}[{odd}] is {labels[odd]}, but {_IDS}[{odd}] is {ids[odd]}: set each label to "
                f"the id at the same position (labels are not shifted), or {_NO_LABEL}"
            )
    if not kept:
        return None
    targets = None if labels is None else tuple(labels[i] != _NO_LABEL for i in kept)
    return TokenIds(tuple(ids[i] for i in kept), targets)


def _arguments(record: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    arguments = record.get(_TEMPLATE_ARGUMENTS)
    if isinstance(arguments, str):
        arguments = _json(arguments, _TEMPLATE_ARGUMENTS, place)
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{place}: {_TEMPLATE_ARGUMENTS!r} is {type_text(arguments)}: give a mapping")
    return {name: value for name, value in arguments.items() if value is not None}


def _field(record: Mapping[str, Any], name: str, place: str) -> Any:
    if name not in record:
        raise ValueError(
            f"{place}: no field {name!r}, which an earlier record of this file has; the fields are {sorted(record)}: "
            "give all records of a file the same fields"
        )
    return record[name]


def _text(value: object, name: str, place: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and any(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value):
        raise ValueError(f"{place}: {name!r} is a conversation: set messages_field to {name!r} instead of text_field")
    raise ValueError(f"{place}: {name!r} is {type_text(value)}, not text: set text_field to a text field")


def _messages(value: object, name: str, place: str) -> Messages:
    if isinstance(value, str):
        value = _json(value, name, place)
    if not isinstance(value, list) or not value:
        what = "empty" if value == [] else type_text(value)
        raise ValueError(f"{place}: {name!r} is {what}: give a list of messages, {{role: ..., content: ...}}")
    return tuple(_message(message, f"{place}: {name}[{i}]") for i, message in enumerate(value))


def _message(message: object, where: str) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} is {type_text(message)}: give a mapping with role and content")
    # Templates would write null fields.
    converted = {name: value for name, value in message.items() if value is not None}
    if "role" not in converted and "from" in converted:
        converted["role"] = converted.pop("from")
        if "value" in converted:
            converted["content"] = converted.pop("value")
    for name in _UNTRAINED:
        weight = converted.pop(name, 1)
        if weight not in (0, 1):
            raise ValueError(f"{where}: the {name} is {weight!r}: give 1, or 0 to exclude the message from training")
        if not weight:
            converted["weight"] = 0
    role = converted.get("role")
    if isinstance(role, str):
        role = converted["role"] = _SPEAKERS.get(role.lower(), role.lower() if role.lower() in _ROLES else role)
    if not isinstance(role, str) or not role:
        raise ValueError(
            f"{where} has no role; its fields are {sorted(map(str, message))}: add a role, such as user or assistant"
        )
    content = converted.get("content")
    if isinstance(content, list):
        content = converted["content"] = _parts(content, where)
    if content is not None and not isinstance(content, str):
        raise ValueError(f"{where}: the content is {type_text(content)}: give a text")
    calls = converted.get("tool_calls")
    if calls is not None:
        converted["tool_calls"] = _calls(calls, where)
    if content is None and not calls:
        raise ValueError(f"{where}: a message of {role} has neither content nor tool_calls: add content")
    converted.setdefault("content", "")
    if role == ASSISTANT and not (calls or converted["content"].strip() or converted.keys() - OF_MESSAGES):
        converted["weight"] = 0
    return converted


def _parts(parts: Sequence[object], where: str) -> str:
    texts: list[str] = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind not in (None, "text") or not isinstance(text, str):
            raise ValueError(f"{where}: the content has a part of type {kind or type(part).__name__}: give only text")
        texts.append(text)
    return "".join(texts)


def _calls(calls: object, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"{where}: tool_calls is {type_text(calls)}: give a list of {{function: ...}}")
    checked: list[Mapping[str, Any]] = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}: a tool call has no function name: give {{function: {{name, arguments}}}}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                json.loads(arguments or "{}")
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{where}: the arguments of {function['name']} are not JSON ({error}): give valid JSON"
                ) from error
        written = {**function, "arguments": arguments if arguments is not None else {}}
        checked.append({**call, "function": written} if "function" in call else written)
    return checked


def _tools(value: object, name: str, place: str) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, str):
        value = _json(value, name, place) if value.strip() else None
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise ValueError(f"{place}: {name!r} is not a list of tools: give JSON schemas of functions, or leave it out")
    return tuple(value)


def _json(text: str, name: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: {name!r} is not valid JSON ({error}): correct it") from error


def shared_length(first: str, second: str) -> int:
    differing = (i for i, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(differing, min(len(first), len(second)))


def texts_of(document: Document) -> list[str]:
    if isinstance(document, str):
        return [document]
    if isinstance(document, Completion):
        return [document.prompt, document.completion]
    if isinstance(document, TokenIds):
        return []
    return document.texts


def characters_of(document: Document) -> int:
    if isinstance(document, TokenIds):
        return len(document.ids)
    return sum(map(len, texts_of(document)))
