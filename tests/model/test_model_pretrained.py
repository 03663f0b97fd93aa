import json
import math
import os
import shutil

import pytest
import torch
from model_helpers import SMALL, with_strong_gates
from safetensors.torch import load, save_file

from acp_repro.model import FoXConfig, FoXForCausalLM, load_config, load_pretrained, save_pretrained


@pytest.fixture
def saved(tmp_path):
    """A checkpoint folder that tests may damage."""
    torch.manual_seed(0)
    save_pretrained(FoXForCausalLM(FoXConfig.pro(**SMALL)), tmp_path / "ck")
    return tmp_path / "ck"


def read_tensors(folder):
    """In memory, not mapped from the file: these tests overwrite the file."""
    return load((folder / "model.safetensors").read_bytes())


def edit_config(folder, **changes):
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


@pytest.mark.parametrize(
    ("preset", "share", "epsilon"), [("pro", True, -7.5), ("llama", False, -7.5), ("rope", True, None)]
)
def test_round_trip(tmp_path, preset, share, epsilon, small_ids):
    config = getattr(FoXConfig, preset)(
        **SMALL, qk_norm_share_param_across_head=share, log_pruning_tolerance=epsilon, norm_eps=1e-5
    )
    torch.manual_seed(0)
    model = with_strong_gates(FoXForCausalLM(config))
    save_pretrained(model, tmp_path / "deep" / "folder")
    again = load_pretrained(tmp_path / "deep" / "folder")
    assert again.config == config
    for (name, one), (name_again, two) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert name == name_again and torch.equal(one, two)
        assert two.requires_grad and two.device.type == "cpu" and two.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(model(small_ids), again(small_ids))
    assert sorted(p.name for p in (tmp_path / "deep" / "folder").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_invalid_overrides_are_rejected(saved):
    with pytest.raises(ValueError, match="log_prunning_tolerance: no such field of FoXConfig"):
        load_pretrained(saved, log_prunning_tolerance=None)
    with pytest.raises(ValueError, match="log_pruning_tolerance: must be a finite number below 0"):
        load_pretrained(saved, log_pruning_tolerance=3)


def test_saved_config_matches_the_authors_format(saved, official_pro):
    """Settings of the computation have the authors' keys and types."""
    ours = json.loads((saved / "config.json").read_text())
    theirs = json.loads((official_pro / "config.json").read_text())
    assert ours["model_type"] == "forgetting_transformer-project_fox"
    assert set(ours) <= set(theirs)
    sizes = {"vocab_size", "hidden_size", "num_hidden_layers", "num_heads"}
    assert {k: v for k, v in ours.items() if k not in sizes} == {k: theirs[k] for k in ours if k not in sizes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_rope": 0}, "config.json: use_rope: must be true or false, got 0"),
        ({"attention_bias": 0}, "attention_bias 0 is not supported, only false is"),
        ({"use_rope": True}, 'fgate_type "full" is not supported, only "none" is'),
        ({"use_rope": True, "fgate_type": "none", "rope_base": 1e4}, "rope_base 10000.0 is not supported"),
        ({"num_kv_heads": 2}, "num_kv_heads 2 is not supported, only null or the same as num_heads is"),
        ({"model_type": ...}, "only 'forgetting_transformer-project_fox' is"),
        ({"hidden_act": "gelu"}, 'only "swish" or "silu" is'),
        ({"hidden_size": ..., "qk_norm": ...}, "config.json lacks hidden_size, qk_norm"),
        ({"hidden_size": "64"}, "config.json: hidden_size: must be a whole number"),
        ({"num_hidden_layers": 10**9}, "too few for num_hidden_layers=1000000000"),
        ({"vocab_size": 10**12}, r"lm_head.weight has shape \(97, 64\), should be"),
        (b'{"vocab_size": 9', "config.json is not valid JSON"),
        (b"\xff\xfe", "config.json is not valid JSON"),
        (b"[1]", "config.json must hold a JSON object"),
    ],
    ids=str,
)
def test_invalid_config_is_rejected_before_weights_are_allocated(saved, changes, message):
    if isinstance(changes, bytes):
        (saved / "config.json").write_bytes(changes)
    else:
        edit_config(saved, **changes)
    with pytest.raises(ValueError, match=message):
        load_pretrained(saved)


def change_weights(folder, change):
    tensors = read_tensors(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def cut_weights(folder, size):
    os.truncate(folder / "model.safetensors", size)


NORM, HEAD = "model.norm.weight", "lm_head.weight"
DAMAGES = [
    (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    (shutil.rmtree, "config.json is missing"),
    (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
    (lambda folder: cut_weights(folder, 0), "is not a complete safetensors file"),
    (lambda folder: cut_weights(folder, 100_000), "is not a complete safetensors file"),
    (
        lambda folder: torch.save(read_tensors(folder), folder / "model.safetensors"),
        "is not a complete safetensors file",
    ),
    (lambda folder: change_weights(folder, lambda w: w[NORM][3:].fill_(math.nan)), f"{NORM} .*holds NaN"),
    (lambda folder: change_weights(folder, lambda w: w.pop(NORM)), rf"missing {NORM} \(64,\)"),
    (lambda folder: change_weights(folder, lambda w: w.update(more=w[NORM] + 1)), r"unexpected more \(64,\)"),
    (
        lambda folder: change_weights(folder, lambda w: w.update({HEAD: torch.zeros(97, 65)})),
        rf"{HEAD} has shape \(97, 65\), should be \(97, 64\)",
    ),
    (
        lambda folder: change_weights(folder, lambda w: w.update({NORM: w[NORM].int()})),
        f"{NORM} does not hold floating-point numbers",
    ),
    (
        lambda folder: (folder / "done.json").write_text('{"sha256": "0"}'),
        "is missing, truncated or changed: .*done.json",
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damaged_checkpoint_is_rejected(saved, damage, message):
    damage(saved)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        load_pretrained(saved)
    assert str(saved) in str(error.value)


def test_failed_save_keeps_the_previous_checkpoint(saved, monkeypatch):
    before = {p.name: p.read_bytes() for p in saved.iterdir()}

    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    torch.manual_seed(9)
    with pytest.raises(OSError, match="no space"):
        save_pretrained(FoXForCausalLM(FoXConfig.pro(**SMALL)), saved)
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == before


def test_explicit_tensors_and_compiled_models_can_be_saved(tmp_path):
    model = FoXForCausalLM(FoXConfig.pro(**SMALL))
    state = {name: torch.full_like(t, 0.5) for name, t in model.state_dict().items()}
    save_pretrained(torch.compile(model), tmp_path, state_dict=state)
    assert (load_pretrained(tmp_path).lm_head.weight == 0.5).all()
    del state["lm_head.weight"]
    with pytest.raises(ValueError, match=r"state_dict does not fit its config: missing lm_head"):
        save_pretrained(model, tmp_path, state_dict=state)


def test_class_loads_and_saves_folders(saved, tmp_path, small_ids):
    model = FoXForCausalLM.from_pretrained(saved, dtype=torch.float64, log_pruning_tolerance=None)
    assert isinstance(model, FoXForCausalLM) and model.lm_head.weight.dtype == torch.float64
    assert model.model.layers[0].attn.log_pruning_tolerance is None
    model = load_pretrained(saved)
    model.save_pretrained(tmp_path / "again")
    model.loss_per_token(small_ids, small_ids).mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()  # the file is unchanged
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()


def test_optional_and_repeated_config_keys(saved, tmp_path):
    config = load_config(saved)
    edit_config(saved, num_kv_heads=config.num_heads, attention_bias=..., hidden_act="silu")
    assert load_config(saved) == config
    save_pretrained(FoXForCausalLM(FoXConfig.rope(**SMALL)), tmp_path / "rope")
    edit_config(tmp_path / "rope", rope_base=..., fgate_type=...)
    assert load_config(tmp_path / "rope") == FoXConfig.rope(**SMALL)


def test_shards_are_loaded_from_their_folder_without_a_single_file(saved):
    tensors, index = read_tensors(saved), saved / "model.safetensors.index.json"
    names = ["../elsewhere.safetensors", "two.safetensors"]
    for name, some in zip(names, (list(tensors)[:3], list(tensors)[3:]), strict=True):
        save_file({one: tensors[one] + 1 for one in some}, saved / name)
    places = {one: names[position >= 3] for position, one in enumerate(tensors)}
    index.write_text(json.dumps({"weight_map": places}))
    assert torch.equal(load_pretrained(saved).lm_head.weight, tensors["lm_head.weight"])
    (saved / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"ck.elsewhere\.safetensors is missing"):
        load_pretrained(saved)
    (saved.parent / "elsewhere.safetensors").rename(saved / "elsewhere.safetensors")
    assert torch.equal(load_pretrained(saved).lm_head.weight, tensors["lm_head.weight"] + 1)


def test_loaded_model_is_independent_of_its_file(saved):
    model, tensors = load_pretrained(saved), read_tensors(saved)
    path = saved / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name


def test_run_folder_resolves_to_its_weights(saved, tmp_path):
    run = tmp_path / "runs" / "cpu" / "pro-tiny-128-acp"
    run.mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load_pretrained(run)
    (run / "run.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="not finished.*finish its training first"):
        load_pretrained(run)
    shutil.copytree(saved, run / "model")
    assert load_config(run) == load_config(saved)
    assert torch.equal(load_pretrained(run).lm_head.weight, load_pretrained(saved).lm_head.weight)
