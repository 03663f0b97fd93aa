"""Figures 3, 8 and 11: held-out loss at each position of the context, with and without ACP."""

from __future__ import annotations

import pandas as pd

from acp_repro.common.statistics import equivalence, over_draws

from .. import drawing, style
from ..tables import one_each, some
from ..verdict import Verdict, Word
from . import naming, paired, statistics, versions

LOSS_WITHIN_NATS = 0.002
POSITION_NATS = 0.01  # the margin at one position, where a loss is the mean over a window
ONE_BIT = "loss, one weight moved"  # a test of the metric same_weights
REPEAT = "exact, a second time"  # a training run of the metric first_divergence
WEAK_TOLERANCE = -20.0
OFFICIAL = "official-pairs"  # the suite whose runs the authors' kernels train
MODEL = ["size", "context_length_tokens"]
PAIR = ["architecture", *MODEL, "seed"]


def draw(records: pd.DataFrame) -> drawing.Figure:
    """A column for each size and context length: the losses at each position with ACP and exact, and below
    them the difference and the spread between seeds.

    Args:
        records: ``loss_curve`` records of runs with ACP and of their exact pairs.

    Raises:
        UnfitRecords: a run lacks its pair.
    """
    curves, unlike = statistics.loss_differences(records), versions.unlike(records, PAIR)
    gaps, seeds = statistics.largest_gaps(curves), seeds_apart(records)
    marked = dict(zip(records["size"], naming.marked(records), strict=True))
    models = list(curves.groupby(MODEL, sort=False))
    options = {"rows": 2, "sharex": "col", "sharey": "row", "squeeze": False}
    width = style.COLUMN_INCHES if len(models) == 1 else style.PAGE_INCHES
    figure, axes = drawing.panels(len(models), 3.4, width, **options)
    for (top, ax), (model, of_model) in zip(axes.T, models, strict=True):
        size, length = model
        pairs = gaps[(gaps[MODEL] == list(model)).all(axis=1)]
        mark = "†" * any(_mark(row, unlike) for row in pairs.itertuples())
        top.set_title(f"{marked[size]}, {style.length_label(length)}{mark}")
        if size in seeds.index:
            apart = seeds[size]
            ax.fill_between(apart.index, -apart, apart, color="0.9", lw=0, label="two seeds")
        for end in (-LOSS_WITHIN_NATS, LOSS_WITHIN_NATS):
            ax.axhline(end, color="0.4", lw=0.8, ls="--", label=f"criterion, ±{LOSS_WITHIN_NATS:g} nats")
        for _, curve in of_model.groupby("seed"):
            position = curve["position"]
            top.plot(position, curve["exact"], color=style.ROLES["exact"], alpha=0.4, lw=2.5, label="exact")
            top.plot(position, curve["acp"], color=style.ROLES["acp"], lw=1, label="ACP")
            ax.plot(position, curve["difference"], color=style.ROLES["acp"], lw=1)
        if same := (pairs["gap_nats"] == 0).sum():
            words = "identical" if same == len(pairs) else f"{same} of {len(pairs)} identical"
            ax.text(0.97, 0.98, words, transform=ax.transAxes, ha="right", va="top")
            ax.margins(y=0.22)  # room for the text above the criterion
        style.token_axis(ax.xaxis, int(length))
        ax.set_xlabel("token position")
    axes[0, 0].set_ylabel("loss (nats)")
    axes[1, 0].set_ylabel("ACP − exact (nats)")
    drawing.legend(figure, 5, title=versions.notes(unlike) or None)
    return figure


def seeds_apart(records: pd.DataFrame) -> pd.Series:
    """The largest difference between seeds of one setting, by size and position."""
    setting = [*statistics.CURVE, "log_pruning_tolerance"]
    losses = records.groupby(setting, dropna=False)["loss_nats"]
    apart = (losses.max() - losses.min())[losses.size() > 1]
    return apart.groupby(["size", "position"]).max()


def _mark(row: tuple, unlike: dict[tuple, str]) -> str:
    """The mark † if the runs of a pair differ in more than ACP; see :func:`versions.unlike`."""
    return unlike[tuple(getattr(row, key) for key in PAIR)][:1]


def gaps_in_words(differences: pd.DataFrame, unlike: dict[tuple, str]) -> str:
    """The largest difference of each pair of :func:`statistics.loss_differences`, and its position."""
    gaps = statistics.largest_gaps(differences)
    return "; ".join(
        f"{size} at {style.length_label(length)}: "
        + ", ".join(
            (f"{row.gap_nats:.4f} at position {row.position}" if row.gap_nats else "identical")
            + _mark(row, unlike)
            + (f" (seed {row.seed})" if len(pairs) > 1 else "")
            for row in pairs.itertuples()
        )
        for (size, length), pairs in gaps.groupby(["size", "context_length_tokens"], sort=False)
    ) + versions.notes(unlike, ". ")


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    name, records = naming.ARCHITECTURES[context.runs[0].architecture], context.records["loss_curve"]
    named = records.assign(size=naming.marked(records))
    differences = statistics.loss_differences(named)
    numbers = gaps_in_words(differences, versions.unlike(named, PAIR))
    gap = differences["difference"].abs().max()
    first = (
        f"The losses with and without ACP differ by at most {gap:.4f} nats at any position."
        if gap
        else "The losses with and without ACP are identical at every position."
    )
    apart = seeds_apart(records)
    noise = (
        f" Grey bands show the difference between two seeds of one setting, at most {apart.max():.3f} nats."
        if len(apart)
        else ""
    )
    columns = ("measured_tokens", "window_tokens")
    tokens, windows = (", ".join(f"{n:,}" for n in records[column].unique()) for column in columns)
    caption = f"""{naming.heading(context.item)} {first} The models are {name}, one per column. Upper panels
show the loss with ACP (thin line) and of exact attention (wide, pale line) for each seed. Lower panels show
the difference. Each point is the mean over {windows} positions around it. Dashed lines mark the criterion for
the mean over all positions.{noise} Every context length uses the same {tokens} held-out tokens, in whole
windows. The two runs of a pair differ only in ACP, in training and in evaluation, and are trained separately.
The largest differences of the pairs, in nats, are {numbers}."""
    return draw(records), caption


def losses_match(
    loss: pd.DataFrame, step_losses: pd.DataFrame | None = None, first_divergence: pd.DataFrame | None = None
) -> Verdict:
    """Reproduced if the diverging pairs rule out a mean difference of :data:`LOSS_WITHIN_NATS`; contradicted
    if they show a larger one. Bitwise identical pairs are counted and excluded from the interval."""
    return _equivalent(*_pairs(loss, step_losses, first_divergence))


def pairs_identical(
    loss: pd.DataFrame, step_losses: pd.DataFrame | None = None, first_divergence: pd.DataFrame | None = None
) -> Verdict:
    """Reproduced if at least :data:`paired.LEAST_PAIRS` pairs end at bitwise identical losses."""
    return _identical(*_pairs(loss, step_losses, first_divergence))


def official_losses_match(loss: pd.DataFrame, step_losses: pd.DataFrame | None = None) -> Verdict:
    """:func:`losses_match` for the pairs that the official kernels trained."""
    return _equivalent(*_pairs(loss, step_losses, None, official=True))


def official_identical(loss: pd.DataFrame, step_losses: pd.DataFrame | None = None) -> Verdict:
    """:func:`pairs_identical` for the pairs that the official kernels trained."""
    return _identical(*_pairs(loss, step_losses, None, official=True))


def _equivalent(apart: pd.Series, words: str, more: dict) -> Verdict:
    """The verdict of two one-sided tests on ACP − exact, in nats, over the diverging pairs."""
    if why := paired.too_few(apart):
        return Verdict(Word.INCONCLUSIVE, f"{why}\n{words}", why, **more)
    diverging = apart[apart != 0]
    found = equivalence(estimate := over_draws(diverging), LOSS_WITHIN_NATS)
    mean = f"{estimate.mean:+.4f} nats [{found.low:+.4f}, {found.high:+.4f}]"
    short = f"mean loss difference of {len(diverging)} diverging pairs, ACP − exact: {mean}"
    equal = f"{len(apart) - len(diverging)} of {len(apart)} pairs are bitwise identical and not in this mean"
    return Verdict.of(found.shown, f"{short}\n{equal}\n{words}", short, **more | {"n": len(diverging)})


def _identical(apart: pd.Series, words: str, more: dict) -> Verdict:
    same = int((apart == 0).sum())
    met = True if same >= paired.LEAST_PAIRS else None
    short = f"{same} of {len(apart)} pairs are bitwise identical"
    return Verdict.of(met, f"{short}\n{words}", short, **more)


def _pairs(
    loss: pd.DataFrame,
    step_losses: pd.DataFrame | None,
    first_divergence: pd.DataFrame | None,
    official: bool = False,
) -> tuple[pd.Series, str, dict]:
    """The differences of held-out loss of the counted pairs, all differences in words, and fields of the
    verdict, for pairs that the official kernels trained or for all others."""
    loss = loss.assign(method=statistics.methods(loss), size=naming.marked(loss), suite=loss.get("suite", ""))
    loss = some(loss[(loss["suite"] == OFFICIAL) == official], "loss")
    keys = ["suite", *PAIR]
    one_each(loss, [*keys, "method"], "loss")
    acp, exact = (loss[loss["method"] == side].set_index(keys)["loss_nats"] for side in ("acp", "exact"))
    acp, exact = acp.align(exact, join="inner")
    difference = acp - exact
    if difference.empty:
        return difference, paired.NO_PAIR, {}
    unlike = {pair: words for pair, words in versions.unlike(loss, keys).items() if pair in difference.index}
    several = loss["suite"].nunique() > 1
    each = ("\n" if several else "; ").join(
        f"{f'{pair[0]}, ' if several else ''}{pair[2]} at {style.length_label(pair[3])}, seed {pair[-1]}: "
        # Four digits would show a smaller difference as zero.
        + (f"{gap:+{'.0e' if abs(gap) < 5e-5 else '.4f'}}{unlike[pair][:1]}" if gap else "0")
        for pair, gap in difference.items()
    )
    note = versions.notes(unlike, "\n", paired.NOT_COUNTED)
    counted = difference[[not unlike[pair] for pair in difference.index]]
    parts = []
    if counted.any():
        largest = f"The diverging pairs differ by at most {counted.abs().max():.4f} nats"
        parts = [largest, _divergence_steps(loss, step_losses), _seeds_apart(loss)]
    head = "ACP − exact in nats, one pair per line:\n" if several else "ACP − exact in nats, "
    parts += [head + each, _first_divergences(first_divergence)]
    labels = (f"{s}, {size}, {style.length_label(n)}, seed {seed}" for s, _, size, n, seed in counted.index)
    more = {
        "n": len(counted) or None,
        "unit": "pair",
        "values": dict(zip(labels, counted, strict=True)),
        "axis": f"ACP − exact, nats (margin ±{LOSS_WITHIN_NATS:g})",
    }
    return counted, "\n".join(filter(None, parts)) + note, more


def positions_match(loss_curve: pd.DataFrame) -> Verdict:
    """Reproduced if the losses of every pair differ by less than :data:`POSITION_NATS` at every position."""
    gaps = []
    for suite, curves in loss_curve.groupby("suite", sort=False):
        both = curves.groupby([*PAIR])["log_pruning_tolerance"].transform(lambda x: x.isna().nunique()) == 2
        if both.any():
            table = statistics.largest_gaps(statistics.loss_differences(curves[both])).assign(suite=suite)
            unlike = versions.unlike(curves[both], PAIR)
            gaps.append(table.assign(mark=[_mark(row, unlike) for row in table.itertuples()]))
    table = some(pd.concat(gaps), "loss_curve of a pair")
    each = "\n".join(
        f"{row.suite}, {row.size} at {style.length_label(row.context_length_tokens)}, seed {row.seed}: "
        + (f"{row.gap_nats:.4f}{row.mark} at position {row.position}" if row.gap_nats else f"0{row.mark}")
        for row in table.itertuples()
    )
    missed = table[table["gap_nats"] >= POSITION_NATS]
    marked = " (†)" * (set(missed["mark"]) == {"†"})
    short = (
        f"of the {len(table)} pairs with a loss curve, pairs that differ by {POSITION_NATS:g} nats or more: "
        f"{len(missed)}{marked}"
    )
    same = f"{(table['gap_nats'] == 0).sum()} of {len(table)} pairs are identical at every position"
    largest = f"Largest absolute difference of each pair in nats:\n{each}"
    return Verdict.of(missed.empty, f"{short}\n{same}\n{largest}", short, n=len(table), unit="pair")


def _divergence_steps(loss: pd.DataFrame, step_losses: pd.DataFrame | None) -> str:
    """ "The losses of diverging pairs first differ at steps 37 to 618"."""
    if step_losses is None:
        return ""
    steps = step_losses.merge(loss[["suite", "run"]].drop_duplicates(), on=["suite", "run"])
    first = first_differences(steps).dropna()
    return f"The losses of diverging pairs first differ at steps {style.span(first, '.0f')}" * bool(
        len(first)
    )


def first_differences(steps: pd.DataFrame) -> pd.Series:
    """The first step at which the losses with and without ACP differ, by pair; NaN for identical losses."""
    exact, keys = steps["log_pruning_tolerance"].isna(), ["suite", *PAIR]
    both = steps[~exact].merge(steps[exact], on=[*keys, "step"], suffixes=("", "_exact"))
    differ = both["step"].where(both["loss_nats"] != both["loss_nats_exact"])
    return differ.groupby([both[key] for key in keys]).min()


def _seeds_apart(loss: pd.DataFrame) -> str:
    """ "For comparison, two seeds of one setting differ by up to 0.028 nats"."""
    seeds = loss.groupby(["suite", *PAIR[:-1], "method"])["loss_nats"].agg(["min", "max", "count"])
    seeds = seeds[seeds["count"] > 1]
    apart = (seeds["max"] - seeds["min"]).max()
    return f"For comparison, two seeds of one setting differ by up to {apart:.3f} nats" if len(seeds) else ""


def _first_divergences(first_divergence: pd.DataFrame | None) -> str:
    """The steps at which runs diverge from an exact run that trains from the same weights and batches."""
    if first_divergence is None:
        return ""
    words = []
    for name, steps in first_divergence.groupby("training", sort=False):
        diverging = steps.loc[steps["diverges_here"] == 1, "step"]
        identical = f"bitwise identical for all {steps['step'].max()} steps"
        words.append(f"{name}: {f'diverges at step {diverging.min()}' if len(diverging) else identical}")
    return "\n".join(["One exact run was repeated with a changed setting:", *words])


def same_weights(records: pd.DataFrame, tasks: pd.DataFrame | None = None) -> Verdict:
    """Reproduced if no log-likelihood changes by more than one bit of a weight changes the loss of a token;
    contradicted if one changes by more than twice that."""
    table = one_each(pd.concat([records, tasks]), ["suite", "run", "test"], "same_weights")
    one_bit, largest = table["test"] == ONE_BIT, table["largest_difference_nats"]
    most, margin = largest[~one_bit].max(), largest[one_bit].min()
    counts = table.rename(columns={"differing_answers": "other"}).groupby("test", sort=False)
    counts = counts[["differing_items", "items", "other"]].sum(min_count=1).astype(float)
    moved = counts.index == ONE_BIT
    short = (
        f"log-likelihoods differ by at most {most:.2g} nats" if most else "both give equal log-likelihoods"
    )
    ours = (
        f"{short}\nThe margin is {margin:.2g} nats"
        f"\nDiffering log-likelihoods: {_fractions(counts[~moved], 'differing_items')}"
        f"\nDiffering answers: {_fractions(counts[~moved], 'other')}"
        f"\nControl by one unit of bfloat16: {_fractions(counts[moved], 'differing_items')}"
        + ("\nDownstream tasks were not measured" if tasks is None else "")
    )
    met = True if most <= margin else False if most > 2 * margin else None
    return Verdict.of(met, ours, short, n=int(one_bit.sum()), unit="model")


def _fractions(counts: pd.DataFrame, column: str) -> str:
    """ "76 of 1,881 (needle), 0 of 500 (lambada_openai)"; tests without a value are left out."""
    return ", ".join(
        f"{part:,.0f} of {whole:,.0f} ({test})"
        for test, part, whole in zip(counts.index, counts[column], counts["items"], strict=True)
        if part >= 0
    )


def same_steps(step_losses: pd.DataFrame, first_divergence: pd.DataFrame | None = None) -> Verdict:
    """Reproduced if the losses of three pairs are identical at e^-20 at every step; contradicted if a pair
    differs and a repeated exact run does not."""
    tolerance = some(step_losses, "step_losses")["log_pruning_tolerance"].fillna(WEAK_TOLERANCE)
    steps = step_losses[(tolerance == WEAK_TOLERANCE) & ~step_losses["run"].str.contains("-nudged")]
    first = some(first_differences(steps), "step_losses, e^-20")
    diverging, count = first.dropna(), len(first)
    ours = f"{count - len(diverging)} of {count} pairs are bitwise identical at every step"
    ours += f"\nThe others diverge at step {style.span(diverging, '.0f')}" if len(diverging) else ""
    repeats = []
    if first_divergence is not None:
        repeats = first_divergence.loc[first_divergence["training"] == REPEAT, "diverges_here"]
    same = not len(diverging) and count >= paired.LEAST_PAIRS
    met = same or (False if len(diverging) and len(repeats) and not any(repeats) else None)
    judged = steps.merge(first.index.to_frame(index=False))["run"].unique()
    return Verdict.of(met, ours, n=count, unit="pair", runs=judged)


def perturbed_identical(loss: pd.DataFrame) -> Verdict:
    """Reproduced if at least :data:`paired.LEAST_PAIRS` perturbed pairs end at bitwise identical losses."""
    return _identical(*_perturbed(loss))


def ensembles_match(loss: pd.DataFrame) -> Verdict:
    """Reproduced if paired t tests rule out a mean difference of :data:`LOSS_WITHIN_NATS` over the diverging
    perturbed pairs."""
    return _equivalent(*_perturbed(loss))


def _perturbed(loss: pd.DataFrame) -> tuple[pd.Series, str, dict]:
    """As :func:`_pairs`, for the pairs whose runs start from the same perturbed parameter."""
    loss = loss[loss["run"].str.contains("-nudged")]
    loss = loss.set_index(loss["run"].str.replace("-acp|-exact", "", regex=True))
    sides = (loss[loss["log_pruning_tolerance"].isna() == exact]["loss_nats"] for exact in (False, True))
    acp, exact = (some(side, "loss, an ensemble") for side in sides)
    apart = (acp - exact).dropna()
    spread = loss.groupby(level=0)["loss_nats"].mean().std()
    each = ", ".join(f"{gap:+.4f}" if gap else "0" for gap in apart)
    words = (
        f"ACP − exact in nats: {each}\n"
        f"For comparison, the loss has a standard deviation of {spread:.4f} nats over the perturbations"
    )
    return apart, words, {"n": len(apart), "unit": "pair", "runs": list(loss["run"])}
