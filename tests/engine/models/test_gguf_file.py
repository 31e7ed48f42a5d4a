from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headrace.engine.models.errors import ModelError
from headrace.engine.models.gguf_file import read_gguf
from support.gguf_files import write_raw

METADATA: dict[str, Any] = {
    "a.flag": True,
    "a.count": 7,
    "a.ratio": 0.5,
    "a.name": "naïve 🙂",
    "a.words": ["", "x", "naïve"],
    "a.numbers": [1, -2, 3],
}


def _write(folder: Path) -> Path:
    tensors: dict[str, np.ndarray] = {
        "one": np.arange(5, dtype=np.float32),
        "two": np.arange(12, dtype=np.float16).reshape(3, 4),
    }
    return write_raw(folder / "m.gguf", "llama", METADATA, tensors)


def test_reads_what_the_package_reads(tmp_path: Path) -> None:
    path = _write(tmp_path)
    file = read_gguf(path)
    package = gguf.GGUFReader(path)
    for key in [*METADATA, "general.architecture"]:
        assert file.metadata[key] == package.get_field(key).contents(), key
    assert list(file.tensors) == [tensor.name for tensor in package.tensors]
    for theirs in package.tensors:
        ours = file.tensors[theirs.name]
        assert ours.offset == theirs.data_offset
        assert ours.type is theirs.tensor_type
        assert ours.shape == tuple(reversed(theirs.shape.tolist()))
    two = file.raw(file.tensors["two"]).view(np.float16)
    np.testing.assert_array_equal(two, np.arange(12).reshape(3, 4))


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    """Half a download is told as such, wherever it was cut."""
    content = _write(tmp_path).read_bytes()
    short = tmp_path / "short.gguf"
    last = read_gguf(tmp_path / "m.gguf").tensors["two"]
    for size in range(0, last.offset + last.num_bytes, 3):
        short.write_bytes(content[:size])
        with pytest.raises(ModelError, match=r"short\.gguf"):
            read_gguf(short)


@pytest.mark.parametrize("content", [b"", b"GGML" + bytes(100), b"GGUF" + b"\xff" * 100])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        read_gguf(path)


def test_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        read_gguf(tmp_path / "none.gguf")
