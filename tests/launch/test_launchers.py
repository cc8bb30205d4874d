"""Real launches: processes started by Lightning's launchers and by torchrun, not by the test harness."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fresh import environment
from tests.harness import run
from tests.launch.fit import Net
from tests.parity import Outcome, trained

LAUNCHES = {
    "popen": [sys.executable, "-m", "tests.launch.fit", "popen"],
    "spawn": [sys.executable, "-m", "tests.launch.fit", "spawn"],
    # What Lightning's notebook launcher does.
    "fork": [sys.executable, "-m", "tests.launch.fit", "fork"],
    "torchrun": [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tests.launch.fit", "popen",
    ],
}  # fmt: skip


def reference() -> Outcome:
    return trained(Net, 0, data=(16, 4), max_epochs=2)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_two_processes(launch: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [*LAUNCHES[launch], str(tmp_path)], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert seen == [{"replicas": 2, "rank": rank, "weight": "ShardedParameter"} for rank in range(2)]
    got = torch.load(tmp_path / "trained.pt", weights_only=True)
    expected = run(2, reference)[0]
    assert got["plain"]
    assert got["weights"].keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert torch.equal(got["weights"][name], value), name
    assert got["metrics"] == expected.metrics
