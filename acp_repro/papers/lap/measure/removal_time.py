"""The savings of removal: time and memory against the keep ratio."""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from acp_repro.lap import PruningAutoencoder
from acp_repro.lap.autoencoder import pad
from acp_repro.lap.decoder import Decoding
from acp_repro.lap.encoder import encode_removed
from acp_repro.pipeline.benchmark.timing import ORDER, in_columns, interleaved, peak_memory, wall_ms
from acp_repro.pipeline.paper import samples, with_columns

from ..task import TrainedPruning

SHARES = (1.0, 0.75, 0.5, 0.25, 0.1)
DECODED_TOKENS = 16
REPEATS = 5


@with_columns(
    "method",
    "length_tokens",
    "measured_texts",
    "repeats",
    "keep_ratio",
    *samples("encoder_ms"),
    *samples("decoder_ms"),
    "encoder_peak_bytes",
    "decoder_peak_bytes",
    "memory_bytes",
    "order",
)
@torch.no_grad()
def measure_removal_time(trained: TrainedPruning) -> list[dict[str, Any]]:
    """Records of encoding and decoding, each with masks and with removal, at several keep ratios.

    Held-out texts are concatenated to texts of each length. The bias of the gates sets the target ratio, and
    ``keep_ratio`` is the actual ratio. If two targets result in the same ratio, as with gates that do not
    distinguish tokens, this ratio is measured once. Decoding generates 16 tokens, batched and with a cache;
    with masks the memory contains the whole text.

    Times are medians. ``encoder_peak_bytes`` and ``decoder_peak_bytes`` are measured peaks in addition to
    weights and inputs. ``memory_bytes`` is computed: the bytes of the texts that the decoder stores between
    steps, which are vectors, and keys and values of every layer.
    """
    rows = []
    for length in trained.measure_settings.timed_lengths:
        input_ids, seen = _texts(trained, length), set()
        for share in SHARES:
            model = _rebias(trained.model, input_ids, share)
            if (kept := _kept(model, input_ids)) not in seen:
                rows += _compare(trained, model, input_ids)
            seen.add(kept)
    return rows


def _texts(trained: TrainedPruning, length: int) -> Tensor:
    """Concatenated held-out texts (B, length) int64; each row ends with EOS."""
    stream = [i for row in trained.heldout_rows(10**9) for i in row[:-1]]
    needed = trained.measure_settings.timed_texts * (length - 1)
    stream = (stream * (needed // len(stream) + 1))[:needed]
    rows = [stream[i : i + length - 1] for i in range(0, needed, length - 1)]
    tokenizer = trained.task.tokenizer
    return pad([[*row, tokenizer.eos_id] for row in rows], tokenizer.pad_id).to(trained.device)


def _rebias(model: PruningAutoencoder, input_ids: Tensor, share: float) -> PruningAutoencoder:
    """A model with the same weights, and with the bias that keeps about this share of the tokens."""

    def biased(beta: float) -> PruningAutoencoder:
        settings = dataclasses.replace(model.pruning, beta=beta)
        return PruningAutoencoder(model.t5, settings, model.tokenizer).eval()

    low, high = -1e4, 1e4
    if share == 1.0:
        return biased(high)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _kept(biased(middle), input_ids) < share else (low, middle)
    return biased(high)


def _kept(model: PruningAutoencoder, input_ids: Tensor) -> float:
    return float(model.encode_ids(input_ids).keep_ratio.mean())


def _compare(trained: TrainedPruning, model: PruningAutoencoder, input_ids: Tensor) -> list[dict[str, Any]]:
    memory = model.encode_ids(input_ids)
    masked = model.encode_tokens(input_ids, "removed")
    real, eos = input_ids != model.t5.config.pad_token_id, input_ids == model.t5.config.eos_token_id
    encode = {
        "masked": lambda: model.encode_tokens(input_ids, "removed"),
        "removed": lambda: encode_removed(model.t5.encoder, input_ids, real, eos, model.pruning),
    }
    held = {"masked": (masked.hidden, masked.memory_mask), "removed": (memory.vectors, memory.mask)}
    decode = {name: functools.partial(_write, model, *parts) for name, parts in held.items()}
    encoder_ms, decoder_ms = (
        interleaved(works, trained.device, REPEATS, wall_ms) for works in (encode, decode)
    )
    return [
        {
            "method": name,
            "length_tokens": input_ids.shape[1],
            "measured_texts": len(input_ids),
            "repeats": len(encoder_ms[name]),
            "order": ORDER,
            "keep_ratio": float(memory.keep_ratio.mean()),
            **in_columns(encoder=encoder_ms[name], decoder=decoder_ms[name]),
            "encoder_peak_bytes": peak_memory(encode[name], trained.device),
            "decoder_peak_bytes": peak_memory(decode[name], trained.device),
            "memory_bytes": held_bytes(model, held[name][0]),
        }
        for name in held
    ]


def held_bytes(model: PruningAutoencoder, vectors: Tensor) -> int:
    """The bytes of a memory (B, M, D) of any dtype, and of its keys and values in every decoder layer."""
    config = model.t5.config
    elements = config.d_model + 2 * len(model.t5.decoder.block) * config.num_heads * config.d_kv
    return vectors.shape[0] * vectors.shape[1] * elements * vectors.element_size()


def _write(model: PruningAutoencoder, vectors: Tensor, mask: Tensor) -> None:
    state = Decoding(model.t5, vectors, mask, model.pruning.decoder_window)
    tokens = torch.full((len(vectors),), model.t5.config.decoder_start_token_id, device=vectors.device)
    for _ in range(DECODED_TOKENS):
        tokens = state.step(tokens).argmax(-1)
