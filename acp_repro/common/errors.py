"""The base class of errors that end a command with one line, and helpers for their messages."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class UserError(Exception):
    """An error that the user can fix; the message is one line that says how.

    A command prints the message as ``error: ...`` and ends with ``exit_code``. In Python the error is an
    ordinary exception.
    """

    exit_code = 1


class UsageError(UserError, ValueError):
    """An invalid option or value; the command ends with exit code 2, as with argparse."""

    exit_code = 2


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """A context that converts errors about a file or value of the user into :class:`UsageError`."""
    try:
        yield
    except UsageError:
        raise
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory is exhausted; torch has several error classes for this."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and ("allocate memory" in words or "out of memory" in words)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``; did you mean X?`` if a known name is similar to ``name``, else an empty string, to end an error."""
    text, known = str(name).lower(), list(known)
    near = (
        [one for one in known if one.lower() == text]
        or ([one for one in known if one.lower().startswith(text)][:5] if text else [])
        or [one for one in known if sorted(one.lower()) == sorted(text)][:1]
        or difflib.get_close_matches(str(name), known, 1)
    )
    return f"; did you mean {', '.join(near)}?" if near else ""
