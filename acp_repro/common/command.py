"""How every command ends: with an exit code, and for a user's mistake with one line and no traceback."""

from __future__ import annotations

import argparse
import errno
import functools
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from .docs import plain
from .errors import UsageError, UserError, is_out_of_memory

Main = Callable[..., int | None]
# The libraries of the extras of pyproject.toml, by the name that is imported.
_EXTRAS = {
    **dict.fromkeys(("numpy", "pandas", "pydantic", "scipy", "yaml", "tqdm", "fsspec"), "chain"),
    **dict.fromkeys(("matplotlib", "seaborn", "PIL", "markdown_it"), "figures"),
    "safetensors": "checkpoints",
    "tokenizers": "bpe",
    "rich": "inspect",
    "lm_eval": "eval",
    **dict.fromkeys(("shap", "sacrebleu", "rouge_score", "rapidfuzz", "sklearn"), "lap"),
    "transformers": "transformers",
}
# Threads that wait by spinning make small operators many times slower on a machine that is shared.
_PASSIVE = {"OMP_WAIT_POLICY": "passive"}
# The errors of a wrong output path; the second line is a file where a folder should be.
_NOT_WRITABLE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENAMETOOLONG),
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
)


def command(resume: str = "", *, extra: str = "") -> Callable[[Main], Main]:
    """Makes a ``main`` that returns an exit code and turns a user's mistakes into one line.

    :class:`UserError` becomes ``error: ...``. The same holds for a full disk, for a path that cannot be
    written to, and where memory runs out. Ctrl-C prints ``stopped`` and gives 130.

    Args:
        resume: what the same command does next time, printed after Ctrl-C. An interrupt's own message
            replaces it.
        extra: the extra that installs all that the command needs, named if a library is missing.
    """

    def decorate(main: Main) -> Main:
        @functools.wraps(main)
        def one_line(arguments: list[str] | None = None) -> int:
            try:
                return main(arguments) or 0
            except UserError as error:
                return fail(str(error), error.exit_code)
            except ModuleNotFoundError as error:
                usual = _EXTRAS.get((error.name or "").partition(".")[0])
                if usual is None:
                    raise
                return fail(f"{error}; `pip install 'acp_repro[{extra or usual}]'` brings it", 2)
            except KeyboardInterrupt as interrupt:
                print("; ".join(filter(None, ["\nstopped", str(interrupt) or resume])), file=sys.stderr)
                return 130
            except BrokenPipeError:  # `| head` stops reading
                return _close_pipe()
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                return fail(_about_memory(error))
            except OSError as error:
                if error.errno not in _NOT_WRITABLE:
                    raise
                return fail(f"{error.filename or 'writing'}: {error.strerror}; nothing is left half written")

        return one_line

    return decorate


def _about_memory(error: Exception) -> str:
    """How much was asked for, where torch or NumPy say it as a number and a unit; else the error's words."""
    words = next(iter(str(error).splitlines()), "")
    if found := re.search(r"allocate ([0-9.]+) (\w+)", words):
        number, unit = found.groups()
        size = f"{int(number) / 2**30:,.1f} GiB" if unit == "bytes" else f"{number} {unit}"
        words = f"{size} at once"
    return f"there is not enough memory{words and f': {words}'}; make what was asked for smaller"


def run_command(main: Main) -> None:
    """Runs a ``main`` as the process and exits with its code.

    A pipe that closes early (``| head``) ends it silently. A character that the terminal cannot show is
    written as its escape.
    """
    sys.stdout.reconfigure(errors="backslashreplace")
    for name, value in _PASSIVE.items():  # read when torch is imported, which commands do later
        os.environ.setdefault(name, value)
    code = main()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _close_pipe()
    sys.exit(code)


def run_words(words: str) -> int:
    """Runs a command in another process, ``python`` by this interpreter; returns its exit code.

    It gets a SIGTERM too. A terminal sends it Ctrl-C itself, and it says what it saved, so this one waits.
    """
    first, *rest = shlex.split(words)
    process = subprocess.Popen([sys.executable if first == "python" else first, *rest])
    before = {
        number: signal.signal(number, lambda number, _: number == signal.SIGTERM and process.terminate())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code  # as a shell says which signal ended it


def _close_pipe() -> int:
    """Lets Python end without an error although the pipe is closed: its reader has stopped."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def fail(message: str, code: int = 1) -> int:
    """Prints ``error: message`` and returns ``code``."""
    print(f"error: {message}", file=sys.stderr)
    return code


def described_parser(
    name: str, doc: str, *, as_written: bool = False, **more: Any
) -> argparse.ArgumentParser:
    """The parser of ``python -m acp_repro.NAME``, described by its module's docstring.

    Args:
        as_written: keep the docstring's lines; else join it into one paragraph, without the command in its
            first line.
    """
    if as_written:
        more["formatter_class"] = argparse.RawDescriptionHelpFormatter
    else:
        summary, details = doc.split("\n\n", 1)
        doc = summary.split(":")[0] + ". " + details
    return argparse.ArgumentParser(prog=f"python -m acp_repro.{name}", description=plain(doc), **more)


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Rows of cells as lines, each column of one width.

    Args:
        left: the columns that are aligned left; the others are numbers.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def positive(text: str) -> int:
    """The type of an option that counts something.

    Raises:
        argparse.ArgumentTypeError: it is not a whole number of at least 1, or too large for a machine's word.
    """
    if not text.isdecimal() or not 1 <= int(text) <= sys.maxsize:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1, or is too large")
    return int(text)


def number(least: float, most: float = math.inf) -> Callable[[str], float]:
    """The type of an option that is a finite number from ``least`` to ``most``.

    Raises:
        argparse.ArgumentTypeError: it is not.
    """

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or math.isinf(value):
            wanted = f"from {least} to {most}" if most < math.inf else f"of at least {least}"
            raise argparse.ArgumentTypeError(f"{text} is not a number {wanted}")
        return value

    return parse


def output_file(text: str) -> Path:
    """The type of an option that names a file to write.

    Raises:
        argparse.ArgumentTypeError: it is a folder, lies in what is none, or may not be written to.
    """
    if text == "-":
        raise argparse.ArgumentTypeError("- names no file here; give one, or /dev/stdout")
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; give a file")
    if path.exists() and not path.is_file():  # a device or a pipe
        return path
    above = next(folder for folder in Path(os.path.realpath(path)).parents if folder.exists())
    if not above.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {above} is a file and no folder")
    if not os.access(above, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: nothing may be written in {above}")
    return path


def choose_device(name: str | None):
    """The ``torch.device`` of an option ``--device``; None is a GPU if there is one.

    Raises:
        UsageError: this machine does not have the device.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name}: no such device; use cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: only cpu and cuda are supported; use one of them")
    if device.type == "cuda":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not gpus:
            raise UsageError(f"--device {name}: PyTorch finds no GPU here; leave --device out, or use cpu")
        if device.index is not None and device.index >= gpus:
            raise UsageError(f"--device {name}: there are {gpus} GPUs, cuda:0 to cuda:{gpus - 1}")
    return device
