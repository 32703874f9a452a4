"""Compiled folder: a captured model and its graphs as validated data, from which a run starts without tracing.

    save(folder, program, variants.items)        write program.json, graphs/*.json and manifest.json
    compiled = load(folder)                      read and validate it; a ValueError names the problem and the fix
    compiled.program                             the Program, as `capture` returned it
    Variants(program, ..., library=compiled)     take graphs from the folder, and compile those that are missing

A process that shares its capture with others on its machine works the same way: it calls `save` with a private
temporary folder, and the others `load` it. For a folder that outlives the process, `save` also takes a `ModelRecord`
and the results of the check, and `load` takes a model to compare with.

The human-readable parts of a folder are written and shown by `commands/`. The format: docs/compiled_folder.md.
"""
