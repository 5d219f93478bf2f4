"""Rows of numbers, NumPy arrays and torch tensors alike: checked, joined, gathered.

`Any` is one of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import is_tensor
from keyhole._checks import check_finite, check_float_array


def joined_rows(arrays: Sequence[Any], what: str) -> Any:
    """What every batch has one row per sample of, or none has, end to end."""
    present = [array for array in arrays if array is not None]
    if not present:
        return None
    if len(present) != len(arrays):
        raise ValueError(
            f"`batches` must all carry {what}, or none: {len(present)} of {len(arrays)} do. Give "
            f"the others {what} of their own."
        )
    widths = {int(array.shape[1]) for array in present}
    if len(widths) > 1:
        raise ValueError(f"`batches` must have {what} of one dimension: got {sorted(widths)}.")
    return concatenated(present)


def offsets_of(counts: Int[np.ndarray, " n"]) -> Int[np.ndarray, " o"]:
    """Where runs of these lengths begin, and the last one ends."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def gathered(
    offsets: Int[np.ndarray, " o"], rows: np.ndarray
) -> tuple[Int[np.ndarray, " p"], Int[np.ndarray, " t"]]:
    """Some of the runs that begin at ``offsets``.

    Where they begin end to end, and the place of each entry before.
    """
    counts = np.diff(offsets)[rows]
    new_offsets = offsets_of(counts)
    shifts = np.repeat(offsets[rows] - new_offsets[:-1], counts)
    return new_offsets, np.arange(new_offsets[-1]) + shifts


def of_tensors() -> Any:
    """The same for tensors: torch is imported where there are any."""
    from keyhole import _tensors

    return _tensors


def check_numbers(value: Any, name: str) -> Any:
    """Return ``value`` in float32 or float64."""
    if is_tensor(value):
        return of_tensors().check_float_tensor(value, name)
    return check_float_array(value, name)


def check_all_finite(array: Any, name: str) -> None:
    """Raise if there is NaN or infinity; the message names the first."""
    if is_tensor(array):
        of_tensors().check_finite_tensor(array, name)
    else:
        check_finite(array, name)


def all_finite(array: Any) -> bool:
    """Whether there is neither NaN nor infinity."""
    if is_tensor(array):
        return bool(array.isfinite().all())
    return bool(np.isfinite(array).all())


def concatenated(arrays: Sequence[Any]) -> Any:
    """Rows end to end."""
    n_tensors = sum(is_tensor(array) for array in arrays)
    if n_tensors == 0:
        return np.concatenate(arrays)
    if n_tensors < len(arrays):
        raise TypeError(
            "sets must be NumPy arrays or torch tensors, all of one kind: got both. Convert some "
            "of them."
        )
    return of_tensors().concatenate(arrays)


def like(array: Any, other: Any) -> Any:
    """``array`` as it is, or on the device of ``other`` if that is a tensor."""
    if is_tensor(other):
        return of_tensors().as_tensor(array, other)
    return array


def astype(array: Any, dtype: Any) -> Any:
    """The array in float32 or float64; itself if it is that."""
    if is_tensor(array):
        return of_tensors().astype(array, np.dtype(dtype).name)
    return array.astype(dtype, copy=False)


def alike(tokens: Any, query: Any) -> tuple[Any, Any]:
    """Both in the wider type of the two, and where the tokens are."""
    if is_tensor(query) and not is_tensor(tokens):
        raise TypeError(
            "`keys` and `query` must be of one kind: got NumPy keys and a torch query. Convert one "
            "of them."
        )
    # types by their NumPy names, which torch puts a prefix to
    dtypes = [np.dtype(str(array.dtype).removeprefix("torch.")) for array in (tokens, query)]
    wider = np.result_type(*dtypes)
    return astype(tokens, wider), astype(like(query, tokens), wider)


def copied(array: Any) -> Any:
    """The same numbers in memory of their own."""
    if is_tensor(array):
        return array.clone()
    return array.copy()


def frozen(array: Any) -> Any:
    """A view that cannot be written to, in one piece; tensors have none such."""
    if is_tensor(array):
        return array.contiguous()
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def with_last(array: Any, value: float) -> Any:
    """[x; value] for every row."""
    if is_tensor(array):
        return of_tensors().with_last(array, float(value))
    extended = np.empty((array.shape[0], array.shape[1] + 1), dtype=array.dtype)
    extended[:, :-1] = array
    extended[:, -1] = value
    return extended


def with_columns(array: Any, columns: np.ndarray) -> Any:
    """Rows with further columns last, in the type and on the device of the array."""
    columns = columns.astype(str(array.dtype).removeprefix("torch."), copy=False)
    if is_tensor(array):
        return of_tensors().with_columns(array, columns)
    return np.concatenate([array, columns], axis=1)


def weighted_sums(
    matrix: Any, weights: Float[np.ndarray, " a"], offsets: Int[np.ndarray, " o"], axis: int
) -> Any:
    """Σ_j w_j x_j over the rows, or columns, of each run; the matrix is overwritten."""
    if is_tensor(matrix):
        return of_tensors().weighted_sums(matrix, weights, offsets, axis)
    matrix *= np.expand_dims(weights.astype(matrix.dtype), 1 - axis)
    return np.add.reduceat(matrix, offsets[:-1], axis=axis)


def empty_matrix(n: int, m: int, other: Any) -> Any:
    """A float64 matrix that is yet to be filled, on the device of ``other`` if that is a tensor."""
    if is_tensor(other):
        return of_tensors().empty(n, m, other.device)
    return np.empty((n, m))


def on_host(array: Any) -> np.ndarray:
    """A NumPy array in host memory; itself if it is one."""
    if is_tensor(array):
        return np.asarray(of_tensors().as_array(array))
    return np.asarray(array)


def check_sizes(n: int, lengths: np.ndarray, dim: int, name: str) -> None:
    """Raise unless there are sets, all with keys, and coordinates."""
    if n == 0:
        raise ValueError(f"`{name}` must hold at least one set: got none (0 sample(s)).")
    if dim == 0:
        raise ValueError(f"tokens of `{name}` must have at least one coordinate: got 0 feature(s).")
    if lengths.min() < 1:
        i = int(lengths.argmin())
        raise ValueError(
            f"every set of `{name}` must have at least one key: set {i} has no keys. "
            "Drop it, or give it a token that says 'empty'."
        )


def check_query(query: Any, n: int) -> None:
    """Raise unless there is one query per set."""
    if query.ndim != 2 or query.shape[1] == 0:
        raise ValueError(
            f"`query` must have shape (n, d_q), one query per set: got shape {tuple(query.shape)} "
            f"for {n} sets."
        )
    if query.shape[0] != n:
        raise ValueError(
            f"`query` must have one row per set: got {query.shape[0]} rows for {n} sets."
        )


def check_extras(extras: Any, n: int) -> Float[np.ndarray, "n c"] | None:
    """Sample-level features of n samples in float64, in host memory; or None."""
    if extras is None:
        return None
    if is_tensor(extras):
        extras = of_tensors().as_array(extras)
    columns = check_float_array(extras, "extras").astype(np.float64)
    if columns.ndim != 2 or len(columns) != n or columns.shape[1] == 0:
        raise ValueError(
            f"`extras` must have shape (n, c), one row per sample: got shape {columns.shape} for "
            f"{n} samples. A single column is x[:, None]."
        )
    check_finite(columns, "extras")
    return columns
