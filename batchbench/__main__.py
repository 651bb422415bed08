"""The `batchbench` command and `python -m batchbench`."""

import sys


def main() -> None:
    """Run the command line; an interrupt while it is still being imported is one line too."""
    try:
        from batchbench.cli import app
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    app()


if __name__ == "__main__":
    main()
