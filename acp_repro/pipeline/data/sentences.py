"""Sentences of the standard library's documentation, with what they document, and of a novel; each once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from acp_repro.pipeline.data.sources import StdlibSource, sample_text

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_CLAUSE_END = re.compile(r"(?<=[,;:])\s+")
_PROSE = re.compile(r"[A-Za-z][\w'\-]*")


def sentences(shortest: int, longest: int) -> dict[str, bool]:
    """Sentences of docstrings, in the order of the files and of each file.

    The value says whether the sentence documents a function or method; otherwise a class or module. For a
    sentence that stands in both, the first one counts.

    Args:
        shortest, longest: the length of a sentence, in characters.
    """
    found: dict[str, bool] = {}
    for document in StdlibSource().documents():
        if not document.name.endswith(".py"):
            continue
        for text, of_function in _docstrings(document.data.decode()):
            for sentence in _sentences(text):
                if shortest <= len(sentence) <= longest:
                    found.setdefault(sentence, of_function)
    return found


def clauses(shortest: int, longest: int) -> dict[str, None]:
    """Sentences of the sample novel, in its order. A sentence that is too long is cut into its clauses.

    Args:
        shortest, longest: the length of a piece, in characters.
    """
    found: dict[str, None] = {}
    for sentence in _sentences(sample_text()):
        pieces = [sentence] if len(sentence) <= longest else _CLAUSE_END.split(sentence)
        found |= dict.fromkeys(piece for piece in pieces if shortest <= len(piece) <= longest)
    return found


def _docstrings(source: str) -> Iterator[tuple[str, bool]]:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a template, such as those of lib2to3
        return
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *functions)) and (text := ast.get_docstring(node)):
            yield text, isinstance(node, functions)


def _sentences(docstring: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", docstring):
        lines = paragraph.splitlines()
        # Indented lines and prompts are examples, not prose.
        if any(line.startswith((" ", ">>>", "-", "*", "+", ".")) for line in lines):
            continue
        for sentence in _SENTENCE_END.split(" ".join(" ".join(lines).split())):
            if len(_PROSE.findall(sentence)) >= 3:
                yield sentence
