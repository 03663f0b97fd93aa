"""The explorer's page: its contents and its rendering in a browser."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from acp_repro.attention.boundary import find_boundary
from acp_repro.common.errors import UsageError
from acp_repro.explorer.explorer import Explorer, token_pieces
from acp_repro.explorer.heads import weigh_heads
from acp_repro.explorer.pack import LEAST_WEIGHT
from acp_repro.explorer.rule_table import head_map, measure_rules
from acp_repro.model import ByteTokenizer
from acp_repro.model.capture import attention_inputs
from tests.test_heads import small_model

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LENGTH = 700
WORDS = "to forget is to keep what <matters> & nothing élse.\n"
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
PATIENCE_MS = 180_000  # the default timeout of 30 s is too short on a loaded machine


def tokens(length=LENGTH):
    return torch.tensor([ByteTokenizer.bos_id, *(WORDS * length).encode()[: length - 1]])[None]


@pytest.fixture(scope="module")
def seen():
    """Two models of two layers of three heads; the second's gates are open, and it is exact."""
    models = [small_model(heads=3), small_model(heads=3, log_pruning_tolerance=None)]
    with torch.no_grad():
        for block in models[1].model.layers:
            block.attn.fgate_proj.bias.add_(5.0)
    heads = [
        replace(weigh_heads(model, [tokens()]), facts=["its text"], name=name)
        for model, name in zip(models, ("one", "two"), strict=True)
    ]
    heads[0].rules = head_map(measure_rules(models[0], tokens()), "one", "its text", LENGTH)
    return heads


@pytest.fixture(scope="module")
def page(seen, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    Explorer(seen[0], tokenizer=ByteTokenizer()).save(folder / "one.html")
    Explorer(*seen, tokenizer=ByteTokenizer()).save(folder / "two.html")
    return folder


# ---- contents --------------------------------------------------------------------------------


def test_names_and_text_are_escaped_in_the_page(seen):
    strange = replace(seen[0], name="</script><b>x</b>", facts=["<i>"])
    text = Explorer(strange, tokenizer=ByteTokenizer()).html
    assert "<b>x</b>" not in text and "<i>" not in text and "default-src 'none'" in text
    framed = Explorer(seen[0], tokenizer=ByteTokenizer())._repr_html_()  # in a notebook
    assert framed.startswith("<iframe") and framed.count("<") == 2


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("naïve 日", ["⟨256⟩", *"na", "ï", "", *"ve ", "日", "", ""]),
        ([255, 65, 195], ["\ufffd", "A", "\ufffd"]),  # invalid bytes, and an incomplete character
    ],
)
def test_tokens_sharing_a_character_show_that_character(text, pieces):
    tokenizer = ByteTokenizer()
    ids = tokenizer.prompt(text) if isinstance(text, str) else text
    assert token_pieces(torch.tensor(ids), tokenizer) == pieces


@pytest.mark.parametrize("strips", [True, False])
def test_pieces_of_space_stripping_tokenizers_form_the_text(strips):
    """Tokenizers of Llama 2, Mistral, Phi-3 and T5: a token decoded separately loses its space."""
    tokenizers = pytest.importorskip("tokenizers", reason="pip install -e '.[bpe]'")
    decoders = tokenizers.decoders
    bytes_ = [f"<0x{byte:02X}>" for byte in "日".encode()]
    words = ["▁the", "▁cat", "▁▁", "sat", "\n", "▁", *bytes_, "▁mats"]
    ids = {f"<0x{byte:02X}>": byte for byte in range(256)} | {w: 256 + i for i, w in enumerate(words[:6])}
    ids["▁mats"] = 262
    llama = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        llama if strips else [decoders.ByteFallback(), decoders.Metaspace()]
    )
    pieces = token_pieces(torch.tensor([ids[word] for word in words]), tokenizer)
    assert pieces == ["the", " cat", "  ", "sat", "\n", " ", "日", "", "", " mats"]


def test_compared_models_must_match(seen):
    with pytest.raises(UsageError, match="one and three differ in layers, heads or tokens"):
        Explorer(seen[0], replace(seen[0], name="three", input_ids=seen[0].input_ids.flip(0)))
    assert [model.name for model in Explorer(seen[0], seen[0]).models] == ["one (first)", "one (second)"]


# ---- rendering -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    if BROWSER is None:
        pytest.skip("no browser; install one, e.g. apt install chromium")
    driver = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with driver.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=BROWSER, args=FLAGS, timeout=PATIENCE_MS)


@pytest.fixture
def visit(browser, page):
    """Opens the page; fails at the end if the browser logged an error or used the network."""
    problems = []

    def go(name="one.html", at="", width=1280):
        tab = browser.new_page(viewport={"width": width, "height": 860})
        tab.set_default_timeout(PATIENCE_MS)
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda request: request.url.startswith("http") and problems.append(request.url))
        tab.goto(f"{(page / name).as_uri()}{at}")
        view = re.search(r"view=(\w+)", at)
        tab.locator(f"body[data-drawn={view[1] if view else 'model'}]").wait_for()
        return tab

    yield go
    assert problems == []


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize(
    "view", ["head&layer=1&head=1", "text&layer=0&head=2&token=699", "compare&layer=0&head=0", "rules"]
)
def test_every_view_renders_without_errors(visit, width, view):
    visit("two.html", f"#view={view}", width)


def test_link_preserves_zoom_token_and_epsilon_and_arrow_keys_update_the_text(visit):
    tab = visit(at="#view=head&layer=0&head=1&token=300&part=250,250,100&log-epsilon=-3")
    assert "log ε = −3.0" in tab.locator("#pruning").inner_text()
    tab.locator("#own-epsilon").click()
    tab.wait_for_url(lambda url: "log-epsilon" not in url and "part=250" in url)
    text = visit(at="#view=text&layer=0&head=1&token=300")
    text.keyboard.press("ArrowRight")
    text.wait_for_url(lambda url: "token=301" in url)


def test_page_decodes_the_packed_data(visit, seen):
    """Every value of every head, within the rounding error of bytes."""
    tab, heads, inputs = visit(), seen[0], attention_inputs(small_model(heads=3), tokens())
    for index, head in enumerate(heads.heads):
        read = tab.evaluate(
            """async index => {
              const head = await models[0].head(index), T = text.length, all = [...Array(T).keys()];
              const N = Math.ceil(T / head.model.cell);
              const epsilons = [-10, -40, -3, -0.5, -10];
              return {gates: all.map(i => head.gate(i)), c: [...head.c], first: [...head.firstKept],
                distance: [...head.byDistance],
                received: all.map(j => head.received(j)), lost: all.map(i => head.lostOf(i)),
                keys: all.map(i => head.keysOf(i).keys.map(k => [k.key, k.weight])),
                logits: all.map(i => head.keysOf(i).keys.map(k => k.logit)),
                boundaries: epsilons.map(e => { head.prune(e); return [...head.boundary]; }),
                cells: [...Array(N).keys()].map(m => [...Array(m + 1).keys()].map(n => head.square(m, n)))};
            }""",
            index,
        )
        w, c = head.weights, head.log_fgate.double().cumsum(0)
        q, k = (x[0, head.head] for x in (inputs[head.layer].q, inputs[head.layer].k))
        np.testing.assert_allclose(read["gates"], head.log_fgate.exp(), atol=0.003)
        np.testing.assert_allclose(read["c"], c, rtol=0.01, atol=0.01)
        assert read["first"] == w.first_kept.tolist()
        for epsilon, boundary in zip((-10, -40, -3, -0.5, -10), read["boundaries"], strict=True):
            delta = torch.tensor([[head.threshold + epsilon + 10]])
            assert boundary == find_boundary(c[None, None], delta, LENGTH, *heads.grid).flatten().tolist()
        assert sum(read["distance"]) == pytest.approx(1, abs=1e-5)
        np.testing.assert_allclose(read["received"], w.received, rtol=0.06, atol=1e-3)
        assert (np.array(read["lost"]) >= w.pruned_mass.numpy() * (1 - 1e-6)).all()
        for query, keys in enumerate(read["keys"]):
            weights = w.weights[query].numpy()
            count = max(1, int((weights >= LEAST_WEIGHT).sum()))
            assert [key for key, _ in keys] == w.keys[query, :count].tolist()
            np.testing.assert_allclose([weight for _, weight in keys], weights[:count], atol=0.004)
            scores = k[w.keys[query, :count].long()] @ q[query] / q.shape[-1] ** 0.5
            np.testing.assert_allclose(read["logits"][query], scores, atol=0.2)
        for m, row in enumerate(read["cells"]):
            np.testing.assert_allclose(row, w.cells[m, : m + 1], rtol=0.03, atol=1e-5)
