"""Continues a text and streams the continuation:
``python -m acp_repro.generate MODEL --prompt "It was"``.

MODEL is a FoX checkpoint folder in the authors' format with a tokenizer.json next to the weights, or a
run folder such as runs/cpu/NAME. The model reads BOS and then the prompt, because every training sequence
began with BOS. The same seed generates the same text on the same machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from .common.bounds import NotNegative, Seed, within
from .common.command import bounded, checkpoint_parser, choose_device, command, positive, run_command
from .common.errors import UsageError
from .explorer.checkpoint import Checkpoint

if TYPE_CHECKING:
    from .model.tokenizer import Tokenizer

DEFAULT_PROMPT = "It was a dark and stormy night; the rain fell in torrents, and"


def stream_text(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Yields the text of the ids piece by piece, and buffers an incomplete character.

    A token of byte-level BPE may end inside a character. Its bytes then decode to one final U+FFFD until the
    next tokens complete the character; any earlier U+FFFD represents invalid bytes. The text of a token can
    depend on the previous token, so the last tokens are decoded together.
    """
    held: list[int] = []
    given = 0  # characters of the buffered tokens that have been yielded
    for token in ids:
        held.append(token)
        text = tokenizer.decode(held)
        waiting = int(text.endswith("\N{REPLACEMENT CHARACTER}"))
        if len(text) - waiting > given:
            yield text[given : len(text) - waiting]
        # An incomplete character has at most three bytes.
        held = held[-4:] if waiting else held[-1:]
        given = len(tokenizer.decode(held)) - waiting
    if held and len(text := tokenizer.decode(held)) > given:
        yield text[given:]


def cut_at_stop(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Yields the text of ``pieces`` up to the first of ``stops``; buffers text that may begin a stop."""
    held = ""
    for piece in pieces:
        held += piece
        places = [at for at in map(held.find, stops) if at >= 0]
        if places:
            yield held[: min(places)]
            return
        # The number of characters at the end of the buffer that may begin a stop.
        begun = (n for stop in stops for n in range(1, len(stop)) if held.endswith(stop[:n]))
        ready = len(held) - max(begun, default=0)
        yield held[:ready]
        held = held[ready:]
    yield held


@command(extra="bpe,checkpoints")
def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    checkpoint = Checkpoint(options.model)  # before torch is imported
    device = choose_device(options.device)

    import torch

    from .model.generation import stream_tokens, use_one_thread_if_small

    tokenizer, vocab_size = checkpoint.require_tokenizer(), checkpoint.config.vocab_size
    prompt = tokenizer.prompt(options.prompt)
    if max(prompt) >= vocab_size:
        raise UsageError(
            f"the tokenizer has ids up to {max(prompt)}, but the model has only {vocab_size}; use the "
            "tokenizer that the model was trained with"
        )
    # BOS begins another document.
    stop_ids = {tokenizer.bos_id, *(int(one) for one in options.stop if one.isdecimal())}
    if max(stop_ids) >= vocab_size:
        raise UsageError(f"--stop: a number is a token id, and the model's are 0 to {vocab_size - 1}")
    seed = options.seed if options.seed is not None else torch.seed() % 2**31
    usual = "bfloat16" if device.type == "cuda" else "float32"
    model = checkpoint.load(device, dtype=getattr(torch, options.dtype or usual))
    use_one_thread_if_small(model)
    tokens = stream_tokens(
        model,
        torch.tensor([prompt], device=device),
        options.max_new_tokens,
        options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        stop_ids=tuple(stop_ids),
        generator=torch.Generator(device).manual_seed(seed),
    )
    new = (token for token in map(int, tokens) if token not in stop_ids)
    _write(options.prompt)
    stops = [one for one in options.stop if not one.isdecimal()]
    for text in cut_at_stop(stream_text(tokenizer, new), stops):
        _write(text)
    _write("\n")
    if options.seed is None and options.temperature:
        print(f"seed: {seed}", file=sys.stderr)


def _unescape(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\t", "\t")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = checkpoint_parser("generate", __doc__)
    add = parser.add_argument
    add(
        "--prompt", default=DEFAULT_PROMPT, metavar="TEXT", help="default: %(default)r; - reads it from stdin"
    )
    add("--max-new-tokens", type=positive, default=200, metavar="N", help="default: %(default)s")
    add(
        "--temperature",
        type=bounded(NotNegative),
        default=0.8,
        metavar="X",
        help="0: greedy decoding (default: %(default)s)",
    )
    add("--top-k", type=positive, metavar="N", help="sample from the N most probable tokens (default: all)")
    add(
        "--top-p",
        type=bounded(Annotated[float, within("(0, 1]")]),
        metavar="X",
        help="sample from the smallest set of tokens with this total probability (default: all)",
    )
    add(
        "--stop",
        action="append",
        type=_unescape,
        default=[],
        metavar="TOKEN|TEXT",
        help="stop before this token id or text (\\n is a line end); repeatable",
    )
    add("--seed", type=bounded(Seed), metavar="N", help="default: a new one each time, which is printed")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of weights and cache (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    options = parser.parse_args(arguments)
    if options.prompt == "-":
        options.prompt = sys.stdin.read()
    return options


if __name__ == "__main__":
    run_command(main)
