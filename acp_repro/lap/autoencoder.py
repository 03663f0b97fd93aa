"""A T5 that compresses a text into the vectors of a few tokens, and reconstructs the text from them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers.utils.hub import cached_file

from acp_repro.common import files
from acp_repro.model.third_party import load_model, quiet_transformers

from .blocks import T5, fuse_norms
from .config import PruningConfig, PruningError
from .decoder import decode_teacher, write_greedily
from .encoder import Encoded, Memory, encode_masked, encode_removed
from .gates import compression_loss, expected_lengths, soft_lengths
from .text import TOKENIZER_FILE, TextTokenizer

IGNORED = -100
CONFIG_KEY = "learnable_attention_pruning"  # key of the pruning settings in the T5's config.json
FLAN_T5_SMALL = {
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 8,
    "num_decoder_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
}


@dataclass(frozen=True)
class Losses:
    """The losses and statistics of one training batch.

    Attributes:
        cross_entropy: nats per token, a float32 scalar.
        compression: the compression loss, a scalar in 0 to 1.
        lengths: (S + 1, B) float32; see ``gates.soft_lengths`` and, for hard concrete gates,
            ``expected_lengths``.
        kept: (S + 1, B) number of tokens left after each gate, by the evaluation rule on these gates.
        correct: (B,) float, share of tokens whose logit is the largest.
    """

    cross_entropy: Tensor
    compression: Tensor
    lengths: Tensor
    kept: Tensor
    correct: Tensor


class PruningAutoencoder(nn.Module):
    """A ``T5ForConditionalGeneration`` with gates in its encoder and a decoder with a short window.

    Args:
        t5: a T5 of transformers. ``blocks.fuse_norms`` replaces its norms and GELUs, in place.
        pruning: the pruning settings.
        tokenizer: None for a model that reads token ids only.

    Raises:
        PruningError: the tokeniser has more ids than the model, or other ids for ``<pad>`` and ``</s>``; or
            the T5's config lacks one of the ids that T5 needs.
    """

    t5: T5

    def __init__(
        self,
        t5: transformers.T5ForConditionalGeneration,
        pruning: PruningConfig,
        tokenizer: TextTokenizer | None = None,
    ):
        super().__init__()
        fuse_norms(t5)
        self.t5, self.pruning, self.tokenizer = t5, pruning, tokenizer
        config = t5.config
        wanted = ("pad_token_id", "eos_token_id", "decoder_start_token_id")
        if lacking := [name for name in wanted if getattr(config, name, None) is None]:
            raise PruningError(f"the T5's config.json has no {', '.join(lacking)}; add the missing ids")
        if tokenizer is not None and (
            tokenizer.vocab_size > config.vocab_size
            or (tokenizer.pad_id, tokenizer.eos_id) != (config.pad_token_id, config.eos_token_id)
        ):
            raise PruningError(
                f"the tokenizer has {tokenizer.vocab_size} ids, <pad> {tokenizer.pad_id} and </s> "
                f"{tokenizer.eos_id}; the model {config.vocab_size}, {config.pad_token_id} and "
                f"{config.eos_token_id}; use the tokenizer of its training"
            )

    # --- creating, saving, loading ---

    @classmethod
    def from_scratch(
        cls, pruning: PruningConfig, tokenizer: TextTokenizer, **shape: Any
    ) -> PruningAutoencoder:
        """A model with random weights from torch's generator, of Flan-T5-small's shape by default.

        Embeddings and head share their weights, as in T5 1.0, and dropout is 0.

        Args:
            shape: keys of ``transformers.T5Config`` that replace the defaults, such as ``d_model``.

        Raises:
            PruningError: T5 has no such key.
        """
        known = transformers.T5Config()
        if unknown := [name for name in shape if not hasattr(known, name)]:
            raise PruningError(f"T5Config has no key {', '.join(unknown)}")
        config = transformers.T5Config(
            vocab_size=tokenizer.vocab_size,
            pad_token_id=tokenizer.pad_id,
            eos_token_id=tokenizer.eos_id,
            decoder_start_token_id=tokenizer.pad_id,  # pyright: ignore[reportCallIssue]
            **{"dropout_rate": 0.0, **FLAN_T5_SMALL, **shape},
        )
        return cls(transformers.T5ForConditionalGeneration(config), pruning, tokenizer)

    @classmethod
    def from_t5(
        cls, name_or_folder: str | Path, pruning: PruningConfig, **options: Any
    ) -> PruningAutoencoder:
        """A model with the weights of a T5, such as ``google/flan-t5-small``, from a folder or the Hub.

        Args:
            options: options of ``T5ForConditionalGeneration.from_pretrained``.

        Raises:
            UsageError: the T5 does not exist, is another kind of model, or has no ``tokenizer.json``.
        """
        t5 = load_model(transformers.T5ForConditionalGeneration, name_or_folder, **options)
        try:
            path = cached_file(str(name_or_folder), TOKENIZER_FILE)
        except OSError as error:
            reason = str(error).strip().splitlines()[0]
            raise PruningError(f"{name_or_folder}: no {TOKENIZER_FILE} beside the T5 ({reason})") from error
        return cls(t5, pruning, TextTokenizer.read(Path(str(path))))

    def save_pretrained(self, folder: str | Path, weights: dict[str, Tensor] | None = None) -> None:
        """Writes config.json, model.safetensors and tokenizer.json.

        The pruning settings have their own key in config.json, so that plain transformers loads the same
        folder as a T5.

        Args:
            weights: unsharded weights on the CPU, named as in :meth:`state_dict`, if the model's own weights
                are sharded. Shapes and dtypes are kept.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = self.state_dict() if weights is None else weights
        with quiet_transformers():
            self.t5.save_pretrained(
                folder, state_dict={name.removeprefix("t5."): tensor for name, tensor in state.items()}
            )
        config = json.loads((folder / "config.json").read_text())
        # This key alone tells transformers whether the head scales its input.
        config["tie_word_embeddings"] = bool(self.t5.config.scale_decoder_outputs)
        config[CONFIG_KEY] = dataclasses.asdict(self.pruning)
        files.write_json(folder / "config.json", config)
        if self.tokenizer is not None:
            self.tokenizer.save(folder)

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: torch.device | str = "cpu") -> PruningAutoencoder:
        """Loads a model that :meth:`save_pretrained` wrote, in evaluation mode.

        Raises:
            UsageError: the folder does not exist, or contains a checkpoint of another model.
        """
        folder = Path(folder)
        config = files.read_json(folder / "config.json")
        if CONFIG_KEY not in config:
            raise PruningError(
                f"{folder}: config.json has no key {CONFIG_KEY}; give the folder of a trained pruning "
                "autoencoder, or start from a T5 with PruningAutoencoder.from_t5"
            )
        try:
            pruning = PruningConfig(**config[CONFIG_KEY])
        except (TypeError, PruningError) as error:
            raise PruningError(f"{folder}: {error}") from error
        t5 = load_model(transformers.T5ForConditionalGeneration, folder)
        path = folder / TOKENIZER_FILE
        tokenizer = TextTokenizer.read(path) if path.is_file() else None
        return cls(t5, pruning, tokenizer).to(device).eval()

    # --- training ---

    @property
    def num_gates(self) -> int:
        """S, the number of gates in the encoder."""
        return len(self.pruning.gated_blocks(len(self.t5.encoder.block)))

    def forward(
        self, input_ids: Tensor, noise: Tensor | None = None, mask: str | None = None, blind: bool = False
    ) -> Losses:
        """The two losses of a batch, teacher-forced.

        Args:
            input_ids: (B, T) integer, each text with its EOS, followed by padding.
            noise: (S, B, T) float32 from ``gates.draw_noise``, for training.
            mask: see ``encoder.encode_masked``. Default: ``training_mask`` in training, else ``removed``.
            blind: gates drop tokens at random, with the probability that their bias and the noise imply.
        """
        if mask is None:
            mask = self.pruning.training_mask if self.training else "removed"
        if mask == "hard_concrete":
            mask = "soft"  # its log gates are added unchanged: a gate of 0 removes its token
        real = input_ids != self.t5.config.pad_token_id
        encoded = self.encode_tokens(input_ids, mask, noise, blind)
        decoder_inputs = self.shift_right(input_ids)
        logits = decode_teacher(
            self.t5, encoded.hidden, encoded.memory_mask, decoder_inputs, self.pruning.decoder_window
        )
        labels = input_ids.masked_fill(~real, IGNORED)
        cross_entropy = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)
        kept = encoded.kept
        if encoded.open_probability is not None:
            lengths = expected_lengths(encoded.open_probability, real)
        else:
            counted = kept if mask == "straight_through" else None
            lengths = soft_lengths(encoded.log_gate, real, self.t5.config.d_kv, counted)
        right = ((logits.argmax(-1) == input_ids) & real).sum(1) / real.sum(1)
        counts = torch.cat([real.sum(-1)[None], kept.sum(-1)])
        return Losses(cross_entropy, compression_loss(lengths), lengths, counts, right)

    def encode_tokens(
        self, input_ids: Tensor, mask: str, noise: Tensor | None = None, blind: bool = False
    ) -> Encoded:
        """``encoder.encode_masked`` on (B, T) integer token ids."""
        config = self.t5.config
        real = input_ids != config.pad_token_id
        return encode_masked(
            self.t5.encoder,
            input_ids,
            real,
            input_ids == config.eos_token_id,
            self.pruning,
            mask=mask,
            noise=noise,
            # The loss is a mean over tokens, so one nat of one token contributes this much.
            credit_limit=self.pruning.credit_nats / real.sum(),
            blind=blind,
        )

    def shift_right(self, input_ids: Tensor) -> Tensor:
        """The decoder's inputs (B, T) integer: the start token, then all tokens except the last."""
        start = torch.full_like(input_ids[:, :1], self.t5.config.decoder_start_token_id)
        return torch.cat([start, input_ids[:, :-1]], 1)

    # --- use ---

    def token_ids(self, texts: Sequence[str], places: Sequence[str] = ()) -> Tensor:
        """(B, T) int64 on the model's device: each text with its EOS, padded at the end.

        Args:
            places: the origin of each text, such as a file and its line, for errors.

        Raises:
            PruningError: a text is empty, too long or not a string, or the model has no tokeniser.
        """
        if self.tokenizer is None:
            raise PruningError("this model has no tokenizer.json; pass token ids to encode_ids")
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) for text in texts):
            raise PruningError("texts: give a list of at least one text, each a str")
        rows = self.tokenizer.encode_all(texts)
        most = self.pruning.max_length
        for index, row in enumerate(rows):
            place = places[index] if places else f"text {index + 1} of {len(rows)}"
            if not row:
                raise PruningError(f"{place} is empty; remove it")
            if len(row) + 1 > most:
                raise PruningError(
                    f"{place} has {len(row) + 1} tokens with its EOS, and the model's maximum is {most}; "
                    "split it"
                )
        eos = self.t5.config.eos_token_id
        return pad([[*row, eos] for row in rows], self.t5.config.pad_token_id).to(self.device)

    def encode(self, texts: Sequence[str]) -> Memory:
        """The kept vectors of the texts, with their positions and tokens."""
        return self.encode_ids(self.token_ids(texts))

    @torch.no_grad()
    def encode_ids(self, input_ids: Tensor) -> Memory:
        """:meth:`encode` for (B, T) integer token ids with EOS and padding; dropped tokens are removed.

        Raises:
            PruningError: a text has no EOS, the only token that is never dropped.
        """
        config = self.t5.config
        real, eos = input_ids != config.pad_token_id, input_ids == config.eos_token_id
        if not eos.any(1).all():
            raise PruningError(f"a text has no EOS (id {config.eos_token_id}); append EOS to each text")
        with evaluating(self):
            vectors, mask, positions, dropped_by = encode_removed(
                self.t5.encoder, input_ids, real, eos, self.pruning
            )
        tokens = []
        if self.tokenizer is not None:
            for row, places in zip(input_ids.tolist(), positions.tolist(), strict=True):
                tokens.append(self.tokenizer.tokens(row[place] for place in places if place >= 0))
        lengths = real.sum(1)
        return Memory(vectors, mask, positions, input_ids, lengths, dropped_by, tokens, self.num_gates)

    def decode(self, memory: Memory, max_length: int | None = None) -> list[str]:
        """The texts that the model generates from a memory, by greedy decoding.

        Args:
            max_length: the maximum number of tokens in a text; default: the model's maximum.
        """
        if self.tokenizer is None:
            raise PruningError("this model has no tokenizer.json; use decode_ids")
        rows = self.decode_ids(memory.vectors, memory.mask, max_length)
        return [self.tokenizer.decode(row) for row in rows]

    @torch.no_grad()
    def decode_ids(self, vectors: Tensor, mask: Tensor, max_length: int | None = None) -> list[list[int]]:
        """Token ids of each text, without EOS. Finished texts leave the batch.

        Args:
            vectors, mask: of a :class:`Memory`: (B, M, D), and (B, M) float added to the scores.
            max_length: see :meth:`decode`.
        """
        most = self.pruning.max_length if max_length is None else max_length
        with evaluating(self):
            return write_greedily(self.t5, vectors, mask, self.pruning.decoder_window, most)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.t5.device


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context with ``model`` in evaluation mode, which restores the mode of each module on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def pad(rows: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    """(B, T) int64 of rows of ids, padded at the end."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad_id)
