"""Session-wide set-up: the fork server, guards against leaks, and the check that distributed tests really ran."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests import harness

DISTRIBUTED = Path(__file__).parent / "strategy"
NOTHING_RAN = "tests/strategy was collected, but no test started a world of two or more ranks"


def pytest_configure(config: pytest.Config) -> None:
    # Early, so that the imports of the server overlap with collection.
    if not config.option.collectonly:
        harness.start_server()


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


def _nothing_ran(session: pytest.Session) -> bool:
    collected = any(DISTRIBUTED in item.path.parents for item in session.items)
    return collected and not session.config.option.collectonly and harness.worlds_run() == 0


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if _nothing_ran(session):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"\nERROR: {NOTHING_RAN}", red=True)
