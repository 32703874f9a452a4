"""Weights of Hugging Face directories: read by the ranks that own them, and written as a directory of the same form.

A run's own checkpoints belong in the folder above.
"""
