"""A stop signal (SIGTERM, as schedulers send it before they take a machine away) ends training on all ranks together."""

import signal
from types import FrameType

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.trainer.states import TrainerFn

from lightning_zero.partition.engine import ZeroEngine


def stop_together(trainer: "pl.Trainer", engine: ZeroEngine) -> None:
    """Let the Trainer's handler of SIGTERM only note the signal: the ranks then stop training after the same batch, and
    evaluation, where nothing is lost, each with its own.

    Lightning's own starts a broadcast from inside the handler. A rank whose partner is in a gather at that moment would
    wait for it, and the partner for the rank, until the process group's time limit.
    """
    connector = trainer._signal_connector
    trains = trainer.state.fn == TrainerFn.FITTING

    def note(signum: int, frame: FrameType | None) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None and not engine.stop_wanted:
            launcher.kill(signum)
        engine.stop_wanted = True
        if not trains:
            stop()

    def stop() -> None:
        connector.received_sigterm = True  # the loop ends with the batch

    engine.on_stop = stop
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, _HandlersCompose):
        own = connector._sigterm_notifier_fn
        handler.signal_handlers = [note if one == own else one for one in handler.signal_handlers]
