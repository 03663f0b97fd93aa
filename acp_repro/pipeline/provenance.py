"""Provenance of a record: commit, versions and the processor's name."""

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

ORIGIN_COLUMNS = (
    "origin",
    "device",
    "dtype",
    "torch_version",
    "triton_version",
    "ptxas_version",
    "python_version",
    "commit",
)


def origin(device: str, dtype: str, uses_gpu: bool) -> dict[str, Any]:
    """The values of :data:`ORIGIN_COLUMNS` for the current process; on a GPU including the versions of triton
    and ptxas that compiled the kernels."""
    return {
        "origin": "measured",
        "device": device,
        "dtype": dtype,
        "python_version": platform.python_version(),
        "commit": commit(),
        "torch_version": version("torch"),
        "triton_version": version("triton") if uses_gpu else None,
        "ptxas_version": _ptxas_version() if uses_gpu else None,
    }


@functools.cache
def commit() -> str | None:
    """``$ACP_REPRO_COMMIT``, or the checkout's commit, with ``-dirty`` if tracked files differ, or None.

    The variable has priority, because files copied without their history may be in a checkout of another
    commit.
    """
    if named := os.environ.get("ACP_REPRO_COMMIT"):
        return named
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():  # installed: the folder around it is another project
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", "-C", str(root), *arguments), capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        dirty = "-dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "--short=12", "HEAD") + dirty
    except (OSError, subprocess.CalledProcessError):
        return None


def version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _ptxas_version() -> str | None:
    """The ptxas that triton calls; two of its versions are reported to give wrong numbers."""
    try:
        import triton

        ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
        text = subprocess.run((ptxas, "--version"), capture_output=True, text=True).stdout
    except (ImportError, OSError):
        return None
    found = re.search(r"V(\d+(?:\.\d+)+)", text)
    return found.group(1) if found else None


def processor_name() -> str:
    """The CPU's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def made_on(device: Any) -> dict[str, Any]:
    """The columns of a record about the ``torch.device`` that it was made on, as keywords for its writer."""
    return {"device": device_name(device), "uses_gpu": device.type == "cuda"}


def device_name(device: Any) -> str:
    """The name of a ``torch.device``'s processor or GPU."""
    if device.type != "cuda":
        return processor_name()
    import torch

    return torch.cuda.get_device_name(device)
