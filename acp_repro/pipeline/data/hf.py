"""Hugging Face datasets, downloaded once into the cache.

With a limit on the number of documents the dataset is streamed, so that only these documents are downloaded.
Later runs read the cached files and need neither the network nor the library.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from acp_repro.common.artifacts import open_or_build
from acp_repro.common.command import progress_bar
from acp_repro.common.digests import hash_json
from acp_repro.pipeline.data.files import DataError, default_cache, read_records
from acp_repro.pipeline.data.sources import Row, TextSource

_FILE = "documents.jsonl.zst"


class HubSource(TextSource):
    """Splits of a dataset. Blank documents are skipped and not counted.

    Args:
        path, config: arguments of ``datasets.load_dataset``; ``path`` may be a folder.
        splits: maps ``train``, ``dev``, ``test``, or None for text without a split, to the names of the
            dataset's splits.
        fields: maps ``text`` and, if there are labels, ``label`` to the names of the dataset's fields.
        most: the number of documents to download from each split; None downloads all.
    """

    def __init__(
        self,
        path: str,
        config: str | None,
        splits: Mapping[str | None, str],
        fields: Mapping[str, str],
        most: int | None = None,
    ):
        self._splits = {split: _fetch(path, config, name, fields, most) for split, name in splits.items()}
        super().__init__(self._splits.values())

    def rows(self) -> Iterator[Row]:
        for split, file in self._splits.items():
            for _, record in read_records(file):
                yield Row(**record)._replace(split=split)


def _fetch(path: str, config: str | None, split: str, fields: Mapping[str, str], most: int | None) -> Path:
    """The file of JSON lines with fields of `Row`; it is written again if a local folder changes."""
    others = {name: field for name, field in fields.items() if name != "text"}
    folder = Path(path)
    local = sorted(p for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else []
    state = [[str(p.relative_to(folder)), p.stat().st_size, p.stat().st_mtime_ns] for p in local]
    what = [path, config, split, fields["text"], most, *([others] if others else []), *state]

    def build(folder: Path) -> dict[str, int]:
        from fsspec.compression import zstd  # imported late, so that a command reports it missing in one line

        documents = 0
        records = islice(_records(path, config, split, fields, most), most)
        with zstd.open(folder / _FILE, "wb") as file:
            for record in progress_bar(records, f"fetching {path}", unit=" documents", leave=False):
                file.write(json.dumps(record).encode() + b"\n")
                documents += 1
        if not documents:
            raise DataError(f"path: {path}, split {split}, contains no text")
        return {"documents": documents}

    fetched = default_cache() / f"hf-fetched-{hash_json(what)[:16]}"
    open_or_build(fetched, {"source": what}, build)
    return fetched / _FILE


def _records(
    path: str, config: str | None, split: str, fields: Mapping[str, str], most: int | None
) -> Iterator[dict[str, Any]]:
    try:
        import datasets

        loaded = datasets.load_dataset(path, config, split=split, streaming=most is not None)
        feature = (getattr(loaded, "features", None) or {}).get(fields.get("label"))
        names = getattr(feature, "names", None)
        for record in loaded:
            for field in fields.values():
                if record.get(field) is None:
                    raise DataError(f"path: {path} has no field {field!r}; it has: {', '.join(record)}")
            if record[fields["text"]].strip():
                yield _row(record, fields, names)
    except DataError:
        raise
    except Exception as error:  # from the import, the network, the Hub client or a file's format
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"path: the dataset {path} cannot be read ({reason[:300]}); check path, config, split and "
            "the network, and run pip install '.[hf]'"
        ) from error


def _row(record: dict[str, Any], fields: Mapping[str, str], names: list[str] | None) -> dict[str, Any]:
    """The fields of a `Row` that are in the record."""
    # UTF-8 cannot encode half of a surrogate pair, which is not a character.
    row = {"text": record[fields["text"]].encode(errors="replace").decode()}
    if "label" in fields and not names:
        row["label"] = str(record[fields["label"]])
    elif "label" in fields and record[fields["label"]] >= 0:  # a test split may hide its labels as -1
        row |= {"label": names[record[fields["label"]]], "number": record[fields["label"]]}
    return row
