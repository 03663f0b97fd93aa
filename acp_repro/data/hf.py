"""The first documents of a Hugging Face dataset, fetched once into a file of the cache.

The dataset is streamed, so no more of it is loaded than is asked for. Afterwards it is text as any
other, and needs neither the network nor the library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from acp_repro.data.cache import EntryWriter, open_or_build
from acp_repro.data.config import DataConfig
from acp_repro.data.files import DataError

_FRAME_BYTES = 4 << 20  # of text, compressed together


def downloaded(config: DataConfig, cache: Path) -> Path:
    """The file of JSON lines (field ``text``) with the documents that ``config`` names.

    Blank documents are left out, and do not count.

    Raises:
        DataError: the library is missing, or the dataset, its configuration, split or field.
    """
    import zstandard

    what = [config.path, config.config, config.split, config.text_field, config.max_documents]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def build(writer: EntryWriter) -> dict:
        lines, documents = bytearray(), 0
        for text in tqdm(
            islice(_texts(config), config.max_documents),
            desc=f"fetching {config.path}",
            unit=" documents",
            leave=False,
            disable=None,
        ):
            lines += json.dumps({"text": text}).encode() + b"\n"
            documents += 1
            if len(lines) >= _FRAME_BYTES:
                writer.append("documents.jsonl.zst", zstandard.compress(lines))
                lines.clear()
        if not documents:
            raise DataError(f"path: {config.path}, split {config.split}, holds no text")
        writer.append("documents.jsonl.zst", zstandard.compress(lines))
        return {"source": what, "documents": documents}

    return open_or_build(cache / f"hf-fetched-{key[:16]}", key, build).folder / "documents.jsonl.zst"


def _texts(config: DataConfig) -> Iterator[str]:
    try:
        import datasets
    except ImportError as error:
        raise DataError("corpus: hf needs the library `datasets`; pip install -e '.[hf]'") from error
    try:
        stream = datasets.load_dataset(config.path, config.config, split=config.split, streaming=True)
        for number, record in enumerate(stream):
            text = record.get(config.text_field)
            if not isinstance(text, str):
                raise DataError(
                    f"text_field: {config.text_field!r} holds {type(text).__name__} in document "
                    f"{number} of {config.path}; set text_field to a field of text (there are: "
                    f"{', '.join(record)})"
                )
            if text.strip():
                # Half of a surrogate pair is no character, and no file of UTF-8 can hold it.
                yield text.encode(errors="replace").decode()
    except DataError:
        raise
    except Exception as error:  # of the network, of the Hub's client, of a file's format
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"path: the dataset {config.path} cannot be read ({reason[:300]}); check path, config and "
            "split, and the network, which is needed once"
        ) from error
