"""The usual recipe of PEFT on a FoX model: LoRA with Trainer."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="pip install -e '.[transformers]'")

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

import acp_repro.hf  # noqa: F401  # registers FoX

from .tiny import saved


def test_lora_with_trainer(tmp_path):
    peft = pytest.importorskip("peft", reason="pip install peft")
    pytest.importorskip("accelerate", reason="pip install -e '.[retention]'")
    names = ["q_proj", "fgate_proj", "o_proj"]
    config = peft.LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM")
    saved(tmp_path / "base", log_pruning_tolerance=-10.0)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = torch.randint(2, 97, (8, 40), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=1,
        learning_rate=0.01,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
    )
    Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator).train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {
        name for name in before if "lora_B" in name
    }  # in the first step, B is 0: A has no gradient
    model.save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    with torch.no_grad():
        logits = model.eval()(ids).logits
        assert torch.equal(again(ids).logits, logits)
        merged = again.merge_and_unload()(ids).logits
    torch.testing.assert_close(merged, logits, rtol=1e-4, atol=1e-3)
