"""Compiled folder: a captured model and its graphs as validated data, which a run starts from without tracing.

docs/compiled_folder.md describes the format and its use.
"""
