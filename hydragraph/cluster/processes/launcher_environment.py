"""Checks of a launcher's environment variables, such as torchrun's."""

from __future__ import annotations

from collections.abc import Mapping

_LEAST = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
_PORTS = 65536


def check_environment(environment: Mapping[str, str]) -> None:
    for name, least in _LEAST.items():
        text = environment.get(name, str(least))
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"{name} is {text!r}: set it to a whole number of at least {least}, or unset it")
    rank, ranks, port = (int(environment.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if ranks and rank >= ranks:
        raise ValueError(f"RANK is {rank}, but WORLD_SIZE is {ranks}: number the processes from 0 to {ranks - 1}")
    if port >= _PORTS:
        raise ValueError(f"MASTER_PORT is {port}: set it to a port below {_PORTS}")
