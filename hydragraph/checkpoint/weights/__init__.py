"""Readers and writers of the weights of Hugging Face directories."""
