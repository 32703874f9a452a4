"""Rendezvous of the ranks that remain after a failure, and of new ranks that join, in rounds called generations."""
