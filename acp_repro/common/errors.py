"""The one base class of errors that end a command in one line."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class UserError(Exception):
    """Something that the person at the terminal can mend; the message is one line that says how.

    A command prints it as ``error: ...`` and leaves with ``exit_code``; in Python it is an ordinary
    exception. Subclasses also derive from ValueError or RuntimeError, so that code which knows only
    those catches them.
    """

    exit_code = 1


class UsageError(UserError, ValueError):
    """An option or a value that cannot be; leaves with 2, as argparse does."""

    exit_code = 2


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Makes what a library says of a file or value that the user named a :class:`UsageError`.

    Also a decorator.
    """
    try:
        yield
    except UsageError:
        raise
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``; did you mean X?`` where a known name is like ``name``, else nothing; for the end of an error."""
    near = difflib.get_close_matches(str(name), list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""
