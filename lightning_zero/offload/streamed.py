"""The optimizer step straight from files: chunks of master and state are read ahead, updated and written behind.

[Note: streaming a step]
The masters, each kind of Adam's state and, where they rest there, the gradients of a unit are ranges of files, cut at the
same elements into chunks. While the kernel updates one chunk in memory, the next ones are being read and the last ones
written, each byte once in either direction (gradients are only read). The buffers are ``CHUNKS_AT_ONCE`` sets of one chunk of each
kind: with Adam 48 MiB, 64 MiB with gradients, whatever the size of the model. State that no update has made yet is what a new file reads as, zeros.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.offload.runs import STATES, AdamRun, Part, by_unit, has_kernel, is_adam, runs_of, states_of
from lightning_zero.offload.store import Store, aligned
from lightning_zero.offload.threads import Threads
from lightning_zero.partition.elementwise import is_moment
from lightning_zero.partition.rest import Place, Rested, resting
from lightning_zero.partition.unit import Unit
from lightning_zero.partition.updater import UpdateGroup, stand_in
from lightning_zero.settings import CHUNK_BYTES, CHUNKS_AHEAD, CHUNKS_AT_ONCE
from lightning_zero.transfer import Link, Transfer


class StreamedUpdate:
    """Carries out updates of master weights and state that rest in ``store`` (the engine's ``Updater``)."""

    is_early = False

    def __init__(self, store: Store, threads: Threads, link: Link | None = None) -> None:
        self.link = link
        self.has_changed = False
        self._store = store
        self._threads = threads
        self._numbers: dict[int, int] = {}
        self._places: dict[tuple[int, int, str], Place] = {}
        """By optimizer, unit and name: the state of all parameters of the unit."""
        self._kept: dict[tuple[int, int, str, int], Rested] = {}
        """The parts that belong to one parameter: what users find in the optimizer's ``state``."""
        self._buffers: dict[int, list[Tensor]] = defaultdict(list)

    # -- where state rests -------------------------------------------------------------------------------------------

    def prepare(self, optimizers: Iterable[Optimizer], locate: Callable[[Any], Any]) -> None:
        """Take the room for what Adam will keep; ``locate`` is the engine's. Raises OSError if there is not enough."""
        for optimizer in optimizers:
            for group in optimizer.param_groups if is_adam(optimizer) else ():
                for located in (locate(parameter) for parameter in group["params"] if parameter.requires_grad):
                    for name in states_of(group) if located is not None else ():
                        self._place(optimizer, located[0], name, located[0].main.dtype)

    def room(self, optimizer: Optimizer, unit: Unit, index: int, name: str, dtype: torch.dtype) -> Rested:
        key = (self._number(optimizer), unit.index, name, index)
        if key not in self._kept or self._kept[key].dtype != dtype:
            local = unit.in_shard(index)
            part = self._place(optimizer, unit, name, dtype).part(local.start, local.stop)
            self._kept[key] = Rested(part, torch.device("cpu"), compares=True)
        return self._kept[key]

    def keep(self, optimizer: Optimizer, unit: Unit, index: int, state: dict[str, Any]) -> dict[str, Any]:
        shape = unit.shards[index].shape  # type: ignore[union-attr]
        for name, value in state.items():
            if is_moment(value, shape) and resting(value) is None:
                rest = self.room(optimizer, unit, index, name, value.dtype)
                if value is not rest.tensor:
                    rest.replace(value.detach()).synchronize()
                    state[name] = rest.tensor
        return state

    def put_away(self) -> None:
        for rest in self._kept.values():
            rest.put_away()

    def _number(self, optimizer: Optimizer) -> int:
        return self._numbers.setdefault(id(optimizer), len(self._numbers))

    def _place(self, optimizer: Optimizer, unit: Unit, name: str, dtype: torch.dtype) -> Place:
        key = (self._number(optimizer), unit.index, name)
        if key not in self._places or self._places[key].dtype != dtype:
            self._places[key] = self._store.place(f"{key[0]}.{name}", unit.layout.shard_numel, dtype)
        return self._places[key]

    # -- updates -----------------------------------------------------------------------------------------------------

    def run(self, optimizer: Optimizer, groups: list[UpdateGroup]) -> None:
        """Update the shards in ``groups``. Raises OSError if a file cannot be read or written: unless ``has_changed``,
        all is then as it was."""
        self.has_changed = False
        self.put_away()
        with torch.no_grad():
            if has_kernel(optimizer, groups):
                jobs = [_Job(self, optimizer, unit, parts) for unit, parts in by_unit(groups)]
                self._stream(jobs)
            else:
                for unit, parts in by_unit(groups):
                    self._step_as_itself(optimizer, unit, parts)
        return None

    def _step_as_itself(self, optimizer: Optimizer, unit: Unit, parts: list[Part]) -> None:
        """Another optimizer's own step, for one unit that is brought to memory as a whole."""
        items = [item for _, some in parts for item in some]
        unit.hold_main()
        for rest in (resting(value) for item in items for value in item.state.values()):
            if rest is not None:
                rest.bring()
        self.has_changed = True
        stand_in(optimizer, [UpdateGroup(settings, some) for settings, some in parts]).step()
        for item in items:
            item.shard.grad = None
            self.keep(optimizer, unit, item.index, item.state)
        self.put_away()
        unit.publish()

    def _stream(self, jobs: "list[_Job]") -> None:
        chunks = [chunk for job in jobs for chunk in job.chunks()]
        reads: dict[int, list[Transfer]] = {}
        writes: dict[int, list[Transfer]] = defaultdict(list)  # by set of buffers
        try:
            for position, chunk in enumerate(chunks):
                for ahead in range(position, min(position + CHUNKS_AHEAD + 1, len(chunks))):
                    if ahead not in reads:
                        _wait(writes.pop(ahead % CHUNKS_AT_ONCE, []))  # its buffers are free again
                        reads[ahead] = chunks[ahead].read(self._buffers_of(ahead % CHUNKS_AT_ONCE, chunks[ahead]))
                _wait(reads[position])
                self.has_changed = True
                chunk.update(self._threads)
                writes[position % CHUNKS_AT_ONCE] = chunk.write()
                if chunk.is_last:
                    chunk.job.finish()
            _wait([transfer for some in writes.values() for transfer in some])
        except BaseException:
            # Threads may still be at work on the buffers; what has failed first is what is raised.
            with suppress(OSError):
                _wait([transfer for some in (*reads.values(), *writes.values()) for transfer in some])
            raise

    def _buffers_of(self, number: int, chunk: "_Chunk") -> list[Tensor]:
        buffers = self._buffers[number]
        while len(buffers) < chunk.count:
            buffers.append(aligned(CHUNK_BYTES, self._store.account).view(torch.float32))
        return buffers

    def run_early(self, optimizer: Optimizer, groups: list[UpdateGroup]) -> None:
        """Not offered: undoing an update would take the memory that files are to save."""

    def revoke(self) -> None:
        """There are no early updates."""

    def close(self) -> None:
        self._buffers.clear()


class _Job:
    """The update of one unit."""

    def __init__(self, update: StreamedUpdate, optimizer: Optimizer, unit: Unit, parts: list[Part]) -> None:
        self.unit = unit
        self.runs = [AdamRun(items, settings) for settings, part in parts for items in runs_of(part)]
        self.names = STATES[: max(len(run.names) for run in self.runs)]
        self.states = [update._place(optimizer, unit, name, torch.float32) for name in self.names]
        for run in self.runs:
            for item in run.items:
                update.keep(optimizer, unit, item.index, item.state)  # what users have put there
                for name in run.names:
                    if name not in item.state:
                        item.state[name] = update.room(optimizer, unit, item.index, name, torch.float32).tensor
        unit.put_away()
        self.rest = unit.main_rest
        self.gradients = unit.gradient_place if any(run.grad_rests for run in self.runs) else None

    def chunks(self) -> "Iterator[_Chunk]":
        numel, size = self.unit.layout.shard_numel, CHUNK_BYTES // 4
        wanted = []
        for start in range(0, numel, size):
            chunk = _Chunk(self, start, min(start + size, numel))
            # What a device gets is staged as a whole.
            if chunk.runs or self.unit.copies_all:
                wanted.append(chunk)
        wanted[-1].is_last = True
        yield from wanted

    def finish(self) -> None:
        for run in self.runs:
            run.count()
        self.unit.published = self.unit.master is not None
        self.unit.publish()


class _Chunk:
    """The elements ``[start, stop)`` of a unit's shard."""

    def __init__(self, job: _Job, start: int, stop: int) -> None:
        self.job = job
        self.is_last = False
        self.runs = [run for run in job.runs if run.start < stop and start < run.stop]
        self._start, self._stop = start, stop
        written = [*([] if job.rest is None else [job.rest.place]), *job.states]
        places = [*written, *([] if job.gradients is None else [job.gradients])]
        self._places = [place.part(start, stop) for place in places]
        self._written = len(written)
        self._buffers: list[Tensor] = []

    @property
    def count(self) -> int:
        """Buffers that it needs."""
        return len(self._places)

    def read(self, buffers: list[Tensor]) -> list[Transfer]:
        numel = self._stop - self._start
        self._buffers = [b.view(place.dtype)[:numel] for b, place in zip(buffers, self._places)]
        return [place.read(buffer) for place, buffer in zip(self._places, self._buffers, strict=True)]

    def update(self, threads: Threads) -> None:
        unit, (states, fetched) = self.job.unit, (self._buffers[: self._written], self._buffers[self._written :])
        if self.job.rest is None:
            main = unit.main.detach()[self._start : self._stop]
        else:
            main, *states = states
        for run in self.runs:
            start, stop = max(run.start, self._start), min(run.stop, self._stop)
            part = slice(start - self._start, stop - self._start)
            grad = fetched[0][part] if run.grad_rests else None
            run.step(start, stop, main[part], [state[part] for state in states[: len(run.names)]], None, threads, grad)
        if unit.master is not None:
            unit.weights_target()[self._start : self._stop].copy_(main)

    def write(self) -> list[Transfer]:
        if not self.runs:
            return []
        written = zip(self._places[: self._written], self._buffers)
        return [place.write(buffer) for place, buffer in written]


def _wait(transfers: list[Transfer]) -> None:
    """For all of them, also where one fails."""
    failed: OSError | None = None
    for transfer in transfers:
        try:
            transfer.synchronize()
        except OSError as error:
            failed = failed or error
    if failed is not None:
        raise failed
