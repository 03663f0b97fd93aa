"""The artifact store: it accepts intact, up-to-date files and folders, and rejects others in one line.

A manifest is a JSON object, written last and atomically::

    {FACTS..., "inputs": {...}, "sha256": {"NAME": "...", ...}, "digest": "..."}

``inputs`` identify the sources of the artifact. ``sha256`` contains the hash of every file of a folder, or is
the hash of a single file. ``digest`` covers the rest of the manifest, so any edit of the manifest is
detected. The manifest of a folder is its ``manifest.json``. The caller names the manifest of a file, and a
JSON file can be its own manifest. ``done.json`` beside published weights contains only facts and ``sha256``;
such a manifest matches any inputs.
"""

import contextlib
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .digests import hash_json
from .errors import UserError
from .files import lock, read_json, sha256_of, sync, write_json

MANIFEST = "manifest.json"
REMEDY = "restore it from a copy, or delete it to build it again"
_log = logging.getLogger(__name__)


class ArtifactError(UserError, ValueError):
    """An artifact is missing, damaged or made from other inputs; the message names its path and a remedy."""


def identify_run(description: Mapping[str, Any]) -> dict[str, str]:
    """The inputs that identify a run's checkpoints and weights, from the content of its ``run.json``."""
    return {"settings": hash_json(description.get("settings"))}


def read_object(path: Path, remedy: str = REMEDY) -> dict[str, Any]:
    """The JSON object in a file; raises :class:`ArtifactError` if the file does not contain one."""
    content = read_json(path)
    if not content:
        raise ArtifactError(f"{path} is missing, empty or not a JSON object; {remedy}")
    return content


def open_or_explain(
    path: Path, inputs: Mapping[str, Any] | None = None, *, manifest: Path | None = None, remedy: str = REMEDY
) -> dict[str, Any]:
    """The manifest, without ``digest``, of an artifact that is intact and was made from ``inputs``.

    Args:
        path: a folder, or a file with its ``manifest``.
        inputs: JSON values; None accepts any inputs.
        remedy: what the user can do about an error, as the end of its message.

    Raises:
        ArtifactError: the artifact is missing, damaged or made from other inputs.
    """
    file = manifest or path / MANIFEST
    content = read_object(file, remedy)
    is_published = "digest" not in content and manifest not in (None, path)
    if not is_published and content.pop("digest", None) != hash_json(content):
        wrong = f"has an edited {file.name}"
    elif not is_published and inputs is not None and (names := changed_inputs(content, inputs)):
        wrong = f"was made from other inputs ({', '.join(names)})"
    elif not is_intact(path, content, file):
        wrong = f"is missing, truncated or changed: it does not match the SHA-256 in {file}"
    else:
        return content
    raise ArtifactError(f"{path} {wrong}; {remedy}")


def is_intact(path: Path, content: Mapping[str, Any], manifest: Path | None = None) -> bool:
    """Whether a file or folder has the ``sha256`` in the ``content`` of its manifest."""
    with contextlib.suppress(OSError):
        return content.get("sha256") == _hash(path, manifest or path / MANIFEST)
    return False


def changed_inputs(content: Mapping[str, Any], inputs: Mapping[str, Any]) -> list[str]:
    """The names of inputs whose values in the ``content`` of a manifest differ from ``inputs``."""
    recorded = content["inputs"]
    expected = json.loads(json.dumps(inputs))
    return [name for name in {**recorded, **expected} if recorded.get(name) != expected.get(name)]


def hash_files(paths: Iterable[Path]) -> str:
    """The SHA-256 of the paths and contents of files, which identifies them as an input."""
    lines = [f"{path} {sha256_of(path)}\n" for path in paths]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def is_current(path: Path, inputs: Mapping[str, Any] | None, manifest: Path | None = None) -> bool:
    """Whether the artifact is intact and was made from ``inputs``, as in :func:`open_or_explain`."""
    with contextlib.suppress(ArtifactError):
        return bool(open_or_explain(path, inputs, manifest=manifest))
    return False


def write_manifest(
    file: Path, path: Path, inputs: Mapping[str, Any], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes the manifest of the artifact at ``path`` into ``file`` and returns its content."""
    content = json.loads(json.dumps({**facts, "inputs": inputs, "sha256": _hash(path, file)}))
    write_json(file, content | {"digest": hash_json(content)})
    return content


def begin(path: Path) -> Path:
    """Creates an empty temporary folder beside ``path``, which :func:`publish` renames to ``path``."""
    temporary = path.with_name(f".{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # a killed process may have left one
    temporary.mkdir(parents=True)
    return temporary


def publish(path: Path, inputs: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Syncs the folder of :func:`begin` to disk, renames it to ``path`` and returns its manifest."""
    temporary = path.with_name(f".{path.name}")
    for file in temporary.iterdir():
        sync(file)
    content = write_manifest(temporary / MANIFEST, temporary, inputs, facts)
    if path.exists():
        shutil.rmtree(path)
    temporary.rename(path)
    sync(path.parent)
    return content


def open_or_build(
    path: Path, inputs: Mapping[str, Any], build: Callable[[Path], Mapping[str, Any]]
) -> dict[str, Any]:
    """The manifest of the folder ``path``, which is built unless it is current; only one process builds it.

    ``build`` writes files into the folder in its argument and returns facts as JSON values.
    """
    with contextlib.suppress(ArtifactError):
        return open_or_explain(path, inputs)
    with lock(path.with_name(f"{path.name}.lock")):
        try:
            return open_or_explain(path, inputs, remedy="building it again")
        except ArtifactError as error:  # no other process has built it in the meantime
            if path.exists():
                _log.warning("%s", error)
        temporary = begin(path)
        try:
            return publish(path, inputs, build(temporary))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _hash(path: Path, manifest: Path) -> str | dict[str, str] | None:
    """The SHA-256 of a file, or of each file of a folder; None for a file that is its own manifest."""
    if path == manifest:
        return None
    if path.is_file():
        return sha256_of(path)
    files = sorted(file for file in path.iterdir() if file != manifest)
    with ThreadPoolExecutor() as threads:
        hashes = threads.map(sha256_of, files)
        return {file.name: sha256 for file, sha256 in zip(files, hashes, strict=True)}
