"""Expected results of a call in float64, with a rounding-error budget for each element."""

import math

import pytest
import torch

from acp_repro.attention import forgetting_attention, reference
from acp_repro.attention.backends import HAS_TRITON
from acp_repro.attention.decay import LOG_FGATE_FLOOR, cumulative_log_fgate, cut_documents

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="pip install triton")
on_cpu = pytest.mark.skipif(
    DEVICE == "cuda", reason="tests the CPU path: run CUDA_VISIBLE_DEVICES= make test"
)
IMPLEMENTATIONS = [
    pytest.param("reference"),
    pytest.param("blockwise", marks=on_cpu),
    pytest.param("triton", marks=needs_triton),
]
NAMES = ("out", "dq", "dk", "dv", "dlog_fgate")
EPS = 2.0**-24  # the unit roundoff of float32, the dtype of all values between two matrix products
SIGMAS = 6.0  # standard deviations of a sum of roundings; a uniform rounding deviates by its bound / sqrt(3)
LEVELS = 5.0  # roundings of a number of the size of lse or a decay between a score and its weight


def expected(q, k, v, log_fgate, visible, scale, dtype, dout=None, fall=0.0):
    """{name: (value, budget)} of out and, with ``dout``, of every gradient (Equations 1 to 3).

    A budget propagates each rounding to the result. The weights P, dS and out are rounded to ``dtype`` (unit
    u) independently, which allows SIGMAS deviations of such a sum. Values in float32 have errors of a few EPS
    of their largest intermediate, counted as if all errors added up. The softmax cancels errors that all
    scores of a row share, so the error of a score counts by 1 - p; but the error of lse affects the backward
    pass in full.

    Args:
        q, dout: (B, H, Tq, D). k, v: (B, Hkv, Tk, D). log_fgate: (B, H, Tk). All float64.
        visible: (B, H, Tq, Tk) bool, entries that are neither masked nor pruned, in addition to causality.
        fall: nats that an implementation adds to all scores of a block and subtracts again.
    """
    u = torch.finfo(dtype).eps / 2
    least = torch.finfo(dtype).smallest_normal * u  # half of the smallest number
    chance = SIGMAS * u / math.sqrt(3)
    group, head_dim, shift = q.shape[1] // k.shape[1], q.shape[3], k.shape[2] - q.shape[2]
    k, v = (reference.shared_heads(x, q.shape[1]) for x in (k, v))
    scores = reference.attention_scores(q, k, log_fgate, sm_scale=scale, kept=visible)
    lse = scores.logsumexp(-1, keepdim=True)
    lse = lse.masked_fill(lse == -math.inf, 0.0)  # a row without keys
    p = (scores - lse).exp()
    out = p @ v

    product = EPS * 4 * math.sqrt(head_dim)  # error of a sum over D, relative to its terms
    total = EPS * (8 + 2 * math.sqrt(k.shape[2]))  # error of a sum over keys or queries
    c = cumulative_log_fgate(log_fgate)[..., shift:, None]
    decay = reference.decay_bias(log_fgate, q.shape[2])
    decay = decay.masked_fill(decay == -math.inf, 0.0)
    level = lse.abs() + decay.abs() + c.abs() * 2.0**-22 + fall
    score_noise = product * scale * (q.abs() @ k.abs().mT) + LEVELS * EPS * level
    noise = score_noise * (1 - 2 * p) + (p * score_noise).sum(-1, keepdim=True)
    budget = chance * (p.square() @ v.square()).sqrt()
    found = {"out": (out, budget + (p * (noise + total) + p.clamp(max=least)) @ v.abs(), u)}

    if dout is not None:
        dp = dout @ v.mT
        ds = p * (dp - (dout * out).sum(-1, keepdim=True))
        noise = noise + score_noise  # lse is stored; scores are recomputed, maybe in another order
        p_wrong = p * (noise + total) + p.clamp(max=least)
        dp_noise = product * (dout.abs() @ v.abs().mT)
        # delta, the row sums of dout * out, is computed from a rounded out, whose weights were rounded too.
        variance = (dout * out).square().sum(-1, keepdim=True) + (p * dp).square().sum(-1, keepdim=True)
        delta_variance = chance**2 * variance
        delta_noise = (p * noise * dp.abs()).sum(-1, True) + product * (dout * out).abs().sum(-1, True)
        ds_noise = noise * ds.abs() + p * (dp_noise + delta_noise)
        ds_wrong = ds_noise + total * ds.abs() + ds.abs().clamp(max=least)

        def over_heads(*shares):
            return (x.unflatten(1, (-1, group)).sum(2) for x in shares)

        def gradient(value, variance, linear, factor=1.0, unit=u):
            return value * factor, (variance.sqrt() + linear) * factor, unit

        variance = chance**2 * (ds.square() @ k.square()) + delta_variance * (p @ k).square()
        found["dq"] = gradient(ds @ k, variance, ds_wrong @ k.abs(), scale)
        variance = (chance**2 * ds.square() + delta_variance * p.square()).mT @ q.square()
        found["dk"] = gradient(*over_heads(ds.mT @ q, variance, ds_wrong.mT @ q.abs()), scale)
        variance = chance**2 * (p.square().mT @ dout.square())
        found["dv"] = gradient(*over_heads(p.mT @ dout, variance, p_wrong.mT @ dout.abs()))

        # A gate affects the decay of each pair of an earlier key and a query at the gate or later.
        above = torch.ones_like(ds[0, 0], dtype=torch.bool).triu(shift + 1)

        def across(x):
            return (x.cumsum(-1) - x).masked_fill(above, 0.0)

        # dc is a row sum minus a column sum. dS is computed once for each, so their errors do not cancel.
        apart = EPS * (2 + LEVELS * level) * ds.abs() + p * dp_noise
        sums = apart.sum(-2)
        sums[..., shift:] += apart.sum(-1)
        variance = (delta_variance * across(p).square()).sum(-2)
        variance = variance + (SIGMAS * sums).square().flip(-1).cumsum(-1).flip(-1)
        read = log_fgate >= LOG_FGATE_FLOOR
        gates = (x * read for x in (across(ds).sum(-2), variance, across(ds_noise).sum(-2)))
        found["dlog_fgate"] = gradient(*gates, unit=EPS)
    nothing = 4 * least if dtype == torch.float16 else 1e-33
    return {name: (x, budget + 2 * unit * x.abs() + nothing) for name, (x, budget, unit) in found.items()}


def judge(actual: dict[str, torch.Tensor], right: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The largest ratio of an error to its budget.

    Raises:
        AssertionError: the ratio is greater than 1; the message names the element.
    """
    worst = 0.0
    for name, x in actual.items():
        value, budget = right[name]
        require(x.shape == value.shape, f"{name} has shape {tuple(x.shape)}, not {tuple(value.shape)}")
        require(x.isfinite().all(), f"{name} holds {(~x.isfinite()).sum()} numbers that are not finite")
        ratio = (x.double() - value).abs() / budget
        if ratio.numel():
            largest, at = ratio.flatten().max(0)
            place = tuple(n.item() for n in torch.unravel_index(at, ratio.shape))
            require(
                largest <= 1,
                f"{name}{[*place]} is {x[place]:.6g} and not {value[place]:.6g}: {largest:.3g} times its "
                f"budget; {(ratio > 1).sum()} of {ratio.numel()} are over theirs",
            )
            worst = max(worst, largest.item())
    return worst


def require(true, message: str) -> None:
    """``assert`` without pytest's representation of the tensors."""
    if not true:
        raise AssertionError(message)


def make_inputs(
    seqlen_q, seqlen_k, heads=2, kv_heads=1, head_dim=16, batch=1, dtype=torch.float32, device=DEVICE
):
    """(q, k, v, log_fgate, dout), head first; even heads are local, odd ones global."""
    generator = torch.Generator().manual_seed(seqlen_q)

    def draw(heads, length):
        return torch.randn(batch, heads, length, head_dim, generator=generator).to(dtype)

    mean = torch.where(torch.arange(heads) % 2 == 0, 0.3, 1e-3)[:, None]
    log_fgate = -torch.rand(batch, heads, seqlen_k, generator=generator) * 2 * mean
    rows = [draw(heads, seqlen_q), *(draw(kv_heads, seqlen_k) for _ in "kv")]
    return [x.to(device) for x in (*rows, log_fgate, draw(heads, seqlen_q))]


def right(inputs, window, start, grid, documents=None, seq_start=None):
    """{name: (value, budget)} if row i sees keys i - window + 1 to i of its kept blocks and its document."""
    q, k, v, log_fgate, dout = (x.double() for x in inputs)
    keys = torch.arange(k.shape[2], device=q.device)
    rows = keys[k.shape[2] - q.shape[2] :, None]
    visible = (rows - keys < window) & reference.kept_entries(start, q.shape[2], k.shape[2], *grid)
    if documents is not None:
        number = torch.bucketize(keys, documents, right=True)
        visible, log_fgate = visible & (number == number[rows]), cut_documents(log_fgate, documents)
    if seq_start is not None:
        visible = visible & (keys >= seq_start[:, None, None, None])
    fall = 128.0 if DEVICE == "cpu" else 0.0
    return expected(q, k, v, log_fgate, visible, q.shape[3] ** -0.5, inputs[0].dtype, dout, fall)


def run(inputs, implementation, **options):
    """Output and gradients, and the start index."""
    leaves = [x.detach().requires_grad_() for x in inputs[:4]]
    out, start = forgetting_attention(
        *leaves, head_first=True, implementation=implementation, return_start_index=True, **options
    )
    results = (out.detach(), *torch.autograd.grad(out, leaves, inputs[4]))
    return dict(zip(NAMES, results, strict=True)), start
