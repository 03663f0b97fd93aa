"""Every item of every paper: its module, its files, its target of Make and its claims agree."""

import ast
import dataclasses
import graphlib
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import analysis
from acp_repro.chain.errors import SuiteError
from acp_repro.chain.registry import find_paper, paper_names
from acp_repro.chain.rules import make_rules
from acp_repro.chain.suite import load_suite
from acp_repro.papers.acp.paper import PAPER
from analysis import drawing
from analysis.acp import figure2, table2
from analysis.report.gather import paper_words
from tests.analysis import synthetic

ROOT = Path(__file__).parents[2]
PAPERS = [find_paper(name) for name in paper_names()]
ITEMS = [
    pytest.param(paper, item, id=f"{paper.name}-{item.name}") for paper in PAPERS for item in paper.items
]
MODULES = sorted(m.name for m in pkgutil.walk_packages(analysis.__path__, "analysis."))


@pytest.mark.parametrize(("paper", "item"), ITEMS)
def test_names_of_an_item_agree(paper, item):
    drawn = paper.module_of(item)
    assert item.name == item.path("some").stem and item in drawn.ITEMS
    assert drawn.__name__ == f"{paper.analysis}.{drawn.ITEMS[0].name}"  # the first gives the file its name
    assert item.is_table == (item.path("some").suffix == ".md")
    assert all(paper.quantity(name) for name in item.quantities)
    if item.missing:
        return
    assert callable(drawn.make) and callable(drawn.tabulate if item.is_table else drawn.draw)
    assert "drawing.main(globals())" in Path(drawn.__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_a_quantity_has_its_name_from_its_file(paper):
    folder = importlib.import_module(paper.measures).__path__
    assert sorted(paper.measured) == sorted(module.name for module in pkgutil.iter_modules(folder))
    for quantity, name in zip(paper.quantities, paper.measured, strict=True):
        assert quantity.name == name and bool(quantity.measure) != bool(quantity.command)
        assert quantity is paper.quantity(name) and set(quantity.later) <= set(quantity.columns)


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
def test_the_contents_are_what_the_modules_have(paper):
    assert tuple(item.name for item in paper.items) == paper.contents
    first = paper.contents[0]
    for contents, lost in ((paper.contents[1:], first), ((*paper.contents, "figure99"), "figure99")):
        other = dataclasses.replace(paper, contents=contents)
        with pytest.raises(SuiteError, match=f"^paper {paper.name}: {lost}: must stand in its contents, and"):
            _ = other.items
    elsewhere = dataclasses.replace(paper, analysis="nowhere.at.all")
    assert elsewhere.claims == ()
    with pytest.raises(SuiteError, match=r"its figures stand in nowhere\.at\.all, which is not here"):
        elsewhere.item(first)


@pytest.mark.parametrize("suite", sorted(path.stem for path in (ROOT / "experiments").glob("*.yaml")))
def test_make_has_a_target_of_each_item(suite, monkeypatch):
    monkeypatch.chdir(ROOT)
    suite = load_suite(suite)
    rules = make_rules(suite)
    for item in suite.paper.items:
        for name in (item.name, *item.aliases):
            assert re.search(rf"^(\S+ )*{name}( \S+)*:", rules, re.MULTILINE), name
        if not item.missing and item.runs(suite):
            assert f"{item.path(suite.name)}: " in rules
            assert f" {suite.paper.draw_command(item)} --suite {suite.name}" in rules


@pytest.mark.parametrize(("paper", "item"), [param for param in ITEMS if param.values[1].claims])
def test_claims_say_what_they_check_and_where_the_paper_says_it(paper, item):
    for claim in item.claims:
        assert callable(claim.check)
        assert claim.holds_if and claim.quantities
        assert set(claim.quantities) <= set(item.quantities)
        place = paper_words(claim, paper, item).split()[0]
        assert place in ("Abstract:", "Section", "Appendix", "Figure", "Table")


def test_the_command_line_of_an_item(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    synthetic.two_lengths(tmp_path)
    code, error = synthetic.command(monkeypatch, capsys, figure2.__name__)
    assert code == 1
    assert error.startswith("error: no records of pruned_ratio in results/mini for pro-tiny-256-acp")
    assert "make them with `python -m acp_repro.measure pruned_ratio --suite mini --run pro" in error
    code, error = synthetic.command(monkeypatch, capsys, figure2.__name__, "minii")
    assert code == 2 and "no such suite; there are mini" in error
    assert synthetic.command(monkeypatch, capsys, table2.__name__) == (0, "")
    for item in (item for item in PAPER.items if item.missing):
        with pytest.raises(ValueError, match=f"{item.name} cannot be made yet: it needs"):
            drawing.find("mini", item.name)
    with pytest.raises(ValueError, match="figure11_right: the grid of experiments/mini.yaml has no run of"):
        drawing.find("mini", "figure11_right")
    synthetic.write_savings()
    with pytest.raises(ValueError, match="say python -m analysis.acp.figure2 --suite mini"):
        drawing.draw("mini", "figure2", "another.figure2")
    with pytest.raises(ValueError, match="paper acp has no item 'figureC'"):
        drawing.draw("mini", "figureC", "analysis.retention.figureC")


def test_an_item_that_shares_a_file_is_drawn_by_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    synthetic.two_lengths(tmp_path, "pro, llama")
    synthetic.write_savings("llama")
    assert synthetic.command(monkeypatch, capsys, "analysis.acp.figure2", "mini", "figure10") == (0, "")
    assert (tmp_path / "figures/mini/figure10.png").is_file()
    code, error = synthetic.command(monkeypatch, capsys, "analysis.acp.figure2", "mini", "figure4")
    assert code == 2 and "invalid choice: 'figure4' (choose from " in error


TOY = {
    "paper.py": """
        from dataclasses import dataclass, field
        from acp_repro.chain.paper import Paper, Suite
        from acp_repro.chain.run import Run, Strict, TrainerConfig
        from acp_repro.chain.suite import SuiteFile

        @dataclass(frozen=True)
        class Grid(Strict):
            width: list[int]

        @dataclass(frozen=True, kw_only=True)
        class File(SuiteFile):
            grid: list[Grid]

        @dataclass(frozen=True, kw_only=True, eq=False)
        class ToyRun(Run):
            width: int
            name = property(lambda run: f"wide{run.width}")
            setting = property(lambda run: (run.width,))

            def columns(self):
                return {"layer_width": self.width}

        def make_run(file, suite, where, *, width):
            return ToyRun(suite=suite, seed=0, training=TrainerConfig(), width=width)

        PAPER = Paper(
            name="toy", title="NNs of <toys>", url="https://example.org/toy", file=File, suite=Suite,
            axes=("width",), make_run=make_run, run_columns=("layer_width",),
            measures="toy", measured=("error",), contents=("figure1",), task="", analysis="toy",
        )
    """,
    "error.py": """
        from acp_repro.chain.paper import Quantity

        QUANTITY = Quantity("error", ("error_percent",))
    """,
    "figure1.py": '''
        """Errors by width."""
        from acp_repro.chain.paper import Claim, Item
        from analysis import drawing
        from analysis.verdict import Verdict

        def draw(records):
            from matplotlib import pyplot as plt
            figure, ax = plt.subplots()
            ax.plot(records["layer_width"], records["error_percent"])
            return figure

        def make(found):
            return draw(found.records["error"]), "**Figure 1.** Errors. Of toys."

        def wider_is_better(error):
            return Verdict.of(error["error_percent"].is_monotonic_decreasing, "as <drawn>")

        CLAIM = Claim("Wider is better", "Section 1: it is", "each is", ("error",), wider_is_better)
        ITEMS = (Item("figure1", "Errors", ("error",), claims=CLAIMS),)

        if __name__ == "__main__":
            drawing.main(globals())
    ''',
}


@pytest.mark.parametrize("claims", ["()", "(CLAIM,)"], ids=["alone", "with criteria"])
def test_a_paper_of_another_package_is_drawn_and_reported(tmp_path, claims):
    """It has no table of values, and its models are described by nothing but the columns of its runs."""
    (tmp_path / "toy").mkdir()
    for name, text in TOY.items():
        (tmp_path / "toy" / name).write_text(dedent(text).replace("claims=CLAIMS", f"claims={claims}"))
    (tmp_path / "toy" / "__init__.py").touch()
    metadata = tmp_path / "toy-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[acp_repro.papers]\ntoy = toy.paper:PAPER\n")
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "toys.yaml").write_text(
        "paper: toy\ndescription: toys\ngrid: [{width: [1, 2]}]\n"
    )
    write = """
        from acp_repro.chain.records import write_records
        from acp_repro.chain.suite import load_suite
        suite = load_suite("toys")
        for run in suite.runs:
            write_records(suite.paper, run, suite.paper.quantity("error"), [{"error_percent": 9 / run.width}],
                          device="a chip", dtype="float32", trained_tokens=7)
    """

    def python(*arguments: str) -> str:
        path = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "", "MPLCONFIGDIR": str(tmp_path)}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    python("-c", dedent(write))
    assert python("-m", "toy.figure1", "--suite", "toys").startswith("figure: ")
    python("-m", "analysis.report", "--suite", "toys")
    page = (tmp_path / "figures" / "toys" / "report.html").read_text(encoding="utf-8")
    assert "<h1>NNs of &lt;toys&gt;, re-run: suite toys</h1>" in page
    assert '<a href="https://example.org/toy">https://example.org/toy</a>' in page
    assert '<th scope="col">layer width</th>' in page and "<td>2</td>" in page
    assert "python -m toy.figure1 --suite toys" in page and 'src="data:image/png' in page
    if claims == "()":
        assert "No claim of the paper is written down" in page
    else:
        assert "1 criterion: 1 met" in page and "as &lt;drawn&gt;" in page


# --- the modules themselves


def test_analysis_needs_no_torch():
    # A finder, because scipy takes an entry of None in sys.modules for torch itself.
    block = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
    )
    modules = ", ".join(m for m in MODULES if "main" not in m)
    subprocess.run([sys.executable, "-c", f"{block}import {modules}"], check=True, cwd=ROOT)


def test_analysis_has_no_import_circle():
    imports = {name: set() for name in MODULES}
    for name, found in imports.items():
        spec = importlib.util.find_spec(name)
        package = name if spec.submodule_search_locations else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                stem = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                found |= {stem, *(f"{stem}.{alias.name}" for alias in node.names)} & set(MODULES)
        assert name not in found
    tuple(graphlib.TopologicalSorter(imports).static_order())
    packages: dict[str, set[str]] = {}
    for name, found in imports.items():
        home = name if name in ("analysis.acp", "analysis.report") else name.rpartition(".")[0]
        packages.setdefault(home, set()).update({n.rpartition(".")[0] for n in found} - {home})
    tuple(graphlib.TopologicalSorter(packages).static_order())
    assert "analysis.acp" not in packages["analysis.report"] | packages["analysis"]
    assert PAPER in PAPERS
