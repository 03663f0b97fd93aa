"""What the LAP article says of its figures and table, and the words of the criteria that check it."""

from __future__ import annotations

from acp_repro.chain.paper import Claim

ACCURACY, BLEU, ROUGE = 0.98, 0.95, 0.94  # Section Results
SMALL_ACCURACY, SMALL_KEPT = 0.9, 0.6  # what a minute's model must reach
GAP = 0.05  # of accuracy between the soft mask and real removal that counts as closed
CLOSE = 0.05  # of accuracy that counts as close, in probing
FASTER_BELOW = 0.5  # of the tokens kept
OWN_WINDOW = 3  # tokens to either side of a vector's origin
OWN_SHARE = 0.5

_RESULTS = "Section Results: accuracy 0.98, BLEU 0.95, ROUGE 0.94 on the test set"
_GRADUALLY = (
    "Section Differentiable Masking: we just gradually reduce their influence; Results: retained vs. dropped"
)
_PRESERVES = "Section Results: preserves key information while significantly reducing sequence length"
_EFFICIENT = "Section Conclusion: the model becomes more efficient"

DYNAMICS = (
    Claim(
        "The model drops tokens and still learns to reconstruct",
        "Section Results, training dynamics: the model balances compression and accuracy during training",
        "over the last tenth of training the main run keeps less than at the first look, and its accuracy "
        f"with tokens removed is higher, or {SMALL_ACCURACY:g} at least where training began from a model "
        "that could reconstruct",
        ("dynamics",),
        "drops_and_learns",
    ),
)
SCORES = (
    Claim(
        "Texts are reconstructed almost completely",
        _RESULTS,
        f"a gated run reaches {ACCURACY}, {BLEU} and {ROUGE}, teacher forced, with tokens really removed and "
        "at most 95 % of them kept",
        ("reconstruction",),
        "article_scores",
    ),
    Claim(
        "A small model keeps its accuracy with fewer tokens",
        _PRESERVES,
        f"a gated run has a teacher-forced accuracy of at least {SMALL_ACCURACY} with tokens really removed "
        f"and at most {SMALL_KEPT:.0%} of them kept",
        ("reconstruction",),
        "small_goal",
    ),
    Claim(
        "What soft masks suppress may be removed",
        _GRADUALLY,
        "in every run with soft masks, by either reading of the gate, accuracy with tokens removed is at "
        f"most {GAP} below that with the soft mask",
        ("reconstruction",),
        "soft_gap",
    ),
    Claim(
        "What hard concrete gates close may be removed",
        _GRADUALLY,
        f"in every run with hard concrete gates, accuracy with tokens removed is at most {GAP} below that "
        "with the soft mask; both are alike by construction, for a closed gate is a mask of minus infinity",
        ("reconstruction",),
        "hard_concrete_gap",
    ),
    Claim(
        "Texts can be written from the compressed memory alone",
        "Section Architecture: the decoder is forced to use the compressed memory; it is scored forced",
        "of a gated run, more than half of the held-out texts come back word for word when written freely",
        ("reconstruction",),
        "free_running",
    ),
)
CURVE = (
    Claim(
        "Lambda trades accuracy for compression",
        "Section Loss Function: lambda controls how much we care about compression against accuracy",
        "among runs with hard concrete gates and one seed, no larger lambda keeps more tokens",
        ("reconstruction",),
        "lambda_compresses",
    ),
)
PROBING = (
    Claim(
        "Kept vectors still tell what the text is about",
        "Section Sentiment Probing: close to what standard attention-based models like BERT get",
        f"votes of kept vectors are at most {CLOSE} less accurate than votes of all tokens' vectors with "
        "open gates, and better than the larger class; it cannot be told where an exact one-sided test of "
        "the latter at 5 % decides nothing",
        ("probe",),
        "probe_close",
    ),
)
SHAP = (
    Claim(
        "Each kept vector stands for the text around it",
        "Section SHAP: each token tends to specialize, attending to a slice of the sentence",
        f"at least {OWN_SHARE:.0%} of the positive attribution of kept vectors, EOS apart, falls on tokens "
        f"within {OWN_WINDOW} places of their origin; written tokens that are not the text's are left out",
        ("attribution",),
        "own_slice",
    ),
    Claim(
        "EOS gathers from the whole text",
        "Section SHAP: and the final token, EOS, pulls in the big picture",
        "the attribution of EOS is spread over more of the text than that of other vectors: a smaller share "
        "of it falls on its largest fifth of tokens",
        ("attribution",),
        "eos_is_global",
    ),
)
SAVINGS = (
    Claim(
        "Dropping tokens saves the encoder time and memory",
        _EFFICIENT,
        f"wherever at most {FASTER_BELOW:.0%} of the tokens are kept, the encoder with removal is faster "
        "than with masks, and holds less at its peak",
        ("removal_time",),
        "encoder_saves",
    ),
    Claim(
        "Dropping tokens saves the decoder time and memory",
        _EFFICIENT,
        f"wherever at most {FASTER_BELOW:.0%} of the tokens are kept, the decoder with removal is faster "
        "than with masks, and holds less, at its peak and from token to token",
        ("removal_time",),
        "decoder_saves",
    ),
)
