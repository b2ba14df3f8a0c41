"""Finds chats by words in their titles and messages.

Texts and terms are compared folded: letter case, ß or ss, and how an accent is written do not
matter. Terms of three characters and more use the trigram index; shorter ones (most Chinese and Japanese
words) are looked for in the texts themselves. Whatever is typed is text, never query syntax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from storage.database import Database, fold

_TRIGRAM_LEN: Final = 3
_CONTEXT_LEN: Final = 40
"""Characters of the text shown on either side of the first hit."""


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A chat that has every term in its title, or in one of its messages."""

    chat_id: str
    title: str
    message_id: int | None
    """The newest message with the terms, or None when the title has them."""
    snippet: str
    """The text around the first term, on one line."""
    num_hits: int
    """Messages of the chat that have the terms."""


def search_chats(database: Database, text: str, *, limit: int = 100) -> list[SearchHit]:
    """Chats with every word of `text` in the title or in one message, newest change first."""
    terms = [fold(term) for term in text.replace("\0", " ").split()]
    if not terms:
        return []
    hits = {hit.chat_id: hit for hit in _title_hits(database, terms)}
    for hit in _message_hits(database, terms):
        hits.setdefault(hit.chat_id, hit)
    order = database.query("SELECT id FROM chats ORDER BY updated_at DESC, id")
    return [hits[row["id"]] for row in order if row["id"] in hits][:limit]


def _title_hits(database: Database, terms: list[str]) -> list[SearchHit]:
    where = " AND ".join(["instr(fold(title), ?)"] * len(terms))
    rows = database.query(f"SELECT id, title FROM chats WHERE {where}", terms)  # noqa: S608
    return [SearchHit(row["id"], row["title"], None, row["title"], 0) for row in rows]


def _message_hits(database: Database, terms: list[str]) -> list[SearchHit]:
    indexed = [term for term in terms if len(term) >= _TRIGRAM_LEN]
    short = [term for term in terms if len(term) < _TRIGRAM_LEN]
    conditions = ["instr(fold(messages.content), ?)"] * len(short)
    parameters = list(short)
    source = "messages"
    if indexed:
        source = "message_texts JOIN messages ON messages.id = message_texts.rowid"
        conditions.append("message_texts MATCH ?")
        parameters.append(" ".join('"' + term.replace('"', '""') + '"' for term in indexed))
    # SQLite takes the other columns from the row that max() picked.
    rows = database.query(
        "SELECT chat_id, title, max(messages.id) AS id, messages.content AS content,"  # noqa: S608
        f" count(*) AS num_hits FROM {source} JOIN chats ON chats.id = chat_id"
        f" WHERE {' AND '.join(conditions)} GROUP BY chat_id",
        parameters,
    )
    return [
        SearchHit(
            row["chat_id"],
            row["title"],
            row["id"],
            _snippet(row["content"], terms),
            row["num_hits"],
        )
        for row in rows
    ]


def _snippet(content: str, terms: list[str]) -> str:
    folded = fold(content)
    found = [pos for pos in (folded.find(term) for term in terms) if pos >= 0]
    # Folding may change lengths by a character here and there: good enough for a glance.
    first = min(found, default=0)
    start, end = max(0, first - _CONTEXT_LEN), first + 2 * _CONTEXT_LEN
    line = " ".join(content[start:end].split())
    return ("…" if start else "") + line + ("…" if end < len(content) else "")
