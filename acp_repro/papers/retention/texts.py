"""A labelled set as token ids: tokenizer, encoded splits and batches."""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers as t
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from acp_repro.pipeline.data.files import DataError
from acp_repro.pipeline.data.labelled import LabelledSet, read_labelled
from acp_repro.pipeline.data.sources import Row
from acp_repro.pipeline.data.tokenizer import learn_bpe
from acp_repro.pipeline.run import file_of
from acp_repro.pipeline.training.run_folder import TrainingError

from .runs import RetentionRun
from .schema import CLS, MASK, PAD, SEP, SPECIAL, UNK, BackboneConfig, DatasetConfig


@dataclass(frozen=True)
class Encoded:
    """One example as ids, [CLS] question [SEP] text [SEP], truncated to the dataset's length."""

    ids: list[int]
    example: Row
    offsets: list[tuple[int, int]]  # for extraction: characters of each token; (0, 0) outside the text
    span: tuple[int, int] | None  # first and last token of the answer; (0, 0) if it was truncated


class Texts:
    """The splits of a dataset, encoded for a backbone."""

    def __init__(
        self, dataset: DatasetConfig, backbone: BackboneConfig, tokenizer_folder: Path | None = None
    ):
        self.dataset = dataset
        self.labelled = load_labelled(dataset)
        for split, examples in self.labelled.splits.items():
            if not examples:
                place = dataset.function.place(dataset.path)
                raise DataError(f"{place} has no example in the split {split}; add some")
        source = tokenizer_folder or backbone.pretrained
        self.tokenizer = (
            load_tokenizer(source) if source else train_tokenizer(self.labelled, backbone.vocab_size)
        )
        self._separators = 1  # between a question and its text
        if backbone.model_type == "longformer" and not backbone.pretrained:
            self._separators = 2  # its question-answering head needs three [SEP] in total
            self.tokenizer.backend_tokenizer.post_processor = _template(self.tokenizer.backend_tokenizer, 2)
        self._encoded: dict[str, list[Encoded]] = {}
        # Hashed before the first use, after which the tokenizer's description includes the last truncation.
        tokenizer = hashlib.sha256(self.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
        self._identity = hashlib.sha256((self.labelled.identity + tokenizer).encode()).hexdigest()

    def encoded(self, split: str) -> list[Encoded]:
        if split not in self._encoded:
            self._encoded[split] = self._encode(self.labelled.splits[split])
        return self._encoded[split]

    def _encode(self, examples: Sequence[Row]) -> list[Encoded]:
        """Encodes all examples with the same truncation in one call, so that the tokenizer uses all cores."""
        alike: dict[str | bool, list[int]] = {}
        for place, kind in enumerate(self._truncations(examples)):
            alike.setdefault(kind, []).append(place)
        found: dict[int, Encoded] = {}
        for kind, places in alike.items():
            chosen = [examples[place] for place in places]
            found |= zip(places, self._encode_alike(chosen, kind), strict=True)
        return [found[place] for place in range(len(examples))]

    def _encode_alike(self, examples: Sequence[Row], truncation: str | bool) -> Iterator[Encoded]:
        asks, extractive = bool(examples[0].question), self.labelled.is_extractive
        texts = [example.text for example in examples]
        given = ([example.question for example in examples], texts) if asks else (texts,)
        limit = {"truncation": truncation, "max_length": self.dataset.max_tokens}
        # Texts about language models may contain "[SEP]", which is then plain text, not a special token.
        out = self.tokenizer(*given, return_offsets_mapping=extractive, split_special_tokens=True, **limit)
        for row, example in enumerate(examples):
            offsets, span = [], None
            if extractive:
                inside = [part == int(asks) for part in out.sequence_ids(row)]
                both = zip(out["offset_mapping"][row], inside, strict=True)
                offsets = [tuple(offset) if i else (0, 0) for offset, i in both]
                span = _span(example.answer, offsets)
                if self._separators == 2 and not asks:
                    raise DataError(f"{self.dataset.corpus}: Longformer answers only texts with a question")
            yield Encoded(out["input_ids"][row], example, offsets, span)

    def _truncations(self, examples: Sequence[Row]) -> list[str | bool]:
        """The truncation of each example: only the text, unless the question exceeds half of the length."""
        asking = [example.question for example in examples if example.question]
        if not asking:
            return [True] * len(examples)
        ids = iter(self.tokenizer(asking, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        kinds = [len(next(ids)) <= self.dataset.max_tokens // 2 if e.question else None for e in examples]
        return [{None: True, True: "only_second", False: "longest_first"}[kind] for kind in kinds]

    def tensors(self, rows: Sequence[Encoded]) -> tuple[Tensor, ...]:
        """(input_ids, attention_mask, labels), int64, padded to the longest row.

        For questions the labels are two tensors, the first and the last token.
        """
        length = max(len(row.ids) for row in rows)
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([row.ids + [pad] * (length - len(row.ids)) for row in rows])
        mask = torch.tensor([[1] * len(row.ids) + [0] * (length - len(row.ids)) for row in rows])
        if self.labelled.is_extractive:
            spans = torch.tensor([row.span for row in rows])
            return ids, mask, spans[:, 0], spans[:, 1]
        return ids, mask, torch.tensor([row.example.number for row in rows])

    def batches(self, split: str, rows: int, limit: int | None = None) -> Iterator[list[Encoded]]:
        """Batches of a split, sorted by decreasing length to reduce padding."""
        chosen = self.encoded(split)[:limit]
        ordered = sorted(chosen, key=lambda row: -len(row.ids))
        for at in range(0, len(ordered), rows):
            yield ordered[at : at + rows]

    def gate_settings(self) -> dict[str, Any]:
        """The settings of the gates that depend on the texts: gates never drop a question."""
        if not self.labelled.splits["train"][0].question:
            return {}
        return {"protect": "question", "sep_token_id": self.tokenizer.sep_token_id}

    def describe(self) -> dict[str, Any]:
        sizes = {split: len(examples) for split, examples in self.labelled.splits.items()}
        known = {"corpus": self.dataset.corpus, "hash": self._identity}
        return known | {"examples": sizes, "classes": list(self.labelled.classes)}


def name_inputs(tensors: tuple[Tensor, ...], device: torch.device) -> dict[str, Tensor]:
    """The arguments of a model of transformers, including labels."""
    labels = ("labels",) if len(tensors) == 3 else ("start_positions", "end_positions")
    names = ("input_ids", "attention_mask", *labels)
    return {name: x.to(device) for name, x in zip(names, tensors, strict=False)}


def load_texts(run: RetentionRun) -> Texts:
    """The texts of a run, cached in a process for all runs with the same dataset and tokenizer."""
    of = run.backbone
    kind = BackboneConfig(pretrained=of.pretrained, model_type=of.model_type, vocab_size=of.vocab_size)
    with run.dataset.errors_at(f"{file_of(run.suite)}: datasets.{run.dataset_name}"):
        return _texts(run.dataset, kind, run.start and run.start.model_folder)


_texts = functools.lru_cache(maxsize=8)(Texts)


def load_labelled(dataset: DatasetConfig) -> LabelledSet:
    """The labelled set of a task, with the first ``max_examples`` examples of each split by hash."""
    labelled = read_labelled(dataset.corpus, dataset.path, **dataset.options)
    if dataset.max_examples is None:
        return labelled
    splits = {
        split: sorted(found, key=lambda row: hashlib.sha256(f"{row.question}\n{row.text}".encode()).digest())[
            : dataset.max_examples
        ]
        for split, found in labelled.splits.items()
    }
    return LabelledSet(splits, labelled.classes, labelled.classes_are)


def _span(answer: tuple[int, int], offsets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The first and last token that overlap the answer; (0, 0) if no token overlaps."""
    touched = [i for i, (start, end) in enumerate(offsets) if start < answer[1] and end > answer[0]]
    return (touched[0], touched[-1]) if touched else (0, 0)


def train_tokenizer(labelled: LabelledSet, vocab_size: int):
    """A byte-level BPE trained on the training split, with BERT's special tokens."""
    pieces = sorted(f"{e.question}\n{e.text}" for e in labelled.splits["train"])
    return make_bert_tokenizer(learn_bpe(pieces, vocab_size, SPECIAL, UNK))


def make_bert_tokenizer(bpe: t.Tokenizer) -> PreTrainedTokenizerFast:
    """Converts a byte-pair tokenizer to transformers: ids remain, and BERT's special tokens are appended."""
    bpe.add_special_tokens([token for token in SPECIAL if bpe.token_to_id(token) is None])
    bpe.post_processor = _template(bpe)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, cls_token=CLS, sep_token=SEP, unk_token=UNK, mask_token=MASK
    )


def _template(bpe: t.Tokenizer, separators: int = 1) -> t.processors.TemplateProcessing:
    """The special tokens around a text, and around and between a question and its text."""
    return t.processors.TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {' '.join([SEP] * separators)} $B {SEP}",
        special_tokens=[(CLS, bpe.token_to_id(CLS)), (SEP, bpe.token_to_id(SEP))],
    )


def load_tokenizer(source: str | Path):
    """A fast tokenizer, by name or from the folder of a model."""
    try:
        if Path(source).is_dir() and (Path(source) / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(source)
        return AutoTokenizer.from_pretrained(source, use_fast=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise TrainingError(
            f"no tokenizer at {source} ({reason}); without a network put the model's folder there"
        ) from error
