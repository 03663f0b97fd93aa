"""Tables 2 and 4, the paper's numbers, and Figure 10, from records written by hand."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from acp_repro.records import RecordError, read_records
from acp_repro.suite import load_suite
from analysis import figure10, statistics, style, table2, table4
from tests.analysis import synthetic


@pytest.fixture
def suite(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    synthetic.two_lengths(tmp_path)
    synthetic.write_savings()
    return tmp_path


def test_search_share_by_hand():
    run = {"architecture": "pro", "size": "a", "context_length_tokens": 128, "seed": 0}
    times = pd.DataFrame(
        [
            {**run, "method": "acp", "forward_ms": 3.0, "backward_ms": 5.0, "boundary_search_ms": 0.4},
            {**run, "method": "exact", "forward_ms": 9.0, "backward_ms": 9.0},
        ]
    )
    table = statistics.search_share(times)
    assert table[["search_ms", "attention_ms"]].to_numpy().tolist() == [[0.4, 8.0]]
    assert table["percent"].tolist() == pytest.approx([5.0])
    with pytest.raises(ValueError, match="no record has method acp"):
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
    shown, values = table4.tabulate(read_records("mini", "attention_time"))
    table = shown.set_index("L")
    # 0.1 of 2 ms at 256 tokens, 0.08 of 1.6 at 512; the paper's last row, which we did not measure.
    assert table["tiny"].tolist() == ["5.0 %", "5.0 %", "–", "–", "–"]
    assert table.loc["16k"].tolist() == ["–", "6 %", "4 %", "3 %"]
    ours = values[values["source"] == "measured"]
    assert ours["attention_ms"].tolist() == [2.0, 1.6]
    assert values[values["source"] == "paper"]["search_ms"].isna().all()


def test_table_command_writes_text_and_numbers(suite, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["table4", "--suite", "mini"])
    style.main("table4", "", table4.make, style.save_table)
    printed = capsys.readouterr().out
    folder = suite / "figures" / "mini"
    text = (folder / "table4.md").read_text()
    assert text in printed and str(folder / "table4.md") in printed
    assert text.startswith("**Table 4.**") and "a processor" in text
    assert "\n| L | tiny | 125M, paper |" in text and "\n| --- | ---: |" in text
    assert len(pd.read_csv(folder / "table4.csv")) == 2 + 9
    monkeypatch.setattr("sys.argv", ["table4", "--suite", "nowhere"])
    with pytest.raises(SystemExit, match="measure attention_time --suite nowhere"):
        style.main("table4", "", table4.make, style.save_table)


def test_paper_values_are_whole():
    table = style.paper_values()
    assert (table["low"] <= table["high"]).all()
    assert table[["item", "quantity", "unit", "place"]].notna().all(axis=None)
    assert not table.duplicated(["item", "quantity", "size", "context_length_tokens", "method"]).any()
    # Six models and thirteen columns in each of Tables 1 and 3; three by three in Table 4.
    assert table["item"].value_counts()[["table1", "table3"]].tolist() == [78, 78]
    cells = table[(table["item"] == "table4") & table["size"].notna()]
    assert len(cells) == 9 and cells["low"].sum() == 34
    assert style.paper_range("table4", "boundary_search_share") == (2.0, 6.0)


def test_averages_of_tables_1_and_3_are_those_of_their_columns():
    """A slip of the pen in one of 132 cells would show here."""
    table = style.paper_values()
    for item in ("table1", "table3"):
        rows = table[(table["item"] == item) & table["quantity"].str.contains("accuracy")]
        for _, row in rows.groupby(["context_length_tokens", "method"]):
            means = row["quantity"] == "average_accuracy"
            assert row[~means]["low"].mean() == pytest.approx(row[means]["low"].item(), abs=0.0051)


def test_figure10_is_figure2_for_llama(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    synthetic.two_lengths(tmp_path, "pro, llama")
    synthetic.write_savings("pro")
    with pytest.raises(RecordError, match="architecture = llama"):
        figure10.make("mini")
    synthetic.write_savings("llama")
    figure, caption = figure10.make("mini")
    assert caption.startswith("**Figure 10.**") and "FoX (LLaMA)" in caption and "norms" in caption
    # Bars of 256 and 512 tokens, then the paper's.
    heights = [[bar.get_height() for bar in ax.patches] for ax in figure.axes]
    assert heights[0][:2] == [50.0, 70.0]
    assert heights[1][:2] == pytest.approx([50.0, 60.0]) and heights[1][2] == 20.0
    assert heights[2][:2] == pytest.approx([100.0, 150.0])
    plt.close(figure)
