"""The page: every head of one model, or of two side by side, in one HTML file that loads nothing."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from acp_repro.common import files
from acp_repro.common.errors import UsageError
from acp_repro.model import FoXConfig, FoXForCausalLM

from .looking import ModelHeads, look
from .pack import Listing, pack_model, pack_text
from .page import render


class NotComparable(UsageError):
    """Two models whose heads have no partner; one line that says why."""


class Decodes(Protocol):
    """Any tokenizer that says what a token reads."""

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass
class Seen:
    """A model's heads, under a name and with facts, such as its text, for the page's head."""

    name: str
    heads: ModelHeads
    facts: Sequence[str] = ()


class Explorer:
    """A page over one model or two. In a notebook the last line of a cell shows it; ``save`` writes it.

    Args:
        seen: one model, or two of the same number of layers and heads on the same tokens.
        tokenizer: says what tokens read; None shows their ids.
        height: of the frame in a notebook, in pixels.

    Raises:
        NotComparable: the two do not fit each other.
    """

    def __init__(self, *seen: Seen, tokenizer: Decodes | None = None, height: int = 900):
        self.seen, self.tokenizer, self.height = seen, tokenizer, height
        if len(seen) > 1:
            first, second = seen
            if _shape(first.heads) != _shape(second.heads):
                raise NotComparable(f"{first.name} and {second.name} differ in layers or heads")
            if not torch.equal(first.heads.input_ids, second.heads.input_ids):
                raise NotComparable(f"{first.name} and {second.name} were looked at on different tokens")

    @cached_property
    def html(self) -> str:
        """The whole page."""
        listing = Listing.of([s.heads for s in self.seen])
        ids = self.seen[0].heads.input_ids
        pieces, text = pack_text(token_pieces(ids, self.tokenizer), ids.numpy())
        packed = [pack_model(s.name, [*_facts(s.heads), *s.facts], s.heads, listing) for s in self.seen]
        about = {"models": [about for about, _ in packed], "pieces": pieces}
        blobs = {"text": text} | {
            f"m{m}h{h}": blob for m, (_, blobs) in enumerate(packed) for h, blob in enumerate(blobs)
        }
        return render("Heads of " + " and ".join(s.name for s in self.seen), about, blobs)

    def save(self, path: str | Path) -> Path:
        """Writes the page, whole or not at all."""
        return files.write_text(path, self.html)

    def _repr_html_(self) -> str:
        # A frame, so that the page's style and a notebook's stay apart; nothing has to be installed for it,
        # and it works in whatever shows notebooks, with no kernel behind it too.
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
        tokens: ids, (T,) or (sequences, T), as the model reads them, BOS included. The first sequence is
            shown; the numbers of each head are over all.
        tokenizer: anything whose ``decode([id])`` says what a token reads; None shows ids.
        compare: a second model of the same shape, shown beside the first.
        names: what the page calls them.
        log_pruning_tolerance, dtype: see :func:`look`.

    Raises:
        NotToBeLookedAt: fewer tokens than two blocks, or too many for this machine's memory.
        NotComparable: the models differ in shape.
    """
    device = next(model.parameters()).device
    ids = torch.atleast_2d(torch.as_tensor(tokens, dtype=torch.long))
    batches = [batch.to(device) for batch in ids.split(1)]
    models = [model] if compare is None else [model, compare]
    if compare is not None:
        check_comparable(names[0], model.config, names[1], compare.config)
    seen = [
        Seen(name, look(m, batches, log_pruning_tolerance=log_pruning_tolerance, dtype=dtype))
        for name, m in zip(names, models, strict=False)
    ]
    return Explorer(*seen, tokenizer=tokenizer)


def check_comparable(first: str, first_config: FoXConfig, second: str, second_config: FoXConfig) -> None:
    """Refuses two models, with their names, whose layers or heads differ in number.

    Raises:
        NotComparable: they do.
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
    """(T,), what each token reads; what reads as nothing, such as BOS, is named by its id."""
    reads: dict[int, str] = {}
    for token in ids.unique().tolist():
        reads[token] = (tokenizer.decode([token]) if tokenizer else "") or f"⟨{token}⟩"
    return [reads[token] for token in ids.tolist()]


def _facts(heads: ModelHeads) -> list[str]:
    layers, each = _shape(heads)
    row, (block_q, block_k) = heads.table.iloc[0], heads.grid
    return [
        f"{layers} layers of {each} heads",
        f"{heads.length:,} tokens",
        f"log ε {row['log_pruning_tolerance']:g}".replace("-", "−"),
        f"blocks of {block_q} × {block_k}",
        *(
            [f"numbers over {row['measured_tokens']:,} tokens"]
            if row["measured_tokens"] > heads.length
            else []
        ),
    ]
