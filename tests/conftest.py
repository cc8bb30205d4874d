"""Session-wide set-up: the fork server, guards against leaks, and the check that distributed tests really ran."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import harness

DISTRIBUTED = Path(__file__).parent / "strategy"
NOTHING_RAN = "tests/strategy was collected, but no test started a world of two or more ranks"


# Of the processes that pytest-xdist runs tests in: worlds started, as each of them has said at its end.
worlds_of_workers: list[int] = []


def pytest_configure(config: pytest.Config) -> None:
    # Early, so that the imports of the server overlap with collection. A controller of workers runs no tests itself.
    if not config.option.collectonly and (_is_worker(config) or config.getoption("dist", "no") == "no"):
        harness.start_server()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For ``-n auto``: the ranks of a test wait for each other half of the time, so there may be more tests than cores."""
    return max(1, 3 * (os.cpu_count() or 1) // 2)


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Give the next test the environment variables this one found, and refuse a process group left behind."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a process group behind")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if "worlds" in getattr(node, "workeroutput", {}):  # not if it died
        worlds_of_workers.append(node.workeroutput["worlds"])


def _nothing_ran(session: pytest.Session) -> bool:
    if session.config.option.collectonly:
        return False
    if worlds_of_workers:
        return max(worlds_of_workers) == 0
    return _is_distributed(session) and harness.worlds_run() == 0


def _is_distributed(session: pytest.Session) -> bool:
    return any(DISTRIBUTED in item.path.parents for item in getattr(session, "items", ()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _is_worker(session.config):
        # All workers have collected all tests, and each has run some.
        if _is_distributed(session):
            session.config.workeroutput["worlds"] = harness.worlds_run()  # type: ignore[attr-defined]
    elif _nothing_ran(session):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"\nERROR: {NOTHING_RAN}", red=True)
