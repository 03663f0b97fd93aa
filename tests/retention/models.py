"""Tiny encoders with random weights, one of every supported type."""

import copy

import torch
import transformers

from acp_repro.retention import RetentionConfig, retain

SMALL = {"vocab_size": 60, "max_position_embeddings": 80, "num_labels": 3, "pad_token_id": 0}
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 48}
CONFIGS = {
    "DistilBert": lambda: transformers.DistilBertConfig(
        dim=32, n_heads=4, n_layers=3, hidden_dim=48, **SMALL
    ),
    "Bert": lambda: transformers.BertConfig(**SIZES, **SMALL),
    "Roberta": lambda: transformers.RobertaConfig(**SIZES, **SMALL),
    "Longformer": lambda: transformers.LongformerConfig(attention_window=8, sep_token_id=2, **SIZES, **SMALL),
}
METHODS = ("adaptive", "random", "h2o", "top", "infor_coef")
HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering")


def build(kind="DistilBert", head="SequenceClassification", dtype=torch.float32, **changes):
    """A model in evaluation mode with deterministic weights."""
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    if head == "QuestionAnswering":
        config.num_labels = 2
    for name, value in changes.items():
        setattr(config, name, value)
    return getattr(transformers, f"{kind}For{head}")(config).to(dtype).eval()


def batch(rows=4, length=24, seed=0):
    """Token ids with padding on the right; 2 is the separator: twice after the question, and at the end."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (rows, length), generator=generator)
    ids[:, 0], ids[:, 4], ids[:, 5] = 1, 2, 2
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, length - 3 * row :] = 0
        ids[row, length - 3 * row - 1] = 2
    return {"input_ids": ids * mask, "attention_mask": mask}


def labels_for(head, inputs):
    rows, length = inputs["input_ids"].shape
    if head == "SequenceClassification":
        return {"labels": torch.arange(rows) % 3}
    if head == "TokenClassification":
        return {"labels": torch.arange(rows * length).view(rows, length) % 3}
    return {"start_positions": torch.full((rows,), 6), "end_positions": torch.full((rows,), 8)}


def answers(output):
    """All logits of a head."""
    names = [n for n in ("logits", "start_logits", "end_logits") if getattr(output, n, None) is not None]
    return torch.stack([getattr(output, name).flatten() for name in names])


def retained(model, budget=0.4, **settings):
    settings = {"sep_token_id": 2, "over_budget": "keep", **settings}
    return retain(copy.deepcopy(model), RetentionConfig(budget, **settings)).eval()
