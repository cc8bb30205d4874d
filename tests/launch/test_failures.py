"""A rank that fails takes the others with it: every process ends, none with success."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.fresh import environment

SCRIPT = ["-m", "tests.launch.fail"]
POPEN = [sys.executable, *SCRIPT]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *SCRIPT]
CASES = {
    "an exception": (POPEN, "raise", "broken on purpose"),
    "a killed process": (TORCHRUN, "kill", "SIGKILL"),
    "a read on one rank": (POPEN, "read", "rank 0 is reading outside of a step parameter 'net.0.weight'"),
}


@pytest.mark.parametrize("case", CASES)
def test_all_processes_end(case: str, tmp_path: Path) -> None:
    command, how, message = CASES[case]
    done = subprocess.run(
        [*command, how, str(tmp_path)], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=90
    )
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    pids = [int(path.read_text()) for path in tmp_path.glob("rank*.pid")]
    assert len(pids) == 2
    assert wait_for_end(pids), "a rank lives on"


@pytest.mark.parametrize("how", ["stop", "stop one"])
def test_a_stop_signal_ends_all_ranks_after_the_same_batch(how: str, tmp_path: Path) -> None:
    """While one rank is in a gather that the other has not come to; and where only one of them gets the signal."""
    subprocess.run([*POPEN, how, str(tmp_path)], cwd=tmp_path, env=environment(), capture_output=True, timeout=90)
    ends = [(tmp_path / f"rank{rank}.end").read_text() for rank in range(2)]
    assert ends == ["SIGTERMException after 2 steps"] * 2
    # The ranks are together, so a callback can still save.
    assert torch.load(tmp_path / "stopped.ckpt", weights_only=True)["global_step"] == 2
    assert wait_for_end([int(path.read_text()) for path in tmp_path.glob("rank*.pid")]), "a rank lives on"


def wait_for_end(pids: list[int], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
