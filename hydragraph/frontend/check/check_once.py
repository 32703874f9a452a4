"""Numeric check on one rank per host."""

from __future__ import annotations

from hydragraph.cluster.launch import World
from hydragraph.errors import Unsupported
from hydragraph.frontend.check.narrow_model import CheckedModel
from hydragraph.frontend.check.numeric_check import MODES, check, log, report
from hydragraph.frontend.check.passed_checks import fingerprint, recall, remember
from hydragraph.frontend.compiled_folder.variant_cache import VariantCache
from hydragraph.log import doing
from hydragraph.passes.variants import Variants

# Default mode; hydragraph's own tests set it to "off"
AUTO: str = "auto"
_latest: list[Variants] = []


def mode_of(asked: str | bool) -> str:
    """Return a check mode, or raise ValueError; False means "off", because YAML reads `off` as False."""
    mode = "off" if asked is False else asked
    if mode not in MODES:
        raise ValueError(f"'check' is {asked!r}: use one of {', '.join(map(repr, MODES))}")
    return AUTO if mode == "auto" else str(mode)


def check_here(subject: CheckedModel, asked: str | bool) -> str:
    """Check a captured program; return a one-line result, or "" if the check is off."""
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
    """Check on one rank per host; all ranks must call this, and all raise if any check fails."""
    if mode_of(asked) == "off":
        return
    own: Exception | None = None
    if world.local_rank == 0:
        try:
            check_here(subject, asked)
        except Unsupported as error:
            own = error
        except Exception as error:
            # `error` may not be picklable
            own = RuntimeError(f"check: {type(error).__name__}: {error}")
    # All ranks take part in the gather before any raises.
    for failure in (own, *world.gather(own)):
        if failure is not None:
            raise failure
