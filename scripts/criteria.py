"""Derives from git when each claim's criterion was first committed, and when the results were measured.

Writes ``criteria.csv`` (claim, commit) and ``commits.csv`` (commit, time) in ``analysis/reproduction/``,
from which the ledger determines whether a criterion is older than its scores. Run the script in a full clone,
before `make reproduction`, when claims or results have changed: ``python scripts/criteria.py``. A criterion
dates from the commit that first contains its current text, ignoring placeholders and line breaks. A row of
``criteria.csv`` is kept as long as the claim exists, so remove the row of a criterion whose meaning changes.
Rows of criteria that predate ``claims.toml`` were derived in the same way from the strings of the Python
files that declared them.
"""

import csv
import gzip
import re
import subprocess
import tomllib
from pathlib import Path

from acp_repro.pipeline.paper_registry import find_paper, paper_names
from analysis import ledger

FOLDER = Path("analysis/reproduction")


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], capture_output=True, text=True, errors="replace", check=True
    ).stdout


def plain(text: str) -> str:
    """The text of a criterion on one line, without the names of constants."""
    return " ".join(re.sub(r"\{[^{}]*\}", "{}", text).replace("\\\n", "").split())


def texts(content: str) -> set[str]:
    """The criteria of a version of ``claims.toml``."""
    return {
        plain(entry.get("holds_if", "")) for entries in tomllib.loads(content).values() for entry in entries
    }


def first_commits() -> dict[str, str]:
    """The oldest commit of every criterion that ``claims.toml`` has ever contained."""
    found: dict[str, str] = {}
    for commit in git(
        "log", "--reverse", "--date-order", "--format=%h", "--", "analysis/*/claims.toml"
    ).split():
        for name in git("ls-tree", "-r", "--name-only", commit, "analysis/").split():
            if name.endswith("claims.toml"):
                for text in texts(git("show", f"{commit}:{name}")):
                    found.setdefault(text, commit)
    return found


def main() -> None:
    """Adds the missing rows of both tables."""
    path = FOLDER / "criteria.csv"
    known = {row["claim"]: row["commit"] for row in csv.DictReader(path.open(encoding="utf-8"))}
    commits, rows = first_commits(), {}
    for name in paper_names():
        declared = tomllib.loads(Path(f"analysis/{name}/claims.toml").read_text(encoding="utf-8"))
        raw = {
            entry["claim"]: entry.get("holds_if", "") for entries in declared.values() for entry in entries
        }
        for id, claim, _ in ledger.numbered(find_paper(name)):
            commit = known.get(id) or commits.get(plain(raw.get(claim.claim, "")))
            if claim.metrics and commit:
                rows[id] = git("rev-parse", "--short=12", commit).strip()
    measured = set()
    for record in Path("results").glob("*/*/*.csv*"):
        with (gzip.open if record.suffix == ".gz" else open)(record, "rt", encoding="utf-8") as lines:
            measured |= {row["commit"] for row in csv.DictReader(lines)}
    times = {
        one: git("show", "-s", "--format=%ct", one).strip() for one in sorted(measured | set(rows.values()))
    }
    for name, header, table in (
        ("criteria", ("claim", "commit"), rows),
        ("commits", ("commit", "time"), times),
    ):
        with (FOLDER / f"{name}.csv").open("w", encoding="utf-8", newline="") as lines:
            writer = csv.writer(lines, lineterminator="\n")
            writer.writerows([header, *table.items()])


if __name__ == "__main__":
    main()
