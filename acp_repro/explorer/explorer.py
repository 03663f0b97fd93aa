"""The page: every head of one model, or of two side by side, in one HTML file that needs no other file."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from acp_repro.common import files
from acp_repro.common.characters import whole_characters
from acp_repro.common.errors import UsageError
from acp_repro.model import FoXConfig, FoXForCausalLM

from .looking import ModelHeads, checked_ids, look
from .pack import Listing, pack_model, pack_text
from .page import render


class NotComparable(UsageError):
    """The heads of two models cannot be paired; the message says why in one line."""


class Decodes(Protocol):
    """Any tokenizer that gives the text of a token."""

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass
class Seen:
    """A model's heads, with a name and facts, such as its text, for the top of the page."""

    name: str
    heads: ModelHeads
    facts: Sequence[str] = ()


class Explorer:
    """A page over one model or two. A notebook shows it as the last line of a cell; ``save`` writes it to a
    file.

    Args:
        seen: one model, or two with the same number of layers and heads on the same tokens.
        tokenizer: gives the text of tokens; None shows their ids.
        height: height of the frame in a notebook, in pixels.

    Raises:
        NotComparable: the two models cannot be compared head by head.
    """

    def __init__(self, *seen: Seen, tokenizer: Decodes | None = None, height: int = 900):
        if len(seen) > 1 and seen[0].name == seen[1].name:  # such as two seeds in folders of one name
            seen = tuple(
                replace(s, name=f"{s.name} ({n})") for s, n in zip(seen, ("first", "second"), strict=True)
            )
        self.seen, self.tokenizer, self.height = seen, tokenizer, height
        if len(seen) > 1:
            first, second = seen
            if _shape(first.heads) != _shape(second.heads):
                raise NotComparable(f"{first.name} and {second.name} differ in layers or heads")
            if not torch.equal(first.heads.input_ids, second.heads.input_ids):
                raise NotComparable(
                    f"{first.name} and {second.name} read different tokens; give both the same"
                )

    @cached_property
    def html(self) -> str:
        """The whole page, as HTML."""
        listing = Listing.of([s.heads for s in self.seen])
        ids = self.seen[0].heads.input_ids
        pieces, text = pack_text(token_pieces(ids, self.tokenizer))
        packed = [pack_model(s.name, [*_facts(s.heads), *s.facts], s.heads, listing) for s in self.seen]
        about = {"models": [about for about, _ in packed], "pieces": pieces}
        blobs = {"text": text} | {
            f"m{m}h{h}": blob for m, (_, blobs) in enumerate(packed) for h, blob in enumerate(blobs)
        }
        return render("Heads of " + " and ".join(s.name for s in self.seen), about, blobs)

    def save(self, path: str | Path) -> Path:
        """Writes the page to ``path``. A failed write leaves no half file."""
        return files.write_text(path, self.html)

    def _repr_html_(self) -> str:
        # A frame, so that the page's style and a notebook's stay apart. It needs no extension and no kernel,
        # so it works in every viewer of notebooks.
        return (
            f'<iframe title="heads" srcdoc="{html.escape(self.html)}" style="width: 100%; '
            f'height: {self.height}px; border: 1px solid #8886; border-radius: 8px"></iframe>'
        )


def explore(
    model: FoXForCausalLM,
    tokens: Tensor | Sequence[int],
    tokenizer: Decodes | None = None,
    *,
    compare: FoXForCausalLM | None = None,
    names: Sequence[str] = ("the model", "the other"),
    log_pruning_tolerance: float | None = None,
    dtype: str = "float32",
) -> Explorer:
    """Every head of ``model`` on ``tokens``, as a page: in a notebook, or as a file by ``save(path)``.

    Args:
        tokens: int64 ids, (T,) or (sequences, T), as the model reads them, BOS included. The page shows the
            first sequence. The numbers of each head are over all sequences.
        tokenizer: anything whose ``decode([id])`` gives the text of a token; None shows ids.
        compare: a second model of the same shape, shown beside the first. Both read the same tokens, so at
            one length.
        names: names of the models on the page.
        log_pruning_tolerance, dtype: see :func:`look`.

    Raises:
        NotToBeLookedAt: fewer tokens than two blocks, too many for this machine's memory, or no ids of the
            model.
        NotComparable: the models differ in shape.
    """
    device = next(model.parameters()).device
    models = [model] if compare is None else [model, compare]
    if compare is not None:
        check_comparable(names[0], model.config, names[1], compare.config)
    ids = checked_ids(tokens, min(m.config.vocab_size for m in models))
    batches = [batch.to(device) for batch in ids.split(1)]
    seen = [
        Seen(name, look(m, batches, log_pruning_tolerance=log_pruning_tolerance, dtype=dtype))
        for name, m in zip(names, models, strict=False)
    ]
    return Explorer(*seen, tokenizer=tokenizer)


def check_comparable(first: str, first_config: FoXConfig, second: str, second_config: FoXConfig) -> None:
    """Checks that two models have the same number of layers and heads.

    Raises:
        NotComparable: they have not; the message has their names.
    """
    shapes = [(c.num_hidden_layers, c.num_heads) for c in (first_config, second_config)]
    if shapes[0] != shapes[1]:
        said = [
            f"{name} has {layers} layers of {heads} heads"
            for name, (layers, heads) in zip((first, second), shapes, strict=True)
        ]
        raise NotComparable(f"{said[0]}, {said[1]}; only models of one shape are compared head by head")


def _shape(heads: ModelHeads) -> tuple[int, int]:
    return heads.table["layer"].nunique(), heads.table["head"].nunique()


def token_pieces(ids: Tensor, tokenizer: Decodes | None) -> list[str]:
    """The text of each of the ``ids`` (T,) int64. A token without text, such as BOS, is shown by its id.

    Where tokens end within a character, the first has the text of all that are needed to end it, and the
    others have none. So the pieces in a row are the text.
    """

    @cache
    def read(*tokens: int) -> str:
        return (tokenizer.decode(list(tokens)) if tokenizer else "") or f"⟨{tokens[0]}⟩"

    return [
        piece for text, parts in whole_characters(ids.tolist(), read) for piece in (text, *[""] * (parts - 1))
    ]


def _facts(heads: ModelHeads) -> list[str]:
    layers, each = _shape(heads)
    (block_q, block_k), measured = heads.grid, heads.table["measured_tokens"].iloc[0]
    return [
        f"{layers} layers of {each} heads",
        f"{heads.length:,} tokens",
        f"blocks of {block_q} × {block_k}",
        *([f"numbers over {measured:,} tokens"] if measured > heads.length else []),
    ]
