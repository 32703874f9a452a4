"""Assignment of sequences to given pipelines and micro-batches."""
