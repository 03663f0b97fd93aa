"""The reconstruction of held-out texts, after training and in the log of the training run."""

from typing import Any

import torch
from rapidfuzz.distance import Levenshtein
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import corpus_bleu
from torch import Tensor

from acp_repro.common.command import progress_bar
from acp_repro.common.files import read_json_lines
from acp_repro.lap.decoder import decode_teacher
from acp_repro.pipeline.paper import with_columns

from ..task import TrainedPruning


@with_columns(
    "decoding",
    "measured_texts",
    "keep_ratio",
    "token_accuracy",
    "bleu",
    "rouge_l",
    "exact_match",
    "edits_per_token",
)
@torch.no_grad()
def measure_reconstruction(trained: TrainedPruning) -> list[dict[str, Any]]:
    """Three records, one for each input of the decoder.

    ``soft``: the true earlier tokens, and the memory under the soft mask, as in training. ``removed``: the
    true earlier tokens, and a memory without the removed tokens. ``free``: the decoder's own earlier tokens
    (free-running), and the memory of ``removed``.

    The accuracy of ``free`` compares positions. ``keep_ratio`` is a mean over texts: for ``soft`` the
    article's L(S) / L or, with hard concrete gates, the expected keep ratio; for the others the actual one.
    """
    rows = trained.heldout_rows(trained.measure_settings.scored_texts)
    written: dict[str, list[list[int]]] = {"soft": [], "removed": [], "free": []}
    ratios: dict[str, list[Tensor]] = {"soft": [], "removed": []}
    model = trained.model
    for input_ids in progress_bar(
        trained.batches(rows), desc=f"{trained.run.name}: reconstruction", leave=False
    ):
        memory = model.encode_ids(input_ids)
        inputs = model.shift_right(input_ids)
        soft = model(input_ids, mask="soft")
        encoded = model.encode_tokens(input_ids, "soft")
        for name, vectors, mask in (
            ("soft", encoded.hidden, encoded.memory_mask),
            ("removed", memory.vectors, memory.mask),
        ):
            logits = decode_teacher(model.t5, vectors, mask, inputs, model.pruning.decoder_window)
            best = logits.argmax(-1).tolist()
            written[name] += [row[:n] for row, n in zip(best, memory.lengths.tolist(), strict=True)]
        written["free"] += model.decode_ids(memory.vectors, memory.mask, 2 * input_ids.shape[1])
        ratios["soft"].append(soft.lengths[-1] / soft.lengths[0])
        ratios["removed"].append(memory.keep_ratio)
    eos = trained.task.tokenizer.eos_id
    written["free"] = [[*row, eos] for row in written["free"]]
    means = {name: float(torch.cat(parts).mean()) for name, parts in ratios.items()}
    means["free"] = means["removed"]
    return [
        {
            "decoding": name,
            "measured_texts": len(rows),
            "keep_ratio": means[name],
            **_scores(trained, rows, found),
        }
        for name, found in written.items()
    ]


def _scores(trained: TrainedPruning, rows: list[list[int]], found: list[list[int]]) -> dict[str, float]:
    """Token accuracy (mean over tokens), BLEU, ROUGE-L and exact match, from 0 to 1, and edits per token."""
    right = sum(a == b for one, two in zip(rows, found, strict=True) for a, b in zip(one, two, strict=False))
    texts, ours = (
        [trained.task.tokenizer.decode(row) for row in rows],
        [trained.task.tokenizer.decode(row) for row in found],
    )
    rouge = RougeScorer(["rougeL"])
    edits = [Levenshtein.distance(one, two) for one, two in zip(rows, found, strict=True)]
    return {
        "token_accuracy": right / sum(map(len, rows)),
        "bleu": corpus_bleu(ours, [texts]).score / 100,
        "rouge_l": sum(rouge.score(one, two)["rougeL"].fmeasure for one, two in zip(texts, ours, strict=True))
        / len(texts),
        "exact_match": sum(one == two for one, two in zip(texts, ours, strict=True)) / len(texts),
        "edits_per_token": sum(edits) / sum(map(len, rows)),
    }


SINGLE = ("accuracy", "soft_accuracy")
BY_GATE = ("keep_ratio", "soft_ratio")


@with_columns("step", "loss_nats", "series", "gate_index", "value")
def measure_dynamics(trained: TrainedPruning) -> list[dict[str, Any]]:
    """One record for each watched step and series; a series of one gate has the index of the gate, from 0.

    ``keep_ratio`` and ``soft_ratio`` are fractions of the tokens before the first gate.
    """
    rows = []
    for line in read_json_lines(trained.run.folder / "metrics.jsonl"):
        if "accuracy" not in line:
            continue
        common = {"step": line["step"], "loss_nats": line["loss_nats"]}
        rows += [{**common, "series": name, "gate_index": None, "value": line[name]} for name in SINGLE]
        for name in BY_GATE:
            rows += [
                {**common, "series": name, "gate_index": g, "value": v} for g, v in enumerate(line[name])
            ]
    return rows
