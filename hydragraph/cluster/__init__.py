"""Processes that start, find, monitor and notify each other, whatever they compute."""
