"""Run one function on several ranks and hand what each rank returns to the test.

    def sum_of_ranks() -> float:
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        return total.item()

    def test_sum() -> None:
        assert run(3, sum_of_ranks) == [3.0, 3.0, 3.0]

Ranks are forked from a server that has torch and Lightning imported already and never computes anything itself, so a
world of two costs about a tenth of a second and every call gets a fresh one. The function must be importable (defined
at module level); arguments and results are pickled. Ranks see the environment variables of the calling test; what they
print appears as output of that test.
"""

import contextlib
import faulthandler
import os
import pickle
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision

DEFAULT_TIMEOUT = 60.0
# What the other ranks get to finish or fail on their own once one rank has failed.
_GRACE = 1.0
# What a rank gets to leave after all ranks have returned.
_EXIT_TIMEOUT = 10.0

# What most tests import: once in the server instead of in every rank, where it is a third of a second of half a second.
_PRELOAD = [
    "torch", "torch.distributed.fsdp", "lightning.pytorch.demos.boring_classes", "pytest", "lightning_zero", "tests.forked",
]  # fmt: skip
_FORKSERVER = get_context("forkserver")
_started_worlds: list[int] = []


class WorldError(Exception):
    """At least one rank raised, died or hung; the message names each and shows the first one's traceback."""


@dataclass(frozen=True)
class _Job:
    folder: str
    world: int
    call: bytes
    environ: dict[str, str]
    timeout: float


@dataclass(frozen=True)
class _Failure:
    # Sort key. A dead rank makes the others fail with "connection closed by peer", so deaths come first.
    order: tuple[int, float]
    rank: int
    headline: str
    detail: str = ""


@dataclass
class _Rank:
    number: int
    process: BaseProcess
    pipe: connection.Connection


def start_server() -> None:
    """Start the fork server; returns at once, while the server imports in the background."""
    # numpy would otherwise start a thread in the server on import, and a forked child inherits its held locks.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _FORKSERVER.set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()


def worlds_run() -> int:
    """How many worlds of at least two ranks this process has started."""
    return sum(world > 1 for world in _started_worlds)


def run(world: int, fn: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT) -> list[Any]:
    """Call ``fn(*args)`` on ``world`` ranks of a fresh Gloo group and return their results in the order of ranks.

    Raises :class:`WorldError` when a rank raises, dies, or has not returned after ``timeout`` seconds.
    """
    __tracebackhide__ = True
    start_server()
    folder = tempfile.mkdtemp(prefix="world-")
    job = _Job(folder, world, pickle.dumps((fn, args)), dict(os.environ), timeout)
    ranks = [_start_rank(job, number) for number in range(world)]
    _started_worlds.append(world)
    try:
        results, failures = _collect(ranks, job)
        if not failures:
            failures = _release(ranks)
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()
            rank.pipe.close()
        _replay_output(job)
        shutil.rmtree(folder, ignore_errors=True)
    if failures:
        raise WorldError(_report(failures, world))
    return [results[number] for number in range(world)]


def make_trainer(root: str | Path, **kwargs: Any) -> Trainer:
    """Build a quiet Trainer for use inside a rank: it joins the group of the harness and launches nothing."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        # One rank takes samples in the order they have, unless it stands for several.
        "use_distributed_sampler": dist.get_world_size() > 1,
    }
    plugins = list(kwargs.pop("plugins", []))
    if kwargs.get("precision") == "16-mixed":
        # On a CPU Lightning takes the flag for bf16-mixed; given itself, the plugin is left alone.
        del kwargs["precision"]
        plugins.append(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")))
    return Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        default_root_dir=root,
        # Named, because a machine's own scheduler variables would otherwise choose another one.
        plugins=[LightningEnvironment(), *plugins],
        **(quiet | kwargs),
    )


@contextlib.contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """Be one rank of a world of any size in this process: collectives return at once and leave data as it is."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _start_rank(job: _Job, number: int) -> _Rank:
    ours, theirs = _FORKSERVER.Pipe()
    process = _FORKSERVER.Process(target=_rank_main, args=(job, number, theirs), name=f"rank-{number}", daemon=True)
    process.start()
    # The child holds the only other end from here on, so its death reads as end of file.
    theirs.close()
    return _Rank(number, process, ours)


def _rank_main(job: _Job, number: int, pipe: connection.Connection) -> None:
    output = os.open(_output_file(job, number), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(file=2)
    os.environ.clear()
    os.environ.update(job.environ)
    # With LOCAL_RANK set Lightning takes the processes as given; it finds the group initialised and keeps it.
    os.environ.update(
        LOCAL_RANK=str(number), NODE_RANK="0", WORLD_SIZE=str(job.world), MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    # Files a test leaves behind go away with the world.
    os.chdir(job.folder)
    with open(_stack_file(job, number), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        try:
            message = pickle.dumps((time.time(), None, _call(job, number)))
        except BaseException:
            message = pickle.dumps((time.time(), traceback.format_exc(), None))
        pipe.send_bytes(message)
        # Nobody leaves while another rank may still be talking to it.
        pipe.recv_bytes()
    if dist.is_initialized():
        dist.destroy_process_group()


def _call(job: _Job, number: int) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    store = dist.FileStore(os.path.join(job.folder, "store"), job.world)
    # Later than the deadline of the parent, which can name the ranks that hang; Gloo cannot.
    limit = timedelta(seconds=10 * job.timeout)
    dist.init_process_group("gloo", store=store, rank=number, world_size=job.world, timeout=limit)
    fn, args = pickle.loads(job.call)
    return fn(*args)


def _collect(ranks: list[_Rank], job: _Job) -> tuple[dict[int, Any], list[_Failure]]:
    """Wait for all ranks; after the first failure the others have one second more."""
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    waiting = {rank.pipe: rank for rank in ranks}
    deadline = time.monotonic() + job.timeout
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            verb = "still running, stopped" if failures else f"hung: no result after {job.timeout:g} s"
            failures.extend(_stop_hanging(list(waiting.values()), job, verb))
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                when, error, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                failures.append(_death(rank))
            else:
                results[rank.number] = value
                if error is not None:
                    failures.append(_Failure((1, when), rank.number, "raised " + _last_line(error), error))
        if failures:
            deadline = min(deadline, time.monotonic() + _GRACE)
    return results, failures


def _release(ranks: list[_Rank]) -> list[_Failure]:
    """Let all ranks go, now that each has returned, and see that they do."""
    for rank in ranks:
        with contextlib.suppress(BrokenPipeError):
            rank.pipe.send_bytes(b"")
    deadline = time.monotonic() + _EXIT_TIMEOUT
    failures = []
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        if rank.process.exitcode is None:
            failures.append(_Failure((2, rank.number), rank.number, "returned but did not end: a thread was left"))
        elif rank.process.exitcode != 0:
            failures.append(_death(rank))
    return failures


def _death(rank: _Rank) -> _Failure:
    rank.process.join(_GRACE)
    return _Failure((0, time.time()), rank.number, f"died with exit code {rank.process.exitcode}")


def _stop_hanging(ranks: list[_Rank], job: _Job, verb: str) -> list[_Failure]:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
    # The handler writes from C, also while the rank is blocked in a collective.
    time.sleep(0.2)
    failures = []
    for rank in ranks:
        stack = Path(_stack_file(job, rank.number)).read_text()
        failures.append(_Failure((2, rank.number), rank.number, verb, stack))
    return failures


def _stack_file(job: _Job, number: int) -> str:
    return os.path.join(job.folder, f"stack-{number}")


def _output_file(job: _Job, number: int) -> str:
    return os.path.join(job.folder, f"output-{number}")


def _replay_output(job: _Job) -> None:
    for number in range(job.world):
        path = Path(_output_file(job, number))
        text = path.read_text(errors="replace") if path.exists() else ""
        if text:
            print(f"--- output of rank {number} of {job.world} ---\n{text}", end="")


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def _report(failures: list[_Failure], world: int) -> str:
    failures = sorted(failures, key=lambda failure: failure.order)
    lines = [f"rank {failure.rank} of {world} {failure.headline}" for failure in failures]
    first = failures[0]
    if first.detail:
        lines += ["", f"rank {first.rank}:", first.detail.rstrip()]
    return "\n".join(lines)
