"""Weights in Hugging Face directories."""
