"""A user's mistake ends a command without a traceback, and its message names the file, key or option."""

import importlib
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from acp_repro.model import FoXConfig, FoXForCausalLM, save_pretrained
from tests.suites import YAML

ROOT = Path(__file__).parent.parent
AR, LAP = "pretrained/ar-tiny-stdlib", "pretrained/lap-0.6m"
CASES = [  # a command, its arguments, and the required words of its message
    ("train", "--suite none", "experiments/none.yaml"),
    ("train", "--suite none --device gpu", "experiments/none.yaml"),
    ("train", "--jobs 0", "--jobs"),
    ("train", "--siute cpu", "did you mean --suite?"),
    ("train", "--suite begun", "begun: a folder, not a suite"),
    ("train", "--suite empty", "experiments/empty.yaml: data.path: "),
    ("train", "--suite short", "experiments/short.yaml: data: no heldout document has context_length = 128"),
    ("suite", "--new experiments/empty.yaml --text long.txt", "--new"),
    ("suite", "--new new.yaml --text four.txt", "too short"),
    ("measure", "loss --suite none", "experiments/none.yaml"),
    ("plan", "--suite none", "experiments/none.yaml"),
    ("benchmark_attention", "--device cuda:99", "--device cuda:99"),
    ("data", "'{corpus: text, path: nowhere}'", "path: nowhere"),
    ("data", "'{tokenizer: gpt3}'", "tokenizer"),
    ("inspect", "nowhere", "nowhere"),
    ("inspect", "bare", "config.json"),
    ("inspect", "half", "model.safetensors"),
    ("inspect", "flipped", "flipped/done.json"),
    ("inspect", "begun", "begun"),
    ("inspect", "mute", "tokenizer.json"),
    ("inspect", "fox --token-ids short.npy", "--context-length"),
    ("inspect", "fox --token-ids blank.txt", "blank.txt"),
    ("inspect", "fox --token-ids real.npy", "real.npy"),
    ("inspect", "fox --token-ids big.npy", "5000"),
    ("inspect", "fox --text four.txt", "four.txt"),
    ("inspect", "fox --text=missing.txt", "--text"),
    ("inspect", "fox --text blank.txt", "--text: "),
    ("sweep_epsilon", "fox --text four.txt", "--text: "),
    ("inspect", "fox --html x --context-length 100", "--context-length"),
    ("inspect", "fox --html x --compare wide", "wide"),
    ("inspect", "fox --html x --compare ''", "config.json"),
    ("inspect", "fox --context-length=0", "--context-length"),
    ("inspect", "fox --tokens=x", "--tokens"),
    ("inspect", "fox --log-pruning-tolerance=1", "--log-pruning-tolerance"),
    ("inspect", "fox --compare=x", "--compare"),
    ("inspect", "fox --device gpu", "--device gpu"),
    ("generate", "nowhere", "nowhere"),
    ("generate", "mute", "tokenizer.json"),
    ("generate", "fox --stop 999999", "4095"),
    ("generate", "fox --temperature=-1", "--temperature"),
    ("generate", "fox --top-p=0", "--top-p"),
    ("generate", "fox --top-p=2", "--top-p"),
    ("generate", "fox --top-k=0", "--top-k"),
    ("generate", "fox --seed=-1", "--seed"),
    ("generate", f"fox --seed={10**20}", "--seed"),
    ("measure", "loss --again", "did you mean --force?"),
    ("inspect", "fox --length 100", "did you mean --context-length?"),
    ("needle", "fox --lengths 100", "did you mean --context-lengths?"),
    ("benchmark_attention", "--rivals fa4", "did you mean --baselines?"),
    ("benchmark_attention", "--tokens 4096", "did you mean --batch-tokens?"),
    ("benchmark_training", "--official", "did you mean --with-official?"),
    ("sweep_epsilon", "--checkpoint fox", "did you mean MODEL?"),
    ("needle", "nowhere", "nowhere"),
    ("needle", "fox --context-lengths 10", "length"),
    ("needle", "fox --haystack no", "--haystack"),
    ("needle", "fox --haystack four.txt --context-lengths 500", "four.txt"),
    ("needle", "fox --csv .", "--csv"),
    ("needle", "fox --csv there.csv", "there.csv"),
    ("needle", "fox --depths 2", "--depths"),
    ("needle", "mute", "tokenizer.json"),
    ("needle", "damaged", "damaged/tokenizer.json"),
    ("needle", "foreign", "4096"),
    ("convert", "half out --to official", "model.safetensors"),
    ("convert", "bare out --to official", "config.json"),
    ("convert", "half . --to official", "not empty"),
    ("lap.compress", "nowhere --text a", "nowhere"),
    ("lap.compress", "nowhere --file latin.txt", "latin.txt"),
    ("lap.compress", "fox --text a", "fox"),
    ("lap.compress", f"{LAP} --file long.txt", "long.txt:4"),
    ("lap.compress", f"{LAP} --text a --device tpu", "--device tpu"),
    ("retention.show", "nowhere --text x", "nowhere"),
    ("retention.show", "fox --text x", "fox"),
    ("retention.show", f"{AR} --text ' '", "text"),
    ("retention.show", f"{AR} --file big.npy", "big.npy"),
    ("retention.show", f"{AR} --text x --budget 0", "budget"),
    ("retention.show", f"{AR} --text x --budget nan", "budget"),
    ("retention.show", "cut --text x", "cut"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, small_fox):
    """A working folder with checkpoints and texts, most of them damaged."""
    missing = {"fox": "-", "mute": "tokenizer.json", "half": "model.safetensors", "bare": "config.json"}
    files = {
        "damaged/tokenizer.json": b'{"mod',
        "flipped/done.json": b'{"sha256": "0"}',
        "begun/run.json": b"{}",
        "cut/model.safetensors": b"cut short",
        "blank.txt": b" \n",
        "four.txt": b"mist",
        "latin.txt": "café".encode("latin-1"),
        "long.txt": b"a cat\n\n\n" + b"a " * 2000,
        "there.csv": b"",
        "experiments/empty.yaml": YAML.replace("path: text.txt", "path: blank.txt").encode(),
        "experiments/short.yaml": YAML.replace("[heldout.txt]", "[four.txt]").encode(),
        "text.txt": b"a text of some words. " * 300,
        "heldout.txt": b"a text of other words. " * 300,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("mistakes"))
        Path("pretrained").symlink_to(ROOT / "pretrained")
        for name in (*missing, "damaged", "flipped"):
            shutil.copytree(small_fox, name, ignore=shutil.ignore_patterns(missing.get(name, "-")))
        shutil.copytree(AR, "cut")
        for name in ("begun", "experiments"):
            Path(name).mkdir()
        for name, content in files.items():
            Path(name).write_bytes(content)
        for name, ids in (
            ("short", np.zeros(300, int)),
            ("real", np.zeros(5000)),
            ("big", np.full(5000, 5000)),
        ):
            np.save(f"{name}.npy", ids)
        for name, vocab_size in (("wide", 4096), ("foreign", 97)):
            shape = {"vocab_size": vocab_size, "hidden_size": 64, "num_hidden_layers": 1, "num_heads": 2}
            save_pretrained(FoXForCausalLM(FoXConfig.pro(**shape)), name)
            shutil.copy("fox/tokenizer.json", name)
        yield


@pytest.mark.parametrize(("module", "arguments", "named"), CASES)
def test_user_errors_are_reported_without_a_traceback(folders, capsys, module, arguments, named):
    if module in ("convert", "lap.compress", "retention.show"):
        pytest.importorskip("transformers", reason="pip install -e '.[transformers]'")
    try:
        code = importlib.import_module(f"acp_repro.{module}").main(shlex.split(arguments))
    except SystemExit as end:
        code = end.code
    error = capsys.readouterr().err
    assert code in (1, 2) and named in error and "Traceback" not in error
    assert error.startswith("usage: ") or (error.startswith("error: ") and error.count("\n") == 1)
