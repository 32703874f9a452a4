"""Conversations and prompts with completions as tokens, of which only what a model is to say is a target."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from hydragraph.data.documents import Completion, Conversation, Document
from hydragraph.data.token_file import Encoded

ASSISTANT = "assistant"
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]


@dataclass(frozen=True)
class Template:
    """A chat template of Hugging Face: text in Jinja that writes a conversation out.

    Attributes:
        text: in Jinja. Where it marks `{% generation %}`, what stands there counts. Elsewhere a turn is what it adds to
            the conversation before it with the prompt to generate; a template that rewrites earlier turns is refused.
        special: tokens that it may name, such as {"bos_token": "<s>"}.
        train_on: "assistant": what the assistant says; "last": only the last time; "all": every token counts.
    """

    text: str
    special: Mapping[str, str] = field(default_factory=dict)
    train_on: str = "assistant"

    def spans(self, conversation: Conversation, place: str) -> tuple[str, list[Span]]:
        """Return a conversation's text, and where in it the characters stand that count.

        Raises:
            ValueError: the template refuses the conversation, nothing in it counts, or what counts cannot be told.
        """
        messages = conversation.messages
        if self.train_on == "all":
            text, _ = self._render(conversation, place)
            return text, [(0, len(text))]
        says = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not says:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise ValueError(
                f"{place}: no message of the assistant (only of {roles}), so there is nothing to learn: leave it out"
            )
        if self.train_on == "last":
            says = says[-1:]
        if _GENERATION.search(self.text):
            text, marked = self._render(conversation, place, mask=True)
            found = [span for span in marked if span[0] < span[1]]
            if not found:
                raise ValueError(f"{place}: the chat template marks nothing of it as generated: correct the template")
            return text, found if self.train_on == "assistant" else found[-1:]
        text, _ = self._render(conversation, place)
        return text, [self._turn(conversation, i, text, place) for i in says]

    def _turn(self, conversation: Conversation, i: int, text: str, place: str) -> Span:
        """Return where message `i` stands in the text of its conversation."""
        messages = conversation.messages
        tools = conversation.tools
        before, _ = self._render(Conversation(messages[:i], tools), place, prompt=True)
        after = text if i == len(messages) - 1 else self._render(Conversation(messages[: i + 1], tools), place)[0]
        if text.startswith(after) and after.startswith(before) and len(after) > len(before):
            return len(before), len(after)
        raise ValueError(
            f"{place}: the chat template writes messages[{i}] otherwise where others follow it, so that what the "
            "assistant says cannot be told from the rest: mark it with {% generation %} in a template of your own "
            "(data.chat_template), or set data.train_on to last"
        )

    def _render(
        self, conversation: Conversation, place: str, prompt: bool = False, mask: bool = False
    ) -> tuple[str, list[Span]]:
        """Return what the template writes, and what it marks as generated."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            render: Any = render_jinja_template
            texts, marked = render(
                conversations=[[dict(message) for message in conversation.messages]],
                tools=[dict(tool) for tool in conversation.tools] or None,
                chat_template=self.text,
                return_assistant_tokens_mask=mask,
                add_generation_prompt=prompt,
                **self.special,
            )
        except Exception as error:  # templates raise what they like, and Jinja its own errors
            sentence = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{place}: the chat template refuses it ({sentence}): correct the conversation, or set "
                "data.chat_template to a template that takes it"
            ) from error
        return str(texts[0]), [(int(start), int(end)) for start, end in marked[0]] if mask else []


@dataclass(frozen=True, eq=False)
class Encoder:
    """Turns documents into tokens.

    Attributes:
        tokenizer: without truncation and padding.
        end: the id that ends a text, and an answer whose template ends it with no special token.
        template: for conversations; None: there is none.
    """

    tokenizer: Tokenizer
    end: int
    template: Template | None = None

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self.tokenizer.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @cached_property
    def _begin(self) -> list[int]:
        """What the tokenizer puts before a text of its own accord."""
        around: list[int] = self.tokenizer.encode("").ids
        return around[:1] if around and around[0] != self.end else []

    def encode(self, document: Document, place: str) -> Encoded:
        """Return a document as tokens; a text is ended by `end`.

        Raises:
            ValueError: nothing in it is a target, or its template refuses it; it names the place.
        """
        if isinstance(document, str):
            return Encoded([*self._ids(document), self.end])
        if isinstance(document, Completion):
            return self._completion(document)
        return self._conversation(document, place)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _completion(self, pair: Completion) -> Encoded:
        """Encode prompt and completion apart, as a model is given the prompt when it generates."""
        prompt = self._ids(pair.prompt)
        if prompt[: len(self._begin)] != self._begin:  # the text may begin with it already
            prompt = [*self._begin, *prompt]
        answer = self._ids(pair.completion)
        if answer[-1:] != [self.end]:
            answer = [*answer, self.end]
        return Encoded([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))

    def _conversation(self, conversation: Conversation, place: str) -> Encoded:
        if self.template is None:
            raise ValueError(
                f"{place} is a conversation, and the tokenizer has no chat template: set data.chat_template to chatml, "
                "or to the file of a template"
            )
        text, spans = self.template.spans(conversation, place)
        # The template writes the tokens that begin and end, so the tokenizer adds none.
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        targets = _within(encoding.offsets, spans)
        if not any(targets):
            raise ValueError(
                f"{place}: what the assistant says has no token, so there is nothing to learn: leave it out"
            )
        if spans[-1][1] == len(text) and not self._ends(ids):
            ids, targets = [*ids, self.end], [*targets, True]
        return Encoded(ids, targets)

    def _ends(self, ids: Sequence[int]) -> bool:
        """Say whether a conversation ends with a special token, white space after it aside."""
        for token in reversed(ids):
            if token in self._special or token == self.end:
                return True
            if self.tokenizer.decode([token]).strip():
                return False
        return False


def _within(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Say of each token whether it holds a character of a span; spans are in order and apart."""
    starts = [start for start, _ in spans]
    found = []
    for begin, end in offsets:
        i = bisect_right(starts, end - 1) - 1  # the last span that begins before the token ends
        found.append(begin < end and i >= 0 and begin < spans[i][1])
    return found
