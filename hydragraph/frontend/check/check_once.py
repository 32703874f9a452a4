"""Scheduling of the check: it runs where a program is captured, on one rank per host, which informs the others."""

from __future__ import annotations

from collections.abc import Callable

from hydragraph.cluster.launch import World
from hydragraph.errors import Unsupported
from hydragraph.frontend.check.numeric_check import MODES, CheckedModel, check, log, report
from hydragraph.frontend.check.passed_checks import fingerprint, recall, remember
from hydragraph.frontend.compiled_folder.variant_cache import VariantCache
from hydragraph.log import doing
from hydragraph.passes.variants import Variants

# Meaning of "auto"; the project's own tests, which compare everything themselves, set it to "off".
AUTO = "auto"

# The variants of the last checked program, so that its executable need not compile them again.
_latest: list[Variants] = []


def mode_of(asked: str | bool) -> str:
    """Return the check mode that a user selected; YAML reads `off` as False.

    Raises:
        ValueError: there is no such mode.
    """
    mode = "off" if asked is False else asked
    if mode not in MODES:
        raise ValueError(f"check is {asked!r}: use {', '.join(map(repr, MODES))}")
    return AUTO if mode == "auto" else str(mode)


def check_here(subject: CheckedModel, asked: str | bool) -> str:
    """Check a captured program in this process and log the result.

    Returns:
        a line about the check that passed, in this run or an earlier one; "" if the check is off.

    Raises:
        Unsupported: the program differs from its model, or could not be compared with it.
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
    variants = Variants(subject.program, added=True, cache=VariantCache())
    checked = check(subject, mode, variants)
    _latest[:] = [variants]
    report(checked)
    if key is not None:
        remember(key, str(checked))
    return str(checked)


def check_on_hosts(subject: CheckedModel, asked: str | bool, world: World) -> None:
    """Check a captured program on one rank per host; all ranks must call this with equal arguments.

    Raises:
        Unsupported: on every rank, if the check failed on any host.
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
    """Return the exception that a function raised, in a picklable form."""
    try:
        run()
    except Unsupported as error:
        return error
    except Exception as error:  # not every exception can be pickled
        return RuntimeError(f"check: {type(error).__name__}: {error}")
    return None
