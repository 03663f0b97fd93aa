"""Figure 2: scores against temperature and stretch."""

from __future__ import annotations

import pandas as pd

from .. import drawing
from ..tables import one_each
from ..verdict import Verdict
from . import errors

PLATEAU_POINTS = 2.0
DEFAULTS = {"temperature": 0.66, "stretch_low": -0.1, "stretch_high": 1.1}
TITLES = {
    "temperature": "temperature $\\beta$",
    "stretch_low": "stretch $\\gamma$",
    "stretch_high": "stretch $\\zeta$",
}


def swept(records: pd.DataFrame, name: str) -> pd.DataFrame:
    """The first test score of the runs that differ from the default in ``name`` alone: the mean over seeds,
    with their minimum ``low`` and maximum ``high``."""
    test = records[records["split"] == "test"]
    for other, value in DEFAULTS.items():
        if other != name:
            test = test[test[other] == value]
    test = test[test["metric"] == test.groupby("dataset")["metric"].transform("first")]
    key = ["dataset", "backbone", "budget", "gates", name]
    one_each(test, [*key, "seed"], "figure2")
    score = ("score_percent", "mean"), ("score_percent", "min"), ("score_percent", "max")
    columns = dict(zip(("score_percent", "low", "high"), score, strict=True))
    return test.groupby(key, as_index=False, sort=False).agg(**columns).sort_values(name)


def draw(records: pd.DataFrame) -> drawing.Figure:
    """One panel per setting of the relaxation, one line per task and budget, from ``score`` records."""
    figure, axes = drawing.panels(3, 2.5, sharey=True)
    for ax, (name, title) in zip(axes, TITLES.items(), strict=True):
        table = swept(records, name)
        for (dataset, _, budget, _), line in table.groupby(["dataset", "backbone", "budget", "gates"]):
            label = f"{dataset}, {100 * budget:g} %"
            (drawn,) = ax.plot(line[name], line["score_percent"], "o-", label=label)
            ax.vlines(line[name], line["low"], line["high"], color=drawn.get_color())
            for usual in line.loc[line[name] == DEFAULTS[name], "score_percent"]:
                ends, band = (usual - PLATEAU_POINTS, usual + PLATEAU_POINTS), f"±{PLATEAU_POINTS:g} points"
                ax.axhspan(*ends, color=drawn.get_color(), alpha=0.12, lw=0, zorder=0, label=band)
        ax.axvline(DEFAULTS[name], color="0.4", lw=1, ls="--", zorder=1, label="the paper's default")
        ax.set(xlabel=title)
        ax.set_xticks(sorted(table[name].unique()))
        ax.margins(x=0.15)
    axes[0].set_ylabel("test score (%)")
    drawing.legend(figure, 5)
    return figure


def spans(records: pd.DataFrame) -> pd.Series:
    """The range of the scores of a line in points, by task and budget: the maximum over the three panels."""
    key = ["dataset", "backbone", "budget", "gates"]
    scores = [swept(records, name).groupby(key, sort=False)["score_percent"] for name in TITLES]
    points = pd.concat([score.max() - score.min() for score in scores])
    return points.groupby(level=["dataset", "budget"], sort=False).max()


def make(context: drawing.DrawContext) -> tuple[drawing.Figure, str]:
    records = context.records["score"]
    moved = ", ".join(
        f"{points:.1f} points ({task}, {100 * budget:g} %)"
        for (task, budget), points in spans(records).items()
    )
    caption = f"""**Figure 2.** A change of the temperature or of one stretch changes the test score by at
most {moved}. Each point is the mean of Adaptive Retention over seeds, on the test split only. A bar, if
longer than the point, shows the range over seeds. Bands show the criterion's margin of
{PLATEAU_POINTS:g} points around the score at the default values. The criterion also counts the items of the
dev split. The axis does not begin at 0. The paper's figure calls the stretch (gamma and zeta of Eq. 6)
"threshold"."""
    return draw(records), caption


def plateau(score: pd.DataFrame) -> Verdict:
    key = ["suite", *errors.SETTING]
    table = errors.settings(score, [*key, *DEFAULTS])
    usual = (table[list(DEFAULTS)] == list(DEFAULTS.values())).all(axis=1)
    found = errors.compared(table[~usual], table[usual], key)
    if not found:
        return Verdict.of(None, "no setting is swept")

    def words(one: errors.Comparison) -> str:
        moved = ", ".join(
            f"{name.replace('_', ' ')} {getattr(one.row, name):g}"
            for name, value in DEFAULTS.items()
            if getattr(one.row, name) != value
        )
        return f"{moved} ({one.place}): {one.points}"

    return errors.within(sorted(found, key=lambda one: (one.place, words(one))), PLATEAU_POINTS, words)
