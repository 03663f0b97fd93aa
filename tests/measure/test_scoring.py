"""The scoring core: every way of batching gives the log-likelihoods of one request at a time."""

import itertools
import random

import pytest
import torch

from acp_repro.model import FoXConfig, FoXForCausalLM
from acp_repro.model.cache import FoXCache
from acp_repro.papers.acp.evaluation.scoring import Request, Scorer
from acp_repro.papers.acp.fits import TooLong

VOCABULARY = 61


def tiny(architecture: str = "pro", tolerance: float | None = -10.0) -> FoXForCausalLM:
    torch.manual_seed(0)
    make = FoXConfig.pro if architecture == "pro" else FoXConfig.llama
    config = make(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=2,
        initializer_range=0.3,
        log_pruning_tolerance=tolerance,
    )
    return FoXForCausalLM(config).eval()


def scorer(model, **options) -> Scorer:
    settings = {"max_length": 512, "batch_tokens": 256, "dtype": "float32"} | options
    return Scorer(model, torch.device("cpu"), **settings)


def requests(seed: int = 0) -> list[Request]:
    """Questions of 1 to 40 tokens with four answers of 1 to 9, some of which are one token or the same."""
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(count)]

    questions = [ids(length) for length in (1, 2, 7, 7, 7, 40, 40, 33)]
    asked = [Request(question, ids(draw.randint(1, 9))) for question in questions for _ in range(3)]
    asked += [Request(questions[3], [token]) for token in (5, 6)]
    asked.append(asked[4])
    draw.shuffle(asked)
    return asked


def sums(scores: list) -> list[float]:
    return [score.log_likelihood for score in scores]


@torch.no_grad()
def one_at_a_time(model, request: Request, max_length: int = 512) -> tuple[float, bool]:
    """By the definition: log softmax of the logits of the whole sequence, in float64."""
    ids = torch.tensor([*request.context, *request.continuation])[-(max_length + 1) :]
    logits = model(ids[None, :-1])[0, -len(request.continuation) :].double()
    targets = ids[-len(request.continuation) :]
    chosen = logits.log_softmax(-1).gather(1, targets[:, None]).sum()
    return chosen.item(), bool((logits.argmax(-1) == targets).all())


@pytest.mark.parametrize("architecture", ["pro", "llama"])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("batch_tokens", [1, 64, 4096])
def test_scores_are_those_of_one_request_at_a_time(architecture, share, batch_tokens, monkeypatch):
    monkeypatch.setattr("acp_repro.papers.acp.evaluation.scoring._MIN_BATCH", 0)
    monkeypatch.setattr("acp_repro.papers.acp.evaluation.scoring._MIN_SAVED", 0)
    model = tiny(architecture, None)
    asked, seen = requests(), []
    found = scorer(model, share_contexts=share, batch_tokens=batch_tokens).score(
        asked, lambda places, scores: seen.extend(zip(places, scores, strict=True))
    )
    assert [score for _, score in sorted(seen)] == found
    for request, score in zip(asked, found, strict=True):
        expected, greedy = one_at_a_time(model, request)
        assert score.log_likelihood == pytest.approx(expected, abs=2e-5)
        assert score.is_greedy == greedy


def test_pruned_scores_are_within_what_pruning_may_lose():
    dense, pruned = (scorer(tiny(tolerance=t)).score(requests()) for t in (None, -10.0))
    for one, other in zip(dense, pruned, strict=True):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-2)


def test_greedy_is_what_greedy_decoding_gives():
    model = tiny()
    context = [3, 1, 4, 1, 5]
    continued = model.generate(torch.tensor([context]), 6)[0, 5:].tolist()
    good, bad = scorer(model).score(
        [Request(context, continued), Request(context, [*continued[:-1], (continued[-1] + 1) % VOCABULARY])]
    )
    assert good.is_greedy and not bad.is_greedy


def test_what_is_too_long_loses_its_beginning():
    model = tiny(tolerance=None)
    long = requests()[0]
    long = Request(list(range(50)), long.continuation[:3] or [1])
    short = scorer(model, max_length=16)
    (score,) = short.score([long])
    assert short.truncated == 1
    assert score.log_likelihood == pytest.approx(one_at_a_time(model, long, 16)[0], abs=2e-5)
    whole = scorer(model, max_length=50 + len(long.continuation) - 1)  # the last token is never read
    whole.score([long])
    assert whole.truncated == 0
    with pytest.raises(TooLong, match="a continuation of 17 tokens does not fit a context of 16"):
        short.score([Request([1], [2] * 17)])


def test_same_input_is_one_pass_and_shared_contexts_are_fewer_tokens():
    model, question = tiny(), list(range(30))
    answers = scorer(model)
    answers.score([Request(question, [token]) for token in (1, 2, 3)])
    assert answers.tokens == 30
    asked = [Request(question, [a, b]) for a, b in itertools.product((1, 2), (3, 4))]
    apart, shared = scorer(model), scorer(model, share_contexts=True, batch_tokens=40)
    assert sums(apart.score(asked)) == pytest.approx(sums(shared.score(asked)), abs=2e-5)
    assert (apart.tokens, shared.tokens) == (62, 30 + 4)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory_halves_the_batch_and_one_sequence_too_long_is_one_line(error):
    model, limit = tiny(), 90

    class Small(torch.nn.Module):
        config, lm_head = model.config, model.lm_head

        def forward(self, input_ids, cache=None, return_hidden=False):
            if input_ids.numel() > limit:
                raise error
            return model(input_ids, cache=cache, return_hidden=return_hidden)

    asked = requests()
    small = scorer(Small(), batch_tokens=2000)
    found = small.score(asked)
    assert small.batch_tokens <= 180
    assert sums(found) == pytest.approx(sums(scorer(model).score(asked)), abs=2e-5)
    with pytest.raises(TooLong, match="a sequence of 100 tokens does not fit in this device's memory"):
        small.score([Request([1] * 100, [2])])
    error = RuntimeError("another")
    with pytest.raises(RuntimeError, match="another"):
        small.score([Request([1] * 100, [2])])


@pytest.mark.parametrize("architecture", ["pro", "llama"])
@torch.no_grad()
def test_selected_rows_of_a_cache_go_on_alone(architecture):
    model = tiny(architecture)
    prompts = torch.randint(0, VOCABULARY, (2, 70), generator=torch.Generator().manual_seed(1))
    more = torch.randint(0, VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(2))
    cache, rows = FoXCache(2), torch.tensor([1, 0, 1])
    model(prompts, cache=cache)
    copy = cache.select_rows(rows)
    after = model(more, cache=copy)
    assert (cache.length, copy.length) == (70, 75)
    whole = model(torch.cat((prompts[rows], more), 1))[:, 70:]
    torch.testing.assert_close(after, whole, atol=2e-4, rtol=1e-4)
    first = model(more[:2], cache=cache)  # the one copied from is as it was
    torch.testing.assert_close(first, model(torch.cat((prompts, more[:2]), 1))[:, 70:], atol=2e-4, rtol=1e-4)


def test_progress_is_told_while_it_is_made():
    model, order = tiny(), []

    class Watched(torch.nn.Module):
        config, lm_head = model.config, model.lm_head

        def forward(self, input_ids, **options):
            order.append("batch")
            return model(input_ids, **options)

    scorer(Watched(), batch_tokens=1).score(requests()[:3], lambda places, scores: order.append(len(places)))
    assert order == ["batch", 1] * 3
