"""The metrics of LAP: for each metric the function that measures it and its runs."""

from acp_repro.pipeline.paper import Metric

from . import measure

METRICS = (
    Metric("dynamics", lambda: measure.reconstruction.measure_dynamics),
    Metric("reconstruction", lambda: measure.reconstruction.measure_reconstruction),
    Metric("probe", lambda: measure.probe.measure_probe, lambda suite: suite.probed),
    Metric(
        "attribution",
        lambda: measure.attribution.measure_attribution,
        lambda suite: [suite.main_run],
        large=True,
    ),
    Metric(
        "keep_ratio_by_word",
        lambda: measure.keep_ratio_by_word.measure_keep_ratio_by_word,
        lambda suite: [suite.main_run],
    ),
    Metric("removal_time", lambda: measure.removal_time.measure_removal_time, lambda suite: [suite.main_run]),
)
