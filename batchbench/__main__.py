"""The `batchbench` command and `python -m batchbench`."""

import sys


def main() -> None:
    """Run the command line; what happens before or outside a command is one line too."""
    try:
        from batchbench.cli import app

        app()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except OSError as error:  # the help or the version, on a device that is full
        print(f"error: output: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
