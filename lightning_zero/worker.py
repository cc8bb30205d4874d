"""A thread that runs tasks one after another."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch


class Worker:
    """Runs submitted tasks in order on one daemon thread, which starts with the first task.

    A daemon, because a task may wait for another rank: that must not keep a process from ending.
    """

    def __init__(self, name: str, begin: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._begin = begin
        """Called on the thread before its first task."""
        self._queue: SimpleQueue[tuple[Future, Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: Callable[[], Any]) -> Future:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        future: Future = Future()
        self._queue.put((future, task))
        return future

    def close(self) -> None:
        """End the thread after the tasks submitted so far; waits a second for it."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=1.0)
            self._thread = None

    def _run(self) -> None:
        self._begin()
        while (item := self._queue.get()) is not None:
            future, task = item
            try:
                with torch.no_grad():
                    result = task()
            except BaseException as error:
                future.set_exception(error)
            else:
                # Drop what the task keeps alive before its owner can look whether it is still in use.
                del task, item
                future.set_result(result)
                del result
            del future
