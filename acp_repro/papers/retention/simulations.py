"""Tests the appendices' claims on problems that are small enough for an exact solution:
``python -m acp_repro.papers.retention.simulations --suite SUITE``.

The command writes ``results/SUITE/benchmark/estimator.csv``, ``variance.csv`` and ``complexity.csv``.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from acp_repro.common.command import command, described_parser, run_command
from acp_repro.pipeline.paper import with_columns
from acp_repro.pipeline.provenance import processor_name
from acp_repro.pipeline.records import write_suite_records
from acp_repro.pipeline.suite_file import load_suite
from acp_repro.retention.gates import hard_concrete

TEMPERATURES = (0.1, 0.2, 0.33, 0.5, 0.66, 0.8, 1.0, 1.5)
STRETCH = (-0.1, 1.1)
TOKENS, PROBLEMS, SAMPLES = 8, 5, 200_000
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def draw_problem(seed: int) -> tuple[Tensor, Tensor]:
    """Random (weights, scores), (T,) float64 each, for the loss softplus(-sum_t weight_t z_t)."""
    generator = torch.Generator().manual_seed(seed)
    weights = 2 * torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    return weights, torch.randn(TOKENS, generator=generator, dtype=torch.float64)


def compute_loss(weights: Tensor, z: Tensor) -> Tensor:
    """The smooth and nonlinear loss softplus(-sum_t weight_t z_t), (...,) float64 for z (..., T)."""
    return torch.nn.functional.softplus(-(weights * z).sum(-1))


def compute_exact_gradient(weights: Tensor, scores: Tensor) -> Tensor:
    """The gradient (T,) float64 with respect to s of the expected loss for z ~ Bernoulli(sigmoid(s)), summed
    over all 2^T masks."""
    scores = scores.clone().requires_grad_()
    masks = torch.tensor(list(itertools.product((0.0, 1.0), repeat=len(scores))), dtype=scores.dtype)
    p = torch.sigmoid(scores)
    probability = torch.where(masks > 0, p, 1 - p).prod(-1)
    (gradient,) = torch.autograd.grad((probability * compute_loss(weights, masks)).sum(), scores)
    return gradient


def sample_gradients(
    weights: Tensor, scores: Tensor, temperature: float, stretch: tuple[float, float] | None, u: Tensor
) -> Tensor:
    """The gradient (samples, T) float64 with respect to s, through the relaxed z, for each row of noise
    ``u``.

    Args:
        stretch: None omits stretch and clamp (the plain Concrete relaxation).
    """
    each = scores.expand_as(u).clone().requires_grad_()
    if stretch is None:
        z = torch.sigmoid((each + torch.log(u) - torch.log1p(-u)) / temperature)
    else:
        z = hard_concrete(each, u, temperature, stretch)
    (gradient,) = torch.autograd.grad(compute_loss(weights, z).sum(), each)
    return gradient


def draw_noise(samples: int, tokens: int, seed: int) -> Tensor:
    """Uniform noise (samples, T) float64 in (0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(samples, tokens, generator=generator, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)


@with_columns(
    "relaxation",
    "swept_temperature",
    "problem",
    "tokens",
    "samples",
    "relative_bias",
    "relative_bias_error",
    "relative_variance",
)
def simulate_estimator() -> Iterator[dict[str, Any]]:
    """Appendix D: the bias of the relaxed gradient relative to the exact gradient, by temperature."""
    for seed in range(PROBLEMS):
        weights, scores = draw_problem(seed)
        exact, u = compute_exact_gradient(weights, scores), draw_noise(SAMPLES, TOKENS, seed)
        for temperature in TEMPERATURES:
            for name, stretch in (("hard_concrete", STRETCH), ("concrete", None)):
                found = sample_gradients(weights, scores, temperature, stretch, u)
                bias = found.mean(0) - exact
                error = found.var(0) / SAMPLES
                yield {
                    "relaxation": name,
                    "swept_temperature": temperature,
                    "problem": seed,
                    "tokens": TOKENS,
                    "samples": SAMPLES,
                    "relative_bias": float(bias.norm() / exact.norm()),
                    "relative_bias_error": float(error.sum().sqrt() / exact.norm()),
                    "relative_variance": float(found.var(0).sum() / exact.square().sum()),
                }


@with_columns("batch_samples", "repeats", "gradient_variance")
def simulate_variance() -> Iterator[dict[str, Any]]:
    """Appendix E: the variance of the mean gradient of B samples, by B."""
    weights, scores = draw_problem(0)
    repeats = 4000
    for batch in BATCHES:
        u = draw_noise(repeats * batch, TOKENS, batch)
        found = sample_gradients(weights, scores, 0.66, STRETCH, u).view(repeats, batch, TOKENS).mean(1)
        yield {"batch_samples": batch, "repeats": repeats, "gradient_variance": float(found.var(0).sum())}


@with_columns(
    "tokens", "kept_tokens", "repeats", "complexity", "complexity_ratio", "claimed_ratio", "root_ratio"
)
def simulate_complexity() -> Iterator[dict[str, Any]]:
    """Appendix H: the empirical Rademacher complexity of {x -> w.x, |w| <= 1} with M of T random tokens kept.

    The complexity of this class is E |sum_i sigma_i (x_i * z_i)| / n in closed form, so that only the signs
    are sampled.
    """
    examples, tokens, repeats = 100, 64, 200
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(examples, tokens, generator=generator, dtype=torch.float64)
    whole = None
    for kept in (64, 48, 32, 16, 8, 4, 2, 1):
        norms = []
        for _ in range(repeats):
            order = torch.rand(examples, tokens, generator=generator).argsort(1)
            z = (order < kept).to(x)
            signs = torch.randint(0, 2, (examples, 1), generator=generator) * 2.0 - 1
            norms.append((signs * x * z).sum(0).norm() / examples)
        value = float(torch.stack(norms).mean())
        whole = whole or value
        yield {
            "tokens": tokens,
            "kept_tokens": kept,
            "repeats": repeats,
            "complexity": value,
            "complexity_ratio": value / whole,
            "claimed_ratio": kept / tokens,
            "root_ratio": math.sqrt(kept / tokens),
        }


@command()
def main(arguments: list[str] | None = None) -> None:
    parser = described_parser("papers.retention.simulations", __doc__)
    parser.add_argument(
        "--suite", default="retention", help="a name in experiments/ or a YAML file (default: retention)"
    )
    suite = load_suite(parser.parse_args(arguments).suite)
    about = {"device": processor_name(), "dtype": "float64"}
    for metric in map(suite.paper.metric, ("estimator", "variance", "complexity")):
        print(write_suite_records(suite.name, suite.paper, metric, metric.measure()(), **about))


if __name__ == "__main__":
    run_command(main)
