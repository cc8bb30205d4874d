"""Progress bars for work that may take long."""

import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


class LateBar:
    """A bar on stderr that comes up when the work has taken ``after`` seconds and is not over.

    Called with the bytes done and those to do; the next call, or leaving the context, ends it.
    """

    def __init__(self, text: str, enabled: bool = True, after: float = 3.0) -> None:
        self._enabled = enabled
        self._shows_from = time.monotonic() + after
        columns = (TextColumn(text), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("")

    def __enter__(self) -> "LateBar":
        return self

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)
        if self._enabled and done < total and time.monotonic() >= self._shows_from:
            self._bar.start()

    def __exit__(self, *error: object) -> None:
        if self._bar.live.is_started:  # or it would print an empty line
            self._bar.stop()
