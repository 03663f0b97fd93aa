"""Cache entries give their files as arrays."""

import numpy as np
import pytest

from acp_repro.pipeline.data.cache import open_or_build


def test_an_entry_gives_its_files_as_read_only_arrays(tmp_path):
    def build(writer):
        writer.append("a", np.arange(5, dtype="<u2"))
        writer.append("a", np.arange(5, 8, dtype="<u2"))
        writer.append("b", b"")
        return {"n": 8}

    open_or_build(tmp_path / "entry", {"text": "x"}, build)
    entry = open_or_build(tmp_path / "entry", {"text": "x"}, lambda writer: 1 / 0)
    assert entry.manifest["n"] == 8
    array = entry.array("a", "<u2")
    assert isinstance(array, np.memmap) and array.tolist() == list(range(8))
    assert entry.array("b", "<u2").shape == (0,)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
