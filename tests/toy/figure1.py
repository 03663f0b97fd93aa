"""Error against width."""

from analysis.verdict import Verdict


def make(found):
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots()
    ax.plot(found.records["error"]["width"], found.records["error"]["squared_error"], "o")
    return figure, f"**Figure 1.** Errors of {len(found.runs)} toys."


def learns(error):
    return Verdict.of((error["squared_error"] < 0.1).all(), f"at most {error['squared_error'].max():.2g}")
