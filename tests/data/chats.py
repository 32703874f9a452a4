"""A tokenizer and templates for tests of conversations."""

from __future__ import annotations

from tokenizers import Tokenizer

from hydragraph.data.chat import CHATML
from hydragraph.data.tokenizer import train_bpe

SPECIAL = ("<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>")
WORDS = ["user assistant system tool hello there what is it", "\n ünïcödé 日本 🦎 \r\n"]

MARKED = CHATML
# The same text, without marks.
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# Ends answers with no token, and has no special tokens at all.
BARE = (
    "{% for message in messages %}{{ message.role | capitalize + ': ' + message.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
# Rewrites what the assistant said before, as templates that hide earlier thoughts do.
REWRITES = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('#')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<call>' + (call.function | tojson) }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BEGINS = "{{ bos_token }}" + PLAIN


def encoder() -> Tokenizer:
    return train_bpe(iter(WORDS), 330, SPECIAL)
