"""Prompts and answers of the kinds a chat sees, written for measuring look-up drafting."""

from __future__ import annotations

from typing import NamedTuple


class Recorded(NamedTuple):
    """One turn as it might have gone."""

    kind: str
    prompt: str
    answer: str


ARTICLE = """The lighthouse at Cape Morrow was built in 1874 after three grain ships were lost in a single
winter. Its lamp burned colza oil until 1921, when a paraffin burner was fitted, and the keepers
wound the clockwork that turned the lens every four hours through the night. Visitors who climb the
one hundred and twelve steps today see the original lens, made in Birmingham and shipped in nine
crates, still turning on its bath of mercury. The tower is built of granite from the quarry at
Sel Point, each block numbered by the masons so that the courses could be checked against the
drawings. In 1958 the light was converted to electricity, and in 1983 the last keeper, Ruth
Anselm, handed the keys to the harbour trust. She had kept a weather diary for twenty-six years,
and the trust publishes an extract of it every spring. The diary records eleven gales above force
ten, two strandings, and the arrival of a pair of choughs that nested under the gallery and have
returned every year since."""

CODE = '''class Inventory:
    """Counts of parts by name, with a log of every change."""

    def __init__(self, path):
        self.path = path
        self.counts = {}
        self.log = []

    def load(self):
        with open(self.path) as handle:
            for line in handle:
                name, count = line.rsplit(",", 1)
                self.counts[name] = int(count)

    def save(self):
        with open(self.path, "w") as handle:
            for name, count in sorted(self.counts.items()):
                handle.write(f"{name},{count}\\n")

    def add(self, name, count):
        if count < 0:
            raise ValueError(f"count {count} is negative")
        self.counts[name] = self.counts.get(name, 0) + count
        self.log.append(("add", name, count))

    def remove(self, name, count):
        if count < 0:
            raise ValueError(f"count {count} is negative")
        if self.counts.get(name, 0) < count:
            raise KeyError(f"only {self.counts.get(name, 0)} of {name} left")
        self.counts[name] = self.counts[name] - count
        self.log.append(("remove", name, count))

    def total(self):
        return sum(self.counts.values())
'''

EDITED = (
    CODE.replace("def __init__(self, path):", "def __init__(self, path: Path) -> None:")
    .replace("handle", "file")
    .replace("def load(self):", "def load(self) -> None:")
    .replace("def save(self):", "def save(self) -> None:")
    .replace("self.counts = {}", "self.counts: dict[str, int] = {}")
    .replace("def total(self):", "def total(self) -> int:")
    .replace("name, count):", "name: str, count: int) -> None:")
)

ROWS = [
    ("Ada Brandt", "Oslo", "sensor", 14, "shipped"),
    ("Imre Kovacs", "Pecs", "gateway", 2, "open"),
    ("Lena Fischer", "Ulm", "sensor", 40, "open"),
    ("Marc Dubois", "Lyon", "antenna", 7, "shipped"),
    ("Sofia Rossi", "Turin", "gateway", 3, "returned"),
    ("Jan de Vries", "Delft", "sensor", 12, "shipped"),
    ("Petra Novak", "Brno", "antenna", 9, "open"),
    ("Olof Berg", "Lund", "gateway", 1, "shipped"),
    ("Ines Silva", "Porto", "sensor", 25, "open"),
    ("Tom Keane", "Cork", "antenna", 5, "shipped"),
]

TABLE = "\n".join(f"{n} from {c} ordered {q} units of {p}: {s}." for n, c, p, q, s in ROWS)

JSON = (
    "[\n"
    + ",\n".join(
        f'  {{\n    "customer": "{n}",\n    "city": "{c}",\n    "product": "{p}",\n'
        f'    "quantity": {q},\n    "status": "{s}"\n  }}'
        for n, c, p, q, s in ROWS
    )
    + "\n]"
)

PROSE = """A good knot is one that holds while it is needed and comes undone when it is not. Sailors learn
this early, because a line that jams in a squall can cost a sail, and sometimes more than that. The
bowline earned its name as the king of knots for exactly this reason: under strain it grips, and
when the load is gone two pushes of the thumb open it. Climbers prefer the figure of eight, which is
bulkier but easier to check by eye from a distance, and checking matters more on a cliff than
speed. What both crafts share is the habit of tying the same knot the same way every time. When the
light fails or fingers are cold, memory in the hands does the work, and a knot tied from habit is
right more often than one that is reasoned out. Beginners tend to collect knots like stamps, dozens
of them, and use none well. An old rigger once told me that five are enough for a lifetime, provided
that you never have to think about any of the five. I have come to believe that he was right, and
not only about rope: most practical skill seems to be a small set of things done without thought,
so that thought is free for whatever is new."""

SUMMARY = """The lighthouse at Cape Morrow was built in 1874 after the loss of three grain ships. Its lamp
burned colza oil until 1921 and was converted to electricity in 1958. The original lens, made in
Birmingham, is still turning on its bath of mercury, and visitors can climb the one hundred and
twelve steps to see it. The last keeper, Ruth Anselm, handed the keys to the harbour trust in 1983;
her weather diary, kept for twenty-six years, records eleven gales above force ten and a pair of
choughs that have returned every year since."""

RECORDED = (
    Recorded(
        "quote",
        f"Here is a text.\n\n{ARTICLE}\n\nRepeat the text word for word.",
        f"Here is the text:\n\n{ARTICLE}\n\nThat is the whole text.",
    ),
    Recorded(
        "quote-own",
        f"Write about knots.\n{PROSE}\n\nRepeat your last answer word for word.",
        PROSE,
    ),
    Recorded("summary", f"{ARTICLE}\n\nSummarise the text.", SUMMARY),
    Recorded(
        "code-edit",
        f"Add type hints to this class and call the handle file.\n\n```python\n{CODE}```",
        f"Here is the class with type hints:\n\n```python\n{EDITED}```",
    ),
    Recorded(
        "json",
        f"Turn these lines into a JSON array with customer, city, product, quantity and status.\n{TABLE}",
        f"```json\n{JSON}\n```",
    ),
    Recorded("prose", "Write a few sentences about knots.", PROSE),
)
"""Regenerating is measured from these too: the answer again, with the old one in the pool."""
