"""The shell of all commands: options, signals and exit codes. A user's mistake ends in one line."""

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
DEFAULT_CONTEXT_LENGTH = 4096  # the paper's shortest context length, used in its Figures 4 to 6
CHECKPOINT = "a checkpoint folder, or a run folder"
RENAMED = {  # former names of options
    "--again": "--force",
    "--checkpoint": "MODEL",
    "--length": "--context-length",
    "--lengths": "--context-lengths",
    "--official": "--with-official",
    "--rivals": "--baselines",
}
# Import names of the libraries of each extra in pyproject.toml; "" lists those of the package itself.
_PIPELINE = ("safetensors", "pandas", "pydantic", "scipy", "yaml", "tqdm", "fsspec")
_EXTRAS = {
    "": ("torch", "numpy"),
    "checkpoints": ("safetensors",),
    "bpe": ("tokenizers",),
    "pipeline": _PIPELINE,
    "figures": (*_PIPELINE, "matplotlib", "seaborn", "PIL"),
    "inspect": (*_PIPELINE, "tokenizers"),
    "transformers": ("safetensors", "tokenizers", "transformers"),
    "eval": ("safetensors", "tokenizers", "transformers", "lm_eval"),
}
# Errors of an output path; the second line is for a file in the place of a folder, or the reverse.
_NOT_WRITABLE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENAMETOOLONG),
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
)


def command(
    resume: str = "", *, extra: str = "", smaller: str = "reduce the requested sizes"
) -> Callable[[Main], Main]:
    """A decorator for ``main`` functions: they return an exit code and report a user's mistake in one line.

    :class:`UserError`, a missing library, a full disk, an output path that is not writable, and exhausted
    memory become ``error: ...``. Ctrl-C prints ``stopped`` and returns 130.

    Args:
        resume: what the same command will do next time, printed after Ctrl-C. The message of the interrupt
            replaces it, if there is one.
        extra: the extra with all libraries of the command; the error about a missing library names it.
        smaller: what to do if memory runs out.
    """

    def decorate(main: Main) -> Main:
        @functools.wraps(main)
        def one_line(arguments: list[str] | None = None) -> int:
            try:
                return main(arguments) or 0
            except UserError as error:
                return fail(str(error), error.exit_code)
            except ImportError as error:
                return fail(_explain_missing(error, extra), 2)
            except KeyboardInterrupt as interrupt:
                print("; ".join(filter(None, ["\nstopped", str(interrupt) or resume])), file=sys.stderr)
                return 130
            except BrokenPipeError:  # the reader has ended, as in `| head`
                return _close_pipe()
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = next(iter(str(error).splitlines()), "")
                return fail(f"there is not enough memory; {smaller} ({reason})")
            except OSError as error:
                if error.errno not in _NOT_WRITABLE:
                    raise
                return fail(f"{error.filename or 'writing'}: {error.strerror}; no partial file remains")

        return one_line

    return decorate


@contextlib.contextmanager
def imports_of(extra: str) -> Iterator[None]:
    """A context for imports at the top of a command's module: if a library is missing, the process ends with
    one line that names ``extra``."""
    try:
        yield
    except ImportError as error:
        sys.exit(fail(_explain_missing(error, extra), 2))


def _explain_missing(error: ImportError, extra: str) -> str:
    """One line about a missing library of an extra. Re-raises any other ImportError, which is a bug."""
    # A library may wrap the error about a missing library in one of its own.
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

    A pipe that closes early (``| head``) ends the process silently. Characters that the terminal cannot
    encode are written as escape sequences. Under Make the process ends when Make is killed.
    """
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    if "MAKELEVEL" in os.environ:
        threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    # On a shared machine, spinning threads make small operators many times slower. torch reads the variable
    # on import, which happens later.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    code = main()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _close_pipe()
    sys.exit(code)


def end_with_parent(parent: int) -> None:
    """Sends SIGTERM to this process when its parent has ended, or when its parent, Make, received a signal.

    Make does not forward SIGINT and SIGHUP: it resets the signal's handler and waits for the process.
    """
    before = _handled_signals(parent)
    while os.getppid() == parent and not before & ~_handled_signals(parent):
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def _handled_signals(process: int) -> int:
    """The bit mask of signals for which a process has handlers; 0 if the system does not report them."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/status").read_text().partition("SigCgt:")[2].split()[0], 16)
    return 0


STOP_SIGNALS = [one for one in signal.Signals if one.name in ("SIGINT", "SIGTERM", "SIGHUP")]
STOPPED = 130  # the exit code of a command that a signal stopped


@contextlib.contextmanager
def stop_signals(handler: Callable[[int, Any], object]) -> Iterator[None]:
    """A context in which :data:`STOP_SIGNALS` call ``handler``, except signals that the process ignores, such
    as Ctrl-C in a shell's background jobs. Only the main thread receives signals; in other threads the
    context does nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    wanted = [n for n in STOP_SIGNALS if is_main and signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, restored in before.items():
            signal.signal(number, restored)


def run_words(words: str) -> int:
    """Runs a command line in another process and returns its exit code; ``python`` is this interpreter.

    A stop signal is forwarded to the process as SIGTERM, and the code is then 130. A terminal sends Ctrl-C to
    both processes, so SIGTERM is delayed by half a second, in which the process can report what it saved.
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
    return code if code >= 0 else 128 - code  # a shell's exit code after a signal


def _close_pipe() -> int:
    """Redirects stdout to the null device, so that Python ends without an error about the closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def fail(message: str, code: int = 1) -> int:
    """Prints ``error: message`` and returns ``code``."""
    print(f"error: {message}", file=sys.stderr)
    return code


def plain(doc: str) -> str:
    """``doc`` without reStructuredText markup around names: double backticks and roles."""
    return re.sub(r":\w+:`~?\.?([^`]+)`", r"\1", doc).replace("``", "")


class Parser(argparse.ArgumentParser):
    """A parser that suggests a similar option for an unknown one, and the current name of a renamed one."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.search(r"^unrecognized arguments:.*? (--?[^\s=]+)", message):
            message += did_you_mean(
                RENAMED.get(unknown[1], unknown[1]), [*self._option_string_actions, "MODEL"]
            )
        super().error(message)


def described_parser(name: str, doc: str | None, **more: Any) -> Parser:
    """The parser of ``python -m acp_repro.NAME``, described by its module's docstring.

    With an ``epilog``, the line breaks of the docstring are kept. Otherwise the docstring becomes one
    paragraph, without the command in its first line.
    """
    assert doc is not None
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
        "model",
        metavar="MODEL",
        nargs="?",
        default="pretrained/pro-13m-4k-acp",
        help=f"{CHECKPOINT} (default: %(default)s)",
    )
    parser.add_argument("--device", help="cpu, cuda (default: a GPU if there is one)")
    return parser


def add_text_options(parser: argparse._ActionsContainer) -> None:
    """Adds the options for the text that a checkpoint reads and for the context length."""
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
    """Rows of cells as lines of text with aligned columns.

    Args:
        left: indices of the left-aligned columns; the others, of numbers, are right-aligned.
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
    """The type of an option whose value is a number with a bound of :mod:`.bounds`, such as ``Count``."""
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
        raise argparse.ArgumentTypeError(f"{text} is not writable: it is a folder, or in a read-only one")
    return path


def progress_bar(*arguments: Any, **options: Any) -> Any:
    """A tqdm progress bar with tqdm's arguments. Without a terminal it writes plain lines: one after five
    seconds, then one every 30 seconds, and one at the end."""
    from tqdm import tqdm

    if sys.stderr.isatty():
        return tqdm(*arguments, **options)
    options |= {"file": _PlainLines(), "mininterval": 30, "miniters": 1, "position": 0, "delay": 1e-9}
    bar = tqdm(*arguments, **options)
    if not bar.disable:
        bar.last_print_t -= 25
    return bar


class _PlainLines:
    """An output stream for a progress bar: each update becomes a line of stderr without cursor codes."""

    def write(self, text: str) -> None:
        if line := re.sub(r"\x1b\[A|[\r\n]", "", text).rstrip():
            print(line, file=sys.stderr)

    def flush(self) -> None:
        sys.stderr.flush()


def usable_cores() -> int:
    """The number of cores that this process may use; in a container, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_device(name: str | None):
    """The ``torch.device`` for the value of ``--device``; None selects a GPU if there is one."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name or "cuda"):
        raise UsageError(f"--device {name}: no such device; use cpu, cuda or cuda:1")
    if "torch" not in sys.modules and importlib.util.find_spec("torch"):
        print("loading PyTorch", file=sys.stderr)

    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(name or ("cuda" if gpus else "cpu"))
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise UsageError(f"--device {name}: PyTorch finds {gpus} GPUs on this machine; omit --device")
    return device
