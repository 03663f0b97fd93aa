"""Every metric of LAP: its columns, its runs, and the function that measures it."""

from __future__ import annotations

from acp_repro.pipeline.paper import Metric, samples

from . import measure

METRICS = (
    Metric(
        "dynamics",
        ("step", "loss_nats", "series", "gate_index", "value"),
        lambda: measure.reconstruction.measure_dynamics,
    ),
    Metric(
        "reconstruction",  # all but the edits are shares, 0 to 1
        (
            "decoding",
            "measured_texts",
            "keep_ratio",
            "token_accuracy",
            "bleu",
            "rouge_l",
            "exact_match",
            "edits_per_token",
        ),
        lambda: measure.reconstruction.measure_reconstruction,
    ),
    Metric(
        "probe",
        ("classifier", "vectors_per_text", "train_texts", "measured_texts", "accuracy", "majority_class"),
        lambda: measure.probe.measure_probe,
        lambda suite: suite.probed,
    ),
    Metric(
        "attribution",
        (
            "text",
            "text_tokens",
            "kept_position",
            "kept_token",
            "written_position",
            "written_token",
            "matches_text",
            "shap_nats",
        ),
        lambda: measure.attribution.measure_attribution,
        lambda suite: [suite.main_run],
        large=True,
    ),
    Metric(
        "keep_ratio_by_word",
        ("grouping", "group", "tokens", "kept_tokens"),
        lambda: measure.keep_ratio_by_word.measure_keep_ratio_by_word,
        lambda suite: [suite.main_run],
    ),
    Metric(
        "removal_time",
        (
            "method",
            "length_tokens",
            "measured_texts",
            "repeats",
            "keep_ratio",
            *samples("encoder_ms"),
            *samples("decoder_ms"),
            "encoder_peak_bytes",
            "decoder_peak_bytes",
            "memory_bytes",
            "order",
        ),
        lambda: measure.removal_time.measure_removal_time,
        lambda suite: [suite.main_run],
    ),
)
