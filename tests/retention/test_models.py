"""Gates inside encoders of transformers: removal against masking, training, saving, invalid input."""

import copy
import io

import pytest
import torch
import transformers

from acp_repro.retention import Encoder, RetentionConfig, encoders, from_pretrained, register_encoder, retain
from acp_repro.retention.encoders import find_encoder

from .models import CONFIGS, HEADS, METHODS, SIZES, SMALL, answers, batch, build, labels_for, retained


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_budget_1_matches_the_dense_model(kind, head):
    model, inputs = build(kind, head), batch()
    expected = model(**inputs)
    for settings in ({}, {"method": "h2o"}, {"gates": "input"}):
        found = retained(model, 1.0, **settings)(**inputs)
        assert type(found) is type(expected)
        assert torch.equal(answers(found), answers(expected))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    ("gates", "head"), [*zip(("input", "after_blocks", (1, 3)), HEADS, strict=True), ("output", HEADS[0])]
)
@torch.no_grad()
def test_removing_tokens_equals_masking_them(kind, head, gates):
    model, inputs = build(kind, head), batch(length=21)  # which Longformer pads to its window of 8
    for number, method in enumerate((*METHODS, "adaptive")):  # the paper's in both modes, the others in one
        settings = {"schedule": "geometric", "dropped": "last"} if number % 2 else {}
        short = retained(model, method=method, gates=gates, **settings)
        masked = copy.deepcopy(short)
        masked.retention.configure(removal="mask")
        with short.retention.recorded() as ours, masked.retention.recorded() as oracle:
            found, expected = answers(short(**inputs)), answers(masked(**inputs))
        for one, other in zip(ours, oracle, strict=True):
            assert torch.equal(one.kept, other.kept)
        exact = answers(copy.deepcopy(masked).double()(**inputs))
        error = (expected - exact).abs().max()
        assert (found - exact).abs().max() <= 2 * error + 1e-6
        assert (found - answers(model(**inputs))).abs().max() > 100 * error or gates == "output"


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_blocks_after_the_gate_process_fewer_tokens(kind):
    inputs = batch()
    model = retained(build(kind), 0.25)
    encoder = find_encoder(model)
    lengths, world = [], []

    def look(_, given, named):
        lengths.append(given[0].shape[1])
        world.append(named.get("is_index_global_attn"))

    for block in encoder.find_layers(encoder.find_stack(model)):
        block.register_forward_pre_hook(look, with_kwargs=True)
    with model.retention.recorded() as records:
        model(**inputs)
    assert lengths == ([24, 8, 8] if kind == "Longformer" else [24, 6, 6])  # a window of 8, or 0.25 of 24
    if kind == "Longformer":  # [CLS] attends to all tokens in every block, and no other token does
        assert all(seen[:, 0].all() and not seen[:, 1:].any() for seen in world)
        further = torch.zeros_like(inputs["input_ids"])
        further[:, [0, 7]] = 1
        with model.retention.recorded() as more:
            model(**inputs, global_attention_mask=further)
        assert more[0].kept[:, 7].all()
    (record,) = records
    own = inputs["attention_mask"].sum(1)
    assert record.kept.sum(1).tolist() == (own // 4).tolist() == record.budget.tolist()
    assert record.kept[:, 0].all()  # [CLS]
    assert not (record.kept & (inputs["attention_mask"] == 0)).any()


@torch.no_grad()
def test_examples_are_independent_of_their_batch():
    model, inputs = build(), batch()
    for method in METHODS:
        short = retained(model, method=method)
        alone = torch.cat([short(**{k: v[i : i + 1] for k, v in inputs.items()}).logits for i in range(4)])
        torch.testing.assert_close(short(**inputs).logits, alone, rtol=1e-4, atol=1e-6)
        left = {
            k: torch.stack([torch.roll(row, 3 * i) for i, row in enumerate(v)]) for k, v in inputs.items()
        }
        if method != "random":  # which selects by position
            with short.retention.recorded() as right_side:
                short(**inputs)
            with short.retention.recorded() as left_side:
                short(**left)
            assert right_side[0].kept.sum(1).tolist() == left_side[0].kept.sum(1).tolist()
            assert left_side[0].kept[range(4), range(0, 12, 3)].all()  # [CLS], after the padding


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_received_attention_matches_the_block(kind, monkeypatch):
    monkeypatch.setattr(encoders, "_MOST_WEIGHTS", 4 * 4 * 24 * 7)  # 7 queries at a time
    model, inputs = build(kind), batch()
    encoder = find_encoder(model)
    block = encoder.find_layers(encoder.find_stack(model))[0]
    for path in (encoder.query, encoder.key):
        block.get_submodule(path).weight.mul_(20)  # initially, attention is almost uniform
    if kind == "Longformer":
        out = model(**inputs, output_attentions=True)
        local, world = out.attentions[0], out.global_attentions[0]
        expected = torch.zeros(4, 24)
        expected += world[..., 0].sum(1)  # of the one global query
        for t in range(24):
            if t:
                rows = inputs["attention_mask"][:, t]
                expected[:, 0] += local[:, :, t, 0].sum(1) * rows
                for o in range(9):
                    if 0 <= t + o - 4 < 24:
                        expected[:, t + o - 4] += local[:, :, t, 1 + o].sum(1) * rows
    else:
        model.set_attn_implementation("eager")
        weights = model(**inputs, output_attentions=True).attentions[0]
        expected = (weights * inputs["attention_mask"][:, None, :, None]).sum((1, 2))
    valid = inputs["attention_mask"] > 0
    pruned = retained(model, method="h2o", gates=(1,))
    with pruned.retention.recorded() as records:
        pruned(**inputs)
    scores = records[0].scores.nan_to_num(0.0)  # of the block before the gate
    torch.testing.assert_close(scores * valid, expected * valid, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_save_and_load_round_trip(kind, tmp_path):
    inputs = batch()
    profile = {"schedule": "profile", "profile": (0.5, 0.4)}
    gated = retained(build(kind), 0.3, gates=(0, 2), initial_multiplier=0.5, **profile)
    gated.retention.configure(budget=0.5)
    gated.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    assert type(again) is type(gated) and again.retention.config == gated.retention.config
    assert torch.equal(again.eval()(**inputs).logits, gated(**inputs).logits)
    assert again.retention.multiplier.tolist() == [0.5, 0.5]
    build(kind).save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="the model has no gates"):
        from_pretrained(tmp_path / "dense")


@pytest.mark.parametrize("kind", ["DistilBert", "Longformer"])
def test_bfloat16_and_autocast(kind):
    model, inputs = build(kind), batch()
    labels = labels_for("SequenceClassification", inputs)
    gated = retained(model, 0.4, gates="input")
    with torch.no_grad():
        half = copy.deepcopy(gated).bfloat16()(**inputs).logits
        exact = copy.deepcopy(gated).double()(**inputs).logits
        # At most the error of the dense model in that format, with a small margin.
        dense_error = (copy.deepcopy(model).bfloat16()(**inputs).logits - model(**inputs).logits).abs().max()
        assert (half - exact).abs().max() <= 4 * dense_error + 1e-2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gated.train()(**inputs, **labels).loss.backward()


def test_questions_and_other_tokens_are_protected():
    model, inputs = build("DistilBert", "QuestionAnswering"), batch()
    one = {name: x[:1] for name, x in inputs.items()}
    for schedule, most, settings in (("geometric", 3, {"budget": 0.5}), ("constant", 4, {"budget": 0.2})):
        gated = retained(model, schedule=schedule, over_budget="error", **settings)
        with pytest.raises(ValueError, match=f"5 protected tokens exceed its budget of {most}"):
            gated(**one)  # the budget of the last gate is the least
        gated.retention.configure(over_budget="keep")
        with gated.retention.recorded() as records, torch.no_grad():
            gated(**one)
        assert records[-1].kept[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4]  # up to the separator
    with pytest.raises(ValueError, match="sep_token_id: set it"):
        retain(copy.deepcopy(model), RetentionConfig(0.3)).eval()(**inputs)
    model.config.sep_token_id = 2
    known = retain(copy.deepcopy(model), RetentionConfig(0.3, over_budget="keep"))
    with known.retention.recorded() as records, torch.no_grad():
        known(**inputs)
        known(inputs["input_ids"].masked_fill(inputs["input_ids"] == 2, 3), inputs["attention_mask"])
    assert records[0].kept[:, :5].all()
    assert records[1].kept.sum(1).tolist() == records[1].budget.tolist() == [7, 6, 5, 4]  # without a question
    plain = retained(build(), 0.3, over_budget="error")
    padding = inputs["attention_mask"] == 0  # which does not use the budget
    mask = padding.clone()
    mask[:, 7] = True
    with plain.retention.recorded() as records:
        plain(**inputs, protected_mask=mask)
    assert records[0].kept[:, 7].all()
    assert not (records[0].kept & padding).any()


def with_nan_weights():
    gated = retained(build())
    gated.retention.gates[0].scorer.w.weight.data.fill_(torch.nan)
    return gated


def call(**given):
    return lambda: retained(build())(**batch() | given)


def decoder():
    return transformers.BertLMHeadModel(transformers.BertConfig(**SIZES, **SMALL, is_decoder=True))


LONG = torch.ones(2, 81, dtype=torch.long)
EMPTY = torch.zeros(2, 0, dtype=torch.long)
ERRORS = {
    "example 0 contains only padding": call(attention_mask=torch.zeros(4, 24)),
    "2 texts of 0 tokens": call(input_ids=EMPTY, attention_mask=None),
    r"attention_mask: must be \(4, 24\)": call(attention_mask=torch.ones(4, 1, 24, 24)),
    r"protected_mask: must be \(4, 24\)": call(protected_mask=torch.ones(4, 3)),
    "either input_ids or inputs_embeds": call(input_ids=None),
    "81 tokens are more than the model's 80 positions": call(input_ids=LONG),
    "the scores of the gate at place 1 are NaN": lambda: with_nan_weights()(**batch()),
    "these gates cannot change to {'method'": lambda: retained(build()).retention.configure(method="h2o"),
    "these gates cannot change to {'scorer_width'": lambda: retained(build()).retention.configure(
        scorer_width=3
    ),
    "already has gates": lambda: retained(retained(build())),
    "is a decoder": lambda: retained(decoder()),
    "model type None is not registered": lambda: retained(torch.nn.Linear(2, 2)),
}


@pytest.mark.parametrize("words", ERRORS)
def test_invalid_calls_and_models_are_rejected(words):
    with pytest.raises(ValueError, match=words):
        ERRORS[words]()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_gates_adopt_the_mode_and_the_dtype_of_their_encoder(method, dtype):
    inputs = batch() | labels_for("SequenceClassification", batch())
    config = RetentionConfig(0.4, method=method, gates="input", initial_multiplier=1.0)
    for training in (False, True):
        gated = retain(build(dtype=dtype).train(training), config)
        assert {module.training for module in gated.modules()} == {training}
        assert {x.dtype for x in gated.parameters()} == {dtype}
        assert torch.isfinite(gated(**inputs).loss)
    if config.is_learned:  # steps of 1e-5, which bfloat16 would round away
        gated.bfloat16()
        for _ in range(100):
            gated.retention.ascend(torch.tensor([1e-3]))
        assert gated.retention.multiplier.item() == pytest.approx(1.001, abs=1e-5)


class OwnModel(transformers.BertForSequenceClassification):
    """A user's class, which transformers does not export."""


@pytest.mark.parametrize("make", [OwnModel, transformers.BertModel, transformers.LongformerModel])
@torch.no_grad()
def test_retained_model_survives_pickling(make):
    model = make(CONFIGS["Longformer" if "Longformer" in make.__name__ else "Bert"]()).eval()
    gated, file = retained(model, initial_multiplier=0.5), io.BytesIO()
    torch.save(gated, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert type(again) is type(gated) and isinstance(again, make)
    assert torch.equal(again(**batch())[0], gated(**batch())[0])
    assert again.retention.config == gated.retention.config and again.retention.multiplier == 0.5


@torch.no_grad()
def test_disabling_and_recording_gates_can_be_nested():
    model, inputs = build(), batch()
    gated = retained(model, method="random")
    pruned = gated(**inputs).logits
    with gated.retention.recorded() as outer:
        with gated.retention.disabled():
            assert torch.equal(gated(**inputs).logits, model(**inputs).logits)
        with gated.retention.recorded() as inner:
            assert torch.equal(gated(**inputs).logits, pruned)
        gated(**inputs)
    assert len(inner) == len(outer) == 1
    gated.retention.configure(seed=1)
    assert not torch.equal(gated(**inputs).logits, pruned)


@pytest.mark.parametrize(
    ("kind", "training", "settings"),
    [
        ("DistilBert", True, {}),
        ("DistilBert", False, {"removal": "mask"}),
        ("DistilBert", False, {}),
        ("DistilBert", True, {"method": "h2o"}),
        ("Longformer", True, {}),
    ],
)
@pytest.mark.parametrize("by_config", [False, True])
def test_hidden_states_of_all_blocks_are_returned_without_removal(kind, training, settings, by_config):
    gated, name = retained(build(kind), 0.4, **settings).train(training), "output_hidden_states"
    setattr(gated.config, name, by_config)
    asked = batch() if by_config else batch() | {name: True}
    if kind == "DistilBert" and (training, settings) in ((True, {}), (False, {"removal": "mask"})):
        assert [x.shape for x in gated(**asked).hidden_states] == [(4, 24, 32)] * 4
    else:
        with pytest.raises(ValueError, match=f"{name}: a pruned encoder has no attentions"):
            gated(**asked)


def test_unknown_encoders_can_be_registered():
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
    config = transformers.NystromformerConfig(vocab_size=60, **sizes)
    other = transformers.NystromformerForSequenceClassification(config)
    register_encoder("nystromformer", Encoder("encoder", "attention.self.query", "attention.self.key"))
    gated = retained(other, 0.5)
    with torch.no_grad(), gated.retention.recorded() as records:
        gated(**batch())
    assert records[0].kept[0].sum() == 12
