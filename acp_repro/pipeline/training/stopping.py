"""Ctrl-C and SIGTERM: a run in training ends after its step, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading

GOES_ON = "the same command continues from there"


class Stopped(KeyboardInterrupt):
    """A signal stopped the run, and a checkpoint to continue from is saved; the message says which."""


class StopSignals:
    """A context in which a signal to stop is noted. The training loop reads ``asked`` after each step.

    A second Ctrl-C, or any signal after a first Ctrl-C, stops at once. SIGTERM may arrive twice, because
    launchers send it too. Signals that the process ignores stay ignored, such as Ctrl-C in a shell's
    background jobs. Only the main thread gets signals; in other threads nothing is noted.

    Args:
        speak: after a Ctrl-C, print what happens now.
    """

    def __init__(self, speak: bool):
        self.asked: signal.Signals | None = None
        self._speak, self._before = speak, {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _) -> None:
        if self.asked is not None and signal.SIGINT in (number, self.asked):
            raise KeyboardInterrupt
        if self._speak and number == signal.SIGINT and self.asked is None:
            say_that_it_stops()
        self.asked = signal.Signals(number)


def say_that_it_stops() -> None:
    # Not print: a signal may arrive while the same stream is being written to.
    os.write(2, b"\nstopping: a checkpoint is saved after this step; Ctrl-C again stops at once\n")
