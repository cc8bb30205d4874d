"""Tables as plain text, 80 columns wide: readable in a log file, and printable by a progress bar."""

import io
import sys
from collections.abc import Iterable

from rich.box import ASCII, HORIZONTALS
from rich.console import Console
from rich.table import Table

WIDTH = 80


class ByteUnit:
    """One unit for all cells of a table; decimal, as in the ZeRO paper: 1 GB is 10^9 bytes."""

    def __init__(self, name: str, size: float) -> None:
        self.name, self._size = name, size

    @classmethod
    def for_bytes(cls, largest: float) -> "ByteUnit":
        for name, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
            if largest >= size:
                return cls(name, size)
        return cls("kB", 1e3)

    def scale(self, nbytes: float) -> float:
        return nbytes / self._size

    def show(self, nbytes: float) -> str:
        value = self.scale(nbytes)
        return "0" if not value else f"{value:.0f}" if value >= 1000 else f"{value:.2f}"


def new_table(*columns: str) -> Table:
    """A table with a first column of labels; further columns hold numbers."""
    unicode = "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()
    table = Table(box=HORIZONTALS if unicode else ASCII, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def render(table: Table, titles: Iterable[str], notes: Iterable[str] = ()) -> str:
    """The table with lines of text above and below it."""
    console = Console(
        file=io.StringIO(), width=WIDTH, color_system=None, highlight=False, markup=False, emoji=False,
        force_jupyter=False,  # a notebook's console displays by itself and writes nothing
    )  # fmt: skip
    for part in (*titles, table, *notes):
        console.print(part)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())
