"""Token removal: one scan kernel, groups of examples, no GPU synchronisation."""

import copy

import pytest
import torch

from acp_repro.retention import RetentionScorer, encoders, forward, removal, scorer
from acp_repro.retention.budget import take, top_indices

from .models import CONFIGS, answers, batch, build, retained

KINDS = ("DistilBert", "Bert")


def _slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


# The last length has more chunks than one scan handles; the interpreter takes half a minute.
@pytest.mark.parametrize(("length", "decay"), [(1, 0.9), (33, 0.0), (100, 0.9), (100, 1.0), _slow(1100, 0.9)])
def test_kernels_match_equation_3_and_its_gradient(length, decay, monkeypatch):
    """Against PyTorch in float64, which test_parts.py compares with the recurrence."""
    device = on_a_device()
    torch.manual_seed(length)
    gate = RetentionScorer(8, 20, decay, initial_logit=0.3).to(device)
    hidden = torch.randn(3, length, 8, device=device)
    kept = torch.rand(3, length, device=device) < 0.6
    kept[:, 0] = True
    wanted = torch.randn(3, length, device=device)
    for mask in (None, kept):
        found = []
        for kernels, dtype in ((True, torch.float32), (False, torch.float64)):
            monkeypatch.setattr(scorer, "has_kernels", lambda *_, kernels=kernels, **__: kernels)
            one, given = copy.deepcopy(gate).to(dtype), hidden.to(dtype, copy=True).requires_grad_()
            scores = one(given, mask)
            scores = scores if mask is None else torch.where(mask, scores, 0.0)
            (scores * wanted).sum().backward()
            found.append([scores.detach(), given.grad, *(p.grad for p in one.parameters())])
        torch.testing.assert_close(found[0][0].double(), found[1][0], rtol=1e-5, atol=1e-5)
        for ours, exact in zip(*found, strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5 * exact.abs().max().item())


def on_a_device():
    """The device of Triton's kernels: a GPU, or the CPU with Triton's interpreter."""
    pytest.importorskip("triton", reason="pip install triton")
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("length", [1, 65, _slow(129)])
def test_top_m_kernel_matches_two_sorts(length):
    device = on_a_device()
    from acp_repro.retention.select_kernel import place, select

    torch.manual_seed(length)
    scores = torch.randn(5, length).mul(4).round().div(4)  # many tiess
    scores[1] = scores[1].sign() * 0.0  # 0 and -0 are equal
    scores[2, length // 2] = torch.inf
    scores[3, : length // 3] = -torch.inf
    scores = scores.to(device)
    some = (torch.rand(5, length) < 0.7).to(device)
    some[:, 0] = True
    first = torch.zeros_like(some)
    first[:, 0] = True
    more = first | ((torch.rand(5, length) < 0.1).to(device) & some)
    for candidates, protected in ((None, None), (some, first), (some, more)):
        valid = torch.ones_like(some) if candidates is None else candidates
        saved = first if protected is None else protected
        for share in (0.0, 0.3):
            budget = torch.maximum((valid.sum(1) * share).long(), saved.sum(1))
            for width, given in ((int(budget.max()), budget), (int(budget.min()), None)):
                found, is_nan = select(scores, candidates, protected, given, width)
                expected = top_indices(scores, candidates, saved, given, width)
                assert torch.equal(found.indices, expected.indices) and not is_nan.any()
                assert torch.equal(found.kept(some), expected.kept(some))
                states = torch.randn(5, width, 20, device=device)
                assert torch.equal(
                    take(states, found.slots.long() % width) * found.kept(some)[..., None],
                    place(states, found.slots),
                )
                assert torch.equal(take(scores, found.indices, found.rows), take(scores, found.indices))
    scores[1, -1] = scores[2, 0] = torch.nan
    kept_out = torch.ones_like(some)
    kept_out[2, 0] = False
    assert select(scores, kept_out, None, None, 1)[1].tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
@pytest.mark.slow
def test_forward_with_kernels_equals_forward_without(kind, monkeypatch):
    device = on_a_device()
    model, inputs = build(kind, "TokenClassification").to(device), batch(rows=5)
    for settings in (
        {"gates": "input"},
        {"gates": (2,), "method": "h2o"},
        {"gates": "input", "method": "random"},
        {"schedule": "geometric"},
        {"gates": "input", "dropped": "last"},
    ):
        short = retained(model, **settings)
        for given in (inputs, {"input_ids": inputs["input_ids"]}):
            given = {name: x.to(device) for name, x in given.items()}
            found = []
            for kernels in (False, True):
                for module in (removal, scorer):
                    monkeypatch.setattr(module, "has_kernels", lambda *_, kernels=kernels, **__: kernels)
                with short.retention.recorded() as records:
                    found.append((answers(short(**given)), records))
            (plain, ours), (fast, theirs) = found
            torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)
            assert all(torch.equal(a.kept, b.kept) for a, b in zip(ours, theirs, strict=True))
    short.retention.gates[0].scorer.w.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="the scores of the gate at place 0 are NaN"):
        short(**given)


@pytest.mark.gpu
@torch.no_grad()
def test_removal_on_a_gpu_matches_masking_and_the_cpu():
    model, inputs = build(), batch(rows=7)
    for settings in ({"gates": "input"}, {}, {"schedule": "geometric"}):
        short = retained(model, **settings)
        expected = answers(short(**inputs))
        short.cuda()
        masked = copy.deepcopy(short)
        masked.retention.configure(removal="mask")
        for given in (inputs, {"input_ids": inputs["input_ids"]}):
            given = {name: x.cuda() for name, x in given.items()}
            torch.testing.assert_close(
                answers(short(**given)), answers(masked(**given)), rtol=1e-4, atol=1e-5
            )
        given = {name: x.cuda() for name, x in inputs.items()}
        torch.testing.assert_close(answers(short(**given)).cpu(), expected, rtol=1e-3, atol=1e-4)
    short.retention.gates[0].scorer.w.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="the scores of the gate at place 1 are NaN"):
        short(**given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [{"gates": (1, 2), "schedule": "geometric", "dropped": "last"}, {"method": "h2o"}, {"budget": 0.99}],
)
@torch.no_grad()
def test_example_groups_do_not_change_the_result(kind, settings, monkeypatch):
    short, inputs = retained(build(kind), **{"budget": 0.4, **settings}), batch(rows=5)
    encoder, sizes = encoders.find_encoder(short), []
    block = encoder.find_layers(encoder.find_stack(short))[0]
    block.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    for given in (inputs, {"input_ids": inputs["input_ids"]}):
        whole = answers(short(**given))
        with monkeypatch.context() as patch:
            patch.setattr(forward, "GROUP_TOKENS", 48)
            torch.testing.assert_close(answers(short(**given)), whole, rtol=1e-5, atol=1e-6)
    assert sizes == [5, 2, 2, 1] * 2


@pytest.mark.parametrize(
    ("head", "gates"), [("TokenClassification", "input"), ("QuestionAnswering", "after_blocks")]
)
@torch.no_grad()
@pytest.mark.slow
def test_forward_compiles_to_one_graph_with_the_eager_selection(head, gates):
    """The host reads no value, so the number of protected tokens is unknown to it."""
    model, inputs = build(head=head), batch()
    further = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    further[:, 3] = True
    for settings, masked in (({}, False), ({"schedule": "geometric"}, True), ({"dropped": "last"}, True)):
        short = retained(model, gates=gates, **settings)
        given = inputs if masked else {"input_ids": inputs["input_ids"]}
        more = {} if head == "QuestionAnswering" else {"protected_mask": further}
        torch.compiler.reset()
        compiled = torch.compile(short, backend="eager", fullgraph=True)
        expected = answers(short(**given, **more))
        torch.testing.assert_close(answers(compiled(**given, **more)), expected)
        assert (expected - answers(model(**given))).abs().max() > 1e-3


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("settings", [{}, {"schedule": "geometric"}, {"selection": "threshold"}])
@torch.no_grad()
def test_full_example_does_not_stop_pruning_of_the_others(kind, settings):
    model, inputs = build(kind, "TokenClassification"), batch()
    further = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    further[0] = True
    given = inputs | {"protected_mask": further}
    short = retained(model, gates="input", **settings)
    if "selection" in settings:  # some are above the threshold and some are not
        short.retention.gates[0].scorer.v.bias.zero_()
    masked = copy.deepcopy(short)
    masked.retention.configure(removal="mask")
    found, there = short(**given).logits, inputs["attention_mask"] > 0
    torch.testing.assert_close(found, masked(**given).logits, rtol=1e-4, atol=1e-5)
    dense = model(**inputs).logits
    torch.testing.assert_close(found[0], dense[0], rtol=1e-4, atol=1e-5)
    assert (found - dense)[there].abs().max() > 1e-3
