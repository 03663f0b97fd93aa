"""Tables 2 and 4, the paper's numbers, and Figure 10, from records written by hand."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from acp_repro.pipeline.errors import RecordError
from acp_repro.pipeline.suite import load_suite
from analysis import drawing, style
from analysis.acp import by_length, figure2, models, statistics, table2, table4
from analysis.published import published
from analysis.tables import UnfitRecords, one_each, side_by_side
from tests.analysis import synthetic


@pytest.fixture
def suite(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    synthetic.two_lengths(tmp_path)
    synthetic.write_savings()
    return tmp_path


def test_search_share_by_hand():
    run = {
        "architecture": "pro",
        "size": "a",
        "context_length_tokens": 128,
        "log_pruning_tolerance": -10.0,
        "seed": 0,
        "trained_tokens": 10**9,
    }
    times = pd.DataFrame(
        [
            {**run, "method": "acp", "forward_ms": 3.0, "backward_ms": 5.0, "boundary_search_ms": 0.4},
            {**run, "method": "exact", "forward_ms": 9.0, "backward_ms": 9.0},
        ]
    )
    table = statistics.search_share(times)
    assert table[["search_ms", "attention_ms"]].to_numpy().tolist() == [[0.4, 8.0]]
    assert table["percent"].tolist() == pytest.approx([5.0])
    with pytest.raises(UnfitRecords, match="no record has method acp"):
        statistics.search_share(times[1:])


@pytest.mark.parametrize(
    ("count", "label"),
    [
        (0, "0"),
        (12, "12"),
        (999, "999"),
        (2048, "2k"),
        (1536, "1.5k"),
        (409_600, "410k"),
        (2**28, "268M"),
        (2_684_354_560, "2.7B"),
        (16_106_127_360, "16B"),
    ],
)
def test_count_labels(count, label):
    assert style.count_label(count) == label


def test_table2_has_the_suite_and_the_paper(suite):
    shown, values = table2.tabulate(load_suite("mini"))
    assert shown.iloc[0].tolist() == ["tiny (suite mini)", "2", "32", "16", "0.01", "1.5k"]
    paper = values[values["source"] == "paper"].set_index("size")
    assert paper.loc["360M"].tolist()[1:] == [24, 1024, 64, 0.002, 7.5e9]
    assert shown["size"].tolist()[1:] == ["760M (paper)", "360M (paper)", "125M (paper)"]


def test_table4_by_hand(suite):
    shown, values = table4.tabulate(drawing.find("mini", "table4").records["attention_time"])
    table = shown.set_index("L")
    # 0.1 of 2 ms at 256 tokens, 0.08 of 1.6 at 512; the paper's last row, which we did not measure.
    assert table["tiny (1.5k tokens, start of training)"].tolist() == ["5.0 %", "5.0 %", "–", "–", "–"]
    assert table.loc["16k"].tolist() == ["–", "6 %", "4 %", "3 %"]
    ours = values[values["source"] == "measured"]
    assert ours["attention_ms"].tolist() == [2.0, 1.6]
    assert values[values["source"] == "paper"]["search_ms"].isna().all()


def test_table4_says_the_batches(suite):
    """A search takes as long for a smaller batch, so its share depends on that."""
    _, caption, _ = table4.make(drawing.find("mini", "table4"))
    assert "Timed in batches of 512 tokens (tiny)." in caption


def test_a_text_that_was_read_more_than_twice_is_said_to_be():
    assert style.epochs(400_031_744, "h200-long") == ", 4.5 epochs"
    assert not any((style.epochs(100_007_936, "h100"), style.epochs(10**12, "cpu"), style.epochs(0, "h100")))
    record = {"suite": "h200-long", "trained_tokens": 400_031_744, "device": "a", "dtype": "b"}
    table = pd.DataFrame([record | {"torch_version": "2", "commit": "c"}])
    assert style.provenance(table).endswith("; models trained on 400,031,744 tokens, 4.5 epochs.")


def test_times_in_one_fixed_order_are_named_by_their_commit():
    new = pd.DataFrame({name: ["x"] for name in ("suite", "device", "dtype", "torch_version", "commit")})
    new = new.assign(trained_tokens=0, order="balanced", commit="abc")
    old = new.assign(order=None, commit="123")
    words = "Times of commit 123 were taken in one fixed order"
    assert words in style.provenance(pd.concat([new, old])) and words in style.provenance(new, old)
    assert "fixed order" not in style.provenance(new)
    assert "fixed order" not in style.provenance(old.drop(columns="order"))  # no times


def test_table_command_writes_text_and_numbers(suite, capsys, monkeypatch):
    synthetic.draw("table4")
    printed = capsys.readouterr().out
    folder = suite / "figures" / "mini"
    text = (folder / "table4.md").read_text()
    assert str(folder / "table4.md") in printed
    assert text.startswith("**Table 4.**") and "a processor" in text
    assert (
        "\n| L | tiny (1.5k tokens, start of training) | 125M, paper |" in text and "\n| --- | ---: |" in text
    )
    assert len(pd.read_csv(folder / "table4.csv")) == 2 + 9
    with pytest.raises(UnfitRecords, match="more than one record for source = measured, size = tiny"):
        table4.tabulate(
            pd.concat([drawing.find("mini", "table4").records["attention_time"]] * 2).assign(seed=range(8))
        )


def test_paper_values_are_whole():
    table = published("analysis.acp").table
    assert (table["low"] <= table["high"]).all()
    assert table[["item", "quantity", "unit", "place"]].notna().all(axis=None)
    assert not table.duplicated(["item", "quantity", "size", "context_length_tokens", "method"]).any()
    # Six models and thirteen columns in each of Tables 1 and 3; three by three in Table 4.
    assert table["item"].value_counts()[["table1", "table3"]].tolist() == [78, 78]
    cells = table[(table["item"] == "table4") & table["size"].notna()]
    assert len(cells) == 9 and cells["low"].sum() == 34
    assert models.PUBLISHED.range("table4", "boundary_search_share") == (2.0, 6.0)


def test_averages_of_tables_1_and_3_are_those_of_their_columns():
    """A slip of the pen in one of 132 cells would show here."""
    table = published("analysis.acp").table
    for item in ("table1", "table3"):
        rows = table[(table["item"] == item) & table["quantity"].str.contains("accuracy")]
        for _, row in rows.groupby(["context_length_tokens", "method"]):
            means = row["quantity"] == "average_accuracy"
            assert row[~means]["low"].mean() == pytest.approx(row[means]["low"].item(), abs=0.0051)


def test_figure10_is_figure2_for_llama(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    synthetic.two_lengths(tmp_path, "pro, llama")
    synthetic.write_savings("pro")
    with pytest.raises(RecordError, match="for llama-tiny-256-acp, llama-tiny-512-acp.*make them with"):
        drawing.find("mini", "figure10")
    synthetic.write_savings("llama")
    figure, caption, _ = figure2.make(drawing.find("mini", "figure10"))
    assert caption.startswith("**Figure 10.**") and "FoX (LLaMA)" in caption and "norms" in caption
    heights = [[bars[0].get_height() for bars in ax.containers][:2] for ax in figure.axes]
    assert heights == [[50.0, 70.0], pytest.approx([50.0, 60.0]), pytest.approx([100.0, 150.0])]
    plt.close(figure)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (["125M"], "125M parameters"),
        (["0.2M", "1.3B"], "0.2M, 1.3B parameters"),
        (["tiny"], "size tiny"),
        (["tiny", "125M"], "sizes tiny, 125M"),
    ],
)
def test_a_size_that_is_no_count_is_called_a_size(sizes, words):
    assert models.in_words(sizes) == words


@pytest.mark.parametrize(
    ("tokens", "mark"),
    [(20_054_016, " (20M tokens, start of training)"), (99_000_000, " (99M tokens, start of training)")]
    + [(tokens, "") for tokens in (0, 100_000_000, 2_700_000_000)],
)
def test_a_number_of_the_start_of_training_says_so(tokens, mark):
    """The paper leaves the start out, when most is pruned. Fresh weights are no start."""
    table = pd.DataFrame({"size": ["a"], "context_length_tokens": [4096], "percent": [93.0]})
    assert by_length.listed(table) == "a: 93 % at 4k"
    assert by_length.listed(table.assign(trained_tokens=tokens)) == f"a{mark}: 93 % at 4k"


def test_figure2_tells_the_start_of_training_and_what_is_not_measured(suite):
    """An empty place beside bars was read as nothing saved, and 20M tokens as a trained model."""
    records = drawing.find("mini", "figure2").records
    longest = {name: table[table["context_length_tokens"] == 512] for name, table in records.items()}
    both = {
        name: pd.concat([table, longest[name].assign(size="b", trained_tokens=100_007_936)])
        for name, table in records.items()
    }
    figure = figure2.draw(both)
    for ax in figure.axes:
        assert [text.get_text() for text in ax.texts].count("–") == 1  # b at 256
        assert [bars[0].get_facecolor()[3] for bars in ax.containers[:3]] == [0.25, 0.25, 1.0]
    plt.close(figure)


def test_what_the_grid_lets_prune_stands_beside_what_is_pruned(suite):
    """A longer context has more blocks off the diagonal, so that a share of all blocks grows by itself."""
    found = drawing.find("mini", "figure2")
    records = found.records["pruned_ratio"].assign(block_q_tokens=16, block_k_tokens=16)
    # Blocks of 16 tokens: of 16 rows' 136, 105 lie two or more from the diagonal; of 32 rows' 528, 465.
    table = statistics.pruned_of_grid(records)
    assert table["grid_percent"].tolist() == pytest.approx([100 * 105 / 136, 100 * 465 / 528])
    assert table["of_grid_percent"].tolist() == pytest.approx([50 * 136 / 105, 70 * 528 / 465])
    lengths = records["context_length_tokens"].map({256: 4096, 512: 16_384})
    real = records.assign(block_q_tokens=128, block_k_tokens=64, context_length_tokens=lengths)
    assert statistics.pruned_of_grid(real)["grid_percent"].round(1).tolist() == [91.0, 97.7]
    with pytest.raises(UnfitRecords, match="pruned_ratio: more than one record"):
        statistics.pruned_of_grid(pd.concat([real, real.assign(layer=7, block_q_tokens=64)]))


def test_derived_tables_refuse_what_they_would_have_to_average():
    table = pd.DataFrame({"a": [1, 1, 2, 2], "b": [None, None, 3, 4], "kind": list("xyxy"), "v": range(4)})
    assert one_each(table, ["a", "b", "kind"], "t") is table
    with pytest.raises(UnfitRecords, match="^t: more than one record for a = 1, b = nan$"):
        one_each(table, ["a", "b"], "t")  # a missing value is a key too
    both = side_by_side(table.assign(b=0), ["a"], "kind", "v", ("x", "y"), "t")
    assert both.to_dict("list") == {"a": [1, 2], "x": [0, 2], "y": [1, 3]}
    for some in (table[:3], table[:1], table[1:]):
        with pytest.raises(UnfitRecords, match="needs a record of kind x and one of y"):
            side_by_side(some, ["a"], "kind", "v", ("x", "y"), "t")
