"""The claims of the papers and their verdicts, read from ``claims.json`` without torch.

    from acp_repro import claims
    for row in claims.load():
        print(row["id"], row["verdict"], row["ours"])

``docs/claims/claims.schema.json`` describes every field.
"""

import json
from pathlib import Path
from typing import Any

VERSION = 2  # of the file format
PATH = Path(__file__).parent.parent / "claims.json"


def load(path: str | Path = PATH) -> list[dict[str, Any]]:
    """The rows of ``claims.json``, one dictionary per claim; the default path is the file in the clone.

    Raises:
        FileNotFoundError: the package is not in a clone, and no path is given.
        ValueError: the file has another version of the format.
    """
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    if content.get("version") != VERSION:
        raise ValueError(f"{path}: version {content.get('version')}, expected {VERSION}; update acp_repro")
    return content["claims"]
