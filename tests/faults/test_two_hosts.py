"""A link that is cut between two hosts, which are network namespaces of this one."""

import os
import shutil
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_zero import whereabouts
from lightning_zero.comm import Comm
from tests.faults.two_hosts import cut_and_resume, hosts
from tests.fresh import environment
from tests.harness import run
from tests.parity import rank


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


KEEPER = """
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def meet_alone() -> str:
    """Rank 1 does not come, and whoever keeps the store is there, but does not answer: as behind a link that is down."""
    found = Comm(rank(), 2, torch.device("cpu"), timedelta(seconds=60))
    if rank() == 1:
        return ""
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER], stdout=subprocess.PIPE, env=environment(), text=True)
    try:
        port = int(keeper.stdout.readline())  # type: ignore[union-attr]
        found._whereabouts._store = dist.PrefixStore("here", dist.TCPStore("127.0.0.1", port, is_master=False))
        whereabouts._ANSWER_SECONDS = 0.5
        keeper.send_signal(signal.SIGSTOP)
        found.exchange("waiting", timeout=0.3)
    except RuntimeError as error:
        return str(error)
    finally:
        keeper.kill()
        keeper.wait()
    return "no error"


def test_a_store_that_does_not_answer_is_not_waited_for() -> None:
    message, _ = run(2, meet_alone)
    assert "Rank 0 is waiting, and the other ranks did not come within 0.3 s. Where they are is not known" in message
