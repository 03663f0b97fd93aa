"""``tp_plan="auto"`` of transformers on two ranks (gloo, CPU) against one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="pip install -e '.[transformers]'")

from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import acp_repro.hf  # noqa: F401  # registers FoX
from tests.ranks import run_on

from .tiny import saved

SHAPES = [
    {"log_pruning_tolerance": -10.0},
    {"qk_norm_share_param_across_head": True},
    {"qk_norm": False, "use_k_shift": False, "use_output_norm": False},
]


def compare_with_one_process(folders: list[Path]) -> None:
    """Compares logits, the gradient of every weight and greedy tokens of each model."""
    ids = torch.randint(2, 97, (2, 150), generator=torch.Generator().manual_seed(0))
    for folder in folders:
        alone = AutoModelForCausalLM.from_pretrained(folder)
        split = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
        assert split.model.layers[0].attn.q_proj.weight.to_local().shape == (32, 64)
        logits = []
        for model in (alone, split):
            output = model(ids, labels=ids)
            output.loss.backward()
            logits.append(output.logits)
        torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
        for (name, ours), one in zip(split.named_parameters(), alone.parameters(), strict=True):
            gradient = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
            torch.testing.assert_close(gradient, one.grad, rtol=1e-3, atol=1e-5, msg=name)
        tokens = [model.generate(ids[:, :100], max_new_tokens=8, do_sample=False) for model in (alone, split)]
        assert torch.equal(*tokens)
    dist.destroy_process_group()


def ask_for_three_ranks(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=3))


def test_two_ranks_match_one_rank(tmp_path):
    folders = [tmp_path / str(i) for i in range(len(SHAPES))]
    for folder, shape in zip(folders, SHAPES, strict=True):
        saved(folder, **shape)
    assert run_on(2, tmp_path, compare_with_one_process, folders) == [(0, "")] * 2


def test_heads_must_be_divisible_by_the_ranks(tmp_path):
    saved(tmp_path / "four")
    for code, message in run_on(3, tmp_path, ask_for_three_ranks, tmp_path / "four"):
        assert code == 1
        assert "tp_size=3 does not divide the 4 heads" in message
