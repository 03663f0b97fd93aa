"""Third-party models load completely or fail with a one-line error that names the damage."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from acp_repro.common.errors import UsageError

transformers = pytest.importorskip("transformers", reason="pip install -e '.[transformers]'")
load_model = pytest.importorskip("acp_repro.model.third_party").load_model

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
CAUSAL, CLASSIFIER = transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification
Q = "model.layers.1.self_attn.q_proj.weight"


def save(folder, name="LlamaForCausalLM", **settings):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**SHAPE, **settings))
    model.save_pretrained(folder)
    return model


def change_weights(folder, change):
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, {"format": "pt"})


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGES = {
    f"missing {Q}": lambda folder: change_weights(folder, lambda w: w.pop(Q)),
    "unexpected model.extra": lambda folder: change_weights(
        folder, lambda w: w.update({"model.extra": torch.ones(2)})
    ),
    f"{Q} (1 in all) holds NaN": lambda folder: change_weights(folder, lambda w: w[Q].fill_(torch.nan)),
    f"{Q} has dtype I64, should be floating-point": lambda folder: change_weights(
        folder, lambda w: w.update({Q: w[Q].long()})
    ),
    f"{Q} has shape (32, 31), should be (32, 32)": lambda folder: change_weights(
        folder, lambda w: w.update({Q: w[Q][:, 1:].contiguous()})
    ),
    "model.safetensors cannot be read": lambda folder: (folder / "model.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()[:-9]
    ),
    "has no file named model.safetensors": lambda folder: (folder / "model.safetensors").unlink(),
    "missing model.layers.2": lambda folder: change_config(folder, num_hidden_layers=3),
    "num_hidden_layers is 1000000000, over 1000": lambda folder: change_config(
        folder, num_hidden_layers=10**9
    ),
    "parameters, but the weights have": lambda folder: change_config(folder, intermediate_size=10**9),
    "not a valid JSON": lambda folder: (folder / "config.json").write_text("{"),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_damage_is_reported_in_one_line_with_folder_and_tensor(words, tmp_path, capfd):
    save(tmp_path)
    DAMAGES[words](tmp_path)
    capfd.readouterr()
    with pytest.raises(UsageError) as error:
        load_model(CAUSAL, tmp_path)
    message = str(error.value)
    assert words in message and str(tmp_path) in message and "\n" not in message
    assert capfd.readouterr().err == ""  # no other output, such as transformers' table


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_complete_folder_loads_unchanged(dtype, tmp_path):
    """Tied weights are not stored, and files may have any floating-point dtype."""
    model = save(tmp_path, tie_word_embeddings=True)
    model.to(dtype).save_pretrained(tmp_path)
    loaded = load_model(CAUSAL, tmp_path, dtype="auto")
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors") and loaded.dtype == dtype
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)


@pytest.mark.parametrize("kind", ["BertModel", "BertForMaskedLM", "RobertaForMaskedLM"])
def test_new_head_is_initialised_and_encoder_weights_are_required(kind, tmp_path):
    save(tmp_path, kind)
    state = torch.random.get_rng_state()
    torch.manual_seed(3)
    expected = CLASSIFIER.from_pretrained(tmp_path, num_labels=3).state_dict()
    torch.manual_seed(3)
    loaded = load_model(CLASSIFIER, tmp_path, new_head=True, num_labels=3).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())
    torch.random.set_rng_state(state)
    with pytest.raises(UsageError, match="missing classifier"):
        load_model(CLASSIFIER, tmp_path)
    names = [*load_file(tmp_path / "model.safetensors")]
    (first,) = (name for name in names if name.endswith("layer.0.attention.self.query.weight"))
    other = first.replace("layer.0", "layer.5")
    change_weights(tmp_path, lambda w: w.update({other: w[first].clone()}))
    with pytest.raises(UsageError, match=f"unexpected {other}"):
        load_model(CLASSIFIER, tmp_path, new_head=True)
    change_weights(tmp_path, lambda w: (w.pop(other), w.pop(first)))
    with pytest.raises(UsageError, match=r"missing \w+\.encoder\.layer\.0\.attention"):
        load_model(CLASSIFIER, tmp_path, new_head=True)


def test_shards_are_loaded_from_their_index(tmp_path):
    save(tmp_path).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(shards) > 1
    load_model(CAUSAL, tmp_path / "shards")
    shards[-1].write_bytes(shards[-1].read_bytes()[:-9])
    with pytest.raises(UsageError, match=rf"{shards[-1].name} cannot be read"):
        load_model(CAUSAL, tmp_path / "shards")


def test_code_in_a_folder_is_never_executed_and_never_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user is asked"))
    auto_map = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(UsageError, match="custom code"):
        load_model(CAUSAL, tmp_path, trust_remote_code=True)
    save(tmp_path)  # a model that transformers knows: its own class is used
    change_config(tmp_path, auto_map=auto_map)
    assert type(load_model(CAUSAL, tmp_path, trust_remote_code=True)).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "ran").exists()
