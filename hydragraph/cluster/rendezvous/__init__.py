"""Rendezvous of the ranks that remain after a failure, and of new ones that join, in rounds called generations."""
