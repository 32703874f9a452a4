"""The measurements of `hydragraph bench` and their tables."""
