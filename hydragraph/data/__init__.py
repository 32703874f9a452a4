"""Text files to mini-batches of tokens: readers of formats, chat templates, the tokenizer, the token file, sampling.

It is independent of strategies, ranks and models.
"""
