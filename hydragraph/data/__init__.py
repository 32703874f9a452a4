"""Text files to mini-batches of tokens, independently of strategies, ranks and models."""
