"""Tables 2 and 4 and the paper's numbers, from synthetic results."""

import pandas as pd
import pytest

from acp_repro.pipeline import provenance
from acp_repro.pipeline.suite_file import load_suite
from analysis import drawing
from analysis.acp import naming, table2, table4
from analysis.published import published
from analysis.tables import UnfitRecords, one_each, side_by_side
from tests.analysis import synthetic


@pytest.fixture
def suite(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    synthetic.two_lengths(tmp_path)
    synthetic.write_savings()
    return tmp_path


def test_table2_shows_the_suite_and_the_paper(suite):
    _, values = table2.tabulate(load_suite("mini"))
    assert values.iloc[0, 2:].tolist() == [2, 32, 16, 0.01, 1536]
    paper = values[values["source"] == "paper"].set_index("size")
    assert paper.loc["360M"].tolist()[1:] == [24, 1024, 64, 0.002, 7.5e9]


def test_table4_matches_a_hand_computation(suite):
    _, values = table4.tabulate(drawing.find("mini", "table4").records["attention_time"])
    synthetic.draw("table4")
    written = pd.read_csv("figures/mini/table4.csv")  # numbers, not formatted cells
    assert written["percent"].tolist() == pytest.approx(values["percent"].tolist())
    ours = values[values["source"] == "measured"]
    # 0.1 of 2 ms at 256 tokens, 0.08 of 1.6 at 512.
    assert ours["attention_ms"].tolist() == [2.0, 1.6]
    assert ours["percent"].tolist() == pytest.approx([5.0, 5.0])
    assert values[values["source"] == "paper"]["search_ms"].isna().all()


def test_caption_names_the_measuring_commit(suite, monkeypatch):
    for commit, words in (("abc-dirty", "commit abc-dirty)"), (None, "commit not recorded)")):
        monkeypatch.setattr(provenance, "commit", lambda commit=commit: commit)
        synthetic.write_savings()
        assert words in synthetic.draw("table4")


def test_paper_values_are_complete():
    table = published("analysis.acp").table
    assert (table["low"] <= table["high"]).all()
    assert table[["item", "quantity", "unit", "place"]].notna().all(axis=None)
    assert not table.duplicated(["item", "quantity", "size", "context_length_tokens", "method"]).any()
    # Six models and thirteen columns in each of Tables 1 and 3; three by three in Table 4.
    assert table["item"].value_counts()[["table1", "table3"]].tolist() == [78, 78]
    cells = table[(table["item"] == "table4") & table["size"].notna()]
    assert len(cells) == 9 and cells["low"].sum() == 34
    assert naming.PUBLISHED.range("table4", "boundary_search_share") == (2.0, 6.0)


def test_averages_of_tables_1_and_3_match_their_columns():
    """Detects a transcription error in any of 132 cells."""
    table = published("analysis.acp").table
    for item in ("table1", "table3"):
        rows = table[(table["item"] == item) & table["quantity"].str.contains("accuracy")]
        models = rows.groupby(["context_length_tokens", "method"])
        assert len(models) == 6
        for _, row in models:
            means = row["quantity"] == "average_accuracy"
            assert row[~means]["low"].mean() == pytest.approx(row[means]["low"].item(), abs=0.0051)


def test_derived_tables_reject_duplicate_and_missing_rows():
    table = pd.DataFrame({"a": [1, 1, 2, 2], "b": [None, None, 3, 4], "kind": list("xyxy"), "v": range(4)})
    assert one_each(table, ["a", "b", "kind"], "t") is table
    with pytest.raises(UnfitRecords, match="^t: more than one record for a = 1, b = nan$"):
        one_each(table, ["a", "b"], "t")  # a missing value is a valid key
    both = side_by_side(table.assign(b=0), ["a"], "kind", "v", ("x", "y"), "t")
    assert both.to_dict("list") == {"a": [1, 2], "x": [0, 2], "y": [1, 3]}
    for some in (table[:3], table[:1], table[1:]):
        with pytest.raises(UnfitRecords, match="needs a record of kind x and one of y"):
            side_by_side(some, ["a"], "kind", "v", ("x", "y"), "t")
