"""How every command reads its options, and ends: for a user's mistake with one line and no traceback."""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from .bounds import Count
from .errors import UsageError, UserError, did_you_mean, is_out_of_memory

Main = Callable[..., int | None]
DEFAULT_CONTEXT_LENGTH = 4096  # the paper's shortest, and that of its Figures 4 to 6
CHECKPOINT = "a checkpoint folder, or a run folder"
PUBLISHED = "pretrained/pro-13m-4k-acp"  # comes with a clone
RENAMED = {  # former names of options
    "--again": "--force",
    "--checkpoint": "MODEL",
    "--length": "--context-length",
    "--lengths": "--context-lengths",
    "--official": "--with-official",
    "--rivals": "--baselines",
}
# Libraries of the extras of pyproject.toml, by the name that is imported; the package needs the first two.
_PIPELINE = ("safetensors", "pandas", "pydantic", "scipy", "yaml", "tqdm", "fsspec")
_EXTRAS = {
    "": ("torch", "numpy"),
    "checkpoints": ("safetensors",),
    "bpe": ("tokenizers",),
    "pipeline": _PIPELINE,
    "figures": (*_PIPELINE, "matplotlib", "seaborn", "PIL"),
    "inspect": (*_PIPELINE, "tokenizers", "rich"),
    "transformers": ("safetensors", "tokenizers", "transformers"),
    "eval": ("safetensors", "tokenizers", "transformers", "lm_eval"),
}
# The errors of a wrong output path; the second line is a file where a folder should be.
_NOT_WRITABLE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENAMETOOLONG),
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
)


def command(resume: str = "", *, extra: str = "") -> Callable[[Main], Main]:
    """Makes a ``main`` that returns an exit code and turns a user's mistakes into one line.

    :class:`UserError` becomes ``error: ...``. The same holds for a missing library, a full disk, a path that
    cannot be written to, and where memory runs out. Ctrl-C prints ``stopped`` and gives 130.

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
            except ImportError as error:
                return fail(_about_missing(error, extra), 2)
            except KeyboardInterrupt as interrupt:
                print("; ".join(filter(None, ["\nstopped", str(interrupt) or resume])), file=sys.stderr)
                return 130
            except BrokenPipeError:  # `| head` stops reading
                return _close_pipe()
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = next(iter(str(error).splitlines()), "")
                return fail(f"there is not enough memory; make what was asked for smaller ({reason})")
            except OSError as error:
                if error.errno not in _NOT_WRITABLE:
                    raise
                return fail(f"{error.filename or 'writing'}: {error.strerror}; nothing is left half written")

        return one_line

    return decorate


@contextlib.contextmanager
def imports_of(extra: str) -> Iterator[None]:
    """For imports at the top of a command's module: a missing library ends the process with one line that
    names ``extra``."""
    try:
        yield
    except ImportError as error:
        sys.exit(fail(_about_missing(error, extra), 2))


def _about_missing(error: ImportError, extra: str) -> str:
    """One line for a missing library of an extra. Raises any other ImportError, a mistake of the code."""
    # A library may raise an error of its own from that of a missing library.
    name = (error.name or getattr(error.__cause__, "name", None) or "").partition(".")[0]
    having = [one for one, libraries in _EXTRAS.items() if name in libraries]
    if not having:
        raise error
    said = f"{error}, or too old a version" if importlib.util.find_spec(name) else f"not installed: {name}"
    extras = dict.fromkeys(one for one in (*extra.split(","), having[0]) if one)
    what = f"'.[{','.join(extras)}]'" if extras else "."
    return f"{said}; run `make setup` or `pip install {what}` in the clone"


def run_command(main: Main) -> None:
    """Runs a ``main`` as the process and exits with its code.

    A pipe that closes early (``| head``) ends the process silently. A character that the terminal cannot show
    is written as its escape. Under Make the process ends when Make is killed.
    """
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    if "MAKELEVEL" in os.environ:
        threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    # Threads that wait by spinning make small operators many times slower on a machine that is shared. The
    # variable is read when torch is imported, which commands do later.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    code = main()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _close_pipe()
    sys.exit(code)


def end_with_parent(parent: int) -> None:
    """Sends this process a SIGTERM when its parent has ended, or when Make, its parent, was asked to stop.

    Make passes on no SIGINT and no SIGHUP: it resets the signal's handler and waits for the process.
    """
    before = _handled_signals(parent)
    while os.getppid() == parent and not before & ~_handled_signals(parent):
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def _handled_signals(process: int) -> int:
    """The signals for which a process has handlers, as a mask; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/status").read_text().partition("SigCgt:")[2].split()[0], 16)
    return 0


STOP_SIGNALS = [one for one in signal.Signals if one.name in ("SIGINT", "SIGTERM", "SIGHUP")]
STOPPED = 130  # the exit code of a command that a signal stopped


@contextlib.contextmanager
def stop_signals(handler: Callable[[int, Any], object]) -> Iterator[None]:
    """A context in which the signals to stop call ``handler``, except those that the process ignores, such as
    Ctrl-C in a shell's background jobs. Only the main thread gets signals; in others nothing changes."""
    is_main = threading.current_thread() is threading.main_thread()
    wanted = [n for n in STOP_SIGNALS if is_main and signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, restored in before.items():
            signal.signal(number, restored)


def run_words(words: str) -> int:
    """Runs a command in another process, ``python`` by this interpreter; returns its exit code.

    A signal to stop reaches the process as SIGTERM, and the code is then 130. A terminal sends Ctrl-C to both
    processes, so the SIGTERM comes half a second later: the process has said then what it saved.
    """
    first, *rest = shlex.split(words)
    process, asked = subprocess.Popen([sys.executable if first == "python" else first, *rest]), []

    def stop(number: int, _: Any) -> None:
        asked.append(number)
        threading.Timer(0.5 if number == signal.SIGINT else 0, process.terminate).start()

    with stop_signals(stop):
        code = process.wait()
    if asked:
        return STOPPED
    return code if code >= 0 else 128 - code  # as a shell says which signal ended it


def _close_pipe() -> int:
    """Lets Python end without an error although the pipe is closed: its reader has stopped."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def fail(message: str, code: int = 1) -> int:
    """Prints ``error: message`` and returns ``code``."""
    print(f"error: {message}", file=sys.stderr)
    return code


def plain(doc: str) -> str:
    """``doc`` without what reStructuredText puts around names: double backticks and roles."""
    return re.sub(r":\w+:`~?\.?([^`]+)`", r"\1", doc).replace("``", "")


class Parser(argparse.ArgumentParser):
    """A parser that suggests an option for an unknown one, or its present name for a former one."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.search(r"^unrecognized arguments:.*? (--?[^\s=]+)", message):
            message += did_you_mean(
                RENAMED.get(unknown[1], unknown[1]), [*self._option_string_actions, "MODEL"]
            )
        super().error(message)


def described_parser(name: str, doc: str | None, **more: Any) -> Parser:
    """The parser of ``python -m acp_repro.NAME``, described by its module's docstring.

    Lines stay as they are where there is an ``epilog``. Else the docstring becomes one paragraph, without the
    command in its first line.
    """
    doc = doc or ""  # of `python -OO`
    if "epilog" in more:
        more["formatter_class"] = argparse.RawDescriptionHelpFormatter
    else:
        summary, _, details = doc.partition("\n\n")
        doc = f"{summary.partition(':')[0]}. {details}"
    return Parser(prog=f"python -m acp_repro.{name}", description=plain(doc), **more)


def checkpoint_parser(name: str, doc: str) -> argparse.ArgumentParser:
    """The parser of a command that opens one checkpoint, ``options.model``."""
    parser = described_parser(name, doc)
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=PUBLISHED, help=f"{CHECKPOINT} (default: %(default)s)"
    )
    parser.add_argument("--device", help="cpu, cuda (default: a GPU if there is one)")
    return parser


def add_text_options(parser: argparse._ActionsContainer) -> None:
    """Adds the options for the text that a checkpoint reads, and its length."""
    text = parser.add_mutually_exclusive_group()
    text.add_argument(
        "--text",
        metavar="FILE",
        type=existing,
        help="a text file, .jsonl or folder (default: the run's held-out text, else the book that comes with "
        "the project)",
    )
    text.add_argument(
        "--token-ids", metavar="FILE.npy", type=existing, help="a file of token ids, instead of text"
    )
    parser.add_argument(
        "--context-length",
        type=positive,
        metavar="N",
        help=f"tokens per sequence (default: the run's, else {DEFAULT_CONTEXT_LENGTH})",
    )


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


def bounded(hint: Any) -> Callable[[str], Any]:
    """The type of an option that is a number of :mod:`.bounds`, such as ``Count``."""
    kind, must = get_args(hint)

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if not must.holds(value):
            raise argparse.ArgumentTypeError(f"{text} is not {must.words}")
        return value

    return read


positive = bounded(Count)


def existing(text: str) -> str:
    """The type of an option that names a file or folder to read."""
    if not text or not Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text or 'an empty name'} does not exist")
    return text


def output_file(text: str) -> Path:
    """The type of an option that names a file to write."""
    path = Path(text)
    above = next(folder for folder in Path(os.path.realpath(path)).parents if folder.exists())
    if path.is_dir() or not (path.exists() or (above.is_dir() and os.access(above, os.W_OK))):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: a folder, or in none that you may write")
    return path


def progress_bar(*arguments: Any, **options: Any) -> Any:
    """A bar of tqdm, with its arguments. Without a terminal it writes plain lines: one after five seconds,
    then one every half minute, and one at the end."""
    from tqdm import tqdm

    if sys.stderr.isatty():
        return tqdm(*arguments, **options)
    options |= {"file": _PlainLines(), "mininterval": 30, "miniters": 1, "position": 0, "delay": 1e-9}
    bar = tqdm(*arguments, **options)
    if not bar.disable:
        bar.last_print_t -= 25
    return bar


class _PlainLines:
    """A stream for a bar: what the bar shows becomes a line of stderr, without cursor codes."""

    def write(self, text: str) -> None:
        if line := re.sub(r"\x1b\[A|[\r\n]", "", text).rstrip():
            print(line, file=sys.stderr)

    def flush(self) -> None:
        sys.stderr.flush()


def usable_cores() -> int:
    """How many cores this process may use; in a container, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_device(name: str | None):
    """The ``torch.device`` of an option ``--device``; None is a GPU if there is one."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name or "cuda"):
        raise UsageError(f"--device {name}: no such device; use cpu, cuda or cuda:1")
    if "torch" not in sys.modules and importlib.util.find_spec("torch"):
        print("loading PyTorch", file=sys.stderr)

    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(name or ("cuda" if gpus else "cpu"))
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise UsageError(f"--device {name}: PyTorch finds {gpus or 'no'} GPU here; leave --device out")
    return device
