"""From arguments to a command, and from its failure to one line and an exit code."""

from __future__ import annotations

import argparse
import errno
import sys

from app.cli.output import (
    DOES_NOT_FIT,
    EXIT_CODES,
    FAILURE,
    INTERRUPTED,
    MISSING,
    OFFLINE,
    OK,
    USAGE,
    CommandFailed,
    is_terminal,
    note,
    prepare_streams,
    say,
)
from app.cli.parser import Parser, build_parser
from app.settings import SettingsError
from backends.base import BackendError
from engine.errors import EngineError
from engine.events import ErrorKind

VERSION = "0.1.0"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    prepare_streams()
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as leaving:  # argparse leaves this way for --help and usage errors
        return leaving.code if isinstance(leaving.code, int) else USAGE
    try:
        return _run(args, parser)
    except CommandFailed as error:
        note(f"foretell: {error}" + (f" ({error.hint})" if error.hint else ""))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader left (`| head -1`). Point stdout away so that the exit flush cannot fail too.
        sys.stdout = None
        return OK
    except OSError as error:
        note(f"foretell: {_os_message(error)}")
        return _os_exit_code(error)


def _run(args: argparse.Namespace, parser: Parser) -> int:
    if args.version:
        say(f"foretell {VERSION}")
        return OK
    if args.command == "completion":
        import shtab  # only this command needs it

        say(shtab.complete(parser, shell=args.shell))
        return OK
    if args.command is None and not is_terminal(sys.stdin):
        args = parser.parse_args([*(["--offline"] if args.offline else []), "ask"])
    return _dispatch(args)


def _dispatch(args: argparse.Namespace) -> int:
    # Imported after --help, --version and usage errors have left.
    from app.cli.commands import COMMANDS
    from app.log_file import start_log
    from app.wiring import Wiring
    from storage.errors import ModelNotFound, NotEnoughSpace, OfflineError, StorageError

    exit_codes: dict[type[StorageError], int] = {
        OfflineError: OFFLINE,
        ModelNotFound: MISSING,
        NotEnoughSpace: DOES_NOT_FIT,
    }

    try:
        wiring = Wiring.from_environment(is_offline=args.offline)
        start_log(wiring.paths.log_file)
        return COMMANDS[args.command or "chat"](args, wiring) or OK
    except StorageError as error:
        code = exit_codes.get(type(error), FAILURE)
        raise CommandFailed(str(error), hint=error.hint, exit_code=code) from error
    except (SettingsError, EngineError, BackendError) as error:
        kind: ErrorKind = getattr(error, "kind", "failure")
        raise CommandFailed(str(error), hint=error.hint, exit_code=EXIT_CODES[kind]) from error


def _os_message(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def _os_exit_code(error: OSError) -> int:
    if isinstance(error, FileNotFoundError):
        return MISSING
    return DOES_NOT_FIT if error.errno == errno.ENOSPC else FAILURE
