"""Entry point of `foretell` and of `python -m app`."""

from __future__ import annotations

import sys

from app.cli.main import main as run


def main() -> None:
    """Run the command line and leave with its exit code."""
    sys.exit(run())


if __name__ == "__main__":
    main()
