"""Fixtures for the tests of ``acp_repro.hf``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def one_thread():
    """Small products: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def official_pro() -> Path:
    folder = ROOT.parent / "shared" / "fixtures" / "official_pro"
    if not (folder / "expected.safetensors").is_file():
        pytest.skip(
            "the recorded answers of the official model are not part of this repository: put"
            " official_pro/ (config.json, model.safetensors, expected.safetensors) in"
            " ../shared/fixtures beside the clone to run this test"
        )
    return folder
