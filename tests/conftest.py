"""Enables Triton's interpreter without a GPU, before Triton is imported; skips GPU tests with a reason;
and provides fixtures shared by several folders."""

import os
import shutil
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

REPO_ROOT = Path(__file__).resolve().parents[1]
SHIPPED = REPO_ROOT / "pretrained" / "pro-13m-4k-acp"


def pytest_collection_modifyitems(items):
    # The slowest tests with processes run first; otherwise one core would finish long after the others.
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA GPU: run make test-gpu on a machine with one")
            )


@pytest.fixture
def poisoned():
    """Makes unwritten memory visible: new tensors are full of NaN or of the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def make_suite(tmp_path, monkeypatch):
    """Returns a function that writes a suite file and its corpus to the working folder, which is empty at
    first, and loads the suite."""
    from tests import suites  # imports Triton

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACP_REPRO_CACHE", raising=False)

    def write_and_load(text=suites.YAML, name="mini"):
        suites.write_suite(tmp_path, text, name)
        return suites.load_suite(name)

    return write_and_load


@pytest.fixture(scope="session")
def small_fox(tmp_path_factory) -> Path:
    """Folder of a small FoX with random bfloat16 weights and the tokenizer of the published model."""
    from tests.hf.tiny import saved  # imports Triton

    folder = tmp_path_factory.mktemp("models") / "small-fox"
    saved(folder, vocab_size=4096).bfloat16().save_pretrained(folder)
    shutil.copy(SHIPPED / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="session")
def official_pro() -> Path:
    """Folder of the random-weight model of the authors' code with its recorded outputs."""
    folder = REPO_ROOT.parent / "shared" / "fixtures" / "official_pro"
    if not (folder / "expected.safetensors").is_file():
        pytest.skip(
            "the recorded answers of the official model are not part of this repository: put"
            " official_pro/ (config.json, model.safetensors, expected.safetensors) in"
            " ../shared/fixtures beside the clone to run this test"
        )
    return folder
