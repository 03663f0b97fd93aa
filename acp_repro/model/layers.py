"""The modules of a FoX block (Section 2; the Pro components of Section 4.1).

Shapes: x is (B, T, hidden) between modules; q, k, v are (B, H, T, D) where attention is computed.
Parameter names are those of the official checkpoints, so a state dict needs no translation.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from acp_repro.attention import forgetting_attention
from acp_repro.attention.context_parallel import bound_over_ranks
from acp_repro.attention.decay import document_starts, threshold_offset
from acp_repro.attention.exchange import previous_tokens, shard_positions
from acp_repro.attention.op import launches_alone, threshold_from_norms
from acp_repro.attention.threshold import (
    find_threshold,
    logit_bound_from_norms,
    logit_bound_from_qk_norm,
    pruning_threshold,
)

from .config import ROPE_BASE, FoXConfig
from .layer_cache import LayerCache
from .modules import is_plain, join_weights, joint_products, kernels_of, runs_kernels, split_product
from .norms import HeadRMSNorm

# The QK-norm of the official models has its own epsilon, independent of norm_eps.
QK_NORM_EPS = 1e-5


class Linear(nn.Linear):
    """nn.Linear, initialised as in the paper (Appendix B): N(0, std^2), bias 0."""

    def __init__(self, in_features: int, out_features: int, std: float, bias: bool = False):
        self.std = std  # before nn.Linear.__init__, which calls reset_parameters
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # on the meta device, torch would import its compiler
            nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def token_shift(
    z: Tensor, shift_logit: Tensor, previous: Tensor | None = None, starts: Tensor | None = None
) -> Tensor:
    """Data-dependent token shift: y_t = a_t z_{t-1} + (1 - a_t) z_t with a = sigmoid(shift_logit), float32.

    Args:
        z: (B, T, H, D). shift_logit: (B, T, H).
        previous: (B, 1, H, D), z just before the first token; None is zero, the sequence's start.
        starts: (T,) or (B, T) bool, tokens before which z counts as zero, the starts of packed documents, or
            None.

    Returns:
        (B, T, H, D) in the dtype of z.
    """
    a = torch.sigmoid(shift_logit.float()).unsqueeze(-1)
    wide = z.float()
    first = torch.zeros_like(wide[:, :1]) if previous is None else previous.float()
    if starts is not None:
        first = first.masked_fill(starts[..., :1, None, None], 0.0)
    # Two parts, both computed from slices, which the backward pass takes again. A shifted copy of z would be
    # saved for the backward pass, in compiled code in float32.
    first = torch.lerp(wide[:, :1], first, a[:, :1])
    before = wide[:, :-1]
    if starts is not None:
        before = before.masked_fill(starts[..., 1:, None, None], 0.0)
    rest = torch.lerp(wide[:, 1:], before, a[:, 1:])
    # In three dimensions: with four dimensions and one token, the compiler would assume the layout "channels
    # last" for all tensors and copy them back.
    parts = [part.to(z.dtype).flatten(2) for part in (first, rest)]
    return torch.cat(parts, dim=1).view(z.shape)


def shift_shard(z: Tensor, shift_logit: Tensor, starts: Tensor | None, group: ProcessGroup) -> Tensor:
    """:func:`token_shift` of this rank's shard of a sequence, whose two chunks become rows of the batch."""
    previous = previous_tokens(z, group).flatten(0, 1)[:, None]
    chunks, logits = (x.unflatten(1, (2, -1)).flatten(0, 1) for x in (z, shift_logit))
    starts = None if starts is None else starts.view(2, -1)  # packed documents have a batch of one
    return token_shift(chunks, logits, previous, starts).view(z.shape)


def make_rotation(position: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """RoPE's cosines (T, 1, 1, D / 2) and sines (T, 1, 2, D / 2), float32, of positions (T,) int64; see
    :func:`rotate`.

    The angles are computed in float64, because float32 has few fractional bits for the angles of long texts.
    """
    pair = torch.arange(0, head_dim, 2, dtype=torch.float64, device=position.device)
    angle = position[:, None, None, None] * ROPE_BASE ** (-pair / head_dim)
    sin = angle.sin().float()
    return angle.cos().float(), torch.cat((-sin, sin), dim=-2)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE of x (B, T, H, D): elements i and i + D / 2 are a pair. In float32; returned in the dtype of x."""
    cos, sin = rotation
    pairs = x.float().unflatten(-1, (2, -1))
    return (pairs * cos + pairs.flip(-2) * sin).flatten(-2).to(x.dtype)


class ShiftedLinear(nn.Module):
    """A projection to heads followed by the token shift, for keys or values of FoX (Pro)."""

    context_parallel: ProcessGroup | None = None  # see set_context_parallel

    def __init__(self, hidden_size: int, num_heads: int, std: float):
        super().__init__()
        self.num_heads = num_heads
        self.linear = Linear(hidden_size, hidden_size, std)
        self.shift_proj = Linear(hidden_size, num_heads, std)

    def forward(
        self,
        x: Tensor,
        previous: Tensor | None = None,
        padding: Tensor | None = None,
        starts: Tensor | None = None,
        z: Tensor | None = None,
        shift_logit: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Projects x (B, T, hidden) and shifts, see :func:`token_shift`.

        Args:
            padding: (B, T) bool, tokens that count as z = 0, or None.
            z, shift_logit: (B, T, hidden) and (B, T, H), the two products of x, if they are computed already.

        Returns:
            y and z, both (B, T, H, D) in the dtype of the product. The last z is ``previous`` of the next
            call, and all that decoding has to remember.
        """
        logit: Tensor = self.shift_proj(x) if shift_logit is None else shift_logit
        # Under tensor parallelism, this rank has fewer heads than the config.
        new: Tensor = (self.linear(x) if z is None else z).unflatten(-1, (logit.shape[-1], -1))
        if padding is not None:
            new = new.masked_fill(padding[..., None, None], 0.0)
        if self.context_parallel is not None:
            return shift_shard(new, logit, starts, self.context_parallel), new
        return token_shift(new, logit, previous, starts), new


class ForgettingAttentionCore(nn.Module):
    """The attention itself, without parameters: the one place where a model computes it.

    It is a module so that measuring code can watch its inputs and outputs with forward hooks. Set its
    ``implementation`` to choose one; see ``forgetting_attention``.
    """

    context_parallel: ProcessGroup | None = None  # see set_context_parallel

    def __init__(self, implementation: str = "auto"):
        super().__init__()
        self.implementation = implementation

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_fgate: Tensor,
        adaptive_threshold: Tensor | None,
        seq_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """``forgetting_attention`` (B, H, Tq, D), heads first; the threshold is (H,), (B, H) or None."""
        return forgetting_attention(
            q,
            k,
            v,
            log_fgate,
            head_first=True,
            seq_start=seq_start,
            cu_seqlens=cu_seqlens,
            adaptive_threshold=adaptive_threshold,
            implementation=self.implementation,
            context_parallel=self.context_parallel,
        )


class ForgettingAttentionLayer(nn.Module):
    """Projections, token shift, QK-norm, forget gate or RoPE, attention, output norm and gate."""

    context_parallel: ProcessGroup | None = None  # see set_context_parallel

    def __init__(self, config: FoXConfig):
        super().__init__()
        self.fuse_training = config.fuse_training
        hidden, heads, std = config.hidden_size, config.num_heads, config.initializer_range
        self.num_heads = heads
        self.head_dim = config.head_dim
        self.log_pruning_tolerance = config.log_pruning_tolerance
        self.shifts = {"k": config.use_k_shift, "v": config.use_v_shift}

        def kv_proj(shifted: bool) -> Linear | ShiftedLinear:
            return ShiftedLinear(hidden, heads, std) if shifted else Linear(hidden, hidden, std)

        def qk_norm() -> HeadRMSNorm:
            return HeadRMSNorm(heads, config.head_dim, QK_NORM_EPS, config.qk_norm_share_param_across_head)

        self.q_proj = Linear(hidden, hidden, std)
        self.k_proj = kv_proj(self.shifts["k"])
        self.v_proj = kv_proj(self.shifts["v"])
        self.o_proj = Linear(hidden, hidden, std)
        self.fgate_proj = None if config.use_rope else Linear(hidden, heads, std, bias=True)
        self.ogate_proj = Linear(hidden, hidden, std) if config.use_output_gate else None
        self.q_norm, self.k_norm = (qk_norm() if config.qk_norm else None for _ in "qk")
        self.output_norm = (
            HeadRMSNorm(heads, config.head_dim, config.norm_eps) if config.use_output_norm else None
        )
        self.core = ForgettingAttentionCore()

    def forward(
        self,
        x: Tensor,
        cache: LayerCache | None = None,
        seq_start: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """(B, T, hidden) -> (B, T, hidden).

        Args:
            cache: x holds the tokens after the cached ones, and the cache is extended in place.
            seq_start: (B,) int64, the first real token of each row, counted from the cache's first.
            cu_seqlens: (documents + 1,) integer, the starts of documents packed into one row.
            rotation: of these tokens, see :func:`make_rotation`; with ``use_rope`` alone.
        """
        if self._can_fuse(x, cache, seq_start is None and cu_seqlens is None):
            return self._run_fused(x, cache)
        joint = self.fuse_training and torch.is_grad_enabled()
        products = self._multiply_jointly(x) if joint else {}

        def product(name: str, projection: Any) -> Tensor:
            return products[name] if name in products else projection(x)

        if self.fgate_proj is None:  # gates of 1: no decay
            log_fgate = x.new_zeros((len(x), self.num_heads, x.shape[1]), dtype=torch.float32)
        else:  # float32 from here on, because gates are summed over thousands of tokens
            log_fgate = F.logsigmoid(product("fgate", self.fgate_proj).float()).transpose(1, 2)
        padding = starts = None
        if seq_start is not None:
            position = shard_positions(x.shape[1], self.context_parallel, x.device)
            padding = position + (0 if cache is None else cache.parent.length) < seq_start[:, None]
        if cu_seqlens is not None:
            starts = document_starts(cu_seqlens, x.shape[1] * self._ranks())
            starts = starts[shard_positions(x.shape[1], self.context_parallel, x.device)]
        q = self._split_heads(product("q", self.q_proj))
        k, v = (
            self._shift(name, projection, x, products, cache, padding, starts)
            for name, projection in self._keys_and_values()
        )
        gate = None if self.ogate_proj is None else self._split_heads(product("ogate", self.ogate_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.fgate_proj is None:
            assert rotation is not None
            q, k = rotate(q, rotation), rotate(k, rotation)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        threshold = self._find_threshold(q, k, cache)
        if cache is None:
            out = self.core(q, k, v, log_fgate, threshold, seq_start, cu_seqlens)
        else:
            out = cache.attend(self.core, q, k, v, log_fgate, threshold)
        out = out.transpose(1, 2)

        if self.output_norm is not None:
            out = self.output_norm(out, gate)
        elif gate is not None:
            out = out * torch.sigmoid(gate)
        return self.o_proj(out.flatten(2))

    def _ranks(self) -> int:
        """The number of ranks that share the sequence."""
        return 1 if self.context_parallel is None else self.context_parallel.size()

    def _keys_and_values(self) -> tuple[tuple[str, Linear | ShiftedLinear], ...]:
        return ("k", self.k_proj), ("v", self.v_proj)

    def _projections(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The projections of x by name: wide ones, and narrow ones to one number per head."""
        wide, narrow = {"q": self.q_proj}, {}
        for name, projection in self._keys_and_values():
            if isinstance(projection, ShiftedLinear):
                wide[name], narrow[f"{name}_shift"] = projection.linear, projection.shift_proj
            else:
                wide[name] = projection
        if self.ogate_proj is not None:
            wide["ogate"] = self.ogate_proj
        if self.fgate_proj is not None:
            narrow["fgate"] = self.fgate_proj
        return wide, narrow

    def _multiply_jointly(self, x: Tensor) -> dict[str, Tensor]:
        """Products of x by name, computed as one; none if somebody watches their projections."""
        # In eager mode, the narrow projections share a product. Compiled blocks join all projections: x then
        # has one gradient instead of a sum of five, and the copy that joins the weights also converts them.
        wide, narrow = self._projections()
        joint = wide | narrow if torch.compiler.is_compiling() else narrow
        if not joint or not is_plain(*joint.values()):
            return {}
        return dict(zip(joint, joint_products(x, *joint.values()), strict=True))

    def _multiply(self, x: Tensor, cache: LayerCache | None) -> dict[str, Tensor]:
        """Products of x with all projections by name, in inference: for few rows by one kernel."""
        kernels = kernels_of("step")
        wide, narrow = self._projections()
        every = wide | narrow
        few = x[..., 0].numel() <= kernels.FEW_ROWS and not torch.is_autocast_enabled(x.device.type)
        weights = [p.weight for p in every.values()] if few and is_plain(*every.values()) else []
        if weights and all(w.dtype == x.dtype and w.is_contiguous() for w in weights):
            found = kernels.multiply_rows(x, weights, [p.bias for p in every.values()])
            return dict(zip(every, found, strict=True))
        products = {name: projection(x) for name, projection in wide.items()}
        if not is_plain(*narrow.values()):
            return products | {name: projection(x) for name, projection in narrow.items()}
        if cache is None:
            parts = joint_products(x, *narrow.values())
        else:
            # Weights do not change while a cache is in use, so they are joined once.
            cache.joint_weights = cache.joint_weights or join_weights([*narrow.values()])[0]
            parts = split_product(F.linear(x, *cache.joint_weights), *narrow.values())
        return products | dict(zip(narrow, parts, strict=True))

    @staticmethod
    def join_narrow(layers: "list[ForgettingAttentionLayer]", caches: list[LayerCache]) -> None:
        """Stores the joint weights of all layers in their caches: a few kernels join those of all layers."""
        groups = [[*layer._projections()[1].values()] for layer in layers]
        kinds = {tuple((p.out_features, p.weight.dtype, p.weight.device) for p in one) for one in groups}
        if groups[0] and len(kinds) == 1 and is_plain(*(p for one in groups for p in one)):
            for cache, joint in zip(caches, join_weights(*groups), strict=True):
                cache.joint_weights = joint

    def _can_fuse(self, x: Tensor, cache: LayerCache | None, whole: bool) -> bool:
        """Whether this layer has all of FoX (Pro), and nobody watches what `_run_fused` does not call.

        ``whole`` tells whether all rows of x are one sequence each, without padding.
        """
        own = (self.k_proj, self.v_proj, self.q_norm, self.k_norm, self.output_norm)
        if cache is not None:
            ready = cache.fuses
        else:  # in a mode of PyTorch that intercepts operators, modules compute
            ready = whole and runs_kernels(x) and self.context_parallel is None and launches_alone((x,))
        shifts = isinstance(self.k_proj, ShiftedLinear) and isinstance(self.v_proj, ShiftedLinear)
        complete = ready and shifts and all((*own, self.ogate_proj, self.fgate_proj))
        return complete and is_plain(*filter(None, own))

    def _run_fused(self, x: Tensor, cache: LayerCache | None) -> Tensor:
        """:meth:`forward` on a GPU without gradients: a few kernels do its small operations."""
        kernels, names, norm = kernels_of("step"), ("k_shift", "v_shift"), self.output_norm
        assert self.q_norm and self.k_norm and norm
        products = self._multiply(x, cache)
        given = [products[name] for name in ("q", "k", "v", *names, "fgate")]
        states = [None if cache is None else cache.shift_state(name) for name in names]
        ends: list[Tensor | None] = [None, None]
        if cache is not None and (x.shape[1] > 1 or states[0] is None):  # one token overwrites the states
            ends = [z.new_empty(len(z), 1, self.num_heads, self.head_dim) for z in given[1:3]]
        weights = (self.q_norm.weight, self.k_norm.weight, self.num_heads)
        q, k, v, log_fgate = kernels.shift_and_norm(*given, *states, *ends, *weights, QK_NORM_EPS)
        threshold = self._find_threshold(q, k, cache, kernels)
        if cache is None:
            out = self.core(q, k, v, log_fgate, threshold)
        else:
            for name, end in zip(names, ends, strict=True):
                if end is not None:
                    cache.keep_shift_state(name, end, own=True)
            out = cache.attend(self.core, q, k, v, log_fgate, threshold)
        return self.o_proj(kernels.norm_and_gate(out, products["ogate"], norm.weight, norm.eps))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # tensor parallelism splits the heads

    def _shift(
        self,
        name: str,
        projection: nn.Module,
        x: Tensor,
        products: dict[str, Tensor],
        cache: LayerCache | None,
        padding: Tensor | None,
        starts: Tensor | None,
    ) -> Tensor:
        """Keys or values (B, T, H, D) of x; ``products`` may contain their products."""
        z, state = products.get(name), f"{name}_shift"
        if not self.shifts[name]:
            return self._split_heads(projection(x) if z is None else z)
        previous = None if cache is None else cache.shift_state(state)
        y, z = projection(x, previous, padding, starts, z, products.get(state))
        if cache is not None:
            cache.keep_shift_state(state, z)
        return y

    @torch.no_grad()
    def _find_threshold(
        self, q: Tensor, k: Tensor, cache: LayerCache | None, kernels: Any = None
    ) -> Tensor | None:
        """delta of Section 3, (H,), (B, H) or None; L is the number of keys, or a cache's most.

        ``kernels`` are those of ``step_kernels``, if they may read the weights.
        """
        # U comes from the weights of QK-norm. Without QK-norm, or if hooks may change its output, U comes
        # from the norms of q and k.
        if self.log_pruning_tolerance is None:
            if cache is not None:
                cache.no_eviction_reason = (
                    "attention is exact (log_pruning_tolerance is None), so no key is pruned"
                )
            return None
        if cache is not None and cache.threshold is not None:
            return cache.threshold
        length = k.shape[-2] * self._ranks()
        if cache is not None:
            length = cache.parent.max_length or cache.parent.length + length
        if self.q_norm is None or self.k_norm is None or not is_plain(self.q_norm, self.k_norm):
            if self.context_parallel is not None:
                bound = bound_over_ranks(q, k, None, self.context_parallel)
                return find_threshold(bound, length, self.log_pruning_tolerance)
            if cache is None:
                return threshold_from_norms(q, k, log_pruning_tolerance=self.log_pruning_tolerance)
            cache.no_eviction_reason = (
                "delta comes from measured norms (the model has no QK-norm, or a changed one), and a longer "
                "query or key lowers it later"
            )
            # The largest norm of all past keys is stored, so no step reads the keys again.
            bound = logit_bound_from_norms(q, cache.longest_key(k))
            return pruning_threshold(bound, length, self.log_pruning_tolerance)
        # Weights do not change while a cache is in use, so this bound (Appendix E) is computed once.
        bound = None if cache is None else cache.logit_bound
        weights = (self.q_norm.weight, self.k_norm.weight, self.num_heads, self.head_dim)
        if bound is None and kernels is not None:
            offset = threshold_offset(length, self.log_pruning_tolerance)
            bound, threshold = kernels.bound_and_threshold(*weights, offset, q.dtype)
        else:
            bound = logit_bound_from_qk_norm(*weights, dtype=q.dtype) if bound is None else bound
            threshold = pruning_threshold(bound, length, self.log_pruning_tolerance)
        if cache is not None:
            cache.logit_bound = bound
            if cache.parent.max_length is None:
                cache.no_eviction_reason = (
                    "delta falls as the text grows, unless FoXCache is given a max_length"
                )
            else:
                cache.threshold = threshold.expand(q.shape[:2]).contiguous()
        return threshold
