"""The benchmarks' own logic, without measuring: pages agree with the results that are kept, and competitors train alike."""

import json
from typing import Any

import pytest
import torch

from benchmarks import at_scale, pages
from benchmarks.competitors import KINDS, Setting
from benchmarks.models import TASKS
from benchmarks.run import CASES, RESULTS, Case, make
from tests.harness import run


def test_pages_agree_with_the_results() -> None:
    written = pages.written()
    assert {path.name for path in written} == {"README.md", "scaling.md"}
    assert [path.name for path, text in written.items() if text != path.read_text()] == [], "python -m benchmarks --pages"


@pytest.mark.skipif(not RESULTS.exists(), reason="make bench has kept no results yet")
def test_what_is_kept_is_of_todays_cases() -> None:
    for name, kept in json.loads(RESULTS.read_text())["cases"].items():
        # Packages that were not installed may be missing.
        left_out = {c for c in CASES[name].competitors if c.startswith("DeepSpeed")} - {*kept["competitors"]}
        assert kept["competitors"] == [c for c in CASES[name].competitors if c not in left_out]
        assert kept["seconds"].keys() == {*kept["competitors"]}


def test_every_axis_has_its_values() -> None:
    trained = [case for case in CASES.values() if case.kind == "train"]
    assert {case.ranks for case in trained} == {1, 2, 4}
    assert {case.task for case in trained} >= {"gpt", "narrow", "wide", "convolutional"}
    assert {case.setting.precision for case in trained} == {"fp32", "bf16"}
    assert {case.setting.accumulate for case in trained} == {1, 4}
    assert {case.setting.recompute for case in trained} == {True, False}
    assert all(name in KINDS[case.kind] for case in CASES.values() for name in case.competitors)


def one_case(first: list[float], other: list[float]) -> dict[str, Any]:
    return {"competitors": ["A", "B"], "seconds": {"A": first, "B": other}}


def test_ratios_are_of_the_same_round() -> None:
    # Twice the time in every round, though the machine slows down by ten times in the middle.
    found = pages.ratios(one_case([1.0, 10.0, 1.0, 1.0], [2.0, 20.0, 2.0, 3.0]))
    assert found == {"A": (1.0, 1.0, 1.0), "B": (2.0, 2.0, 3.0)}
    assert pages.ratios(one_case([1.0], [4.0]), "B")["A"] == (0.25, 0.25, 0.25)


def test_targets_tell_whether_they_are_met() -> None:
    target = pages.Target("B over A", 1.5, "case", "A", ("B",))
    assert target.measured({"case": one_case([1.0, 1.0], [1.4, 1.4])}) == 1.4
    assert target.measured({}) is None


def test_content_goes_between_its_comments() -> None:
    page = "a\n<!-- x: said -->\nold\n<!-- end of x -->\nb\n<!-- y: said -->\n<!-- end of y -->\n"
    assert pages.filled(page, "x", "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match="no place for 'z'"):
        pages.filled(page, "z", "new")


def test_a_step_on_paper() -> None:
    # Two units of 16M parameters; per unit 32 MiB, of which half comes from the other node: 0.5 s. Computing 1.5 s.
    bytes_of_unit = 32 * 2**20
    cluster = at_scale.Cluster("two nodes of one", 1, 6 * bytes_of_unit / 1.5, 1e30, 1e30, bytes_of_unit, 0.0)
    found = at_scale.step(cluster, 3, bytes_of_unit, 1, ranks=2)
    # forward: 0.5 of computing, 1 of gathering; backward: 1 of computing, 2 of gathering and reducing; 1 not hidden
    assert (found.computing, round(found.total, 6)) == (1.5, 4.0)
    # Stage 2 has one collective of each in backward; with a fast network only computing is left.
    assert round(at_scale.step(cluster, 2, bytes_of_unit, 1, ranks=2).total, 6) == 3.0
    fast = at_scale.Cluster("fast", 1, cluster.flops, 1e30, 1e30, 1e30, 0.0)
    assert at_scale.step(fast, 3, bytes_of_unit, 1, ranks=2).efficiency == pytest.approx(1.0)


COMPETITORS = (
    "DDP", "FSDP2", "FSDP2, no reshard", "ZeroRedundancyOptimizer", "stage 1", "stage 2", "stage 3", "stage 2, offload",
)  # fmt: skip
SETTINGS = (Setting(), Setting(accumulate=2, recompute=True))


def losses() -> list[dict[str, list[float]]]:
    """By setting and competitor, of three steps; then of one evaluation. Sets a model up twice as well."""
    found = []
    for setting in SETTINGS:
        case, generator = Case("tiny", setting=setting), torch.Generator().manual_seed(0)
        batches = [[TASKS["tiny"].batch(generator) for _ in range(setting.accumulate)] for _ in range(3)]
        competitors = {name: make(case, name) for name in COMPETITORS}
        found.append({name: [it.step(batch) for batch in batches] for name, it in competitors.items()})
    case = Case("tiny", kind="evaluate")
    found.append({name: [make(case, name).step(batches[0])] for name in KINDS["evaluate"]})
    set_up = make(Case("tiny", kind="set up"), "stage 3")
    for _ in range(2):
        set_up.prepare()
        set_up.step([])
    return found


def test_competitors_compute_alike() -> None:
    *trained, evaluated = run(2, losses, timeout=120)[0]
    for found in trained:
        assert len(set(found["DDP"])) == 3
        for name, values in found.items():
            assert values == pytest.approx(found["DDP"], rel=1e-5), name
    for name, values in evaluated.items():
        assert values == pytest.approx(evaluated["plain"], rel=1e-6), name
