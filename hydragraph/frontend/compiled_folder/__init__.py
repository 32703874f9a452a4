"""A captured model and its graphs as validated data (docs/compiled_folder.md)."""
