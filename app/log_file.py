"""The log goes to a rotating private file: the terminal belongs to the screen and to answers."""

from __future__ import annotations

import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path

from storage.errors import StorageError
from storage.paths import make_private_file

MAX_BYTES = 1 << 20
NUM_KEPT = 3


def start_log(path: Path) -> None:
    """Send everything from INFO up to the file; a folder that cannot be written means no log.

    Messages never carry prompts, answers or tokens: callers log ids, counts and errors.
    """
    try:
        make_private_file(path)
        handler = RotatingFileHandler(
            path, maxBytes=MAX_BYTES, backupCount=NUM_KEPT, encoding="utf-8", delay=True
        )
    except (StorageError, OSError):
        logging.getLogger().addHandler(logging.NullHandler())
        return
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    # A full disk, or another window that holds the file on Windows, loses lines of the log: printed
    # on stderr, as logging does by itself, they would stand in the screen.
    logging.raiseExceptions = False
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
