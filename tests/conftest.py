"""Without a GPU the Triton kernels run in Triton's interpreter, which must be asked for before
Triton is imported, and tests of a GPU say why they skip. And the fixtures that several folders use."""

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
    # First what starts processes and takes longest, or one core would still be at it when others are done.
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="run make test-gpu where a GPU is"))


@pytest.fixture
def poisoned():
    """Memory that is not written shows: new tensors are full of NaN, or of the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def small_fox(tmp_path_factory) -> Path:
    """Folder of a small FoX of random bfloat16 weights, with the tokenizer of the shipped one."""
    from tests.hf.tiny import saved  # imports Triton

    folder = tmp_path_factory.mktemp("models") / "small-fox"
    saved(folder, vocab_size=4096).bfloat16().save_pretrained(folder)
    shutil.copy(SHIPPED / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="session")
def official_pro() -> Path:
    """Folder of the random-weight model of the authors' code, with its answers."""
    folder = REPO_ROOT.parent / "shared" / "fixtures" / "official_pro"
    if not (folder / "expected.safetensors").is_file():
        pytest.skip(
            "the recorded answers of the official model are not part of this repository: put"
            " official_pro/ (config.json, model.safetensors, expected.safetensors) in"
            " ../shared/fixtures beside the clone to run this test"
        )
    return folder
