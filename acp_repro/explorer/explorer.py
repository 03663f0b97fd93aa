"""The page: every head of one model, or of two side by side, in one self-contained HTML file."""

import html
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from acp_repro.common import files
from acp_repro.common.errors import UsageError
from acp_repro.model import FoXConfig, FoXForCausalLM
from acp_repro.model.tokenizer import whole_characters

from .heads import ModelHeads, check_ids, weigh_heads
from .pack import choose_stride, pack_model, pack_text, render


class Decoder(Protocol):
    """Any tokenizer that decodes token ids to text."""

    def decode(self, ids: Sequence[int]) -> str: ...


class Explorer:
    """A page of one or two models. A notebook displays it at the end of a cell; ``save`` writes a file.

    Args:
        models: the heads of one model, or of two with the same number of layers and heads on the same tokens.
        tokenizer: decodes tokens; None shows their ids.
        height: height of the frame in a notebook, in pixels.

    Raises:
        UsageError: the two models cannot be compared head by head.
    """

    def __init__(self, *models: ModelHeads, tokenizer: Decoder | None = None, height: int = 900):
        self.models, self.tokenizer, self.height = models, tokenizer, height
        if len(models) > 1:
            first, second = models
            if first.shape != second.shape or not torch.equal(first.input_ids, second.input_ids):
                raise UsageError(
                    f"{first.name} and {second.name} differ in layers, heads or tokens; compare models of "
                    "the same shape on the same tokens"
                )
            if first.name == second.name:  # such as two seeds in folders with the same name
                self.models = tuple(
                    replace(one, name=f"{one.name} ({place})")
                    for one, place in zip(models, ("first", "second"), strict=True)
                )

    @cached_property
    def html(self) -> str:
        """The HTML of the page."""
        stride = choose_stride(self.models)
        pieces, text = pack_text(token_pieces(self.models[0].input_ids, self.tokenizer))
        packed = [pack_model(model, _facts(model), stride) for model in self.models]
        about = {"models": [about for about, _ in packed], "pieces": pieces}
        blobs = {"text": text} | {
            f"m{m}h{h}": blob for m, (_, blobs) in enumerate(packed) for h, blob in enumerate(blobs)
        }
        return render("Heads of " + " and ".join(model.name for model in self.models), about, blobs)

    def save(self, path: str | Path) -> Path:
        """Writes the page to ``path`` atomically and returns the path."""
        return files.write_text(path, self.html)

    def _repr_html_(self) -> str:
        # A frame separates the styles of the page and the notebook. The frame needs no extension and no
        # running kernel, so it works in every notebook viewer.
        return (
            f'<iframe title="heads" srcdoc="{html.escape(self.html)}" style="width: 100%; '
            f'height: {self.height}px; border: 1px solid #8886; border-radius: 8px"></iframe>'
        )


def explore(
    model: FoXForCausalLM,
    tokens: Tensor | Sequence[int],
    tokenizer: Decoder | None = None,
    *,
    compare: FoXForCausalLM | None = None,
    names: Sequence[str] = ("the model", "the other"),
    log_pruning_tolerance: float | None = None,
    dtype: str = "float32",
) -> Explorer:
    """A page of every head of ``model`` on ``tokens``, for a notebook or, by ``save(path)``, as a file.

    Args:
        tokens: int64 ids, (T,) or (sequences, T), with BOS if the model expects it. The page shows the first
            sequence; the statistics of each head are over all sequences.
        tokenizer: an object whose ``decode([id])`` returns the text of a token; None shows ids.
        compare: a second model of the same shape, shown beside the first. Both models read the same tokens.
        names: names of the models on the page.
        log_pruning_tolerance, dtype: see :func:`weigh_heads`.

    Raises:
        UsageError: there are fewer tokens than two blocks, the ids are not in the vocabulary, or the models
            differ in shape. UsageError is a ValueError.
    """
    models = [model] if compare is None else [model, compare]
    if compare is not None:
        check_comparable(names[0], model.config, names[1], compare.config)
    ids = check_ids(tokens, min(m.config.vocab_size for m in models))
    batches = ids.to(next(model.parameters()).device).split(1)
    heads = [
        replace(weigh_heads(m, batches, log_pruning_tolerance=log_pruning_tolerance, dtype=dtype), name=name)
        for m, name in zip(models, names, strict=False)
    ]
    return Explorer(*heads, tokenizer=tokenizer)


def check_comparable(first: str, first_config: FoXConfig, second: str, second_config: FoXConfig) -> None:
    """Raises :class:`UsageError` unless two models have the same number of layers and heads."""
    one, other = (
        f"{c.num_hidden_layers} layers of {c.num_heads} heads" for c in (first_config, second_config)
    )
    if one != other:
        raise UsageError(f"{first} has {one}, {second} has {other}; compare models of the same shape")


def token_pieces(ids: Tensor, tokenizer: Decoder | None) -> list[str]:
    """The text of each token of ``ids`` (T,) int64. A token without text, such as BOS, is shown by its id.

    If a character spans several tokens, the first token shows the text of all tokens up to the end of
    the character, and the others are empty. The concatenated pieces are therefore the text.
    """

    @cache
    def read(*tokens: int) -> str:
        return tokenizer.decode(list(tokens)) if tokenizer else ""

    pieces: list[str] = []
    for text, parts in whole_characters(ids.tolist(), read):
        pieces += [text or f"⟨{ids[len(pieces)]}⟩", *[""] * (parts - 1)]
    return pieces


def _facts(model: ModelHeads) -> list[str]:
    layers, heads = model.shape
    (block_q, block_k), measured = model.grid, model.table["measured_tokens"].iloc[0]
    return [
        f"{layers} layers of {heads} heads",
        f"{model.length:,} tokens",
        f"blocks of {block_q} × {block_k}",
        *([f"statistics over {measured:,} tokens"] if measured > model.length else []),
        *model.facts,
    ]
