"""Assignment of sequences to given pipelines and micro-batches: searches, bounds, the strategy for a mini-batch."""
