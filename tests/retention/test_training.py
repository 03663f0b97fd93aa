"""Training of gates inside encoders of transformers."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from acp_repro.retention import RetentionConfig, from_pretrained, key_bias, retain

from .models import CONFIGS, HEADS, METHODS, batch, build, labels_for, retained


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_training_reaches_every_weight_and_adds_the_penalty(kind, head):
    model, inputs = build(kind, head), batch()
    labels = labels_for(head, inputs)
    for method in METHODS:
        gated = retained(model, method=method, initial_multiplier=2.0, gates="input").train()
        gated(**inputs, **labels).loss.backward()
        assert all(p.grad is not None for name, p in gated.named_parameters() if "retention" in name)
        if method in ("random", "h2o"):
            assert gated.retention.penalty is None
            continue
        penalty, before = gated.retention.penalty.detach(), gated.retention.multiplier.clone()
        found = gated.retention.ascend()
        torch.testing.assert_close(gated.retention.multiplier, (before + 0.01 * found).clamp(min=0))
        if method == "adaptive":
            torch.testing.assert_close(penalty, (2.0 * found).sum())
        plain = gated.eval()(**inputs, **labels, return_dict=False)[0]
        gated.retention.multiplier.fill_(100.0)
        assert gated(**inputs, **labels).loss == plain  # no penalty outside training


@pytest.mark.parametrize(
    ("unit", "schedule"), [("count", "constant"), ("share", "constant"), ("share", "geometric")]
)
def test_violation_is_sum_p_minus_m_over_passes_with_gradients(unit, schedule):
    gated, inputs, means = retained(build(), unit=unit, schedule=schedule).train(), batch(), []
    with torch.no_grad():
        gated(**inputs)  # evaluation does not count
    for rows in (slice(0, 1), slice(1, 4)):
        with gated.retention.recorded() as records:
            gated(**{name: x[rows] for name, x in inputs.items()})
        product, each = 1.0, []
        for record in records:
            torch.testing.assert_close(
                record.counted[:, 1:], torch.sigmoid(record.scores)[:, 1:].nan_to_num(0.0)
            )
            assert (record.counted[:, 0] == 1).all()  # [CLS] counts fully
            product = product * record.counted
            violation = product.sum(1) - record.budget
            each.append(
                (violation / inputs["attention_mask"][rows].sum(1) if unit == "share" else violation).mean()
            )
        means.append(torch.stack(each))
    torch.testing.assert_close(gated.retention.ascend(), torch.stack(means).mean(0))
    assert not gated.retention.take_violation().any()


@pytest.mark.parametrize("kind", ["DistilBert", "Bert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_key_gates_are_an_attention_bias(kind, dtype):
    """Fused attention with one extra entry per key against eager attention with log z added to its scores."""
    none = {"dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "seq_classif_dropout": 0.0}
    model = build(kind, attention_probs_dropout_prob=0.0, **none)
    inputs, found = batch() | labels_for("SequenceClassification", batch()), {}
    for implementation, kind_of_float in (("eager", torch.float64), ("eager", dtype), ("sdpa", dtype)):
        gated = retained(model, gates="input", gate_keys=True, initial_logit=0.5).to(kind_of_float).train()
        gated.config._attn_implementation = implementation
        torch.manual_seed(3)
        noise = torch.rand(4, 24, dtype=torch.float64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand_like", lambda x, noise=noise: noise.to(x.dtype))
            gated(**inputs).loss.backward()
        assert gated.config._attn_implementation == implementation
        gradients = torch.cat([p.grad.double().flatten() for p in gated.parameters() if p.grad is not None])
        found[implementation, kind_of_float] = gradients
    exact, eager, ours = found.values()
    assert (ours - exact).norm() <= 1.2 * (eager - exact).norm() + 1e-6 * exact.norm()


def test_key_bias_is_accurate_to_bfloat16():
    """Rounding biases of about -13 to bfloat16 would change weights by 3 %."""
    bias = torch.tensor([-13.09, -13.03, -12.97])
    query, value = (torch.zeros(1, 1, 3, 16, dtype=torch.bfloat16) for _ in range(2))
    value[0, 0] = torch.eye(3, 16)
    found, _ = key_bias.attention(torch.nn.Identity(), query, query, value, bias[None, None, None])
    weights = found[0, :, 0, :3].float()
    torch.testing.assert_close(weights, torch.softmax(bias, -1).expand(3, 3), rtol=0.005, atol=0)


def test_model_gradients_match_finite_differences():
    model = build(dtype=torch.float64, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0)
    inputs = batch() | labels_for("SequenceClassification", batch())
    for settings in (
        {"gates": "input"},
        {"schedule": "geometric", "gate_keys": True},
        {"method": "infor_coef"},
    ):
        gated = retained(model, initial_multiplier=1.0, initial_logit=0.5, **settings).double().train()

        def loss(gated=gated):
            torch.manual_seed(3)  # the same noise
            return gated(**inputs).loss

        loss().backward()
        weights = [p for n, p in gated.named_parameters() if "retention" in n]
        torch.manual_seed(5)
        direction = [torch.randn_like(w) for w in weights]
        slope = sum((d * w.grad).sum() for d, w in zip(direction, weights, strict=True))
        step, ends = 1e-6, []
        for sign in (1, -2, 1):
            with torch.no_grad():
                for w, d in zip(weights, direction, strict=True):
                    w += sign * step * d
                ends.append(loss())
        torch.testing.assert_close((ends[0] - ends[1]) / (2 * step), slope, rtol=1e-5, atol=1e-9)


def test_training_phases():
    none = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    model, inputs = build(head="TokenClassification", **none), batch()
    gated = retained(model, open_steps=2, hard_from_step=4, gates="input").train()
    weight, valid = gated.retention.gates[0].scorer.w.weight, inputs["attention_mask"] > 0
    for step, phase in enumerate(("open", "open", "soft", "soft", "straight")):
        gated.retention.step = step
        assert gated.retention.phase == phase
        gated.zero_grad()
        with gated.retention.recorded() as records:
            trained = gated(**inputs, **labels_for("TokenClassification", inputs))
        trained.loss.backward()
        # Lambda is 0, so this is the task gradient; open gates give the scorer a zero gradient.
        assert weight.grad.any() == (phase != "open")
        gated.retention.multiplier.fill_(2.0)
        gated(**inputs)
        assert bool(gated.retention.penalty) == (phase != "open")
        gated.retention.ascend(torch.ones(1))
        assert bool(gated.retention.multiplier != 2.0) == (phase != "open")
        gated.retention.multiplier.zero_()
        z, kept = records[0].z, records[0].kept
        assert (z[valid] == 1).all() == (phase == "open")
        assert ((z > 0.01) & (z < 0.99))[valid].any() == (phase == "soft")
    assert torch.equal(z > 0.5, kept) and kept.sum() == records[0].budget.sum()
    # The hard forward pass of training equals inference.
    torch.testing.assert_close(gated.eval()(**inputs).logits, trained.logits)


@pytest.mark.parametrize(("constraint", "least"), [("at_most", 0.0), ("equal", -0.5)])
def test_lambda_is_negative_only_with_equality(constraint, least):
    """Lets gates reopen that closed below the budget."""
    gated = retained(build(), constraint=constraint, multiplier_step=0.1).train()
    for violation, found in ((1.0, 0.1), (-6.0, least)):
        gated.retention.ascend(torch.tensor([violation]))
        assert gated.retention.multiplier.item() == pytest.approx(found)


@pytest.mark.parametrize("gate_keys", [False, True])
def test_z_scales_the_states_after_its_gate(gate_keys):
    """An encoder with identity blocks exposes the factors: z at a gate, and its product after a block."""
    model, inputs, biases = build("DistilBert", "TokenClassification").distilbert, batch(), []
    for block in model.transformer.layer:
        block.forward = lambda hidden, mask, **_: (biases.append(mask), hidden)[1]
    embedded = model(**inputs).last_hidden_state
    for places, dropped in (((1, 2), "zero"), ((3,), "last")):
        gated = retained(model, gates=places, schedule="geometric", gate_keys=gate_keys, dropped=dropped)
        gated.retention.train()
        with gated.retention.recorded() as records, torch.no_grad():
            states = gated(**inputs).last_hidden_state
        valid = (inputs["attention_mask"] > 0)[..., None]
        first = records[0].z[..., None]
        if dropped == "last":  # z of the state, and the rest of the state before the gate
            expected = embedded
        else:
            second = records[1].z[..., None]
            expected = embedded * first * first * second * (first * second)
            if gate_keys:
                bias = torch.log((first * second).clamp(min=1e-6))[..., 0]
                torch.testing.assert_close(biases[-1][:, 0, 0][valid[..., 0]], bias[valid[..., 0]])
        torch.testing.assert_close(states * valid, expected * valid)


def test_penalty_includes_the_loss_of_the_method():
    gated, inputs = retained(build(), method="infor_coef", bottleneck_weight=3.0).train(), batch()
    with gated.retention.recorded() as records:
        gated(**inputs)  # lambda is 0
    free = inputs["attention_mask"] > 0
    free[:, 0] = False
    gate, scores = gated.retention.gates[0], records[0].scores.nan_to_num(0.0)
    assert gate.extra_loss(scores, free) > 0
    torch.testing.assert_close(gated.retention.penalty.detach(), gate.extra_loss(scores, free))


@pytest.mark.parametrize(("constraint", "closes"), [("at_most", False), ("equal", True)])
def test_negative_joint_lambda_rewards_tokens_only_with_an_equality_budget(constraint, closes):
    gated = retained(build(), multiplier="joint", constraint=constraint).train()
    gated.retention.multiplier.data.fill_(-0.5)  # a value that the optimiser may reach
    gated(**batch())
    gated.retention.penalty.backward()
    assert gated.retention.gates[0].scorer.w.weight.grad.any() == closes
    gated.retention.ascend()
    assert gated.retention.multiplier.item() == (-0.5 if closes else 0.0)


def test_fixed_lambda_is_constant_and_joint_lambda_rises_by_descent():
    model, inputs = build(), batch() | labels_for("SequenceClassification", batch())
    fixed = retained(model, multiplier="fixed", initial_multiplier=0.7).train()
    fixed(**inputs).loss.backward()
    fixed.retention.ascend()
    assert fixed.retention.multiplier == torch.tensor([0.7])
    joint = retained(model, multiplier="joint", initial_multiplier=0.7, augmentation=6.0).train()
    joint(**inputs).loss.backward()
    violation = joint.retention._violations[0]
    torch.testing.assert_close(joint.retention.multiplier.grad, -violation)
    expected = 0.7 * violation.sum() + 3 * violation.square().sum()  # half of the augmentation
    torch.testing.assert_close(joint.retention.penalty, expected)


def test_z_without_relaxation_equals_p_and_the_threshold_applies_to_p():
    model, inputs = build(), batch()
    plain = retained(model, relaxation="sigmoid").train()
    with plain.retention.recorded() as records:
        plain(**inputs)
    torch.testing.assert_close(records[0].z[:, 1:], records[0].counted[:, 1:])  # no noise
    by_threshold = retained(model, selection="threshold", threshold=0.9)
    with by_threshold.retention.recorded() as records:
        by_threshold(**inputs)
    expected = (torch.sigmoid(records[0].scores) > 0.9) & (inputs["attention_mask"] > 0)
    assert torch.equal(records[0].kept[:, 1:], expected[:, 1:]) and records[0].kept[:, 0].all()


def test_top_is_distilled_from_its_teacher():
    """With open gates the model equals its dense model, so all terms but KL(teacher || model) are known."""
    none = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    teacher, model, inputs = build().train(), build(**none), batch()
    model.classifier.weight.data.mul_(1000)
    labels = labels_for("SequenceClassification", inputs)
    ours = model(**inputs, **labels)
    config = RetentionConfig(0.4, method="top", open_steps=1, distillation_weight=3.0, over_budget="keep")
    gated = retain(model, config, teacher).train()
    assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
    assert not any("teacher" in name for name in gated.state_dict())
    theirs = teacher(**inputs).logits.softmax(-1)
    divergence = (theirs * (theirs.log() - ours.logits.log_softmax(-1))).sum(1).mean()
    assert divergence > 0.05
    torch.testing.assert_close(gated(**inputs, **labels).loss, ours.loss + 3.0 * divergence)
    gated.retention.configure(distillation_weight=0.0)
    torch.testing.assert_close(gated(**inputs, **labels).loss, ours.loss)


@pytest.mark.gpu
@pytest.mark.parametrize("gates", ["input", "after_blocks"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("first", ["cpu", "cuda"])  # where the model is when it gets its gates
def test_every_method_trains_on_a_gpu(method, gates, first):
    inputs = batch() | labels_for("SequenceClassification", batch())
    teacher = build() if method == "top" else None
    config = RetentionConfig(0.4, method=method, gates=gates, over_budget="keep")
    gated = retain(build().to(first), config, teacher).cuda().train()
    loss = gated(**{name: x.cuda() for name, x in inputs.items()}).loss
    loss.backward()
    gated.retention.ascend()
    assert torch.isfinite(loss)
    assert all(p.grad.isfinite().all() for name, p in gated.named_parameters() if "retention" in name)


def test_transformers_trainer_updates_the_multiplier(tmp_path):
    pytest.importorskip("accelerate", reason="pip install -e '.[retention]'")
    from acp_repro.retention import RetentionCallback

    inputs = batch(rows=6)
    protected = torch.zeros_like(inputs["input_ids"])
    protected[:, 7] = 1
    columns = zip(inputs["input_ids"], inputs["attention_mask"], protected, strict=True)
    rows = [
        {"input_ids": ids, "attention_mask": mask, "protected_mask": more, "labels": i % 3}
        for i, (ids, mask, more) in enumerate(columns)
    ]
    gated = retained(build(), 0.3, gates="input", open_steps=1, over_budget="error")
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=5,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_steps=5,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(gated, arguments, train_dataset=rows, callbacks=[RetentionCallback()])
    with gated.retention.recorded() as records:
        trainer.train()
    assert len(records) == 10 and all((record.z[:, 7] == 1).all() for record in records)
    assert gated.retention.step == 4
    assert gated.retention.multiplier.item() > 0
    assert trainer.state.log_history[3]["retention_multiplier"][0] > 0
    wrapped = SimpleNamespace(module=gated)  # as in DistributedDataParallel
    RetentionCallback().on_step_begin(None, SimpleNamespace(global_step=7), None, model=wrapped)
    assert gated.retention.step == 7
    again = from_pretrained(tmp_path / "checkpoint-5")
    assert again.retention.multiplier == gated.retention.multiplier
