"""Fixtures for the tests of ``acp_repro.model``."""

import pytest
import torch
from model_helpers import SMALL, with_strong_gates

from acp_repro.model import FoXConfig, FoXForCausalLM


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["pro", "llama"])
def small_config(request: pytest.FixtureRequest) -> FoXConfig:
    return getattr(FoXConfig, request.param)(**SMALL)


@pytest.fixture
def small_model(small_config: FoXConfig) -> FoXForCausalLM:
    torch.manual_seed(0)
    return with_strong_gates(FoXForCausalLM(small_config))


@pytest.fixture
def small_ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, SMALL["vocab_size"], (2, 150), generator=generator)
