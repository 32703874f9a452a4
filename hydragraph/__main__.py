"""Entry point of `hydragraph` and `python -m hydragraph`."""

import atexit
import os
import sys
import time
from contextlib import suppress


def main() -> None:
    """Run the command line; Ctrl-C never prints a traceback."""
    began = time.monotonic()
    # codes: the SystemExit's code, or empty without one.
    codes: list[object] = []
    atexit.register(_end_at_once, codes)
    try:
        try:
            from hydragraph.cli import main as run
        except KeyboardInterrupt:
            print("hydragraph: stopped", file=sys.stderr)
            sys.exit(130)
        run(began)
    except SystemExit as ending:
        codes.append(ending.code)
        raise


def _end_at_once(codes: list[object]) -> None:
    """Exit without the final garbage collection, which takes more than a second with PyTorch.

    Training exits normally, because callbacks may have open files.
    """
    for code in codes:
        if isinstance(code, int) and "hydragraph.train.loop" not in sys.modules:
            try:
                sys.stdout.flush()
            except (OSError, ValueError) as error:
                print(f"hydragraph: the output is incomplete: {error}", file=sys.stderr)
                code = code or 1
            with suppress(OSError, ValueError):
                sys.stderr.flush()
            # Flush streams above, because os._exit does not.
            os._exit(code)


if __name__ == "__main__":
    main()
