"""What a corpus is made of: texts, prompts with their completions, and conversations; and how records become them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

FORMATS = ("auto", "text", "chat", "completion")
TRAIN_ON = ("assistant", "last", "all")  # which tokens of a conversation count
OVERLONG = ("cut", "drop", "refuse")  # what becomes of documents that are longer than the context

Format = Literal["text", "chat", "completion"]

# How ShareGPT's conversations call who speaks.
_SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "bing": "assistant",
    "function_response": "tool",
    "observation": "tool",
}


@dataclass(frozen=True)
class Completion:
    """A prompt, whose tokens are no targets, and what follows it, whose tokens are."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them: mappings with a role and, mostly, a content; and the tools on offer."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def texts(self) -> list[str]:
        """What is said in it, for training a tokenizer."""
        return [text for message in self.messages if isinstance(text := message.get("content"), str)]


Document = str | Completion | Conversation


@dataclass(frozen=True)
class Fields:
    """Which fields of a record (a .jsonl object, a row of a table) hold what.

    Attributes:
        format: "text", "chat" or "completion"; "auto": what the fields of a file's first record say.
        text: of a text.
        messages: of a conversation: a list of {role, content}, or of ShareGPT's {from, value}.
        tools: of the tools on offer in it; a record may lack it.
        prompt, completion: of a pair, both texts or both lists of messages.
    """

    format: str = "auto"
    text: str = "text"
    messages: str = "messages"
    tools: str = "tools"
    prompt: str = "prompt"
    completion: str = "completion"

    @property
    def names(self) -> tuple[str, ...]:
        """Every field that may be read."""
        return (self.text, self.messages, self.tools, self.prompt, self.completion)

    def format_of(self, names: Collection[str], place: str, kind: str = "field") -> Format:
        """Return what records with fields of these names hold.

        Args:
            place: of the first of them, for errors.
            kind: what the names are called: "field" or "column".

        Raises:
            ValueError: a field is missing, or "auto" could mean several things.
        """
        needed: dict[Format, tuple[str, ...]] = {
            "text": (self.text,),
            "chat": (self.messages,),
            "completion": (self.prompt, self.completion),
        }
        if self.format != "auto":
            chosen: Format = self.format  # type: ignore[assignment]
            missing = [name for name in needed[chosen] if name not in names]
            if missing:
                setting = "text_field" if chosen == "text" else "messages_field" if chosen == "chat" else "prompt_field"
                raise ValueError(f"{place}: no {kind} {missing[0]!r}: set {setting} to one of {list(names)}")
            return chosen
        possible = [format for format, fields in needed.items() if all(name in names for name in fields)]
        if len(possible) > 1:
            raise ValueError(
                f"{place}: it could be {' or '.join(possible)} by its {kind}s {list(names)}: set format to one of them"
            )
        return possible[0] if possible else "text"

    def document(self, record: Mapping[str, Any], format: Format, place: str) -> Document | None:
        """Return a record's document; None where its text is null.

        Raises:
            ValueError: a field is missing, or of another kind; it names the place.
        """
        if format == "text":
            if self.text not in record:
                raise ValueError(self._no_text(record, place))
            return _text(record[self.text], self.text, place)
        if format == "chat":
            said = _messages(_field(record, self.messages, place), self.messages, place)
            return Conversation(said, _tools(record.get(self.tools), self.tools, place))
        prompt = _field(record, self.prompt, place)
        completion = _field(record, self.completion, place)
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise ValueError(f"{place}: {self.completion!r} is empty, so there is nothing to learn: leave it out")
            return Completion(prompt, completion)
        if isinstance(prompt, list) and isinstance(completion, list):
            turns = (*_messages(prompt, self.prompt, place), *_messages(completion, self.completion, place))
            return Conversation(turns, _tools(record.get(self.tools), self.tools, place))
        raise ValueError(
            f"{place}: {self.prompt!r} is a {type(prompt).__name__} and {self.completion!r} a "
            f"{type(completion).__name__}: give two texts, or two lists of messages"
        )

    def _no_text(self, record: Mapping[str, Any], place: str) -> str:
        """Say what to write where a record has no field of text."""
        lacks = f"{place}: no field {self.text!r}"
        if "conversations" in record:
            return f"{lacks}: set messages_field to 'conversations'"
        texts = sorted(name for name, value in record.items() if isinstance(value, str))
        if texts:
            return f"{lacks}: set text_field to one of {texts}"
        for name in record:
            _text(record[name], name, place)  # says what it is instead
        write = " or ".join(f"{{{json.dumps(name)}: ...}}" for name in (self.text, self.messages))
        return f"{lacks}, nor any other: write {write}"


PLAIN = Fields()


def _field(record: Mapping[str, Any], name: str, place: str) -> Any:
    if name not in record:
        raise ValueError(
            f"{place}: no field {name!r}, which others of the file have; it has {sorted(record)}: "
            "keep records of one kind in a file"
        )
    return record[name]


def _text(value: object, name: str, place: str) -> str | None:
    """Check that a record's field is text or null."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and any(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value):
        raise ValueError(f"{place}: {name!r} is a conversation: set messages_field to {name!r}, and no text_field")
    raise ValueError(f"{place}: {name!r} is a {type(value).__name__}, not text: set text_field to a text field")


def _messages(value: object, name: str, place: str) -> tuple[Mapping[str, Any], ...]:
    """Check a conversation, and write it as templates read it."""
    if isinstance(value, str):
        value = _json(value, name, place)
    if not isinstance(value, list) or not value:
        what = "empty" if value == [] else f"a {type(value).__name__}"
        raise ValueError(f"{place}: {name!r} is {what}: give a list of messages, {{role: ..., content: ...}}")
    return tuple(_message(message, f"{place}: {name}[{i}]") for i, message in enumerate(value))


def _message(message: object, where: str) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} is a {type(message).__name__}: give a mapping with role and content")
    # Tables fill fields that only other messages have with null, which templates would write out.
    found = {name: value for name, value in message.items() if value is not None}
    if "role" not in found and "from" in found:
        speaker = found.pop("from")
        found["role"] = _SPEAKERS.get(speaker, speaker)
        if "value" in found:
            found["content"] = found.pop("value")
    role = found.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(
            f"{where} has no role (it has {sorted(map(str, message))}): give user, assistant, system or tool"
        )
    content = found.get("content")
    if isinstance(content, list):
        content = found["content"] = _parts(content, where)
    if content is not None and not isinstance(content, str):
        raise ValueError(f"{where}: its content is a {type(content).__name__}: give a text")
    calls = found.get("tool_calls")
    if calls is not None:
        found["tool_calls"] = _calls(calls, where)
    if content is None and not calls:
        raise ValueError(f"{where}: a message of {role} without content or tool_calls: give it a content")
    found.setdefault("content", "")  # which templates add to other texts
    return found


def _parts(parts: Sequence[object], where: str) -> str:
    """Return the text of a content that is written in parts."""
    texts: list[str] = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else part
        if kind not in (None, "text") or not isinstance(text, str):
            raise ValueError(f"{where}: its content has a part of {kind or type(part).__name__}: only text is read")
        texts.append(text)
    return "".join(texts)


def _calls(calls: object, where: str) -> list[Mapping[str, Any]]:
    """Return calls of tools with arguments as mappings, which templates write as JSON; OpenAI's files have texts."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"{where}: tool_calls is a {type(calls).__name__}: give a list of {{function: ...}}")
    found: list[Mapping[str, Any]] = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}: a call has no function with a name: give {{function: {{name, arguments}}}}")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: the arguments of {function['name']} are not JSON ({error})") from error
        written = {**function, "arguments": arguments if arguments is not None else {}}
        found.append({**call, "function": written} if "function" in call else written)
    return found


def _tools(value: object, name: str, place: str) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, str):
        value = _json(value, name, place) if value.strip() else None
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise ValueError(f"{place}: {name!r} is no list of tools: give JSON schemas of functions, or leave it out")
    return tuple(value)


def _json(text: str, name: str, place: str) -> object:
    """Read a list that a table holds as text."""
    try:
        found: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: {name!r} is a text that is not JSON ({error}): give a list") from error
    return found


def texts_of(document: Document) -> list[str]:
    """Return what is written in a document, for training a tokenizer."""
    if isinstance(document, str):
        return [document]
    if isinstance(document, Completion):
        return [document.prompt, document.completion]
    return document.texts


def characters_of(document: Document) -> int:
    """Return about how long a document is."""
    return sum(map(len, texts_of(document)))
