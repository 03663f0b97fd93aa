"""The runs of ACP's suites, and the selections of runs for each metric and figure."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from acp_repro.model.config import FoXConfig
from acp_repro.pipeline import data
from acp_repro.pipeline.data.config import DataConfig
from acp_repro.pipeline.paper import Suite, first_seeds
from acp_repro.pipeline.run import Run, file_of

from .schema import SIZE_OVERRIDES, File, SizeConfig, TrainingConfig

# Below this number of weights in the blocks, ranks replicate them (DDP); above it, ranks shard them (FSDP2).
FSDP_FROM = 300_000_000
BLOCK_TOKENS = {"bfloat16": 128, "float32": 64}  # of the pruning grid, queries or keys
PAPER_TOLERANCE = -10.0  # log epsilon, Section 3
# The settings that the runs of one comparison share, and the settings that could change the pruned ratio.
_SHAPE = attrgetter(
    *("architecture", "context_length", "size.num_hidden_layers", "size.hidden_size", "size.head_dim"),
    "size.tokens",
)
_SUSPECTS = attrgetter(
    *("needle_fraction", "size.learning_rate", "size.qk_norm_share_param_across_head", "size.vocab_size")
)


@dataclass(frozen=True, kw_only=True, eq=False)
class FoXRun(Run):
    """One training run of a Forgetting Transformer."""

    architecture: str
    size_name: str
    size: SizeConfig
    context_length: int
    log_pruning_tolerance: float | None
    training: TrainingConfig
    data: DataConfig
    needle_fraction: float = 0.0  # fraction of the training sequences that contain needles
    perturb_init: bool | int = False  # k: the k-th weight is initially changed by one unit of bfloat16

    @property
    def name(self) -> str:
        """For example ``pro-760m-16k-acp``. The exact pair ends in ``exact``, another seed in ``-seed1``, and
        ``-needles10`` denotes needles in 10 % of the training sequences."""
        length = self.context_length
        tokens = f"{length // 1024}k" if length % 1024 == 0 else str(length)
        tolerance = self.log_pruning_tolerance
        method = "exact" if tolerance is None else "acp"
        if tolerance not in (None, PAPER_TOLERANCE):
            method += f"{-tolerance:g}"
        needles = f"-needles{100 * self.needle_fraction:g}" if self.needle_fraction else ""
        seed = f"-seed{self.seed}" if self.seed else ""
        perturbed = (
            f"-nudged{self.perturb_init if self.perturb_init > 1 else ''}" if self.perturb_init else ""
        )
        return f"{self.architecture}-{self.size_name.lower()}-{tokens}-{method}{needles}{seed}{perturbed}"

    @property
    def setting(self) -> tuple:
        """The value that is equal for all seeds of one setting."""
        return (
            self.architecture,
            self.size_name,
            self.context_length,
            self.log_pruning_tolerance,
            self.needle_fraction,
            self.perturb_init,
        )

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run; the last step may exceed the token budget."""
        return -(-self.size.tokens // self.training.batch_tokens)

    def columns(self) -> dict[str, Any]:
        return {
            "architecture": self.architecture,
            "size": self.size_name,
            "context_length_tokens": self.context_length,
            "log_pruning_tolerance": self.log_pruning_tolerance,
            "seed": self.seed,
        }

    def parallel_mode(self, ranks: int) -> str:
        """``none`` for one rank, else ``ddp`` or ``fsdp`` as configured; ``auto`` chooses by model size."""
        if ranks > 1 and self.training.parallel == "auto" and self.size.non_embedding >= FSDP_FROM:
            return "fsdp"
        return super().parallel_mode(ranks)

    def model_config(self, vocab_size: int) -> FoXConfig:
        """The config of the model of this run, for a vocabulary of ``vocab_size`` ids."""
        return getattr(FoXConfig, self.architecture)(
            vocab_size=vocab_size,
            hidden_size=self.size.hidden_size,
            num_hidden_layers=self.size.num_hidden_layers,
            num_heads=self.size.num_heads,
            qk_norm_share_param_across_head=self.size.qk_norm_share_param_across_head,
            log_pruning_tolerance=self.log_pruning_tolerance,
            max_position_embeddings=self.context_length,
        )


def make_run(file: File, suite: str, where: str, *, size: str, context_length: int, **point: Any) -> FoXRun:
    """The run of a point of the grid; raises ValueError with the key of an invalid value."""
    if size not in file.sizes:
        raise ValueError(f"{where}.size: no size {size!r} under sizes, which has {', '.join(file.sizes)}")
    shape = file.sizes[size]
    try:
        training = dataclasses.replace(file.training, **shape.training_overrides)
    except ValueError as error:
        raise ValueError(f"sizes.{size}.{error}") from None
    if training.micro_batch_tokens % context_length:
        key = "training" if shape.micro_batch_tokens is None else f"sizes.{size}"
        raise ValueError(
            f"{key}.micro_batch_tokens: {training.micro_batch_tokens} must be a multiple of the context "
            f"length {context_length}"
        )
    shard = 2 * training.context_parallel * BLOCK_TOKENS[training.dtype]
    if training.context_parallel > 1 and context_length % shard:
        raise ValueError(
            f"training.context_parallel: {training.context_parallel} ranks need a context length that is a "
            f"multiple of {shard}, two chunks of whole blocks for each rank, not {context_length}"
        )
    data = file.data
    if shape.vocab_size is not None:
        data = dataclasses.replace(data, tokenizer={"bpe": shape.vocab_size})
    if training.warmup_tokens > shape.tokens:
        raise ValueError(
            f"training.warmup_tokens: {training.warmup_tokens} are more than the {shape.tokens} tokens of "
            f"sizes.{size}, so its learning rate would only rise; give fewer"
        )
    run = FoXRun(
        suite=suite,
        training=training,
        weights=file.weights,
        size_name=size,
        size=dataclasses.replace(shape, **dict.fromkeys(SIZE_OVERRIDES)),  # moved to `training`
        context_length=context_length,
        data=data,
        **point,
    )
    run.model_config(1)  # an invalid shape or epsilon fails here
    return run


class FoXSuite(Suite):
    """A suite of Forgetting Transformers."""

    runs: tuple[FoXRun, ...]

    def check(self) -> None:
        self.chosen_run("run_for_heads")
        self.chosen_run("run_for_sweep")

    def check_text(self, runs: Iterable[FoXRun]) -> None:
        for run in {(repr(run.data), run.context_length): run for run in runs}.values():
            with run.data.errors_at(f"{file_of(run.suite)}: data"):
                corpus = data.prepare(run.data)
                for split in ("train", "heldout") if run.data.heldout != 0 else ("train",):
                    corpus.sequences(split, run.context_length)

    @property
    def run_for_heads(self) -> FoXRun:
        """The run whose heads are shown (Figures 1, 4, 5, 6)."""
        runs = self.select(architecture="pro", acp=True) or list(self.runs)
        return self.chosen_run("run_for_heads") or min(_largest(runs), key=attrgetter("context_length"))

    @property
    def run_for_sweep(self) -> FoXRun:
        """The run on which epsilon, block size and context length are varied (Figure 7)."""
        return self.chosen_run("run_for_sweep") or self.run_for_heads

    def select(self, *, acp: bool | None = None, **wanted: Any) -> list[FoXRun]:
        """Runs whose attributes equal ``wanted``, such as ``architecture="pro"``; ``acp=True`` for ACP.

        Runs that train with needles or from a changed weight are excluded unless ``wanted`` names that key.
        """
        wanted = {"needle_fraction": 0.0, "perturb_init": False} | wanted
        return [
            run
            for run in self.runs
            if all(getattr(run, key) == value for key, value in wanted.items())
            and (acp is None or (run.log_pruning_tolerance is not None) == acp)
        ]

    def union(self, *some: Iterable[FoXRun]) -> list[FoXRun]:
        """The runs of several lists, each once, in the order of the suite."""
        chosen = {run for runs in some for run in runs}
        return [run for run in self.runs if run in chosen]

    def with_acp(self, architecture: str) -> list[FoXRun]:
        """One run with ACP for each size and context length: the lowest seed, with the paper's epsilon, else
        with the smallest epsilon."""
        runs = first_seeds(self.select(architecture=architecture, acp=True))
        runs.sort(key=lambda run: (run.log_pruning_tolerance == PAPER_TOLERANCE, -run.log_pruning_tolerance))
        best = {(run.size_name, run.context_length): run for run in runs}  # the last of several
        return self.union(best.values())

    def pairs(self, architecture: str, largest: bool | None = None) -> list[FoXRun]:
        """Runs that exist both with ACP (log epsilon = -10) and exact, with otherwise equal settings (Figure
        3), and their other seeds. ``largest`` selects only the largest size (True) or all others (False)."""
        paired = _paired(self.select(architecture=architecture))
        top = _largest(paired)
        return self.with_all_seeds([run for run in paired if largest is None or (run in top) == largest])

    def evaluated(self, architecture: str) -> list[FoXRun]:
        """Runs for the downstream tasks (Tables 1 and 3): all pairs; without pairs, the runs with ACP."""
        return self.pairs(architecture) or self.with_acp(architecture)

    def has_exact_pair(self, run: FoXRun) -> bool:
        """Whether the suite contains ``run`` both with ACP (log epsilon = -10) and exact."""
        return run in _paired(self.runs)

    def needle_runs(self, architecture: str, longest: bool) -> list[FoXRun]:
        """Runs for the needle test: those of the largest size with pairs; without pairs, runs with ACP.
        ``longest`` selects the longest context of this size (Figures 3 and 11), otherwise the shorter
        contexts are selected (Figure 9)."""
        runs = first_seeds(self.pairs(architecture)) or self.with_acp(architecture)
        top = max((run.context_length for run in _largest(runs)), default=0)
        if longest:
            return [run for run in _largest(runs) if run.context_length == top]
        return _largest([run for run in runs if run.context_length < top])

    @property
    def rope_baselines(self) -> list[FoXRun]:
        """Exact runs of FoX (Pro), and of the RoPE baseline with otherwise equal settings."""
        fox, rope = (self.select(architecture=name, acp=False) for name in ("pro", "rope"))
        shape = attrgetter("size_name", "context_length", "seed")
        both = set(map(shape, fox)) & set(map(shape, rope))
        return self.union(run for run in (*fox, *rope) if shape(run) in both)

    @property
    def trained_with_needles(self) -> list[FoXRun]:
        """Pairs of runs whose training text contains needles, for all seeds."""
        return _paired(run for run in self.runs if run.needle_fraction)

    @property
    def needle_trainings(self) -> list[FoXRun]:
        """The runs of :attr:`trained_with_needles`, and as null distribution the exact runs from a changed
        weight."""
        pairs = self.trained_with_needles
        exact = [run for run in self.runs if run.log_pruning_tolerance is None]
        null = [run for run in exact if run.perturb_init and run.needle_fraction]
        return self.union(pairs, null) if pairs else []

    @property
    def ablations(self) -> list[FoXRun]:
        """Runs with ACP that differ in the seed or in one setting that could change the pruned ratio; empty
        if all runs share learning rate, vocabulary, needle fraction and QK-norm."""
        runs = [run for run in self.runs if run.log_pruning_tolerance == PAPER_TOLERANCE]
        runs = [run for run in runs if _SHAPE(run) == _SHAPE(runs[0])]
        return runs if len(set(map(_SUSPECTS, runs))) > 2 else []

    @property
    def longest_trained(self) -> list[FoXRun]:
        """The run of FoX (Pro) with ACP that trains on the most tokens, and its exact pair. Ties select the
        largest model, then the longest context. If any run has a pair, runs without a pair are ignored."""
        runs = self.with_acp("pro")
        runs = [run for run in runs if self.has_exact_pair(run)] or runs
        if not runs or self.weights is not None:  # ready weights have no log
            return []
        best = max(runs, key=lambda run: (run.size.tokens, run.size.non_embedding, run.context_length))
        alike = {"size_name": best.size_name, "context_length": best.context_length}
        exact = first_seeds(self.select(architecture="pro", acp=False, **alike))
        return [run for run in self.runs if run in (best, *exact)]


def _paired(runs: Iterable[FoXRun]) -> list[FoXRun]:
    """The runs in ``runs`` that have both an ACP variant (log epsilon = -10) and an exact variant with
    otherwise equal settings."""
    runs = [run for run in runs if run.log_pruning_tolerance in (PAPER_TOLERANCE, None)]
    keys = [(*run.setting[:3], *run.setting[4:], run.seed) for run in runs]  # all but the tolerance
    return [run for run, key in zip(runs, keys, strict=True) if keys.count(key) == 2]


def _largest(runs: list[FoXRun]) -> list[FoXRun]:
    """The runs of the largest size."""
    top = max((run.size.non_embedding for run in runs), default=0)
    return [run for run in runs if run.size.non_embedding == top]
