"""The memory monitor's tables, 80 columns wide, and its explanations."""

import io
import sys
from collections.abc import Iterable, Mapping

from rich.box import ASCII, HORIZONTALS
from rich.console import Console
from rich.table import Table

from lightning_zero.callbacks.measurements import BUFFERS, OTHER, Reading
from lightning_zero.estimate import KINDS, MemoryEstimate, short_bytes, short_count

WIDTH = 80
TOLERANCE = 0.05
"""Share of the prediction by which a measurement may differ without a word."""

_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "master": "masters",
    "optimizer": "optimizer",
    BUFFERS: "buffers",
    OTHER: "other",
}
_MORE = {
    "parameters": "parameters were added, or their dtype was changed, after training had started",
    "gradients": "gradients are kept in a wider dtype than the parameters, or were accumulated beside the reduced ones",
    "master": "parameters were unfrozen, or their dtype was changed, after training had started",
    "optimizer": "the optimizer keeps more state than a trial step on a small tensor showed",
    BUFFERS: "more units were unsharded at once: read outside of a step, or used by several modules at a time",
}
_LESS = {
    "parameters": "parameters were removed, or their dtype was changed, after training had started",
    "gradients": "not every parameter has had a gradient",
    "master": "parameters were frozen after training had started",
    "optimizer": "parameters that never had a gradient have no state",
    BUFFERS: "reductions ended before the next ones had to be buffered",
}


def opening_table(predicted: MemoryEstimate, formula: MemoryEstimate, plain: MemoryEstimate, optimizers: str) -> str:
    """Before the first step: what each rank is going to hold, beside the formula and plain data parallelism."""
    unit = _Unit.for_bytes(max(plain.total, predicted.total + predicted.buffers))
    table = _new_table("", f"plain DP\n{plain.formula}")
    if predicted.stage:
        table.add_column(f"ZeRO formula\n{formula.formula}", justify="right")
        table.add_column("here\npredicted", justify="right")
    estimates = [plain, formula, predicted] if predicted.stage else [plain]
    for kind in KINDS:
        if any(getattr(estimate, kind) for estimate in estimates):
            table.add_row(_LABELS[kind], *(unit.show(getattr(estimate, kind)) for estimate in estimates))
    table.add_section()
    table.add_row("model states", *(unit.show(estimate.total) for estimate in estimates))
    if predicted.buffers:
        table.add_row(_LABELS[BUFFERS], "", "", unit.show(predicted.buffers))
    counts = f"{short_count(predicted.num_parameters)} parameters, {predicted.precision}, {optimizers}"
    return _text(table, f"Memory per rank in {unit.name}: {_setting(predicted)}; {counts}")


def closing_table(
    predicted: MemoryEstimate,
    formula: MemoryEstimate,
    plain: MemoryEstimate,
    resident: Mapping[str, Reading],
    peak: Mapping[str, Reading],
    others: Mapping[str, tuple[Reading | None, Reading | None]],
    steps: int,
) -> str:
    """After the last step: what the ranks held, beside the prediction.

    ``resident`` and ``peak`` are by kind, with their ``total``; ``others`` are rows that nothing was predicted for.
    """
    unit = _Unit.for_bytes(max(plain.total, peak["total"].max))
    table = _new_table("", "plain\nDP")
    columns = ["ZeRO\nformula", "here\npredicted"] if predicted.stage else []
    for header in [*columns, "resident\nmax", "resident\nmean", "peak\nmax", "peak\nmean"]:
        table.add_column(header, justify="right")

    def predictions(value: float, by_paper: float | None, by_plain: float | None) -> list[str]:
        shown = [by_plain, by_paper, value] if predicted.stage else [by_plain]
        return ["" if item is None else unit.show(item) for item in shown]

    def measured(*readings: Reading | None) -> list[str]:
        return [cell for r in readings for cell in (["", ""] if r is None else [unit.show(r.max), unit.show(r.mean)])]

    for kind in KINDS:
        values = getattr(predicted, kind), getattr(formula, kind), getattr(plain, kind)
        if any(values) or peak[kind].max:
            table.add_row(_LABELS[kind], *predictions(*values), *measured(resident[kind], peak[kind]))
    if predicted.buffers or peak[BUFFERS].max:
        table.add_row(
            _LABELS[BUFFERS], *predictions(predicted.buffers, None, None), *measured(resident[BUFFERS], peak[BUFFERS])
        )
    if peak[OTHER].max:
        empty = [""] * (3 if predicted.stage else 1)
        table.add_row(_LABELS[OTHER], *empty, *measured(resident[OTHER], peak[OTHER]))
    table.add_section()
    totals = predictions(predicted.total + predicted.buffers, formula.total, plain.total)
    table.add_row("total", *totals, *measured(resident["total"], peak["total"]))
    for label, readings in others.items():
        table.add_row(label, *[""] * (3 if predicted.stage else 1), *measured(*readings))
    title = f"Memory per rank in {unit.name} after {steps} steps: {_setting(predicted)}"
    return _text(table, title, [_summary(plain, peak["total"]), *differences(predicted, peak)])


def differences(predicted: MemoryEstimate, peak: Mapping[str, Reading]) -> list[str]:
    """Where the peak is off the prediction by more than the tolerance, and why."""
    lines = []
    for kind in (*KINDS, BUFFERS):
        expected, found = getattr(predicted, kind), peak[kind].max
        if abs(found - expected) <= TOLERANCE * expected:
            continue
        if not expected:
            change = f"{short_bytes(found)} not predicted"
        else:
            change = f"{abs(found / expected - 1):.0%} {'more' if found > expected else 'less'} than predicted"
        reasons = _MORE if found > expected else _LESS
        reason = "the optimizer has made no step" if kind == "optimizer" and not found else reasons[kind]
        lines.append(f"{_LABELS[kind]}: {change}: {reason}.")
    expected, found = predicted.total + predicted.buffers, peak["total"].max
    if not lines and found < (1 - TOLERANCE) * expected:
        lines.append(f"total: {1 - found / expected:.0%} less than predicted: the kinds are not all at their peak at once.")
    return lines


def _summary(plain: MemoryEstimate, together: Reading) -> str:
    if not plain.total:
        return ""
    share = together.max / plain.total
    return f"The peak of a rank, buffers included, is {share:.0%} of plain data parallelism."


def _setting(estimate: MemoryEstimate) -> str:
    ranks = "1 rank" if estimate.world_size == 1 else f"{estimate.world_size} ranks"
    return f"{'nothing sharded' if estimate.stage == 0 else f'ZeRO stage {estimate.stage}'}, {ranks}"


class _Unit:
    """One unit for all cells of a table."""

    def __init__(self, name: str, size: float) -> None:
        self.name, self._size = name, size

    @classmethod
    def for_bytes(cls, largest: float) -> "_Unit":
        for name, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
            if largest >= size:
                return cls(name, size)
        return cls("kB", 1e3)

    def show(self, nbytes: float) -> str:
        value = nbytes / self._size
        return "0" if not value else f"{value:.0f}" if value >= 1000 else f"{value:.2f}"


def _new_table(*headers: str) -> Table:
    unicode = "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()
    table = Table(box=HORIZONTALS if unicode else ASCII, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left", no_wrap=not index)
    return table


def _text(table: Table, title: str, notes: Iterable[str] = ()) -> str:
    # Into a string: a progress bar on the screen needs to print it itself.
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False, markup=False)
    console.print(title)
    console.print(table)
    for note in notes:
        console.print(note)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())
