"""Text files to mini-batches of tokens: readers of formats, chat templates, the tokenizer, the token file, sampling.

This package is independent of strategies, ranks and models. `train/` decides where a run keeps its data.
"""
