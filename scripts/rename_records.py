"""Renames columns, labels and settings in results/ once, to the names of the current code.

No value changes. ``python scripts/rename_records.py`` rewrites the files, then compares every record with the
version of HEAD, cell by cell, and every settings.json with the settings of the current suites.
"""

import csv
import gzip
import io
import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from acp_repro.common import files
from acp_repro.pipeline import freshness
from acp_repro.pipeline.suite_file import load_suite

COLUMNS = {
    "needle_share": "needle_fraction",
    "kept_share": "keep_ratio",
    "kept_ratio": "keep_ratio",
    "larger_class": "majority_class",
    "parts_here": "diverges_here",
    "weight_difference": "parameter_difference",
}
METRICS = {
    "fork.csv.gz": "first_divergence.csv.gz",
    "kept_words.csv": "keep_ratio_by_word.csv",
    "tokens_kept.csv": "keep_ratio_by_layer.csv",
}
KEYS = {
    "nudged": "perturb_init",
    "needle_share": "needle_fraction",
    "blind_steps": "token_dropout_steps",
    "rates_by_size": "scale_parameter",
    "more_path": "extra_path",
    "lambda_zero_at_nats": "lambda_off_loss",
    "shortest": "min_chars",
    "longest": "max_chars",
    "shap_shortest": "shap_min_tokens",
}
GATES = {"bimodal": "mixed", "paper": "paper_ratio"}  # labels of the synthetic gates of benchmarks
LABELS = {
    "kernel_time.csv": {"gates": GATES},
    "decode_time.csv": {"gates": GATES},
    "dynamics.csv": {"series": COLUMNS},
}


def read(name: str, content: bytes) -> list[list[str]]:
    content = gzip.decompress(content) if name.endswith(".gz") else content
    return list(csv.reader(io.StringIO(content.decode(), newline="")))


def new_column(name: str) -> str:
    return COLUMNS.get(name, re.sub("_turns_ms$", "_samples_ms", name))


def new_rows(name: str, rows: list[list[str]]) -> list[list[str]]:
    head, *body = rows
    for column, labels in LABELS.get(name, {}).items():
        at = head.index(column)
        body = [[*row[:at], labels.get(row[at], row[at]), *row[at + 1 :]] for row in body]
    return [[new_column(column) for column in head], *body]


def rename_record(path: Path) -> None:
    content = path.read_bytes()
    before = read(path.name, content)
    after = new_rows(path.name, before)
    if after != before:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(after)
        content = text.getvalue().encode()
        files.write_bytes(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    if path.name in METRICS:
        path.rename(path.with_name(METRICS[path.name]))


def new_settings(settings: Any) -> Any:
    if isinstance(settings, dict):
        return {KEYS.get(key, key): new_settings(value) for key, value in settings.items()}
    return settings


def rename_settings(path: Path) -> None:
    before = json.loads(path.read_text())
    content = {key: value for key, value in before.items() if key != "records"}
    for part in {"run", "measure"} & content.keys():
        content[part] = new_settings(content[part])
    if content.get("measure", {}).get("gates") in GATES:
        content["measure"] = {
            {"gates": "gate_distribution"}.get(key, key): GATES.get(value, value) if key == "gates" else value
            for key, value in content["measure"].items()
        }
    records = {}
    for name, record in before["records"].items():
        name = METRICS.get(name, name)
        if "settings" in record:
            assert record["settings"] == freshness._digest(before), path
            record = {**record, "settings": freshness._digest(content)}
        records[name] = {**record, "sha256": files.sha256_of(path.with_name(name))}
    files.write_json(path, content | {"records": records})


def compare() -> None:
    """Compares every record with the version of HEAD and prints the counts; stops at a difference."""
    count: Counter[str] = Counter()
    names = subprocess.run(["git", "ls-files", "results"], capture_output=True, text=True, check=True)
    for old in map(Path, names.stdout.split()):
        content = subprocess.run(["git", "show", f"HEAD:{old}"], capture_output=True, check=True).stdout
        path = old.with_name(METRICS.get(old.name, old.name))
        if old.name == freshness.PROOFS:
            suite = load_suite(old.parts[1])
            run = next((run for run in suite.runs if run.name == old.parts[2]), None)
            if run is not None:
                same = freshness._has_settings(json.loads(path.read_text()), suite, run)
                count["settings.json, current" if same else f"settings.json, other settings: {path}"] += 1
            continue
        before, after = read(old.name, content), read(path.name, path.read_bytes())
        assert len(before) == len(after), path
        count["records"] += 1
        if content == path.read_bytes():
            count["records, unchanged to the byte"] += 1
        for row, other in zip(before[1:], after[1:], strict=True):
            for column, one, two in zip(before[0], row, other, strict=True):
                assert one == two or LABELS[old.name][column][one] == two, (path, column)
                count["cells, equal as text" if one == two else f"labels in {column}: {one}, now {two}"] += 1
        for one, two in zip(before[0], after[0], strict=True):
            if one != two:
                count[f"column {one}, now {two}"] += 1
    for what, number in sorted(count.items()):
        print(f"{number:>10,} {what}")


if __name__ == "__main__":
    for path in sorted(Path("results").rglob("*.csv*")):
        rename_record(path)
    for path in sorted(Path("results").rglob(freshness.PROOFS)):
        rename_settings(path)
    compare()
