"""Every directory of the program, and nothing else about it.

Knows no setting and reads no environment: whoever starts the program passes the override in.
Directories are created when something is first written there, never by asking for their name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from platformdirs import PlatformDirs

from storage.errors import StorageError


@dataclass(frozen=True, slots=True)
class Paths:
    """Where data, settings, cache and logs live.

    Chats and models are data, never cache: cleaning a cache must not cost anyone a chat.
    """

    home: Path | None = None
    """One folder for everything, or None for the platform's own folders."""
    _dirs: PlatformDirs = field(
        default_factory=lambda: PlatformDirs("foretell", appauthor=False), repr=False, compare=False
    )

    @property
    def data_dir(self) -> Path:
        """Chats and models."""
        return self._place("data", self._dirs.user_data_path)

    @property
    def config_dir(self) -> Path:
        """Settings."""
        return self._place("config", self._dirs.user_config_path)

    @property
    def cache_dir(self) -> Path:
        """What can be made again: system prompts that were read already."""
        return self._place("cache", self._dirs.user_cache_path)

    @property
    def log_dir(self) -> Path:
        """Rotating log files."""
        return self._place("state/log", self._dirs.user_log_path)

    @property
    def database_file(self) -> Path:
        """The SQLite file with chats and bench runs."""
        return self.data_dir / "chats.db"

    @property
    def models_dir(self) -> Path:
        """Downloaded model files and their parts."""
        return self.data_dir / "models"

    @property
    def config_file(self) -> Path:
        """The settings file."""
        return self.config_dir / "config.toml"

    @property
    def log_file(self) -> Path:
        """The current log file."""
        return self.log_dir / "foretell.log"

    def _place(self, name: str, platform_dir: Path) -> Path:
        return platform_dir if self.home is None else self.home / name


def make_private_dir(path: Path) -> Path:
    """Create a directory only its owner can read, and so its missing parents; return it.

    State:  a directory that exists keeps its permissions.
    Raises: StorageError when it cannot be created.
    """
    try:
        missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
        for folder in reversed(missing):  # `parents=True` would give them the usual mode
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot create the folder {path}: {error.strerror}",
            hint="check its permissions, or set FORETELL_HOME to another folder",
        ) from error
    return path


def make_private_file(path: Path) -> Path:
    """Create an empty file with mode 0600 unless it exists; return it.

    Made before a library opens it, because SQLite and `open` create files readable for all.
    Raises: StorageError when it cannot be created.
    """
    make_private_dir(path.parent)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    except PermissionError:
        if not path.exists():
            raise StorageError(
                f"cannot create {path}: permission denied", hint="check the folder's permissions"
            ) from None
    except OSError as error:
        raise StorageError(f"cannot create {path}: {error.strerror}") from error
    return path
