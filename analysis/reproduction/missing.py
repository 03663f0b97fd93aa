"""What is still missing: the one list, at the end of REPRODUCTION.md.

Most of it is read from the suites and from the claims without records.
"""

from __future__ import annotations

from typing import NamedTuple

from acp_repro.pipeline import plan
from acp_repro.pipeline.paper import Suite

from ..verdict import Status
from .gather import Section


class Gap(NamedTuple):
    """Something that nobody has measured, and what would close it."""

    what: str
    how: str


# What no suite and no claim names.
WRITTEN = {
    "acp": (
        Gap(
            "SciQ in Tables 1 and 3: its file here lacks the wrong answers",
            "the file of the Hub: a suite without `measure.lm_eval_data`",
        ),
        Gap(
            'the step from which the losses of a pair differ, where Table A1 has "not recorded"',
            "nothing: they were not kept, and a new training is another pair. New pairs keep `step_losses`",
        ),
        Gap(
            "exact seed 0 of `h200-needle`, asked for many facts and with the loss of every step",
            "that run again: its weights are gone",
        ),
        Gap(
            "the pruned share after training with the paper's batch of 524,288 tokens",
            "suite `h200-arms` with `training.batch_tokens`",
        ),
        Gap(
            "trainings without ACP of 360M at 8k and of 760M at 8k and 16k, for more pairs in `h200-sizes`",
            "`log_pruning_tolerance: [-10]` taken out of its [grid](experiments/h200-sizes.yaml)",
        ),
        Gap(
            "suite `h200-speed`: training steps of the authors' model at 760M and 16k",
            "the command in [its file](experiments/h200-speed.yaml), with `--run NAME`",
        ),
    ),
    "retention": (
        Gap(
            "`haystack` at 50 % of the tokens, with gates after the blocks, and its sweeps",
            "lines in the grid of [its file](experiments/retention-h200.yaml)",
        ),
        Gap(
            "`masked_loss` of four of the five pre-trainings behind suite `retention-h200`",
            "all of the suite again, from one pre-training: their weights are gone",
        ),
        Gap(
            "times of six blocks with gates after them at 50 % and at 4,096 tokens, and of ablations at 50 %",
            "more names under `timed` of [its file](experiments/retention-h200.yaml)",
        ),
        Gap(
            "scores of single items of CUAD and books; more seeds of all but dense, AR and the ablations",
            "all runs of a task again, from one pre-training",
        ),
        Gap(
            "ToP, Infor-Coef, `facts`, `haystack` and roles on 12 blocks",
            "lines in the grid of [its file](experiments/retention-h200-deep.yaml)",
        ),
        Gap(
            "QASPER: its sample goes through a GPU, and is too small to learn from",
            "the whole of QASPER; suite `retention-paper` has the sample",
        ),
    ),
}
# Studies whose code is at the tag v1-full, and what came.
ANSWERED = {
    "acp": (
        (
            "[Figure A3](figures/h200-long/figureA3.md)",
            "past its training length of 16k a model prunes more (88 % at 32k, 90 % at 64k), at no more loss",
        ),
        (
            "[Figure A4](figures/h200-long/figureA4.md)",
            "past the training length of 16k a pair's mean losses differ by 0.001 nats, up to 64k",
        ),
        (
            "[Figure A5](figures/h200-long/figureA5.md), extrapolated",
            "a line through a log of 100M tokens says 82 % pruned after 400M; a longer run came to 86 %",
        ),
        ("`tune_attention`", "the present tiles of the portable kernels are the fastest on a Hopper GPU"),
    )
}


def gaps(section: Section) -> tuple[Gap, ...]:
    """All that is missing of one paper: whole suites, runs of a suite, figures, and what is written down."""
    unmeasured = {
        line.item.label: line for line in section.lines if line.item and line.status is Status.MISSING
    }
    return (
        *(_of_suite(suite) for suite in section.suites if suite.file.published is False),
        *(_of_runs(suite) for suite in section.suites if suite.not_run),
        *(Gap(f"{label}: {line.item.title}", line.ours) for label, line in unmeasured.items()),
        *WRITTEN.get(section.paper.name, ()),
    )


def _of_suite(suite: Suite) -> Gap:
    drawn = any(plan.is_usual(suite, i) and i.runs(suite) for i in suite.paper.items)
    how = f"`make all SUITE={suite.name}`" if drawn else f"the commands in [its file]({suite.path})"
    return Gap(f"suite `{suite.name}`, {len(suite.runs)} runs: {suite.description}", how)


def _of_runs(suite: Suite) -> Gap:
    how = f"take them out of `not_run`; `make all SUITE={suite.name}`"
    count, alike = len(suite.not_run), {}
    for run in suite.not_run:
        alike.setdefault(run.name.removesuffix(f"-seed{run.seed}"), []).append(run)
    names = (
        f"{name} (seeds {', '.join(str(run.seed) for run in runs)})" if len(runs) > 1 else runs[0].name
        for name, runs in alike.items()
    )
    words = f"{count} run{'s' * (count > 1)} of suite `{suite.name}` (`not_run` in [its file]({suite.path}))"
    return Gap(f"{words}: {', '.join(names)}", how)
