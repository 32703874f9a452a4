"""Entry point of the script `hydragraph` and of `python -m hydragraph`."""

import atexit
import os
import sys
import time
from contextlib import suppress


def main() -> None:
    """Run the command line. Ctrl-C prints no traceback, even during imports."""
    began = time.monotonic()
    # codes: the code of the SystemExit that ends the process, or empty without one.
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
    """Exit without the interpreter's final garbage collection, which takes more than a second with PyTorch.

    After training, exit normally, because users' callbacks may have open files.
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
            # os._exit does not flush streams, so they are flushed above.
            os._exit(code)


if __name__ == "__main__":
    main()
