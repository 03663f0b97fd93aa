"""The one base class of errors that end a command in one line."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class UserError(Exception):
    """An error that the user can mend; the message is one line that says how.

    A command prints it as ``error: ...`` and ends with ``exit_code``. In Python it is an ordinary exception.
    """

    exit_code = 1


class UsageError(UserError, ValueError):
    """An option or a value that is not allowed; the command ends with exit code 2, as with argparse."""

    exit_code = 2


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns a library's error about a file or value that the user named into a :class:`UsageError`."""
    try:
        yield
    except UsageError:
        raise
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch has more than one class of error for that."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and ("allocate memory" in words or "out of memory" in words)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``; did you mean X?`` if a known name is like ``name``, else nothing; for the end of an error."""
    text, known = str(name).lower(), list(known)
    near = (
        [one for one in known if one.lower() == text]
        or ([one for one in known if one.lower().startswith(text)][:5] if text else [])
        or [one for one in known if sorted(one.lower()) == sorted(text)][:1]
        or difflib.get_close_matches(str(name), known, 1)
    )
    return f"; did you mean {', '.join(near)}?" if near else ""
