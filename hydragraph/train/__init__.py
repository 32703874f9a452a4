"""A run of `hydragraph train`: its config, folder, data, loop and metrics; slow ranks (`stragglers/`) and fault
injection (`chaos/`).

It uses the public functions of `engine/`. Pages and pictures belong in `report/`, printing and exit codes in
`commands/`.
"""
