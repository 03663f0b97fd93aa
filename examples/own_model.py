"""Forgetting attention in a model of one's own: ``python examples/own_model.py``, some seconds on a CPU.

The task is to repeat: a sequence is random tokens, then the same tokens again. Who predicts the second
half has to look back a fixed distance, and may forget what lies further back. The layer learns which; with
adaptive computation pruning it then skips the blocks that its gates have made negligible.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from acp_repro import ForgettingAttentionLayer, FoXConfig

VOCABULARY, PERIOD, LENGTH = 16, 8, 192


class OwnModel(nn.Module):
    """An embedding, two residual blocks of which the attention is ours, and a linear head."""

    def __init__(self, width: int = 64, heads: int = 2, log_pruning_tolerance: float | None = -10.0):
        super().__init__()
        # The layer reads its sizes and switches here; what it has no use for stays at the defaults.
        config = FoXConfig.pro(
            hidden_size=width, num_heads=heads, log_pruning_tolerance=log_pruning_tolerance
        )
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = nn.ModuleList(ForgettingAttentionLayer(config) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) integer -> (B, T, vocabulary) logits. There is no position embedding: the gates order."""
        x = self.embedding(tokens)
        for norm, attention in zip(self.norms, self.attention, strict=True):
            x = x + attention(norm(x))
        return self.head(x)


def make_batch(size: int, generator: torch.Generator) -> Tensor:
    """(size, LENGTH + 1) tokens that repeat every PERIOD tokens."""
    period = torch.randint(0, VOCABULARY, (size, PERIOD), generator=generator)
    return period.repeat(1, LENGTH // PERIOD + 1)[:, : LENGTH + 1]


def train(model: nn.Module, steps: int = 150, seed: int = 0) -> float:
    """Trains in place; the mean loss of the last ten steps, in nats a token, without the first period."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        batch = make_batch(8, generator)
        logits = model(batch[:, :-1])[:, PERIOD:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1 + PERIOD :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    return sum(losses[-10:]) / 10


if __name__ == "__main__":
    torch.manual_seed(0)
    loss = train(OwnModel())
    print(f"loss {loss:.3f} nats a token; guessing costs {torch.log(torch.tensor(VOCABULARY)):.3f}")
