"""The usual recipes of PEFT and TRL on a FoX model: LoRA with Trainer, and one step of SFT."""

import pytest
import torch

pytest.importorskip("transformers", reason="pip install -e '.[transformers]'")

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

import acp_repro.hf
from acp_repro.hf.conversion import bytes_tokenizer

from .tiny import saved


def settings(folder) -> dict:
    return dict(
        output_dir=str(folder),
        max_steps=1,
        learning_rate=0.01,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
    )


def lora():
    peft = pytest.importorskip("peft", reason="pip install peft")
    pytest.importorskip("accelerate", reason="pip install -e '.[retention]'")
    names = ["q_proj", "fgate_proj", "o_proj"]
    return peft, peft.LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM")


def test_lora_with_trainer(tmp_path):
    peft, config = lora()
    saved(tmp_path / "base", log_pruning_tolerance=-10.0)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = torch.randint(2, 97, (8, 40), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(**settings(tmp_path / "run"))
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


@pytest.mark.parametrize("packed", [False, True], ids=["lora", "packed"])
def test_sft_trains_for_one_step(tmp_path, packed):
    """The loss is the mean over all predicted tokens of documents that do not affect each other."""
    trl = pytest.importorskip("trl", reason="pip install trl")
    datasets = pytest.importorskip("datasets", reason="pip install -e '.[hf]'")
    _, config = lora()
    tokenizer = acp_repro.hf.FoXTokenizer(tokenizer_object=bytes_tokenizer())
    ours = saved(tmp_path / "base", vocab_size=len(tokenizer))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    texts = ["It was a dark and stormy night.", "It was noon."] * 4
    documents = [torch.tensor([tokenizer.encode(text + tokenizer.eos_token)]) for text in texts]
    with torch.no_grad():
        expected = torch.cat([ours.loss_per_token(ids[:, :-1], ids[:, 1:])[0] for ids in documents]).mean()
    trainer = trl.SFTTrainer(
        model,
        trl.SFTConfig(**settings(tmp_path), max_length=48, packing=packed, bf16=False),
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        peft_config=None if packed else config,
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    assert trainer.train().training_loss == pytest.approx(expected.item(), rel=1e-5)
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if packed or "lora_B" in name}
