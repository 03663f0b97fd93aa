"""The explorer's page: what it holds, and what a browser shows of it."""

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from acp_repro.common.errors import UsageError
from acp_repro.explorer.explorer import Explorer, explore, token_pieces
from acp_repro.explorer.heads import weigh_heads
from acp_repro.explorer.pack import D3, LEAST_WEIGHTS, render
from acp_repro.model import ByteTokenizer
from tests.conftest import SHIPPED
from tests.test_heads import small_model

ROOT = Path(__file__).parent.parent
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LENGTH = 700
WORDS = "to forget is to keep what <matters> & nothing élse.\n"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
PATIENCE_MS = 180_000  # the 30 s of a wait by default were too short on a machine under load


def tokens(length=LENGTH):
    return torch.tensor([ByteTokenizer.bos_id, *(WORDS * length).encode()[: length - 1]])[None]


def until(tab, condition, arg=None, seconds=30):
    """Waits for a condition on the page. Playwright's own wait uses ``eval``, which the page forbids."""
    begun = time.monotonic()
    while not tab.evaluate(condition, arg):
        assert time.monotonic() < begun + seconds, condition
        tab.wait_for_timeout(20)


@pytest.fixture(scope="module")
def seen():
    """Two models of two layers of three heads; the second's gates are open, and it is exact."""
    models = [small_model(heads=3), small_model(heads=3, log_pruning_tolerance=None)]
    with torch.no_grad():
        for block in models[1].model.layers:
            block.attn.fgate_proj.bias.add_(5.0)
    first, second = (replace(weigh_heads(model, [tokens()]), facts=["its text"]) for model in models)
    return [replace(first, name="one"), replace(second, name="two")]


@pytest.fixture(scope="module")
def page(seen, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    Explorer(seen[0], tokenizer=ByteTokenizer()).save(folder / "one.html")
    Explorer(*seen, tokenizer=ByteTokenizer()).save(folder / "two.html")
    return folder


# ---- what it holds ---------------------------------------------------------------------------


def test_the_page_is_whole_and_loads_nothing(page):
    text = (page / "one.html").read_text(encoding="utf-8")
    assert "{{" not in re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert not re.search(
        r"""(?:src|href)=["']?(?:https?:)?//|@import|url\((?!#)|fetch\(|XMLHttpRequest""", without_d3(text)
    )
    assert "default-src 'none'" in text
    assert f"d3js.org v{D3}" in text and "Permission to use, copy, modify" in text
    about = json.loads(re.search(r'id="about">(.*?)</script>', text, re.S)[1])
    table = about["models"][0]["table"]
    assert table["kind"] == ["local", "between", "global"] * 2 or set(table["kind"]) >= {"local", "global"}
    assert about["models"][0]["stride"] == 1 and len(text.encode()) < 600_000


def test_the_page_that_comes_with_the_docs_is_of_the_present_sources():
    path = ROOT / "docs" / f"heads-{SHIPPED.name}.html"
    text = path.read_text(encoding="utf-8")
    about = json.loads(re.search(r'id="about">(.*?)</script>', text, re.S)[1])
    blobs = dict(re.findall(r'<script type="text/plain" id="(\w+)">(.*?)</script>', text, re.S))
    assert text == render(f"Heads of {SHIPPED.name}", about, blobs), f"inspect {SHIPPED} --html {path}"
    assert len(text.encode()) < 3_000_000 and len(about["models"][0]["table"]["kind"]) == 36


def without_d3(text: str) -> str:
    return "".join(part for part in text.split("<script>") if "d3js.org v" not in part)


def test_names_and_text_cannot_become_a_part_of_the_page(seen):
    strange = replace(seen[0], name="</script><b>x</b>", facts=["<i>"])
    text = Explorer(strange, tokenizer=ByteTokenizer()).html
    assert "<b>x</b>" not in text and "<i>" not in text
    framed = Explorer(seen[0], tokenizer=ByteTokenizer())._repr_html_()  # in a notebook
    assert framed.startswith("<iframe") and framed.count("<") == 2


def test_tokens_that_share_a_character_read_as_it():
    text = "naïve 日本語 é"
    ids = torch.tensor(ByteTokenizer().prompt(text))
    pieces = token_pieces(ids, ByteTokenizer())
    assert pieces[:6] == ["⟨256⟩", "n", "a", "ï", "", "v"] and "".join(pieces[1:]) == text
    # Bytes that no text has, and a text that ends within a character.
    assert token_pieces(torch.tensor([255, 65, 195]), ByteTokenizer()) == ["\ufffd", "A", "\ufffd"]
    assert token_pieces(torch.tensor([65]), None) == ["⟨65⟩"]


def test_pieces_of_tokenizers_that_drop_a_space_in_front_are_the_text():
    """Those of Llama 2, Mistral, Phi-3 and T5: a token that is decoded by itself loses its space."""
    tokenizers = pytest.importorskip("tokenizers", reason="pip install -e '.[bpe]'")
    decoders, text = tokenizers.decoders, "the cat  sat\non 日本 mats"
    under, first = "▁", "▁" + text.replace(" ", "▁")
    words = ["▁the", "▁", "▁cat", "▁▁", "sat", "\n", "on", "▁mats"]
    vocabulary = [*(f"<0x{byte:02X}>" for byte in range(256)), *words]
    ids = {word: i for i, word in enumerate(vocabulary)}
    tokens = [
        "▁the",
        "▁cat",
        "▁▁",
        "sat",
        "\n",
        "on",
        "▁",
        *(f"<0x{b:02X}>" for b in "日本".encode()),
        "▁mats",
    ]
    assert first == "".join(tokens[:7]) + "日本" + tokens[-1]
    llama = [
        decoders.Replace(under, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    metaspace = [decoders.ByteFallback(), decoders.Metaspace()]
    for steps in (llama, metaspace):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [], byte_fallback=True))
        tokenizer.decoder = decoders.Sequence(steps)
        pieces = token_pieces(torch.tensor([ids[token] for token in tokens]), tokenizer)
        assert "".join(pieces) == text and pieces[:3] == ["the", " cat", "  "] and pieces[7:9] == ["日", ""]


def test_two_models_must_fit_each_other(seen):
    with pytest.raises(UsageError, match="a has 2 layers of 2 heads, b has 2 layers of 3 heads; only"):
        explore(small_model(), tokens(), names=("a", "b"), compare=small_model(heads=3))
    with pytest.raises(UsageError, match="one and three differ in layers, heads or tokens"):
        Explorer(seen[0], replace(seen[0], name="three", input_ids=seen[0].input_ids.flip(0)))
    assert [model.name for model in Explorer(seen[0], seen[0]).models] == ["one (first)", "one (second)"]


# ---- what a browser shows --------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    if BROWSER is None:
        pytest.skip("no browser; install one, e.g. apt install chromium")
    driver = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with driver.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS, timeout=PATIENCE_MS)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser, page):
    """Opens the page; at the end nothing may have been complained of, and nothing asked of a network."""
    problems, tabs = [], []

    def go(name="one.html", at="", width=1280, theme="light", touch=False):
        tab = browser.new_page(
            viewport={"width": width, "height": 860},
            color_scheme=theme,
            accept_downloads=True,
            has_touch=touch,
        )
        tabs.append(tab)
        tab.set_default_timeout(PATIENCE_MS)
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda request: request.url.startswith("http") and problems.append(request.url))
        tab.goto(f"{(page / name).as_uri()}{at}")
        view = re.search(r"view=(\w+)", at)
        tab.locator(f"body[data-drawn={view[1] if view else 'model'}]").wait_for()
        return tab

    yield go
    for tab in tabs:
        tab.close()
    assert problems == []


@pytest.mark.parametrize(("width", "theme"), [(360, "light"), (1280, "dark")])
def test_a_head_and_a_token_are_a_click_away_and_say_their_numbers(visit, seen, width, theme):
    tab, heads = visit(width=width, theme=theme), seen[0]
    row = heads.table.iloc[4]
    paper = tab.evaluate("getComputedStyle(document.querySelector('header')).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(23, 27, 32)"}[theme]
    assert tab.locator(".cell").count() == tab.locator("#heads tbody tr").count() == 6
    assert f"{row['median_window_tokens']:,}" in tab.locator(".cell").nth(4).text_content()
    tab.locator(".cell").nth(4).click()
    tab.wait_for_selector("body[data-drawn=head]")
    kind = {"between": "A head between local and global"}.get(row["kind"], f"A {row['kind']} head")
    assert kind in tab.locator("#view-head .lead").inner_text()
    assert f"{row['mean_forget_gate']:.3f}" in tab.locator("#chosen").inner_text()
    assert tab.evaluate("document.documentElement.scrollWidth - innerWidth") == 0

    tab.get_by_role("tab", name="Text").click()
    tab.wait_for_selector("body[data-drawn=text]")
    tab.locator("[data-i='300']").click()
    tab.wait_for_selector("#token h2:has-text('Token 300')")
    head, listed = heads.head(1, 1), tab.locator("#token .keys li")
    expected = [
        (int(key), float(weight))
        for key, weight in zip(head.weights.keys[300], head.weights.weights[300], strict=True)
        if weight >= LEAST_WEIGHTS[0]
    ] or [(int(head.weights.keys[300, 0]), float(head.weights.weights[300, 0]))]
    assert listed.count() == len(expected)
    for place, (key, weight) in enumerate(expected):
        said = listed.nth(place).inner_text().replace("\xa0", " ")
        assert float(re.search(r"([\d.]+) %", said)[1]) == pytest.approx(100 * weight, abs=0.45)
        assert ("itself" if key == 300 else f"{300 - key} back") in said
    gate = float(re.search(r"gate ([\d.]+)", tab.locator("#token").inner_text())[1])
    assert gate == pytest.approx(float(head.log_fgate[300].exp()), abs=0.003)
    assert tab.evaluate("document.documentElement.scrollWidth - innerWidth") == 0


def test_what_the_page_reads_is_what_was_packed(visit, seen):
    """Every number of every head, within what rounding to bytes allows."""
    tab, heads = visit(), seen[0]
    for index, head in enumerate(heads.heads):
        read = tab.evaluate(
            """async index => {
              const head = await models[0].head(index), T = text.length, all = [...Array(T).keys()];
              const N = Math.ceil(T / head.model.cell);
              return {gates: all.map(i => head.gate(i)), c: [...head.c], first: [...head.firstKept],
                blocks: all.map(i => head.firstOfBlocks(i)), distance: [...head.byDistance],
                received: all.map(j => head.received(j)), lost: all.map(i => head.lostOf(i)),
                keys: all.map(i => head.keysOf(i).keys.map(k => [k.key, k.weight])),
                cells: [...Array(N).keys()].map(m => [...Array(m + 1).keys()].map(n => head.square(m, n)))};
            }""",
            index,
        )
        w, c = head.weights, head.log_fgate.double().cumsum(0)
        np.testing.assert_allclose(read["gates"], head.log_fgate.exp(), atol=0.003)
        np.testing.assert_allclose(read["c"], c, rtol=0.01, atol=0.01)
        assert read["first"] == w.first_kept.tolist()
        blocks = (w.boundary * heads.grid[1]).repeat_interleave(heads.grid[0])[:LENGTH]
        assert read["blocks"] == blocks.tolist()
        assert sum(read["distance"]) == pytest.approx(1, abs=1e-5)
        np.testing.assert_allclose(read["received"], w.received, rtol=0.06, atol=1e-3)
        assert (np.array(read["lost"]) >= w.pruned_mass.numpy() * (1 - 1e-6)).all()
        for query, keys in enumerate(read["keys"]):
            weights = w.weights[query].numpy()
            count = max(1, int((weights >= LEAST_WEIGHTS[0]).sum()))
            assert [key for key, _ in keys] == w.keys[query, :count].tolist()
            np.testing.assert_allclose([weight for _, weight in keys], weights[:count], atol=0.004)
        for m, row in enumerate(read["cells"]):
            np.testing.assert_allclose(row, w.cells[m, : m + 1], rtol=0.03, atol=1e-5)


def test_keys_move_between_heads_tokens_and_views(visit):
    tab = visit(at="#view=text&layer=0&head=0&token=100")
    tab.locator("#tokens").focus()
    tab.keyboard.press("ArrowRight")
    tab.wait_for_selector("#token h2:has-text('Token 101')")
    tab.keyboard.press("]")
    until(tab, "document.querySelector('#which').value === '1'")
    assert "layer=0&head=1&token=101" in tab.url
    tab.keyboard.press("1")
    tab.wait_for_selector("body[data-drawn=model]")
    tab.locator(".cell[tabindex='0']").focus()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("body[data-drawn=head]")
    assert "layer=1&head=1" in tab.url


def test_the_past_of_a_token_is_on_its_page_and_back_returns_to_it(visit):
    tab = visit(at="#view=text&layer=0&head=2")
    assert tab.locator("#page-of").inner_text() == "tokens 0–511 of 700"  # token 350, in the middle
    tab.locator("#overview").press("End")
    tab.wait_for_selector("#token h2:has-text('Token 699')")
    assert tab.locator("#page-of").inner_text() == "tokens 188–699 of 700"
    tab.get_by_role("button", name="← before").click()
    assert tab.locator("#page-of").inner_text() == "tokens 0–511 of 700"
    tab.get_by_role("button", name="back to token 699").click()
    assert tab.locator("#tokens .chosen").get_attribute("data-i") == "699"
    tab.locator("[data-i='600']").click()
    tab.wait_for_selector("#token h2:has-text('Token 600')")
    tab.locator("#tokens").press("ArrowLeft")
    tab.wait_for_selector("#token h2:has-text('Token 599')")
    tab.go_back()
    tab.wait_for_selector("#token h2:has-text('Token 699')")


def test_a_tap_reads_a_query_and_one_finger_moves_the_picture(visit, seen):
    tab = visit(at="#view=head&layer=1&head=1", width=360, touch=True)
    tab.locator("#attention").scroll_into_view_if_needed()
    box = tab.locator(".pointer").bounding_box()
    x, y = box["x"] + box["width"] / 4, box["y"] + box["height"] / 2
    tab.touchscreen.tap(x, y)
    tab.wait_for_selector("#query button")
    query, weights = int(re.search(r"token=(\d+)", tab.url)[1]), seen[0].head(1, 1).weights
    assert query == pytest.approx(LENGTH / 2, abs=5)
    assert tab.locator("#readout").inner_text().startswith("Quer")
    distances = [int(d) for d in re.findall(r"(\d+) back", tab.locator("#query").inner_text())]
    listed = weights.keys[query, : tab.locator("#query li").count()].tolist()
    assert distances == [query - key for key in listed if key != query]

    tab.get_by_role("button", name="Read it in the text").tap()
    tab.wait_for_selector("body[data-drawn=text]")
    assert f"token={query}" in tab.url


def test_a_view_begins_at_its_top_and_the_glossary_with_its_close(visit, seen):
    tab = visit(at="#view=head&layer=0&head=1")
    tab.evaluate("scrollTo(0, 300)")
    tab.get_by_role("tab", name="Text").click()
    tab.wait_for_selector("body[data-drawn=text]")
    assert tab.evaluate("scrollY") == 0 and tab.locator("#text-shade").is_visible()
    shaded = tab.locator("#tokens [style*='--t']").count()
    assert 0 < shaded < tab.locator("#tokens .token").count()  # where it forgets more than usual
    tab.set_viewport_size({"width": 1280, "height": 400})
    tab.locator("#words").click()
    close = tab.get_by_role("button", name="Close")
    assert close.bounding_box()["y"] < 300
    close.click()
    kinds = set(seen[0].table["kind"])
    assert tab.evaluate("models[0].rows[usual].kind") == ("between" if "between" in kinds else "local")


def test_search_sorting_and_filters(visit):
    tab = visit(at="#view=text&layer=0&head=2&token=5")
    tab.fill("#search", "matters")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#hits:has-text('1 of')")
    assert tab.locator("#tokens .chosen").inner_text() == "m"
    assert tab.locator("#far button").count() or "none" in tab.locator("#far").inner_text()
    tab.get_by_role("tab", name="Model").click()
    tab.locator("[data-sort=mean_forget_gate]").click()
    gates = [float(v) for v in tab.locator("#heads tbody tr td:nth-child(8)").all_inner_texts()]
    assert gates == sorted(gates, reverse=True) and len(gates) == 6
    tab.locator("input[value=local]").uncheck()
    assert tab.locator("#heads tbody tr").count() == 6 - tab.locator(".cell.faint").count() < 6


def test_pictures_and_numbers_can_be_saved(visit, tmp_path):
    tab = visit(at="#view=head&layer=1&head=2")
    saved = {}
    for what in ("SVG", "PNG", "CSV"):
        with tab.expect_download() as download:
            tab.locator(f"[aria-label='Save as {what}: Attention along the text']").click()
        download.value.save_as(tmp_path / what)
        saved[what] = (tmp_path / what).read_bytes()
    assert saved["SVG"].startswith(b"<svg") and b"data:image/png" in saved["SVG"]
    assert saved["PNG"].startswith(b"\x89PNG") and len(saved["PNG"]) > 5000
    lines = saved["CSV"].decode().splitlines()
    assert lines[:2] == ["query,key,distance,weight,rounded_by_up_to", "0,0,0,1.0000,0.0039"]


def test_two_models_stand_side_by_side(visit, seen):
    tab = visit("two.html", "#view=compare&layer=0&head=0")
    first, second = (one.table for one in seen)
    changed = int((first["kind"] != second["kind"]).sum())
    assert f"{changed} of 6 heads are of another kind" in tab.locator("#view-compare .lead").inner_text()
    assert tab.locator("#grid-a .cell").count() == tab.locator("#grid-d .cell").count() == 6
    tab.wait_for_selector("#distances svg")
    tab.locator("button:has-text('open it in two')").click()
    tab.wait_for_selector("body[data-drawn=head]")
    assert f"{second['mean_forget_gate'][0]:.3f}" in tab.locator("#chosen").inner_text()
    tab.keyboard.press("1")
    tab.wait_for_selector("body[data-drawn=model]")
