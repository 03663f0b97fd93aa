"""Sentences of the standard library's documentation, each once, with what they document."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from acp_repro.data.sources import StdlibSource

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_PROSE = re.compile(r"[A-Za-z][\w'\-]*")


class Labelled(NamedTuple):
    """A text, and its side of a question with two answers."""

    text: str
    label: int


def stdlib_sentences(shortest: int, longest: int) -> list[Labelled]:
    """Sentences of docstrings, in the order of the files and of each file.

    A sentence is labelled 1 where it documents a function or method, 0 where a class or a module; one that
    stands in both keeps the first.

    Args:
        shortest, longest: characters of a sentence.
    """
    found: dict[str, int] = {}
    for document in StdlibSource().documents():
        if not document.name.endswith(".py"):
            continue
        for text, label in _docstrings(document.data.decode()):
            for sentence in _sentences(text):
                if shortest <= len(sentence) <= longest:
                    found.setdefault(sentence, label)
    return [Labelled(text, label) for text, label in found.items()]


def _docstrings(source: str) -> Iterator[tuple[str, int]]:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a template, such as those of lib2to3
        return
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *functions)) and (text := ast.get_docstring(node)):
            yield text, int(isinstance(node, functions))


def _sentences(docstring: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", docstring):
        lines = paragraph.splitlines()
        # What is indented or a prompt is an example, not prose.
        if any(line.startswith((" ", ">>>", "-", "*", "+", ".")) for line in lines):
            continue
        for sentence in _SENTENCE_END.split(" ".join(" ".join(lines).split())):
            if len(_PROSE.findall(sentence)) >= 3:
                yield sentence
