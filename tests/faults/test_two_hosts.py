"""A link that is cut between two hosts, which are network namespaces of this one."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.faults.two_hosts import cut_and_resume, hosts


@pytest.mark.skipif("LIGHTNING_ZERO_TEST_HOSTS" not in os.environ, reason="takes a minute: set LIGHTNING_ZERO_TEST_HOSTS=1")
def test_a_cut_link_ends_both_hosts_and_training_goes_on(tmp_path: Path) -> None:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` to make namespaces with")
    try:
        with hosts():
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}")
    report = cut_and_resume(tmp_path)
    assert all(status not in (0, None) for status in report.statuses), "a host hung, or ended well"
    for host, output in enumerate(report.outputs):
        assert f"rank {host}: gathering parameters with rank {1 - host} failed" in output
    assert report.began == 4  # the end of the first of three epochs
    assert report.same
