"""How every command ends: with its code, with one line, never with a traceback for what a user did."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable

from ..common.errors import UsageError, UserError

# Threads that wait by spinning make small operators many times slower on a machine that is shared.
_PASSIVE = {"OMP_WAIT_POLICY": "passive"}


def run_command(main: Callable[[], int | None], resume: str = "") -> None:
    """Runs ``main`` and leaves the process.

    :class:`UserError` becomes ``error: ...``; so do a full disk and memory that is used up. Ctrl-C says
    ``stopped`` and leaves with 130. A pipe that closes early (``| head``) ends it without a word.

    Args:
        resume: what the same command does next time, said after Ctrl-C.
    """
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for name, value in _PASSIVE.items():  # read when torch is imported, which commands do later
        os.environ.setdefault(name, value)
    try:
        code = main()
    except UserError as error:
        code = fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        print(f"\nstopped{'; ' + resume if resume else ''}", file=sys.stderr)
        code = 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        code = fail(f"{error.filename or 'a file'}: {error.strerror}; nothing was left half written", 1)
    sys.stdout.flush()
    sys.exit(code or 0)


def fail(message: str, code: int = 1) -> int:
    """Prints ``error: message`` and returns ``code``."""
    print(f"error: {message}", file=sys.stderr)
    return code


def positive(text: str) -> int:
    """The type of an option that counts something.

    Raises:
        argparse.ArgumentTypeError: not a whole number of at least 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def choose_device(name: str | None):
    """The ``torch.device`` of an option ``--device``; None is a GPU if there is one.

    Raises:
        UsageError: no such device here.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name}: no such device; say cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: only cpu and cuda are supported")
    if device.type == "cuda":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not gpus:
            raise UsageError(f"--device {name}: PyTorch sees no GPU here; leave --device out, or say cpu")
        if device.index is not None and device.index >= gpus:
            raise UsageError(f"--device {name}: there are {gpus} GPUs, cuda:0 to cuda:{gpus - 1}")
    return device
