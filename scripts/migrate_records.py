"""Rewrites results/ once: every record gets exactly the columns that its quantity declares, and every
settings.json gets the settings and the digests of the current code.

Columns that older code did not record become empty. No value changes, with one exception: a training of
`fork` gets the full name that the pages print. `python scripts/migrate_records.py` rewrites the files and
then compares each file with the version of HEAD, cell by cell.
"""

import csv
import gzip
import hashlib
import io
import json
import subprocess
from collections import Counter
from pathlib import Path

from acp_repro.common import files
from acp_repro.pipeline import state
from acp_repro.pipeline.suite import load_suite, suite_names
from analysis.ledger import all_records

RENAMED = {"one weight moved": "one weight moved by a unit of float32"}  # the column `training` of `fork`
NOT_RECORDED = {"heads_run", "sweep_run", "main_run", "long_context_lengths"}  # they select a run
# The paths of the code that trains a model, in the layouts of all commits; three files only guide a run.
CODE = ("attention", "model", "training", "data", "pipeline/training", "pipeline/data")
BESIDE = ("/training/run_folder.py", "/training/side_by_side.py", "/training/task.py")


def read(path: Path, content: bytes) -> list[list[str]]:
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    return list(csv.reader(io.StringIO(content.decode(), newline="")))


def rewrite_record(path: Path, columns: tuple[str, ...]) -> None:
    """Adds the missing columns of a record, in the declared order; leaves a complete record as it is."""
    head, *rows = read(path, path.read_bytes())
    assert set(head) <= set(columns), path
    table = [dict(zip(head, row, strict=True)) for row in rows]
    if path.name == "fork.csv.gz":
        for row in table:
            row["training"] = RENAMED.get(row["training"], row["training"])
    elif tuple(head) == columns:
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    content = text.getvalue().encode()
    files.write_bytes(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def rewrite_settings(path: Path, suite, run) -> None:
    """Writes the settings of the current code, which must equal the recorded ones, and the new digests."""
    before = json.loads(path.read_text())
    content = {"folder": before["folder"]}
    if run is not None:
        digest = state._digest(before)
        now = {"run": state._settings(run), "measure": state._settings(suite.measure_settings)}
        check_settings(path, before, now, {"run": run, "measure": suite.measure_settings})
        content |= {"trained": before.get("trained"), **now}
    records = {}
    for name, record in before["records"].items():
        new = {"rows": record["rows"], "sha256": files.sha256_of(path.with_name(name))}
        if run is not None:
            assert record["settings"] == digest, (path, name)  # no record is of other settings
            new |= {"settings": state._digest(content)}
        records[name] = new | {key: record[key] for key in ("weights", "seconds") if key in record}
    files.write_json(path, content | {"records": records})


def leaves(settings, where: str = "") -> dict[str, object]:
    if not isinstance(settings, dict) or not settings:
        return {where: settings}
    return {k: v for key, value in settings.items() for k, v in leaves(value, f"{where}.{key}").items()}


ADDED: Counter[str] = Counter()


def check_settings(path: Path, before: dict, now: dict, of: dict) -> None:
    """Stops if a recorded setting has another value now; counts the keys that come, go or are renamed."""
    for part in ("run", "measure"):
        old = leaves(before[part])
        renamed = {key.replace(".dataset.reader", ".dataset.corpus"): value for key, value in old.items()}
        new = leaves(now[part])
        assert all(renamed[key] == new[key] for key in renamed.keys() & new.keys()), path
        for key in renamed.keys() - new.keys():
            assert key.rpartition(".")[2] in NOT_RECORDED or renamed[key] is None, (path, key)
        old_shape = {**before[part]}
        if ".dataset.reader" in old:
            old_shape["dataset"] = dict(old_shape["dataset"])
            old_shape["dataset"]["corpus"] = old_shape["dataset"].pop("reader")
        for key in NOT_RECORDED & old_shape.keys():
            del old_shape[key]
        assert not state.differences(old_shape, of[part]), path  # what is new has its default
        ADDED.update(f"added {part}{key}" for key in new.keys() - renamed.keys())
        ADDED.update(f"removed {part}{key}" for key in renamed.keys() - new.keys())
        ADDED.update(f"renamed {part}{key}" for key in old.keys() - renamed.keys())


def compare() -> None:
    """Compares every record with the version of HEAD and prints the counts; stops at a difference."""
    count: Counter[str] = Counter()
    names = subprocess.run(["git", "ls-files", "results"], capture_output=True, text=True, check=True)
    for path in map(Path, names.stdout.split()):
        if path.name == state.PROOFS:
            count["settings.json"] += 1
            continue
        old = subprocess.run(["git", "show", f"HEAD:{path}"], capture_output=True, check=True).stdout
        count["records"] += 1
        if old == path.read_bytes():
            count["records, unchanged to the byte"] += 1
        (head, *before), (columns, *after) = read(path, old), read(path, path.read_bytes())
        assert len(before) == len(after), path
        assert [name for name in columns if name in head] == head, path
        for old_row, new_row in zip(before, after, strict=True):
            new = dict(zip(columns, new_row, strict=True))
            for name, value in zip(head, old_row, strict=True):
                if new.pop(name) == value:
                    count["cells, equal as text"] += 1
                else:
                    assert path.name == "fork.csv.gz" and name == "training", (path, name)
                    count[f"cells of fork, {value!r} now {RENAMED[value]!r}"] += 1
            assert not any(new.values()), path
            count["cells of new columns, empty"] += len(new)
        for name in columns:
            if name not in head:
                count[f"files with the new column {path.name}: {name}"] += 1
    for what, number in sorted(count.items()):
        print(f"{number:>10,} {what}")


def write_code_table() -> None:
    """analysis/acp/training_code.csv: the digest of the training code of each commit of published runs."""
    commits = set()
    for suite in map(load_suite, suite_names()):
        if suite.paper.name == "acp" and suite.file.published:
            for table in all_records(suite, ("loss", "needle", "lm_eval")).values():
                commits |= set(table["commit"].dropna())
    lines = [f"{commit},{code_of(commit)}\n" for commit in sorted(commits)]
    files.write_text(Path("analysis/acp/training_code.csv"), "".join(["commit,code\n", *lines]))


def code_of(commit: str) -> str:
    command = ["git", "ls-tree", "-r", commit, *(f"acp_repro/{name}" for name in CODE)]
    tree = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line for line in tree.splitlines() if not line.endswith(BESIDE)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def main() -> None:
    for folder in sorted(Path("results").iterdir()):
        suite = load_suite(folder.name)
        runs = {run.name: run for run in (*suite.runs, *suite.not_run)}
        columns = {q.path("x").name: suite.paper.columns(q) for q in suite.paper.quantities}
        for proofs in sorted(folder.glob(f"*/{state.PROOFS}")):
            for path in proofs.parent.glob("*.csv*"):
                if path.name in columns:  # others belong to no quantity of today and are only kept
                    rewrite_record(path, columns[path.name])
            rewrite_settings(proofs, suite, runs.get(proofs.parent.name))
    write_code_table()
    compare()
    for what, number in sorted(ADDED.items()):
        print(f"{number:>10,} settings.json: {what}")


if __name__ == "__main__":
    main()
