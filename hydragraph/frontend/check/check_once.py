"""When the check runs: where a program is captured, on one rank of each host, which tells the others."""

from __future__ import annotations

from collections.abc import Callable

from hydragraph.cluster.launch import World
from hydragraph.errors import Unsupported
from hydragraph.frontend.check.numeric_check import MODES, CheckedModel, check, log, report
from hydragraph.frontend.check.passed_checks import fingerprint, recall, remember
from hydragraph.log import doing
from hydragraph.passes.variants import Variants

# What "auto" stands for; the project's own tests, which compare everything themselves, make it "off".
AUTO = "auto"

# Those of the program that was checked last, so that its executable need not compile them again.
_latest: list[Variants] = []


def mode_of(asked: str | bool) -> str:
    """Return the mode that a user chose; YAML reads `off` as False.

    Raises:
        ValueError: there is no such mode.
    """
    mode = "off" if asked is False else asked
    if mode not in MODES:
        raise ValueError(f"check is {asked!r}: use {', '.join(map(repr, MODES))}")
    return AUTO if mode == "auto" else str(mode)


def check_here(subject: CheckedModel, asked: str | bool) -> str:
    """Check a captured program in this process and log what was found.

    Returns:
        a line that says what passed, here or in an earlier run; "" where the check is off.

    Raises:
        Unsupported: it differs from its model, or could not be compared with it.
    """
    mode = mode_of(asked)
    if mode == "off":
        return ""
    key = fingerprint(subject, mode)
    line = recall(key) if key is not None else None
    if line is not None:
        log.info("%s (in an earlier run)", line)
        return line
    doing("comparing the captured graphs with the model")
    variants = Variants(subject.program, added=True)
    checked = check(subject, mode, variants)
    _latest[:] = [variants]
    report(checked)
    if key is not None:
        remember(key, str(checked))
    return str(checked)


def check_on_hosts(subject: CheckedModel, asked: str | bool, world: World) -> None:
    """Check a captured program on one rank of each host; all ranks call it, with equal arguments.

    Raises:
        Unsupported: on every rank, if it differs from its model on one.
    """
    if mode_of(asked) == "off":
        return
    error = _error(lambda: check_here(subject, asked)) if world.local_rank == 0 else None
    errors = world.gather(error)
    if error is not None:
        raise error
    for other in errors:
        if other is not None:
            raise other


def _error(run: Callable[[], object]) -> Exception | None:
    """Return what a function raised, in a form that other ranks can have."""
    try:
        run()
    except Unsupported as error:
        return error
    except Exception as error:  # not every error can be sent
        return RuntimeError(f"check: {type(error).__name__}: {error}")
    return None
