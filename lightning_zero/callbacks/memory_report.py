"""The memory monitor's tables and its explanations."""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_zero.callbacks.measurements import ACTIVATIONS, BESIDE, BUFFERS, OTHER, Reading
from lightning_zero.formulas import HOST_KINDS, KINDS, MemoryEstimate, short_bytes
from lightning_zero.tables import ByteUnit, new_table, render

TOLERANCE = 0.05
"""Share of the prediction by which a measurement may differ without a word."""

_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "master": "masters",
    "optimizer": "optimizer",
    BUFFERS: "buffers",
    ACTIVATIONS: "activations",
    "staging": "staging",
    "undo": "undo data",
    "delayed_gradients": "late grads",
    "file_buffers": "file buffers",
    OTHER: "other",
}
_MORE = {
    "parameters": "parameters were added, or their dtype was changed, after training had started",
    "gradients": "gradients are kept in a wider dtype than the parameters, or were accumulated beside the reduced ones",
    "master": "parameters were unfrozen, or their dtype was changed, after training had started",
    "optimizer": "the optimizer keeps more state than a trial step on a small tensor showed",
    "staging": "units of more sizes than at first",
    "undo": "the optimizer keeps more state than a trial step on a small tensor showed",
    "delayed_gradients": "gradients are kept in a wider dtype than the parameters",
    "file_buffers": "gradients were summed in files, or what rests there was looked at",
    BUFFERS: "reductions were slow to end, more units were unsharded at once (read outside of a step, used by several"
    " modules), or gradients were sent in another dtype than they are collected in",
}
_LESS = {
    "parameters": "parameters were removed, or their dtype was changed, after training had started",
    "gradients": "not every parameter has had a gradient",
    "master": "parameters were frozen after training had started",
    "optimizer": "parameters that never had a gradient have no state",
    "staging": "copies were quick, so that less memory was under way at once",
    "undo": "the unit whose gradients come last is not updated early, or early updates did not pay",
    "delayed_gradients": "not every parameter has had a gradient, or the run ended before updates were delayed",
    "file_buffers": "fewer units were fetched at once, or there was no step",
    BUFFERS: "fewer units were under way at once: reductions were quick, or units were not used",
}


@dataclass(frozen=True)
class Forecast:
    """What is known before the first step."""

    setting: str
    """Stage or strategy, and number of ranks."""
    details: str
    """What is being trained, how."""
    predicted: MemoryEstimate
    formula: MemoryEstimate
    """The same number of parameters, all of them trained with Adam and none of them padded, as in the ZeRO paper."""
    plain: MemoryEstimate
    """The same parameters under plain data parallelism."""

    @property
    def columns(self) -> dict[str, MemoryEstimate]:
        if self.predicted.stage == 0:
            return {"plain\nDP": self.plain}
        return {"plain\nDP": self.plain, "ZeRO\nformula": self.formula, "here\npredicted": self.predicted}


def opening_table(forecast: Forecast) -> str:
    """What each rank is going to hold, beside the formula and plain data parallelism."""
    estimates = list(forecast.columns.values())
    unit = ByteUnit.for_bytes(max(estimate.total for estimate in estimates))
    table = new_table(*forecast.columns)
    table.add_row("bytes", *(estimate.formula for estimate in estimates))
    table.add_section()
    for kind in KINDS:
        if any(getattr(estimate, kind) for estimate in estimates):
            table.add_row(_LABELS[kind], *(unit.show(getattr(estimate, kind)) for estimate in estimates))
    table.add_section()
    table.add_row("model states", *(unit.show(estimate.total) for estimate in estimates))
    for kind in (BUFFERS, *HOST_KINDS):
        if getattr(forecast.predicted, kind):
            table.add_row(_LABELS[kind], *_right(estimates, unit.show(getattr(forecast.predicted, kind))))
    titles = [f"Memory per rank in {unit.name}, predicted: {forecast.setting}", forecast.details]
    return render(table, titles, _where(forecast.predicted))


def closing_table(
    forecast: Forecast,
    resident: Mapping[str, Reading],
    peak: Mapping[str, Reading],
    others: Mapping[str, tuple[Reading | None, Reading | None]],
    steps: int,
) -> str:
    """What the ranks held, beside the prediction.

    ``resident`` and ``peak`` are by kind, with their ``total``; ``others`` are rows that nothing was predicted for.
    """
    predicted, estimates = forecast.predicted, list(forecast.columns.values())
    unit = ByteUnit.for_bytes(max(forecast.plain.total, peak["total"].max))
    table = new_table(*forecast.columns, "resident\nmax", "resident\nmean", "peak\nmax", "peak\nmean")

    def measured(*readings: Reading | None) -> list[str]:
        return [cell for r in readings for cell in (["", ""] if r is None else [unit.show(r.max), unit.show(r.mean)])]

    for kind in KINDS:
        values = [getattr(estimate, kind) for estimate in estimates]
        if any(values) or peak[kind].max:
            table.add_row(_LABELS[kind], *map(unit.show, values), *measured(resident[kind], peak[kind]))
    for kind in (*BESIDE, OTHER):
        expected = getattr(predicted, kind, 0)
        if expected or peak[kind].max:
            shown = _right(estimates, unit.show(expected) if kind in (BUFFERS, *HOST_KINDS) else "")
            table.add_row(_LABELS[kind], *shown, *measured(resident[kind], peak[kind]))
    table.add_section()
    totals = [estimate.total for estimate in estimates]
    totals[-1] += predicted.buffers + predicted.beside
    table.add_row("total", *map(unit.show, totals), *measured(resident["total"], peak["total"]))
    for label, readings in others.items():
        table.add_row(label, *_right(estimates, ""), *measured(*readings))
    title = f"Memory per rank in {unit.name}, measured over {steps} steps: {forecast.setting}"
    notes = [*_where(predicted), *differences(predicted, peak)]
    if predicted.stage:
        share = peak["total"].max / forecast.plain.total
        notes.insert(0, f"The peak of a rank, buffers included, is {share:.0%} of plain data parallelism.")
    return render(table, [title], notes)


def _where(predicted: MemoryEstimate) -> list[str]:
    beside = tuple(kind for kind in HOST_KINDS if getattr(predicted, kind))
    places = (("In host memory", (*predicted.on_host, *beside)), ("In files", predicted.on_nvme))
    return [f"{place}: {', '.join(_LABELS[kind] for kind in kinds)}." for place, kinds in places if kinds]


def _right(estimates: list[MemoryEstimate], text: str) -> list[str]:
    """Cells under the estimates, all empty but the last."""
    return [""] * (len(estimates) - 1) + [text]


def differences(predicted: MemoryEstimate, peak: Mapping[str, Reading]) -> list[str]:
    """Where the peak is off the prediction by more than the tolerance, and why."""
    lines = []
    for kind in (*KINDS, BUFFERS, *HOST_KINDS):
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
    expected, found = predicted.total + predicted.buffers + predicted.beside, peak["total"].max
    if not lines and found < (1 - TOLERANCE) * expected:
        lines.append(
            f"total: {1 - found / expected:.0%} less than predicted: the kinds are not all at their peak at once."
        )
    return lines
