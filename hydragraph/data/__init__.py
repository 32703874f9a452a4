"""Conversion of text files to mini-batches of tokens."""
