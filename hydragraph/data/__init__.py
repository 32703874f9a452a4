"""Text files to mini-batches of tokens: readers of formats, chat templates, the tokenizer, the token file, sampling.

Nothing here knows about strategies, ranks or models. Where a run keeps its data is decided in `train/`.
"""
