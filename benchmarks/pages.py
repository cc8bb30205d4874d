"""What the results of ``python -m benchmarks`` look like: in a terminal, and on the pages that show them."""

import json
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import at_scale
from benchmarks.at_scale import markdown
from lightning_zero.tables import new_table, render

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
UNIT_TARGET, PARAMETER_TARGET = 25.0, 2.0
"""Microseconds of Python, for a unit and pass, and for a parameter and step."""
Cases = dict[str, Any]

COLUMNS = ("plain", "DDP", "FSDP2", "FSDP2, no reshard", "stage 1", "stage 2", "stage 3")


def ratios(case: Cases, base: str | None = None) -> dict[str, tuple[float, float, float]]:
    """By competitor: the median of its time over that of ``base`` in the same round, and the quartiles."""
    divisors = case["seconds"][base or case["competitors"][0]]
    found = {}
    for name, seconds in case["seconds"].items():
        paired = sorted(a / b for a, b in zip(seconds, divisors, strict=True))
        found[name] = (statistics.median(paired), paired[len(paired) // 4], paired[3 * len(paired) // 4])
    return found


# -- in a terminal -----------------------------------------------------------------------------------------------------


def as_text(name: str, case: Cases) -> str:
    base = case["competitors"][0]
    rows = new_table("s", f"/ {base}", "quartiles", "last loss")
    for competitor, (middle, low, high) in ratios(case).items():
        seconds = statistics.median(case["seconds"][competitor])
        rows.add_row(
            competitor, f"{seconds:.4f}", f"{middle:.3f}", f"{low:.3f} - {high:.3f}", f"{case['losses'][competitor]:.5f}"
        )
    return render(rows, [f"{name}: {describe(case)}"])


def describe(case: Cases) -> str:
    setting = case["setting"]
    parts = [case["text"], f"{case['ranks']} rank{'s' * (case['ranks'] > 1)}", setting["precision"]]
    parts += [f"accumulation {setting['accumulate']}"] * (setting["accumulate"] > 1)
    parts += ["recompute"] * setting["recompute"]
    kind = {"train": "a training step", "evaluate": "an evaluation step", "set up": "set-up", "fit": "a fit"}[case["kind"]]
    return f"{kind} of {', '.join(parts)}"


# -- targets -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    text: str
    limit: float
    case: str
    base: str
    competitors: tuple[str, ...]
    """The slowest of them counts."""

    def measured(self, cases: Cases) -> float | None:
        """The ratio, or None where it has not been measured."""
        case = cases.get(self.case)
        if case is None or self.base not in case["seconds"]:
            return None
        return max(ratios(case, self.base)[name][0] for name in self.competitors)


TARGETS = [
    Target("stages 1 and 2 over DDP", 0.97, "gpt", "DDP", ("stage 1", "stage 2")),
    Target("stage 3 over FSDP2", 0.7, "gpt", "FSDP2", ("stage 3",)),
    Target("stage 3 over DDP", 1.1, "gpt", "DDP", ("stage 3",)),
    *(
        Target(f"stage {s}, offload, over stage {s}", 1.1, "offload", f"stage {s}", (f"stage {s}, offload",))
        for s in (1, 2, 3)
    ),
    Target("one rank, any stage, over a plain loop", 1.02, "one rank", "plain", ("stage 1", "stage 2", "stage 3")),
    Target("one rank, any stage, over plain Lightning", 1.02, "fit", "plain", ("stage 1", "stage 2", "stage 3")),
    Target("evaluation at stage 3 over FSDP2's", 0.8, "evaluate", "FSDP2", ("stage 3",)),
    Target("stage 3 over DDP, blocks compiled", 1.1, "compile", "DDP, compiled", ("stage 3, compiled",)),
    Target("set-up of 300M at any stage over copying it", 2.0, "set up", "copy", ("stage 1", "stage 2", "stage 3")),
]


FIXED_BUFFERS = 3.5
"""At two ranks, in units: gradients that are coming, two sums under way, and what the other rank sends for one of them."""


def target_rows(cases: Cases) -> Iterable[tuple[str, str, str, str]]:
    for target in TARGETS:
        value = target.measured(cases)
        if value is not None:
            yield target.text, f"{target.limit:g}", f"{value:.2f}", "met" if value <= target.limit else "not met"
    memory = cases.get("gpt", {}).get("memory", {}).get("stage 3")
    if memory:
        value = memory["buffers"] / memory["largest unit"]
        text = "peak of flat buffers at stage 3, in units"
        met = "met" if value <= 2 + FIXED_BUFFERS else "not met"
        yield text, f"2 + {FIXED_BUFFERS:g}", f"{value:.1f}", met


def targets_as_text(cases: Cases) -> str:
    rows = new_table("at most", "measured", "")
    for row in target_rows(cases):
        rows.add_row(*row)
    return render(rows, ["Targets"])


# -- on pages ----------------------------------------------------------------------------------------------------------


def against_ddp(results: Cases) -> str | None:
    case = results["cases"].get("gpt")
    if case is None:
        return None
    rows = [
        (name, f"{middle:.2f}", "" if name == "DDP" else f"{low:.2f} - {high:.2f}")
        for name, (middle, low, high) in ratios(case).items()
    ]
    return markdown(("", "step time / DDP", "quartiles"), rows) + f"\n\nMeasured on: {results['machine']}."


def all_cases(results: Cases) -> str:
    rows = []
    for case in results["cases"].values():
        if case["kind"] == "train" and "DDP" in case["competitors"] + ["plain"] * (case["ranks"] == 1):
            found = ratios(case)
            cells = [f"{found[name][0]:.2f}" if name in found else "" for name in COLUMNS]
            rows.append((describe(case).removeprefix("a training step of "), *cells))
    return markdown(("", *COLUMNS), rows)


def targets(results: Cases) -> str:
    return markdown(("ratio of medians", "at most", "measured", ""), target_rows(results["cases"]))


def python_costs(results: Cases) -> str | None:
    if "overhead" not in results:
        return None
    rows = [("target", f"{UNIT_TARGET:g}", f"{PARAMETER_TARGET:g}")]
    for ranks, costs in results["overhead"].items():
        rows += [(f"{name}, {_ranks(ranks)}", *(f"{value:.0f}" for value in values)) for name, values in costs.items()]
    return markdown(("", "a unit and pass", "a parameter and step"), rows)


def host_costs(of: str, header: str) -> Callable[[Cases], str | None]:
    """Microseconds for a unit and step, by ``header``."""

    def table(results: Cases) -> str | None:
        if of not in results:
            return None
        found = results[of]
        names = list(next(iter(found.values())))
        return markdown((header, *names), [(key, *(f"{costs[name]:.0f}" for name in names)) for key, costs in found.items()])

    return table


def growth(of: str, header: str) -> Callable[[Cases], str | None]:
    """Milliseconds of a step, with its ratio to the same round's DDP or plain step."""

    def table(results: Cases) -> str | None:
        if of not in results:
            return None
        names = ["plain", "DDP", "stage 1", "stage 2", "stage 3"]
        rows = []
        for key, case in results[of].items():
            found, base = ratios(case), case["competitors"][0]
            cells = {name: f"{1000 * statistics.median(case['seconds'][name]):.0f} ms" for name in found}
            cells |= {name: f"{cells[name]} ({found[name][0]:.2f})" for name in found if name != base}
            rows.append((key, *(cells.get(name, "") for name in names)))
        return markdown((header, *names), rows)

    return table


def _ranks(count: str) -> str:
    return "one rank" if count == "1" else f"{count} ranks"


PLACES: dict[str, dict[str, tuple[str, Callable[[Cases], str | None]]]] = {
    "README.md": {"step times": ("step_time", against_ddp)},
    "docs/scaling.md": {
        "cases": ("step_time", all_cases),
        "targets": ("step_time", targets),
        "python": ("scaling", python_costs),
        "units": ("scaling", host_costs("units", "units")),
        "worlds": ("scaling", host_costs("worlds", "ranks")),
        "parameters": ("scaling", growth("parameters", "parameters")),
        "ranks": ("scaling", growth("ranks", "ranks")),
        "at scale": ("", lambda results: at_scale.table()),
        "paper": ("", lambda results: at_scale.paper_table()),
    },
}
"""By page: what stands between two comments of this name, from which file of results (computed, if none). None leaves
what stands there."""


def filled(text: str, name: str, content: str) -> str:
    """``text`` with ``content`` between the comments ``<!-- NAME: ... -->`` and ``<!-- end of NAME -->``."""
    pattern = rf"(<!-- {name}: [^\n]* -->\n)(?:.*?\n)?(<!-- end of {name} -->)"
    if not re.search(pattern, text, re.DOTALL):
        raise ValueError(f"there is no place for {name!r}")
    return re.sub(pattern, lambda found: f"{found[1]}{content}\n{found[2]}", text, count=1, flags=re.DOTALL)


def written() -> dict[Path, str]:
    """The pages as they are to be, by the results that are kept."""
    kept = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    texts = {}
    for page, places in PLACES.items():
        text = (ROOT / page).read_text()
        for name, (file, content) in places.items():
            results = kept.get(file, None if file else {})
            if results is not None and (new := content(results)) is not None:
                text = filled(text, name, new)
        texts[ROOT / page] = text
    return texts


def write() -> None:
    for path, text in written().items():
        path.write_text(text)
