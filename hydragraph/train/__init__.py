"""A run of `hydragraph train`: its config, folder, data, loop and metrics; slow ranks (`stragglers/`), faults
(`chaos/`).

It uses the public calls of `engine/`. Pages and pictures belong in `report/`, printing and exit codes in `commands/`.
"""
