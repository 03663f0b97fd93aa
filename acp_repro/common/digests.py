"""Content hashes, identical on every machine, for cache keys, splits and samples."""

import hashlib
import json
from typing import Any


def hash_json(value: Any) -> str:
    """The SHA-256 of a JSON value, as hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def hash_number(data: bytes) -> int:
    """The first eight bytes of the SHA-256 of ``data``: a uniformly distributed integer in [0, 2**64)."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")
