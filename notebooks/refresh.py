"""Runs the notebooks and stores their outputs: ``python notebooks/refresh.py [NOTEBOOK ...]``.

With ``--check`` the script runs no notebook and lists those whose stored outputs do not match their code.
The stored files are bitwise identical whenever the same code runs on the same machine.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import itertools
import json
import re
import sys
import tempfile
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TAG = "output-not-stored"  # on cells whose output differs from run to run, such as times
WIDGET = "application/vnd.jupyter.widget-view+json"  # needs a running kernel
MOST_BYTES = 2_000_000  # limit on the total size of all notebooks
SECONDS = 300  # time limit of a cell
# Pictures that pages show: the notebook, and the 0-based index of the picture in that notebook.
PICTURES = {
    "four-heads": ("01_forget_gates", 0),
    "retention-gates": ("05_adaptive_retention", 0),
    "retention-scores": ("05_adaptive_retention", 3),
    "lap-gates": ("06_learnable_attention_pruning", 0),
    "lap-mask": ("06_learnable_attention_pruning", 1),
}


class NotStorable(Exception):
    """A notebook has an output that must not be stored; the message names the output."""


def execute(path: Path, start: Path = ROOT / "notebooks") -> nbformat.NotebookNode:
    """The notebook with the outputs of a new kernel that starts in the folder ``start``."""
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(start)}}
    client = NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", record_timing=False, resources=resources
    )
    client.execute()
    return notebook


def tidy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Reduces the notebook, in place, to outputs that depend only on its code, and adds their digest.

    Raises:
        NotStorable: the outputs contain an error, a warning or a path of this machine.
    """
    names = itertools.count()
    styles: dict[str, str] = {}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        kept = [] if TAG in cell.metadata.get("tags", []) else cell.outputs
        cell.outputs = _merge_streams([o for o in kept if WIDGET not in o.get("data", {})])
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                raise NotStorable(f"cell {cell.id}: {output.get('text') or output.get('evalue')}")
            data = output.get("data", {})
            if "text/plain" in data:
                data["text/plain"] = re.sub(r" at 0x[0-9a-f]+", "", data["text/plain"])
            if "text/html" in data:  # pandas assigns a random name to every styled table
                data["text/html"] = re.sub(
                    r"\bT_[0-9a-f]{5}\b|\bT_[0-9a-f]{5}(?=_)",
                    lambda match: styles.setdefault(match[0], f"T_{next(names):05d}"),
                    data["text/html"],
                )
            text = json.dumps({**output, "data": {k: v for k, v in data.items() if "image" not in k}})
            for folder in (ROOT, Path.home(), tempfile.gettempdir()):
                if f"{folder}/" in text:
                    raise NotStorable(
                        f"cell {cell.id}: the output contains a path of this machine, {folder}/..."
                    )
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    notebook.metadata["acp_repro"] = {"stored": digest(notebook)}
    return notebook


def digest(notebook: nbformat.NotebookNode) -> str:
    """SHA-256 of the code and its outputs, which detects a change to either."""
    cells = [
        {key: cell[key] for key in ("source", "outputs", "execution_count", "metadata")}
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    return hashlib.sha256(json.dumps(cells, sort_keys=True).encode()).hexdigest()


def is_stored(path: Path) -> bool:
    """Whether the outputs in the file are those that :func:`refresh` stored for its code."""
    notebook = nbformat.read(path, as_version=4)
    return notebook.metadata.get("acp_repro", {}).get("stored") == digest(notebook)


def refresh(path: Path) -> None:
    """Runs the notebook and writes it atomically."""
    sys.path.insert(0, str(ROOT))
    from acp_repro.common.files import write_text

    notebook = tidy(execute(path))
    write_text(path, nbformat.writes(notebook) + "\n")
    export_pictures(path.stem, notebook)


def export_pictures(name: str, notebook: nbformat.NotebookNode) -> None:
    """Writes the notebook's :data:`PICTURES` to ``docs/images/``."""
    outputs = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [data["image/png"] for data in outputs if "image/png" in data]
    for picture, (of, position) in PICTURES.items():
        if of == name:
            (ROOT / "docs/images" / f"{picture}.png").write_bytes(base64.b64decode(pictures[position]))


def _merge_streams(outputs: list) -> list:
    """The outputs with consecutive prints merged, because their segmentation depends on timing."""
    merged: list = []
    for output in outputs:
        last = merged[-1] if merged else {}
        if output.output_type == "stream" and last.get("name") == output.name:
            last.text += output.text
        else:
            merged.append(output)
    return merged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0] + ".")
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK", help="default: all")
    parser.add_argument(
        "--check", action="store_true", help="only list notebooks whose outputs do not match their code"
    )
    options = parser.parse_args()
    paths = options.notebooks or NOTEBOOKS
    for path in paths:
        if path.suffix != ".ipynb" or not path.is_file():
            parser.error(f"{path}: not a notebook; choose from {', '.join(one.name for one in NOTEBOOKS)}")
    if options.check:
        stale = [path for path in paths if not is_stored(path)]
        for path in stale:
            print(f"{path}: the outputs do not match the code; run python notebooks/refresh.py {path}")
        return int(bool(stale))
    for path in paths:
        try:
            refresh(path)
        except NotStorable as error:
            print(f"error: {path}, {error}", file=sys.stderr)
            return 1
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
