"""The Python blocks of README and docs/ run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parent.parent
# The lab notebook keeps historical names.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "REPRODUCTION.md",
    ROOT / "notebooks" / "README.md",
    *sorted(page for page in (ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("pretrained/*/README.md")),
]


# A block that cannot run states its reason in an invisible comment above it.
BLOCK = re.compile(r"(<!-- not run: [^\n]+ -->\n)?^ *```(\w*)\n(.*?)^ *```$", re.S | re.M)


def python_that_runs(text: str) -> str:
    return "".join(
        dedent(code) for reason, language, code in BLOCK.findall(text) if language == "python" and not reason
    )


# Each page runs in a separate process; the processes share one import of torch.
RUNNER = """
import json, os, sys, traceback
import torch, acp_repro
for page, code in json.load(sys.stdin).items():
    if not os.fork():
        try:
            exec(compile(code, page, "exec"), {"__name__": "__main__"})
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    if os.wait()[1]:
        sys.exit(page)
"""


@pytest.mark.slow
def test_documented_python_blocks_run():
    scripts = {
        str(page.relative_to(ROOT)): code
        for page in PAGES
        if (code := python_that_runs(page.read_text(encoding="utf-8")))
    }
    assert len(scripts) > 4
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(scripts),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
