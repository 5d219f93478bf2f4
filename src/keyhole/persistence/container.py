"""The file: arrays and one JSON document in the safetensors format, with a digest, written whole or not at all.

Eight bytes with the length of a header, the header in JSON (name → dtype, shape, offsets; our document under
``__metadata__``), the data. Every size is checked against the size of the file before anything is allocated.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

FORMAT, VERSION = "keyhole-model", 1
LARGEST_HEADER = 100_000_000
"""Bytes; the limit of safetensors itself."""
DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
"""Types of arrays that a model may hold."""
_NAMES = {np.dtype(code): name for name, code in DTYPES.items()}


def storable(array: np.ndarray) -> bool:
    """Whether the file has a type for this array."""
    return array.dtype.newbyteorder("<") in _NAMES


def write_container(path: Path, document: Any, arrays: Mapping[str, np.ndarray], *, overwrite: bool) -> None:
    """Write arrays and a document; refuse an existing file unless told otherwise.

    The bytes go to a partial file beside ``path`` that takes its name once it is complete.
    """
    from safetensors.numpy import save

    if path.is_dir():
        raise ValueError(f"`path` must name a file: {path.name!r} is a folder. Add a file name, such as model.keyhole.")
    if path.exists() and not overwrite:
        raise _exists(path)
    stored = {name: np.ascontiguousarray(a, dtype=a.dtype.newbyteorder("<")) for name, a in arrays.items()}
    text = json.dumps(document, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    contents = {name: (_NAMES[a.dtype], a.shape, a.tobytes()) for name, a in stored.items()}
    metadata = {"format": FORMAT, "version": str(VERSION), "document": text, "sha256": _digest(text, contents)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name[:100]}.{uuid4().hex}.partial")
    try:
        partial.write_bytes(save(stored, metadata))
        _take_name(partial, path, overwrite)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _take_name(partial: Path, path: Path, overwrite: bool) -> None:
    if overwrite:
        os.replace(partial, path)
        return
    try:
        os.link(partial, path)  # unlike a rename, it fails if somebody made the file in the meantime
    except FileExistsError:
        raise _exists(path) from None
    except OSError:  # a file system without links
        os.replace(partial, path)


def _exists(path: Path) -> ValueError:
    return ValueError(
        f"a file is not replaced unless asked: {path.name!r} exists. Choose another name, or pass overwrite=True."
    )


def read_container(path: Path) -> tuple[Any, dict[str, np.ndarray]]:
    """Read document and arrays, checked: sizes before allocation, then the digest. Raises ValueError or OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LARGEST_HEADER):
            raise damaged(
                path,
                f"a model file starts with the length of its header, at most its own {size:,} bytes",
                f"{length:,}",
            )
        header = _parse(path, file.read(length))
        metadata = _metadata(path, header)
        entries = _entries(path, header, size - 8 - length)
        contents = {}
        for name, (dtype, shape, start, stop) in entries.items():
            file.seek(8 + length + start)
            content = file.read(stop - start)
            if len(content) != stop - start:
                raise damaged(path, "all bytes of an array must be there", f"{len(content):,} for {name!r:.80}")
            contents[name] = (dtype, shape, content)
    if _digest(metadata["document"], contents) != metadata["sha256"]:
        raise damaged(path, "contents must match the digest that was stored with them", "contents that do not")
    arrays = {
        name: np.frombuffer(content, DTYPES[dtype]).reshape(shape).astype(np.dtype(DTYPES[dtype]).newbyteorder("="))
        for name, (dtype, shape, content) in contents.items()
    }
    return _parse(path, metadata["document"].encode()), arrays


def damaged(path: Path, rule: str, evidence: str) -> ValueError:
    """An error with its remedy."""
    return ValueError(
        f"{rule}: {path.name!r} has {evidence}. It is damaged, or was not written by kh.save; fetch it again, or fit "
        "and save the model anew."
    )


def _digest(text: str, contents: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    for name in sorted(contents):
        dtype, shape, content = contents[name]
        digest.update(f"\n{name!r} {dtype} {tuple(shape)} {len(content)}\n".encode("utf-8", "surrogatepass"))
        digest.update(content)
    return digest.hexdigest()


def _parse(path: Path, text: bytes) -> Any:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, "the header of a model file must be JSON", f"another ({str(error)[:80]})") from None
    if not isinstance(parsed, dict):
        raise damaged(path, "the header of a model file must be a JSON object", f"a {type(parsed).__name__}")
    return parsed


def _metadata(path: Path, header: dict[str, Any]) -> dict[str, str]:
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise damaged(path, f"a model file says that its format is {FORMAT!r}", "no such words")
    version = metadata.get("version")
    if version != str(VERSION):
        raise ValueError(
            f"this keyhole reads version {VERSION} of its model files: {path.name!r} has version {version!r:.40}. "
            "Use the keyhole that wrote it, or a newer one."
        )
    for key in ("document", "sha256"):
        if not isinstance(metadata.get(key), str):
            raise damaged(path, f"a model file has a {key} in its metadata", f"{metadata.get(key)!r:.40}")
    return metadata


def _entries(path: Path, header: dict[str, Any], size: int) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Where each array lies: checked against the size of the data, its own shape, and the others."""

    def whole(numbers: Any) -> bool:
        return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 2**62 for n in numbers)

    entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    total = 0
    for name, value in header.items():
        if name == "__metadata__":
            continue
        if not isinstance(value, dict) or value.get("dtype") not in list(DTYPES):
            raise damaged(path, f"an array has a dtype among {', '.join(DTYPES)}", f"{value!r:.80}")
        shape: Any = value.get("shape")
        offsets: Any = value.get("data_offsets")
        if not whole(shape) or len(shape) > 8 or not whole(offsets) or len(offsets) != 2:
            raise damaged(
                path, "an array has a shape and two offsets, whole numbers", f"{shape!r:.60}, {offsets!r:.60}"
            )
        start, stop = offsets
        expected = math.prod(shape) * np.dtype(DTYPES[value["dtype"]]).itemsize
        if not start <= stop <= size or stop - start != expected:
            raise damaged(
                path,
                f"an array of shape {shape!r:.60} takes {expected:,} of the {size:,} bytes of data",
                f"it at {offsets!r:.60}",
            )
        total += stop - start
        entries[name] = (value["dtype"], tuple(shape), start, stop)
    if total != size:
        raise damaged(path, f"arrays share out the {size:,} bytes of data between them", f"arrays of {total:,}")
    return entries
