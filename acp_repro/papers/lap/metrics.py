"""Every metric of LAP: its columns, its runs, and the function that measures it."""

from __future__ import annotations

from acp_repro.pipeline.paper import Metric

M = f"{__package__}.measure"
SHOWN_TEXTS = 5  # of `attribution`, so short that they are drawn word by word

METRICS = (
    Metric("dynamics", "step loss_nats series gate_index value", f"{M}.reconstruction:measure_dynamics"),
    Metric(
        "reconstruction",  # all but the edits are shares, 0 to 1
        "decoding measured_texts keep_ratio token_accuracy bleu rouge_l exact_match edits_per_token",
        f"{M}.reconstruction:measure_reconstruction",
    ),
    Metric(
        "probe",
        "classifier vectors_per_text train_texts measured_texts accuracy majority_class",
        f"{M}.probe:measure_probe",
        lambda suite: suite.probed,
    ),
    Metric(
        "attribution",
        "text text_tokens kept_position kept_token written_position written_token matches_text shap_nats",
        f"{M}.attribution:measure_attribution",
        lambda suite: [suite.main_run],
        large=True,
    ),
    Metric(
        "keep_ratio_by_word",
        "grouping group tokens kept_tokens",
        f"{M}.keep_ratio_by_word:measure_keep_ratio_by_word",
        lambda suite: [suite.main_run],
    ),
    Metric(
        "removal_time",
        "method length_tokens measured_texts repeats keep_ratio encoder_ms+ decoder_ms+ encoder_peak_bytes "
        "decoder_peak_bytes memory_bytes order",
        f"{M}.removal_time:measure_removal_time",
        lambda suite: [suite.main_run],
    ),
)
