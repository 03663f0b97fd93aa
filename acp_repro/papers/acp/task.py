"""The training task of a Forgetting Transformer (Appendix B) for the shared trainer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from acp_repro.attention import shard_sequence
from acp_repro.model import FoXForCausalLM, load_pretrained, save_pretrained
from acp_repro.model.capture import AttentionInputs, watch_attention
from acp_repro.model.config import peak_flops
from acp_repro.model.layers import ForgettingAttentionCore
from acp_repro.pipeline.benchmark.baselines import find_official
from acp_repro.pipeline.data import prepare
from acp_repro.pipeline.needle.documents import NeedleSequences
from acp_repro.pipeline.paper import Suite
from acp_repro.pipeline.provenance import device_name
from acp_repro.pipeline.run import file_of
from acp_repro.pipeline.training.run_folder import check_trained_text
from acp_repro.pipeline.training.task import Task
from acp_repro.pipeline.training.trainer import warmup_and_cosine

from .runs import FoXRun
from .trained import TrainedFoX


class FoXTask(Task):
    """Next-token prediction on sequences of the run's corpus."""

    run: FoXRun
    trained_type = TrainedFoX

    def __init__(self, run: FoXRun):
        super().__init__(run)
        config = run.training
        self.steps, self.step_tokens = run.steps, config.batch_tokens
        self.micro_batches = config.batch_tokens // config.micro_batch_tokens
        self.context_parallel, self._group = config.context_parallel, None
        self.whole_graphs = config.implementation == "auto"
        self._rows = config.micro_batch_tokens // run.context_length
        with run.data.errors_at(f"{file_of(run.suite)}: data"):
            self.corpus = prepare(run.data)
        self._sequences = self.corpus.sequences("train", run.context_length, run.seed)
        if run.needle_fraction:
            self._sequences = NeedleSequences(self._sequences, self.corpus.tokenizer, run.needle_fraction)
        self._config = run.model_config(self.corpus.vocab_size)

    def build(self) -> FoXForCausalLM:
        model = FoXForCausalLM(self._config, self.run.training.gradient_checkpointing)
        if self.run.perturb_init:
            perturb(model, self.run.perturb_init)
        if self.run.training.implementation == "official":
            for block in model.model.layers:
                block.attn.core = OfficialCore()
        return model

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """(input_ids, labels), each (B, T) int64."""
        whole = self._sequences.batch(index, self._rows)
        if self._group is None:
            return whole
        # Labels are computed on the whole sequence, so no label is missing at the edge of a shard.
        return tuple(shard_sequence(x, self._group) for x in whole)

    def share_sequences(self, model: FoXForCausalLM, group: ProcessGroup) -> None:
        model.set_context_parallel(group)
        self._group = group

    def loss(self, model: nn.Module, input_ids: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids, labels=labels).mean()

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine to 0 at the last token (Appendix B)."""
        config, size = self.run.training, self.run.size
        factor = warmup_and_cosine(
            step * config.batch_tokens, config.batch_tokens, config.warmup_tokens, size.tokens
        )
        return size.learning_rate * factor

    def blocks(self, model: FoXForCausalLM) -> list[nn.Module]:
        return list(model.model.layers)

    def watch(self, model: nn.Module, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        """``pruned_ratio`` of each layer on the first sequence of input_ids (B, T) int64."""
        if self.run.log_pruning_tolerance is None:
            return {}
        return {"pruned_ratio": pruned_ratio_per_layer(model, input_ids[:1])}

    def shown(self, watched: dict[str, Any]) -> str:
        ratios = watched.get("pruned_ratio")
        return f"pruned {sum(ratios) / len(ratios):.0%}" if ratios else ""

    def speed(self, tokens_per_s: float, device: torch.device, ranks: int, watched: dict) -> dict[str, float]:
        """``mfu_nominal`` and ``mfu_executed``: fractions of the GPU's peak.

        The first counts all FLOPs, the second only the FLOPs that remain after pruning.
        """
        peak = peak_flops(device_name(device), self.run.training.dtype)
        if peak is None:
            return {}
        ratios = watched.get("pruned_ratio")
        pruned = sum(ratios) / len(ratios) if ratios else 0.0
        return {
            name: tokens_per_s
            * self._config.flops_per_token(self.run.context_length, keep_ratio)
            / (peak * ranks)
            for name, keep_ratio in (("mfu_nominal", 1.0), ("mfu_executed", 1.0 - pruned))
        }

    def describe(self, model: nn.Module) -> dict[str, Any]:
        return {
            "parameters": self._config.num_parameters(),
            "data": self.corpus.describe(self.run.context_length),
        }

    def save(self, model: nn.Module, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        save_pretrained(model, folder, weights)
        self.corpus.save_tokenizer(folder)

    def load(self, folder: Path, device: torch.device) -> FoXForCausalLM:
        return load_pretrained(folder).to(device)

    def trained(self, suite: Suite, device: torch.device) -> TrainedFoX:
        # A tokenizer trained on another corpus assigns the ids to other tokens.
        if self.run.weights is None and self.run.data.bpe_size:
            check_trained_text(self.run, self.run.data.corpus, self.corpus.describe()["hash"])
        return super().trained(suite, device)


class OfficialCore(ForgettingAttentionCore):
    """The authors' attention kernels, which torch.compile cannot trace."""

    def __init__(self):
        super().__init__()
        self._attend = torch.compiler.disable(find_official())

    def forward(self, q, k, v, log_fgate, adaptive_threshold, seq_start=None, cu_seqlens=None) -> Tensor:
        assert seq_start is None and cu_seqlens is None, "training sequences have no padding and no documents"
        return self._attend(q, k, v, log_fgate, head_first=True, adaptive_threshold=adaptive_threshold)


def perturb(model: FoXForCausalLM, which: int = 1) -> None:
    """Changes weight ``which`` of the first query projection to the next bfloat16 number: the smallest change
    that affects the matrix products."""
    weight = model.model.layers[0].attn.q_proj.weight
    with torch.no_grad():
        one = weight.view(-1)[which - 1 : which]
        one.copy_(torch.nextafter(one.bfloat16(), torch.full_like(one, torch.inf).bfloat16()))


def pruned_ratio_per_layer(model: nn.Module, input_ids: Tensor) -> list[float]:
    """The pruned ratio of each layer on ``input_ids`` (B, T), averaged over sequences and heads; empty for an
    exact model. With sharded weights every rank must call this function."""
    ratios: dict[int, Tensor] = {}

    def see(layer: int, inputs: AttentionInputs) -> None:
        if inputs.threshold is not None:
            ratios[layer] = inputs.count().pruned_ratio.mean()

    with watch_attention(model, see):
        model(input_ids, return_hidden=True)
    return torch.stack([ratios[layer] for layer in sorted(ratios)]).tolist() if ratios else []
