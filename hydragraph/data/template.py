"""Chat templates, and the spans of their output that are trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import is_
from typing import Any

from hydragraph.data.documents import ASSISTANT, Conversation, shared_length

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Pattern of special tokens, if the tokenizer's are unknown.
_MARKS = re.compile(r"<[|\uff5c][^<>]*[|\uff5c]>|</?s>")
# Marks the position of a message's content.
_PROBE = "\ue000\ue001\ue002"
_AFTER_THOUGHTS = "</think>"

Span = tuple[int, int]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template, as in Hugging Face's tokenizers.

    Attributes:
        text: the template. The output of its `{% generation %}` blocks is trained on or, without such blocks, the
            content and end token of messages that `train_on` selects.
        special: special tokens by name, such as {"bos_token": "<s>"}.
        train_on: "assistant" (all assistant messages), "last" (the last one) or "all" (every token).
    """

    text: str
    special: Mapping[str, str] = field(default_factory=dict)
    train_on: str = "assistant"
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def spans(self, conversation: Conversation, place: str, marks: Collection[str] = ()) -> tuple[str, list[Span]]:
        """Return a conversation's text, and the disjoint, ordered spans of characters to train on.

        Args:
            marks: the tokenizer's special tokens, which no span may split.

        Raises:
            ValueError: the template rejects the conversation or omits a message, or no message is trained on.
        """
        trained = [] if self.train_on == "all" else self._trained(conversation, place)
        written = self._written(conversation, place, marks)
        if self.train_on == "all":
            return written.text, _without(written.excluded(), len(written.text))
        return written.text, _joined(written.marked(trained) if self._marks else map(written.turn, trained))

    @property
    def _marks(self) -> bool:
        return _GENERATION.search(self.text) is not None

    def _trained(self, conversation: Conversation, place: str) -> list[int]:
        messages = conversation.messages
        says = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not says:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise ValueError(f"{place}: no assistant message (only {roles}): remove the conversation")
        trained = [i for i in (says[-1:] if self.train_on == "last" else says) if messages[i].get("weight") != 0]
        if not trained:
            which = "the last assistant message has" if self.train_on == "last" else "all assistant messages have"
            raise ValueError(f"{place}: {which} weight 0: remove the conversation")
        return trained

    def _written(self, conversation: Conversation, place: str, marks: Collection[str]) -> _Written:
        pattern = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True)))) if marks else _MARKS
        refusal: ValueError | None = None
        calls = any(message.get("tool_calls") for message in conversation.messages)
        # Templates expect different formats, and often accept wrong ones. Use the first one for
        # which the text contains all messages.
        for parts, texts in product((False, True), (False, True) if calls else (False,)):
            try:
                written = _Written(self, conversation, place, _Way(parts, texts), pattern)
                written.check()
            except ValueError as error:
                refusal = refusal or error
                continue
            return written
        assert refusal is not None, "at least one format is tried"
        raise refusal

    def render(
        self,
        messages: Sequence[Message],
        conversation: Conversation,
        place: str,
        prompt: bool = False,
        mask: bool = False,
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            function: Any = render_jinja_template
            texts, marked = function(
                conversations=[[dict(message) for message in messages]],
                tools=[dict(tool) for tool in conversation.tools] or None,
                chat_template=self.text,
                return_assistant_tokens_mask=mask,
                add_generation_prompt=prompt,
                **{**self.special, **self.arguments, **conversation.arguments},
            )
        except Exception as error:
            sentence = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{place}: the chat template rejects the conversation ({sentence}): correct the conversation, or set "
                "data.chat_template to another template"
            ) from error
        return str(texts[0]), [(int(start), int(end)) for start, end in marked[0]] if mask else []


@dataclass(frozen=True)
class _Way:
    """Message format of a template: whether contents are lists (`parts`), and tool arguments JSON text (`texts`)."""

    parts: bool
    texts: bool

    def message(self, message: Message) -> Message:
        converted = {name: value for name, value in message.items() if name != "weight"}
        if self.parts and converted["content"]:
            converted["content"] = [{"type": "text", "text": converted["content"]}]
        if converted.get("tool_calls"):
            converted["tool_calls"] = [self._call(call) for call in converted["tool_calls"]]
        return converted

    def _call(self, call: Message) -> Message:
        function = call.get("function", call)
        arguments = function["arguments"]
        if self.texts and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not self.texts and isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        changed = {**function, "arguments": arguments}
        return {**call, "function": changed} if "function" in call else changed


class _Written:
    def __init__(
        self, template: ChatTemplate, conversation: Conversation, place: str, way: _Way, marks: re.Pattern[str]
    ) -> None:
        self._template = template
        self._conversation = conversation
        self._place = place
        self._messages = [way.message(message) for message in conversation.messages]
        self._way = way
        self._pattern = marks
        self._masks = template._marks and template.train_on != "all"
        self.text, self._marked = template.render(self._messages, conversation, place, mask=self._masks)

    def check(self) -> None:
        if self._masks and not any(start < end for start, end in self._marked):
            raise ValueError(f"{self._place}: the chat template marks no text as generated: correct the template")
        # Contents must appear in order. A template may change a content (strip it, say); one that
        # is not found must at least influence the text.
        at = 0
        for i, message in enumerate(self._conversation.messages):
            said = _said(message)
            position = self.text.find(said, at) if said else -1
            if position >= 0:
                at = position + len(said)
            elif said and self._region(self._messages, i) is None:
                raise ValueError(
                    f"{self._place}: the chat template leaves out the content of messages[{i}] ({message['role']}): "
                    "correct the template (data.chat_template) or the conversation"
                )
            for call in message.get("tool_calls") or ():
                self._check_call(i, call)

    def _check_call(self, i: int, call: Message) -> None:
        function = call.get("function", call)
        arguments = function["arguments"]
        without = {**self._messages[i], "content": ""}
        if function["name"] not in self.text and self._region(_with(self._messages, i, without), i) is None:
            raise ValueError(
                f"{self._place}: the chat template leaves out the tool calls of messages[{i}]: set data.chat_template "
                "to a template that writes tool calls, or put the calls into the content"
            )
        mapping = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        python = str(mapping)
        text = json.dumps(mapping, ensure_ascii=False)
        if not self._way.texts and python != text and python in self.text:
            raise ValueError(
                f"{self._place}: the chat template writes the arguments of {function['name']} in Python syntax, "
                "not as JSON: correct the template"
            )
        if self._way.texts and mapping and json.dumps(arguments if isinstance(arguments, str) else text) in self.text:
            raise ValueError(
                f"{self._place}: the chat template writes the arguments of {function['name']} as a string, "
                "not as an object: correct the template"
            )

    def marked(self, trained: Sequence[int]) -> list[Span]:
        spans = [span for span in self._marked if span[0] < span[1]]
        says = [i for i, message in enumerate(self._conversation.messages) if message["role"] == ASSISTANT]
        if len(trained) < len(says):
            # The template marks all answers: keep the marks around each trained message.
            windows = [self._window(i) for i in trained]
            spans = [span for span in spans if any(lo <= span[0] < hi for lo, hi in windows)]
        text = "".join(self.text[start:end] for start, end in spans)
        at = 0
        for i in trained:
            said = _said(self._conversation.messages[i])
            position = text.find(said, at)
            if position >= 0:
                at = position + len(said)
                continue
            region = self._region(self._messages, i)
            if region is None or not any(start < region[1] and region[0] < end for start, end in spans):
                raise ValueError(
                    f"{self._place}: the chat template does not mark the content of messages[{i}] as generated: "
                    "correct the template"
                )
        return spans

    def _window(self, i: int) -> Span:
        before = (self._region(self._messages, j) for j in reversed(range(i)))
        after = (self._region(self._messages, j) for j in range(i + 1, len(self._messages)))
        begin = next((region[1] for region in before if region), 0)
        return begin, next((region[0] for region in after if region), len(self.text))

    def excluded(self) -> list[Span]:
        """Return the spans of messages with weight 0, including the headers of messages at the beginning."""
        messages = self._conversation.messages
        first = next((i for i, message in enumerate(messages) if message.get("weight") != 0), None)
        if first is None:
            raise ValueError(f"{self._place}: all messages have weight 0: remove the conversation")
        later = [self.turn(i) for i in range(first, len(messages)) if messages[i].get("weight") == 0]
        if first == 0:
            return later
        answers = messages[first]["role"] == ASSISTANT
        return [(0, self.turn(first)[0] if answers else self.turn(first - 1)[1]), *later]

    def turn(self, i: int) -> Span:
        """Return the span that the model generates in message `i`: content and end token."""
        # before: text up to the turn, with its header; after: text up to its end
        before = self._before(i)
        last = i == len(self._messages) - 1
        after = self.text if last else self._text(self._messages[: i + 1])
        span = (len(before), len(after))
        plain = self.text.startswith(after) and after.startswith(before) and len(after) > len(before)
        # If a template renders a last message differently, e.g. with its thoughts, `after` is not a
        # prefix of the whole conversation.
        if not plain:
            span = self._aligned(i, before, after)
        if _said(self._conversation.messages[i]) not in self.text[slice(*span)]:
            region = self._region(self._messages, i)
            if region is None or not (span[0] <= region[0] and region[1] <= span[1]):
                raise self._untold(i)
        return span

    def _before(self, i: int) -> str:
        try:
            return self._text(self._messages[:i], prompt=True)
        except ValueError:
            # Many templates fail without messages[0]
            if i or (content := self._region(self._messages, 0)) is None:
                raise
            return self.text[: content[0]]

    def _aligned(self, i: int, before: str, after: str) -> Span:
        """Return the span for `turn` if the template renders a last message differently."""
        messages = self._messages
        content = self._region(messages, i)
        if content is None:
            raise self._untold(i)
        # start, prompt: ends of the last earlier content in the whole text and in `before`, from
        # where the turn's headers are compared
        start, prompt = 0, 0
        for j in reversed(range(i)):
            here = self._region(messages, j)
            there = self._region(messages[:i], j, prompt=True)
            if here and there and here[1] <= content[0]:
                start, prompt = here[1], there[1]
                break
        header = self._common(self.text[start : content[0]], before[prompt:])
        if not header and before[prompt:]:
            raise self._untold(i)
        following = (self._region(messages, j) for j in range(i + 1, len(messages)))
        end = next((region[0] for region in following if region and region[0] >= content[1]), len(self.text))
        # gap: text up to the next content; the part that also follows this content in `after` ends
        # the turn
        gap = self.text[content[1] : end]
        alone = self._region(messages[: i + 1], i)
        ending = self._common(gap, after[alone[1] :]) if alone else 0
        if not gap[:ending].strip():
            mark = self._pattern.match(gap, len(gap) - len(gap.lstrip()))
            ending = mark.end() if mark else ending
        return start + header, content[1] + ending

    def _common(self, first: str, second: str) -> int:
        size = shared_length(first, second)
        for mark in self._pattern.finditer(first):
            if mark.start() < size < mark.end():
                return mark.start()
        return size

    def _region(self, messages: Sequence[Message], i: int, prompt: bool = False) -> Span | None:
        """Return the span of the text that depends on a message's content, or None if it is not rendered."""
        text = self._text(messages, prompt)
        # Render again with a placeholder: the region lies between the common beginning and the
        # common end of both texts.
        changed = _with(messages, i, _probed(messages[i]))
        try:
            other = self._text(changed, prompt)
        except ValueError:
            return None
        if text == other:
            return None
        start = shared_length(text, other)
        most = min(len(text), len(other)) - start
        same = shared_length(text[len(text) - most :][::-1], other[len(other) - most :][::-1])
        return start, len(text) - same

    def _text(self, messages: Sequence[Message], prompt: bool = False) -> str:
        if not prompt and len(messages) == len(self._messages) and all(map(is_, messages, self._messages)):
            return self.text
        return self._template.render(messages, self._conversation, self._place, prompt)[0]

    def _untold(self, i: int) -> ValueError:
        return ValueError(
            f"{self._place}: the text that the chat template writes for messages[{i}] cannot be located: mark it "
            "with {% generation %} in your own template (data.chat_template), or set data.train_on to 'last'"
        )


def _with(messages: Sequence[Message], i: int, message: Message) -> list[Message]:
    return [*messages[:i], message, *messages[i + 1 :]]


def _said(message: Message) -> str:
    return str(message["content"]).rpartition(_AFTER_THOUGHTS)[2].strip()


def _probed(message: Message) -> Message:
    if message["content"] or not message.get("tool_calls"):
        content = message["content"]
        return {**message, "content": [{"type": "text", "text": _PROBE}] if isinstance(content, list) else _PROBE}
    call, *others = message["tool_calls"]
    function = call.get("function", call)
    arguments = _PROBE if isinstance(function["arguments"], str) else {_PROBE: _PROBE}
    function = {**function, "name": _PROBE, "arguments": arguments}
    return {**message, "tool_calls": [{**call, "function": function} if "function" in call else function, *others]}


def _joined(spans: Iterator[Span] | Sequence[Span]) -> list[Span]:
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _without(excluded: Sequence[Span], size: int) -> list[Span]:
    # excluded (0, 3), (5, 6) of 9: edges 0, 0, 3, 5, 6, 9, so (3, 5), (6, 9) are left
    edges = [0, *(edge for span in _joined(excluded) for edge in span), size]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
