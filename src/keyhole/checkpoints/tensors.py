"""Files of tensors in the safetensors format: the header first, then only what is asked for.

The format is eight bytes that hold the length of a JSON header, the header (name → dtype, shape, offsets), and the
data. We read it ourselves because the NumPy reader of the package knows no bfloat16, and because a file from elsewhere
deserves an answer that says what is wrong with it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keyhole._checks import check_finite

LARGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""
_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8, "BOOL": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
}  # fmt: skip
_READABLE = ("F64", "F32", "F16", "BF16")


class Entry(NamedTuple):
    """Where a tensor lies in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile:
    """The tensors of one file by name.

    Parameters
    ----------
    path : Path
        A file in the safetensors format. Only its header is read here.

    Examples
    --------
    >>> import tempfile
    >>> from safetensors.numpy import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "model.safetensors"
    ...     save_file({"weight": np.eye(2, dtype=np.float16)}, path)
    ...     file = TensorFile(path)
    ...     (list(file.entries), file.read("weight").tolist())
    (['weight'], [[1.0, 0.0], [0.0, 1.0]])
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LARGEST_HEADER):
                raise ValueError(
                    f"a safetensors file starts with the length of its header, at most {LARGEST_HEADER:,} and no more "
                    f"than the file's {size:,} bytes: {self.path.name} says {length:,}. It is truncated or of another "
                    "format; fetch it again, or convert it to safetensors."
                )
            header = _parse(file.read(length), self.path.name)
        self._data = 8 + length
        self.entries: dict[str, Entry] = {
            name: _entry(name, value, size - self._data, self.path.name)
            for name, value in header.items()
            if name != "__metadata__"
        }

    def read(self, name: str) -> np.ndarray:
        """One tensor, finite throughout: float64 as it is, all else as float32, on the way to which nothing is lost."""
        entry = self.entries[name]
        if entry.dtype not in _READABLE:
            raise ValueError(
                f"weights must be stored as one of {', '.join(_READABLE)}: {name!r} in {self.path.name} is "
                f"{entry.dtype}. Quantised checkpoints are not read; use the one they were made from."
            )
        with self.path.open("rb") as file:
            file.seek(self._data + entry.start)
            content = file.read(entry.stop - entry.start)
        if len(content) != entry.stop - entry.start:
            raise ValueError(
                f"a tensor's bytes must all be there: {name!r} in {self.path.name} has {len(content):,} of "
                f"{entry.stop - entry.start:,}. The file shrank while it was read; fetch it again."
            )
        array = _decode(content, entry.dtype).reshape(entry.shape)
        check_finite(array, f"{name} in {self.path.name}")
        return array


def _decode(content: bytes, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        # the upper half of a float32
        return (np.frombuffer(content, dtype="<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F64":
        return np.frombuffer(content, dtype="<f8")
    return np.frombuffer(content, dtype={"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)


def _parse(text: bytes, file: str) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"the header of a safetensors file must be JSON: that of {file} is not ({error}). "
            "The file is damaged or of another format; fetch it again, or convert it to safetensors."
        ) from None
    if not isinstance(header, dict):
        raise ValueError(
            f"the header of a safetensors file must be a JSON object: that of {file} is a {type(header).__name__}. "
            "The file is damaged; fetch it again."
        )
    return header


def _entry(name: str, value: Any, size: int, file: str) -> Entry:
    def whole(numbers: Any) -> bool:
        return isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)

    def refuse(rule: str, evidence: Any) -> ValueError:
        return ValueError(f"{rule}: {name!r} in {file} has {evidence}. The file is damaged; fetch it again.")

    if not isinstance(value, dict):
        raise refuse("a tensor is described by dtype, shape and data_offsets", f"{value!r:.80}")
    dtype: Any = value.get("dtype")
    shape: Any = value.get("shape")
    offsets: Any = value.get("data_offsets")
    if not isinstance(dtype, str):
        raise refuse("a tensor's dtype must be a name", f"{dtype!r:.80}")
    if not whole(shape):
        raise refuse("a tensor's shape must be whole numbers", f"{shape!r:.80}")
    if not whole(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size:
        raise refuse(f"a tensor's data_offsets must lie within the {size:,} bytes of data", f"{offsets!r:.80}")
    expected = math.prod(shape) * _SIZES.get(dtype, 0)
    if dtype in _SIZES and expected != offsets[1] - offsets[0]:
        raise refuse(
            f"a tensor must be as large as its shape says ({dtype} {shape!r:.60}, {expected:,} bytes)",
            f"{offsets[1] - offsets[0]:,} bytes",
        )
    return Entry(dtype, tuple(shape), *offsets)
