"""Every claim of the LAP article, and every figure and table with what draws it."""

from __future__ import annotations

from acp_repro.pipeline.paper import Claim, Item

from . import (
    figure_curve,
    figure_dynamics,
    figure_probing,
    figure_savings,
    figure_shap,
    figure_slices,
    figure_words,
    table_scores,
)

_EFFICIENT = "Section Conclusion: the model becomes more efficient"
_LESS = (
    f". This holds wherever at most {figure_savings.FASTER_BELOW:.0%} of the tokens are kept, and each is "
    f"at most {figure_savings.LESS} of what the same form needs if all tokens are kept"
)
_TIME = (
    f"{_LESS}. From the shortest texts to the longest, time must grow at least half as fast as the tokens. "
    "Where it does not, the host sets the pace, and time cannot be told"
)
_OF = (
    f". This is measured on at least {figure_slices.LONG_TEXTS} held-out texts of "
    f"{figure_slices.LONG_TOKENS} tokens or more. At least {figure_slices.CAME_BACK:.0%} of the tokens of "
    "each were written at their place. In brackets stands a 95 % interval over texts, by a bootstrap"
)
_RESULTS = "Section Results: accuracy 0.98, BLEU 0.95, ROUGE 0.94 on the test set"
_GRADUALLY = (
    "Section Differentiable Masking: we just gradually reduce their influence; Results: retained vs. dropped"
)
FIGURE_CURVE = (
    Claim(
        "Lambda trades accuracy for compression",
        "Section Loss Function: lambda controls how much we care about compression against accuracy",
        "among runs with hard concrete gates and one seed, the largest lambda keeps less than the "
        f"smallest, by more than {100 * figure_curve.CHANCE:.0f} % of the tokens. A larger lambda that "
        "keeps so much more than a smaller one contradicts it. Smaller differences are chance: four "
        "trainings of one run kept 54 to 63 %",
        ("reconstruction",),
        figure_curve.lambda_compresses,
    ),
)
FIGURE_DYNAMICS = (
    Claim(
        "The model drops tokens and still learns to reconstruct",
        "Section Results, training dynamics: the model balances compression and accuracy during training",
        "over the last tenth of training the main run keeps fewer tokens than at the first look. Its "
        f"accuracy with tokens removed is higher. {figure_dynamics.SMALL_ACCURACY:g} is enough where "
        "training began from a model that could reconstruct",
        ("dynamics",),
        figure_dynamics.drops_and_learns,
    ),
)
FIGURE_PROBING = (
    Claim(
        "Kept vectors still tell what the text is about",
        "Section Sentiment Probing: close to what standard attention-based models like BERT get",
        f"votes of kept vectors are at most {figure_probing.CLOSE} less accurate than the better "
        "classifier of all tokens' vectors with open gates. It cannot be told where that one leads the "
        f"larger class by no more than {figure_probing.CLOSE}: then what has learnt nothing is close too. "
        "Nor where it or the kept vectors' has not learnt: an exact one-sided test at 5 % does not show "
        "that it is above the larger class",
        ("probe",),
        figure_probing.probe_close,
    ),
)
FIGURE_SAVINGS = tuple(
    Claim(f"Dropping tokens saves the {what}", _EFFICIENT, criterion, ("removal_time",), check)
    for what, criterion, check in (
        (
            "encoder time",
            f"the encoder with removal is faster than with masks{_TIME}",
            figure_savings.encoder_time,
        ),
        (
            "encoder memory",
            f"with removal its peak is lower than with masks{_LESS}",
            figure_savings.encoder_memory,
        ),
        (
            "decoder time",
            f"the decoder with removal is faster than with masks{_TIME}",
            figure_savings.decoder_time,
        ),
        (
            "decoder memory",
            f"with removal it needs less than with masks, at its peak and from token to token{_LESS}",
            figure_savings.decoder_memory,
        ),
    )
)
FIGURE_SLICES = (
    Claim(
        "Each kept vector attends to a slice of the text",
        "Section SHAP: each token tends to specialize, attending to a slice of the sentence",
        "half of the positive attribution of a kept vector falls on one run of tokens, anywhere in the "
        f"text. In the mean over vectors, without EOS, it covers at most {figure_slices.SLICE_OF_TEXT:.0%} "
        f"of the text, and at most {figure_slices.OF_SCATTERED:.0%} of what the same values cover at "
        "random places of the text" + _OF,
        ("attribution",),
        figure_slices.own_slice,
    ),
    Claim(
        "EOS gathers from the whole text",
        "Section SHAP: and the final token, EOS, pulls in the big picture",
        "in the mean over texts, each third of the text has at least a sixth of the positive attribution of "
        "EOS. A sixth is half of what an even spread gives it" + _OF,
        ("attribution",),
        figure_slices.eos_is_global,
    ),
)
TABLE_SCORES = (
    Claim(
        "Given the true tokens before, texts are reconstructed almost completely",
        _RESULTS,
        f"a gated run reaches an accuracy of {table_scores.ACCURACY}, a BLEU of {table_scores.BLEU} and a "
        f"ROUGE of {table_scores.ROUGE}. The true tokens before are given (teacher forcing). Tokens are "
        "really removed, and at most 95 % are kept",
        ("reconstruction",),
        table_scores.article_scores,
    ),
    Claim(
        "A small model keeps its accuracy with fewer tokens",
        "Section Results: preserves key information while significantly reducing sequence length",
        f"a gated run has a teacher-forced accuracy of at least {figure_dynamics.SMALL_ACCURACY}. Tokens "
        f"are really removed, and at most {table_scores.SMALL_KEPT:.0%} of them are kept",
        ("reconstruction",),
        table_scores.small_goal,
    ),
    Claim(
        "What soft masks suppress may be removed",
        _GRADUALLY,
        f"accuracy with tokens removed is at most {table_scores.GAP} below that with the soft mask. This "
        "holds in every run with soft masks, by either reading of the gate. The reading tested is that of "
        "the article's own code, which evaluates with hard masks. There a token whose log gate is below "
        "-1 is gone",
        ("reconstruction",),
        table_scores.soft_gap,
    ),
    Claim(
        "What hard concrete gates close may be removed",
        _GRADUALLY,
        f"accuracy with tokens removed is at most {table_scores.GAP} below that with the soft mask. This "
        "holds in every run with hard concrete gates. Both are alike by construction: a closed gate is a "
        "mask of minus infinity",
        ("reconstruction",),
        table_scores.hard_concrete_gap,
    ),
    Claim(
        "Texts can be written from the compressed memory alone",
        "Section Architecture: the decoder is forced to use the compressed memory; it is scored forced",
        "when a gated run writes freely, more than half of the held-out texts come back word for word",
        ("reconstruction",),
        table_scores.free_running,
    ),
)
ITEMS = (
    Item(
        "figure_dynamics",
        figure_dynamics.make,
        "Training dynamics",
        ("dynamics",),
        lambda suite: [suite.main_run],
        claims=FIGURE_DYNAMICS,
    ),
    Item(
        "table_scores",
        table_scores.make,
        "Accuracy, BLEU and ROUGE on held-out text, soft, removed and free",
        ("reconstruction",),
        claims=TABLE_SCORES,
    ),
    Item(
        "figure_probing",
        figure_probing.make,
        "Probing classifier against its baselines",
        ("probe",),
        lambda suite: suite.probed,
        "texts with labels",
        FIGURE_PROBING,
    ),
    Item(
        "figure_shap",
        figure_shap.make,
        "Which vector each written word comes from",
        ("attribution",),
        lambda suite: [suite.main_run],
    ),
    Item(
        "figure_curve",
        figure_curve.make,
        "Accuracy against compression, soft and removed",
        ("reconstruction",),
        lambda suite: list(suite.runs) if suite.gated else [],
        "gates",
        FIGURE_CURVE,
        ours=True,
    ),
    Item(
        "figure_slices",
        figure_slices.make,
        "Where in the text a vector's attribution lies",
        ("attribution",),
        lambda suite: [suite.main_run],
        claims=FIGURE_SLICES,
        ours=True,
    ),
    Item(
        "figure_words",
        figure_words.make,
        "Which tokens are kept",
        ("kept_words",),
        lambda suite: [suite.main_run],
        ours=True,
    ),
    Item(
        "figure_savings",
        figure_savings.make,
        "What removal saves",
        ("removal_time",),
        lambda suite: [suite.main_run],
        claims=FIGURE_SAVINGS,
        ours=True,
    ),
)
