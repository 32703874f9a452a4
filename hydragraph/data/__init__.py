"""Conversion of text files to mini-batches of tokens, independent of strategies, ranks and models."""
