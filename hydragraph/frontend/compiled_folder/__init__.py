"""The compiled folder: a captured model and its graphs as checked data, from which a run starts without tracing.

    save(folder, program, variants.items)        write program.json, graphs/*.json and manifest.json
    compiled = load(folder)                      read and check all of it; a ValueError says what is wrong and the fix
    compiled.program                             the Program, as `capture` returned it
    Variants(program, ..., library=compiled)     takes graphs from the folder, and compiles what it lacks

A process that shares its capture with others of its machine does the same: it calls `save` with a private temporary
folder, and the others `load` it. Where the folder is to outlive the process, `save` is given a `ModelRecord` of the
model and what the check found, and `load` a model to compare with.

What people read of a folder is written and shown by `commands/`. The format: docs/compiled_folder.md.
"""
