"""Entry point of the script `hydragraph` and of `python -m hydragraph`."""

import atexit
import os
import sys


def main() -> None:
    """Run the command line; Ctrl-C while its modules are imported ends it without a traceback."""
    codes: list[object] = []
    atexit.register(_end_at_once, codes)
    try:
        try:
            from hydragraph.cli import main as run
        except KeyboardInterrupt:
            print("hydragraph: stopped", file=sys.stderr)
            sys.exit(130)
        run()
    except SystemExit as ending:
        codes.append(ending.code)
        raise


def _end_at_once(codes: list[object]) -> None:
    """End the process after its other exit handlers, unless it trained: callbacks may have open files.

    After an import of PyTorch, the interpreter would collect garbage for more than a second.
    """
    for code in codes:
        if isinstance(code, int) and "hydragraph.train.loop" not in sys.modules:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            except (OSError, ValueError):  # the interpreter reports a closed output
                return
            os._exit(code)


if __name__ == "__main__":
    main()
