"""The optimizer step on the host: the kernel for Adam, the user's own optimizer for others, at once or one step late.

[Note: delayed parameter update]
ZeRO-Offload (ATC 21), section 5.2. From some step on the update for step t's gradients runs on a thread of its own during
step t + 1's forward and backward, and its result is published at the end of that step::

    theta[t + 1] = theta[t] - Adam(g(theta[t - 1]))

The hyper-parameters are those of the step the gradients belong to. The update works on master weights of its own, so
forward and backward never see half of it.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from lightning_zero.offload.cpu_adam import CPUAdam, options_of
from lightning_zero.ops import AdamOptions, adam_step_
from lightning_zero.partition.optimizer import UpdateGroup, UpdateItem, stand_in
from lightning_zero.worker import Worker

_STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class HostUpdate:
    """Carries out the updates of the optimizers it is bound to (the engine's ``Updater``).

    ``delays()`` tells whether the update that comes now is to run one step late.
    """

    def __init__(self, delays: Callable[[], bool], num_threads: int | None = None) -> None:
        self._delays = delays
        self._num_threads = num_threads
        self._worker = Worker("lightning_zero-update")

    def run(self, optimizer: Optimizer, groups: list[UpdateGroup]) -> Future | None:
        """Update the shards in ``groups``; a future where the update goes on in the background."""
        delayed = self._delays()
        if delayed:
            for group in groups:
                for item in group.items:
                    # The next backward may write where this gradient stands.
                    item.grad = item.grad.clone()
                    item.copy = None
        if _has_kernel(optimizer, groups):
            task = lambda: self._adam(groups)  # noqa: E731
        else:
            task = stand_in(optimizer, groups).step
        if delayed:
            return self._worker.submit(task)
        with torch.no_grad():
            task()
        return None

    def close(self) -> None:
        self._worker.close()

    def _adam(self, groups: list[UpdateGroup]) -> None:
        for group in groups:
            options, amsgrad = options_of(group.settings), group.settings.get("amsgrad", False)
            for run in _runs(group.items):
                self._adam_on(run, options, amsgrad)
            for item in group.items:
                item.unit.published = item.copy is not None

    def _adam_on(self, run: list[UpdateItem], options: AdamOptions, amsgrad: bool) -> None:
        """One kernel call for shards that lie side by side."""
        first, last = run[0], run[-1]
        names = _STATES[: 3 if amsgrad else 2]
        for item in run:
            if not item.state:
                item.state["step"] = torch.zeros((), dtype=torch.float32)
        step = int(first.state["step"]) + 1
        states = [_state_range(run, name) for name in names]
        start, stop = first.start, last.start + last.shard.numel()
        unit = first.unit
        adam_step_(
            unit.main.detach()[start:stop],
            first.grad if len(run) == 1 else _range(first.grad, stop - start),
            states[0],
            states[1],
            options,
            step=step,
            max_exp_avg_sq=states[2] if amsgrad else None,
            param_copy=None if first.copy is None else _range(first.copy, stop - start),
            num_threads=self._num_threads,
        )
        for item in run:
            item.state["step"] += 1


def _has_kernel(optimizer: Optimizer, groups: list[UpdateGroup]) -> bool:
    if type(optimizer) not in (Adam, AdamW, CPUAdam):
        return False
    return not any(
        group.settings.get("capturable") or group.settings.get("differentiable") for group in groups
    ) and all(item.shard.dtype == torch.float32 and item.shard.device.type == "cpu" for g in groups for item in g.items)


def _runs(items: list[UpdateItem]) -> Iterator[list[UpdateItem]]:
    """Neighbours in one unit that are at the same step, as far as their memory goes on in the same way."""
    run: list[UpdateItem] = []
    for item in items:
        if run and not _follows(run[-1], item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _follows(before: UpdateItem, item: UpdateItem) -> bool:
    gap = item.start - before.start
    return (
        item.unit is before.unit
        and gap > 0
        and item.index == before.index + 1
        and item.state.get("step", 0) == before.state.get("step", 0)
        and bool(item.state) == bool(before.state)
        and _distance(before.grad, item.grad) == gap
    )


def _distance(a: Tensor, b: Tensor) -> int | None:
    """Elements between the starts of two 1-D views of one storage."""
    if a.dtype != b.dtype or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return None
    return int(b.storage_offset()) - int(a.storage_offset())


def _range(first: Tensor, numel: int) -> Tensor:
    return first.as_strided((numel,), (1,))


def _state_range(run: list[UpdateItem], name: str) -> Tensor:
    """One tensor under the named state of all shards of a run; makes it, or brings loaded state together."""
    first, last = run[0], run[-1]
    numel = last.start + last.shard.numel() - first.start
    present = [item.state[name] for item in run if name in item.state]
    together = len(present) == len(run) and all(
        _distance(present[0], state) == item.start - first.start for state, item in zip(present, run, strict=True)
    )
    if together:
        return _range(present[0], numel)
    flat = torch.zeros(numel, dtype=torch.float32)
    for item in run:
        view = flat[item.start - first.start :][: item.shard.numel()]
        if name in item.state:
            view.copy_(item.state[name])
        item.state[name] = view
    return flat


def default_threads(ranks_on_host: int, cores: int) -> int:
    """Threads for each rank's updates: ranks share the host's cores and never use more."""
    return max(1, min(torch.get_num_threads(), cores // max(1, ranks_on_host)))

