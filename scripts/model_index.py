"""Writes the ``model-index`` of the model cards in ``pretrained/`` from ``claims.json``: python
scripts/model_index.py.

`make reproduction` copies ``pretrained/results.csv``, the results that the cards print, into ``claims.json``.
"""

import json
import re
from itertools import groupby
from pathlib import Path


def model_index(name: str, results: list[dict[str, str]]) -> str:
    """The front matter of one card, in the Hugging Face Hub's format: one result per data set."""
    lines = ["model-index:", f"- name: {name}", "  results:"]
    for (task, dataset), rows in groupby(results, lambda row: (row["task"], row["dataset"])):
        lines += ["  - task:", f"      type: {task}", "    dataset:", "      type: text"]
        lines += [f"      name: {json.dumps(dataset)}", "    metrics:"]
        for row in rows:
            title = json.dumps(f"{row['metric']} ({row['unit']})")
            kind = re.sub(r"\W+", "_", row["metric"]).strip("_")
            lines += [f"    - type: {kind}", f"      name: {title}", f"      value: {float(row['value'])}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Replaces the ``model-index`` at the end of the front matter of each card."""
    results = json.loads(Path("claims.json").read_text(encoding="utf-8"))["pretrained"]
    for name, rows in groupby(results, lambda row: row["folder"]):
        card = Path("pretrained") / name / "README.md"
        _, front, text = card.read_text(encoding="utf-8").split("---\n", 2)
        front = front.partition("model-index:")[0] + model_index(name, list(rows))
        card.write_text(f"---\n{front}---\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
