"""Hashes of content, the same on every machine: for keys of a cache, and for splits and samples."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def hash_json(value: Any) -> str:
    """The SHA-256 of a value of JSON's types, as hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def hash_number(data: bytes) -> int:
    """A number from 0 to 2**64 - 1, evenly distributed: the first eight bytes of the SHA-256 of ``data``."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
