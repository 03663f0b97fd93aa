"""The loss increase when keys of the prompt are evicted, at the memory budget of ACP (``eviction``).

Each policy selects the keys that remain at the end of the prompt. Each selection is applied in three ways:
the weights of the other keys are scaled, or masked, or the rows of these keys are removed from memory.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from acp_repro.attention.decay import cumulative_log_fgate
from acp_repro.model import FoXForCausalLM
from acp_repro.model.capture import AttentionInputs, watch_attention
from acp_repro.model.layers import ForgettingAttentionCore
from acp_repro.pipeline.paper import with_columns
from acp_repro.pipeline.training.trainer import autocast

from ..trained import LabelledBatches, PassSettings

PROMPT_SHARE = 0.75  # share of the context
BLOCK, BIN = 64, 128  # tokens per block of ACP, and per record
SINKS, PROTECTED = 4, 64  # first keys that `window` keeps; first and latest keys that `random` keeps
SCALE = 0.1  # factor of the weights in the treatment `scaled`
POLICIES = ("acp", "window", "lru", "random", "h2o", "oracle")
TREATMENTS = ("scaled", "masked", "removed")
Kept = list[Tensor]  # (H, prompt) bool of each layer


@with_columns(
    "policy",
    "treatment",
    "prompt_tokens",
    "position",
    "measured_tokens",
    "kept_bytes",
    "full_bytes",
    "loss_nats",
    "loss_increase_nats",
    "largest_loss_increase_nats",
)
def measure_eviction(
    model: FoXForCausalLM, batches: LabelledBatches, settings: PassSettings
) -> list[dict[str, Any]]:
    """Records by policy, treatment and position after the prompt, from batches of one sequence.

    The prompt is the first three quarters of the sequence. ``acp`` keeps the keys from the boundary of each
    head onwards. ``oracle`` keeps equally many keys: those with the largest weights of later queries over all
    heads. Every other policy keeps the same number of keys in each head, in total at most as many as ``acp``.

    ``loss_increase_nats`` is relative to the same rows without eviction; ``largest_loss_increase_nats`` is
    the increase of the worst row.
    """
    config = model.config
    assert config.log_pruning_tolerance is not None, "a model that prunes nothing"
    losses: dict[tuple[str, str], list[Tensor]] = {}
    exact: list[Tensor] = []
    prompt = kept_keys = sequences = 0
    for input_ids, labels in batches:
        prompt = int(PROMPT_SHARE * input_ids.shape[1]) // BLOCK * BLOCK
        scores: dict[str, Kept] = {policy: [] for policy in POLICIES}
        with watch_attention(model, functools.partial(add_scores, scores, prompt)):
            exact.append(_late_losses(model, input_ids, labels, prompt, settings.dtype))
        kept = choose_keys(scores)
        kept_keys += sum(int(of_layer.sum()) for of_layer in kept["acp"])
        sequences += 1
        for policy in POLICIES:
            for treatment in TREATMENTS:
                with evicting(model, kept[policy], treatment):
                    loss = _late_losses(model, input_ids, labels, prompt, settings.dtype)
                losses.setdefault((policy, treatment), []).append(loss)
    without = torch.cat(exact)
    key_bytes = 2 * config.head_dim * next(model.parameters()).element_size()
    heads = config.num_hidden_layers * config.num_heads
    return [
        {
            "policy": policy,
            "treatment": treatment,
            "prompt_tokens": prompt,
            "position": index * BIN,
            "measured_tokens": part.numel(),
            "kept_bytes": kept_keys * key_bytes // sequences,
            "full_bytes": heads * prompt * key_bytes,
            "loss_nats": float(part.mean(dtype=torch.float64)),
            "loss_increase_nats": float((part - before).mean(dtype=torch.float64)),
            "largest_loss_increase_nats": float((part - before).max()),
        }
        for (policy, treatment), found in losses.items()
        for index, (part, before) in enumerate(
            zip(torch.cat(found).split(BIN, 1), without.split(BIN, 1), strict=True)
        )
    ]


def _late_losses(model: FoXForCausalLM, input_ids: Tensor, labels: Tensor, prompt: int, dtype: str) -> Tensor:
    """(1, T - prompt): the loss of each token after the prompt that has a label."""
    with torch.no_grad(), autocast(input_ids.device, dtype):
        return model.loss_per_token(input_ids, labels)[:, prompt:].double().cpu()


def add_scores(scores: dict[str, Kept], prompt: int, _layer: int, inputs: AttentionInputs) -> None:
    """Appends to each policy the scores (H, prompt) of the keys of a layer's first sequence. The policy keeps
    the keys with the largest scores."""
    c = cumulative_log_fgate(inputs.log_fgate)[0]
    boundary = inputs.boundary(BLOCK, BLOCK)[0, :, prompt // BLOCK]
    keys = torch.arange(prompt, device=c.device)
    scores["acp"].append(keys >= boundary[:, None] * BLOCK)
    received, last_used, needed = [], [], []
    queries = torch.arange(1, len(c[0]) + 1, device=c.device)
    for head in range(len(c)):
        logits = inputs.q[0, head] @ inputs.k[0, head].T * inputs.q.shape[-1] ** -0.5
        logits = logits.float() + (c[head][:, None] - c[head]).float()
        weights = logits.masked_fill(queries[:, None] <= queries - 1, -math.inf).softmax(-1)
        of_prompt = weights[:prompt, :prompt]
        used = of_prompt >= 1 / queries[:prompt, None]
        received.append(of_prompt.sum(0))
        last_used.append((used * queries[:prompt, None]).amax(0) + keys / prompt)  # ties: the latest key
        needed.append(weights[prompt:, :prompt].sum(0))
    scores["h2o"].append(torch.stack(received))
    scores["lru"].append(torch.stack(last_used))
    scores["oracle"].append(torch.stack(needed))
    scores["window"].append(keys.double().masked_fill(keys < SINKS, math.inf).expand(len(c), -1))
    generator = torch.Generator().manual_seed(len(scores["random"]))
    chance = torch.rand(len(c), prompt, generator=generator).to(c.device)
    protected = (keys < PROTECTED) | (keys >= prompt - PROTECTED)
    scores["random"].append(chance.masked_fill(protected, math.inf))


def choose_keys(scores: dict[str, Kept]) -> dict[str, Kept]:
    """The keys that each policy keeps; half of the keys of ``h2o`` are the latest, as in its code."""
    kept = {"acp": scores["acp"]}
    total = sum(int(of_layer.sum()) for of_layer in kept["acp"])
    each = total // sum(len(of_layer) for of_layer in kept["acp"])
    for policy in ("window", "lru", "random", "h2o"):
        kept[policy] = []
        for of_layer in scores[policy]:
            if policy == "h2o":
                of_layer = of_layer.clone()
                of_layer[:, of_layer.shape[1] - each // 2 :] = math.inf
            chosen = of_layer.topk(each, -1).indices
            kept[policy].append(torch.zeros_like(of_layer, dtype=torch.bool).scatter(1, chosen, True))
    needed = torch.stack(scores["oracle"])
    chosen = needed.flatten().topk(total).indices
    best = torch.zeros(needed.numel(), dtype=torch.bool, device=needed.device).index_fill(0, chosen, True)
    kept["oracle"] = [*best.view_as(needed)]
    return kept


@contextlib.contextmanager
def evicting(model: torch.nn.Module, kept: Kept, treatment: str) -> Iterator[None]:
    """A context in which queries after the prompt attend to the ``kept`` keys of the prompt and to all later
    keys."""

    def replace_late(of_layer: Tensor, _module: torch.nn.Module, arguments: tuple, out: Tensor) -> Tensor:
        late = attend_late(AttentionInputs(*arguments), of_layer, treatment)
        return torch.cat([out[:, :, : of_layer.shape[1]], late.to(out.dtype)], 2)

    cores = [module for module in model.modules() if isinstance(module, ForgettingAttentionCore)]
    with contextlib.ExitStack() as stack:
        for core, of_layer in zip(cores, kept, strict=True):
            stack.enter_context(core.register_forward_hook(functools.partial(replace_late, of_layer)))
        yield


def attend_late(inputs: AttentionInputs, kept: Tensor, treatment: str) -> Tensor:
    """The output (1, H, T - prompt, D) of the queries after the prompt, for one sequence."""
    prompt, length = kept.shape[1], inputs.q.shape[2]
    c = cumulative_log_fgate(inputs.log_fgate)[0]
    bias = (c[:, prompt:, None] - c[:, None]).to(inputs.q.dtype)
    keys = torch.arange(length, device=c.device)
    bias.masked_fill_(keys > keys[prompt:, None], -math.inf)
    survives = F.pad(kept, (0, length - prompt), value=True)
    queries = inputs.q[:, :, prompt:]
    if treatment == "removed":
        heads = []
        for head, of_head in enumerate(survives):
            rows = of_head.nonzero()[:, 0]
            k, v = (x[:, head, rows] for x in (inputs.k, inputs.v))
            heads.append(
                F.scaled_dot_product_attention(queries[:, head], k, v, attn_mask=bias[head][:, rows])
            )
        return torch.stack(heads, 1)
    penalty = math.log(SCALE) if treatment == "scaled" else -math.inf
    bias += torch.where(survives, 0.0, penalty)[:, None].to(bias.dtype)
    return F.scaled_dot_product_attention(queries, inputs.k, inputs.v, attn_mask=bias[None])
