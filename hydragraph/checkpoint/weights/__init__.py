"""Weights of Hugging Face directories: read by their owners, and written."""
