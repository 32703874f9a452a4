"""Weights of Hugging Face directories: read by the ranks that own them, and written in the same format."""
