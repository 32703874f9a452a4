"""Rendezvous of remaining and new ranks, in rounds called generations."""
