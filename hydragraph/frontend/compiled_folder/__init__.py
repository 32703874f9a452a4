"""Compiled folder: a captured model and its graphs as validated data, which a run starts from without tracing.

    save(folder, program, variants.items)        write program.json, graphs/*.json and manifest.json
    compiled = load(folder)                      read and validate it; a ValueError names the problem and the fix
    Variants(program, ..., library=compiled)     take graphs from the folder, and compile those that are missing

docs/compiled_folder.md describes the format.
"""
