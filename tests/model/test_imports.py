"""Import dependencies of the methods: only torch."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_TORCH = (
    *("numpy", "yaml", "pandas", "tqdm", "safetensors", "triton", "tokenizers", "matplotlib"),
    *("pydantic", "pydantic_core", "annotated_types", "transformers"),
)


def run_without(names: tuple[str, ...], code: str) -> None:
    """Runs ``code`` in a Python process without the libraries ``names``."""
    block = f"import sys\nfor name in {names!r}:\n    sys.modules[name] = None\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", block + code], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_importing_the_package_does_not_load_torch():
    run_without(
        (*NOT_TORCH, "torch"), "import acp_repro; assert set(acp_repro.__all__) <= set(dir(acp_repro))"
    )


def test_settings_of_the_methods_are_checked_without_pydantic():
    run_without(
        (*NOT_TORCH, "torch"),
        """
from acp_repro.lap.config import PruningConfig
from acp_repro.model import FoXConfig
from acp_repro.retention.config import RetentionConfig
for settings, name in ((PruningConfig, "tau"), (FoXConfig, "vocab_size"), (RetentionConfig, "budget")):
    settings(**{name: 1})
    try:
        settings(**{name: 0})
        raise AssertionError(settings)
    except ValueError as error:
        assert str(error).startswith(f"{name}: must be "), error
""",
    )


def test_methods_run_with_torch_only():
    run_without(
        NOT_TORCH,
        """
import torch
from acp_repro import FoXConfig, FoXForCausalLM, ForgettingAttentionLayer, forgetting_attention
config = FoXConfig.pro(vocab_size=7, hidden_size=32, num_hidden_layers=1, num_heads=2)
model = FoXForCausalLM(config)
ids = torch.arange(70).view(1, 70) % 7
model.loss_per_token(ids, ids).mean().backward()
assert model.generate(ids, 2, 1.0, top_p=0.9).shape == (1, 72)
assert isinstance(model.model.layers[0].attn, ForgettingAttentionLayer)
x = torch.zeros(1, 70, 2, 16)
assert forgetting_attention(x, x, x, x[..., 0], adaptive_threshold='auto').shape == x.shape
from acp_repro.retention import RetentionConfig, RetentionScorer, keep_top, hard_concrete
RetentionScorer(4, 2, 0.9)(torch.zeros(1, 3, 4))
""",
    )


def test_missing_safetensors_error_names_the_package_to_install():
    run_without(
        ("safetensors",),
        """
from acp_repro import FoXConfig, FoXForCausalLM, load_pretrained
model = FoXForCausalLM(FoXConfig.pro(vocab_size=7, hidden_size=32, num_hidden_layers=1, num_heads=2))
for call in (lambda: model.save_pretrained('out'), lambda: load_pretrained('pretrained/pro-13m-4k-acp')):
    try:
        call()
    except ImportError as error:
        assert 'pip install safetensors' in str(error), error
    else:
        raise AssertionError('no error')
""",
    )
