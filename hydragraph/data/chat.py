"""Conversion of documents to tokens. In completions and most conversations, only the model's answers are targets."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers import Tokenizer

from hydragraph.data.documents import ASSISTANT, AlpacaRecord, Completion, Conversation, Document, TokenIds
from hydragraph.data.template import ChatTemplate, Span
from hydragraph.data.token_file import EncodedDocument, vocabulary_of

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# ChatML for tokenizers without <|im_end|>; end-of-text replaces END.
_BASE_CHATML = (
    "{% for message in messages %}{{ ('' if loop.first else '\\n') + '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + END }}{% endgeneration %}"
    "{% else %}{{ message.content + END }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
)


def chatml(special: Collection[str], end: str) -> str:
    return CHATML if CHATML_TOKENS[1] in special else _BASE_CHATML.replace("END", json.dumps(end, ensure_ascii=False))


@dataclass(frozen=True, eq=False)
class DocumentEncoder:
    """Converter of documents to tokens.

    Attributes:
        tokenizer: neither truncates nor pads.
        end: end-of-text id, appended to answers without a final special token.
    """

    tokenizer: Tokenizer
    end: int
    template: ChatTemplate | None = None

    @cached_property
    def _special(self) -> dict[int, str]:
        added = self.tokenizer.get_added_tokens_decoder()
        return {i: token.content for i, token in added.items() if token.special}

    @cached_property
    def _exact(self) -> Tokenizer:
        """The tokenizer without its post-processor, which may change offsets."""
        exact = Tokenizer.from_str(self.tokenizer.to_str())
        exact.post_processor = None
        return exact

    @cached_property
    def begin(self) -> list[int]:
        # begin: ids that the post-processor adds before a text, such as "<s>"
        ids, around = self._ids("a"), self.tokenizer.encode("a").ids
        return next((around[:n] for n in range(len(around)) if around[n : n + len(ids)] == ids), [])

    def encode(self, document: Document, place: str) -> EncodedDocument:
        if isinstance(document, str):
            return self.encode_texts([document])[0]
        if isinstance(document, TokenIds):
            return self._given(document, place)
        if isinstance(document, AlpacaRecord) and self.template is None:
            document = document.completion
        if isinstance(document, Completion):
            return self._completion(document)
        return self._conversation(document, place)

    def encode_texts(self, texts: Sequence[str]) -> list[EncodedDocument]:
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [EncodedDocument(self._ended(self._begun(encoding.ids))) for encoding in encodings]

    def turn_end(self) -> int | None:
        """Return the special token that ends an answer under the chat template, or None."""
        answer = Conversation(({"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}))
        try:
            encoded = self._conversation(answer, "")
        except ValueError:
            return None
        trained = [token for token, target in zip(encoded.ids, encoded.targets or (), strict=True) if target]
        return next((token for token in reversed(trained) if token in self._special or token == self.end), None)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _begun(self, ids: list[int]) -> list[int]:
        return ids if ids[: len(self.begin)] == self.begin else [*self.begin, *ids]

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if ids[-1:] == [self.end] else [*ids, self.end]

    def _given(self, tokens: TokenIds, place: str) -> EncodedDocument:
        most = vocabulary_of(self.tokenizer)
        odd = next((i for i in tokens.ids if not 0 <= i < most), None)
        if odd is not None:
            raise ValueError(
                f"{place}: the tokenizer has no id {odd}, only 0 to {most - 1}: set data.tokenizer to the tokenizer "
                "that produced the ids"
            )
        return EncodedDocument(list(tokens.ids), None if tokens.targets is None else list(tokens.targets))

    def _completion(self, pair: Completion) -> EncodedDocument:
        prompt = self._begun(self._ids(pair.prompt))
        text = pair.completion
        # Many tokenizers add a space before a text, so encode the completion after other text.
        answer = _rest(self._begun(self._ids(pair.prompt + text)), prompt) or _rest(
            self._ids("\n" + text), self._ids("\n")
        )
        answer = self._ended(answer or self._ids(text))
        return EncodedDocument([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))

    def _conversation(self, conversation: Conversation, place: str) -> EncodedDocument:
        if self.template is None:
            raise ValueError(
                f"{place} is a conversation, but the tokenizer has no chat template: set data.chat_template to "
                "'chatml' or to a template file"
            )
        text, spans = self.template.spans(conversation, place, self._special.values())
        # The chat template writes begin and end tokens.
        encoding = self._exact.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        targets = _within(encoding.offsets, spans)
        if not any(targets):
            raise ValueError(f"{place}: the assistant's text has no tokens: remove the conversation")
        if not text[spans[-1][1] :].strip() and not self._ends(ids):
            # Drop whitespace after the output, and append the end token.
            kept = len(targets) - targets[::-1].index(True)
            ids, targets = [*ids[:kept], self.end], [*targets[:kept], True]
        return EncodedDocument(ids, targets)

    def _ends(self, ids: Sequence[int]) -> bool:
        for token in reversed(ids):
            if token in self._special or token == self.end:
                return True
            if self.tokenizer.decode([token]).strip():
                return False
        return False


def _rest(ids: list[int], first: list[int]) -> list[int]:
    return ids[len(first) :] if ids[: len(first)] == first else []


def _within(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Return whether each token contains a character of the ordered, disjoint spans; an empty token counts as the
    next character.
    """
    starts = [start for start, _ in spans]
    within = []
    for begin, end in offsets:
        # i: last span that starts at or before the token's last character.
        # spans [(2, 5)], tokens (0, 2), (2, 2), (2, 5), (5, 6): False, True, True, False
        i = bisect_right(starts, max(end - 1, begin)) - 1
        within.append(i >= 0 and begin < spans[i][1])
    return within
