"""Entry point of `hydragraph`, and of `python -m hydragraph` if the script is not on the PATH."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while its modules are imported ends it without a traceback."""
    try:
        from hydragraph.cli import main as run
    except KeyboardInterrupt:
        print("hydragraph: stopped", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
