"""Torch tensors as input.

The checks of _checks.py, and the few array operations that a SetBatch needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


def check_float_tensor(value: torch.Tensor, name: str) -> torch.Tensor:
    """Return ``value`` as a float32 or float64 tensor, detached.

    Integers and half precision become float64.
    """
    if value.is_complex():
        raise ValueError(
            f"`{name}` must be real. Complex data not supported: got dtype {value.dtype}. "
            "Pass real and imaginary parts as separate coordinates."
        )
    value = value.detach()
    if value.dtype in (torch.float32, torch.float64):
        return value
    return value.to(torch.float64)


def check_finite_tensor(value: torch.Tensor, name: str) -> None:
    """Raise if ``value`` holds NaN or infinity; the message names the first offender."""
    finite = torch.isfinite(value)
    if bool(finite.all()):
        return
    where = tuple(int(i) for i in torch.nonzero(~finite)[0])
    if bool(torch.isnan(value[where])):
        kind = "NaN"
    else:
        kind = "infinity"
    raise ValueError(
        f"`{name}` must be finite: found {kind} (NaN or inf) at index {where}, "
        f"{int((~finite).sum())} such entries in all. Impute or drop them before fitting."
    )


def as_tensor(array: Any, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``array`` on the device of ``like``, in its own type unless one is given."""
    return torch.as_tensor(_writeable(array), device=like.device, dtype=dtype)


def _writeable(array: Any) -> Any:
    """``array``, copied if it is read-only: torch has no read-only tensors, and warns of it."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        return array.copy()
    return array


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as a NumPy array in host memory."""
    return np.asarray(tensor.detach().cpu().numpy())


def concatenate(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join along axis 0. All must live on one device; the widest type wins."""
    devices = {str(t.device) for t in tensors}
    if len(devices) > 1:
        raise ValueError(
            f"tensors must live on one device: got {', '.join(sorted(devices))}. Move them with "
            ".to(device) first."
        )
    dtype = torch.float32
    if any(t.dtype == torch.float64 for t in tensors):
        dtype = torch.float64
    return torch.cat([t.to(dtype) for t in tensors])


def weighted_sums(
    matrix: torch.Tensor, weights: np.ndarray, offsets: np.ndarray, axis: int = 0
) -> torch.Tensor:
    """Σ_j w_j x_j over the rows, or columns, of each run; the matrix is overwritten.

    The runs begin at ``offsets``, and none is empty.
    """
    if axis == 1:
        return weighted_sums(matrix.T, weights, offsets).T
    matrix *= as_tensor(weights, matrix, matrix.dtype)[:, None]
    lengths = np.diff(offsets)
    if (lengths == 1).all():
        return matrix
    there = as_tensor(lengths, matrix)
    return torch.segment_reduce(matrix.contiguous(), "sum", lengths=there, axis=0)


CHUNK_BYTES = 2**28
"""Bytes of tokens that are scaled, or summarised, at a time: temporaries are float64."""


def standardised(tokens: torch.Tensor, centre: np.ndarray, spread: np.ndarray) -> torch.Tensor:
    """(x − centre) / spread in float64, then in the type of the tokens."""
    centre_there = as_tensor(centre, tokens, torch.float64)
    spread_there = as_tensor(spread, tokens, torch.float64)
    return _changed_in_chunks(tokens, lambda rows: (rows - centre_there) / spread_there)


def to_sphere(tokens: torch.Tensor) -> torch.Tensor:
    """Every token divided by its length; a token of zeros stays."""
    return _changed_in_chunks(tokens, _units_of_rows)


def _units_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows of length one; their largest coordinate is divided out first: no square overflows."""
    largest = rows.abs().amax(dim=1, keepdim=True)
    units = rows / torch.where(largest > 0, largest, 1.0)
    lengths = units.square().sum(dim=1, keepdim=True).sqrt()
    return units / torch.where(lengths > 0, lengths, 1.0)


def _changed_in_chunks(
    tokens: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Tokens after a change of each row, in their own type."""
    out = torch.empty_like(tokens)
    for start, stop in _chunks(tokens):
        out[start:stop] = change(tokens[start:stop])
    return out


def _chunks(tokens: torch.Tensor) -> list[tuple[int, int]]:
    """Where runs of rows of `CHUNK_BYTES` in float64 begin and end."""
    step = max(1, CHUNK_BYTES // max(1, 8 * tokens.shape[1]))
    return [(start, min(start + step, len(tokens))) for start in range(0, len(tokens), step)]


def statistics_of_sets(tokens: torch.Tensor, offsets: np.ndarray) -> np.ndarray:
    """`summaries.statistics_of_sets`, within rounding.

    As there, the order of the keys changes no bit.
    """
    lengths = as_tensor(np.diff(offsets), tokens)

    def reduced(numbers: torch.Tensor, kind: str) -> torch.Tensor:
        return torch.segment_reduce(numbers, kind, lengths=lengths, axis=0)

    def of_every_key(numbers: torch.Tensor) -> torch.Tensor:
        return torch.repeat_interleave(numbers, lengths, dim=0, output_size=len(tokens))

    keys = tokens.to(torch.float64)
    least = reduced(keys, "min")
    largest = reduced(keys, "max")

    # in units of the size of each coordinate in its set: squares neither overflow nor vanish
    size = torch.maximum(least.abs(), largest.abs())
    unit = torch.where(size > 0, size, 1.0)
    keys = keys / of_every_key(unit)
    mean = _means_of_sets(keys, offsets)

    # deviations in units of their own size, so that small ones keep their digits
    deviations = keys - of_every_key(mean)
    spread = reduced(deviations.abs(), "max")
    spread_unit = torch.where(spread > 0, spread, 1.0)
    squares = (deviations / of_every_key(spread_unit)).square()
    deviation = _means_of_sets(squares, offsets).sqrt() * spread_unit
    statistics = torch.stack([mean * unit, deviation * unit, least, largest], dim=1)
    return as_array(statistics)


def _means_of_sets(numbers: torch.Tensor, offsets: np.ndarray) -> torch.Tensor:
    """Means over the keys of each set of numbers of size one at most, whatever their order.

    Sums are those of integers, which are exact: 60 bits are shared by a number and the count.
    """
    lengths = np.diff(offsets)
    n_bits = 60 - int(lengths.max()).bit_length()
    integers = (numbers * 2.0**n_bits).round().to(torch.int64)

    # (as differences of running sums they would take 0.4 of 3.4 s of a fit of 660,000 keys × 768
    # on an H200)
    set_of_key = as_tensor(np.repeat(np.arange(len(lengths)), lengths), numbers)
    sums = integers.new_zeros(len(lengths), integers.shape[1])
    sums.index_add_(0, set_of_key, integers)
    counts = as_tensor(lengths, numbers, torch.float64)
    return sums.to(torch.float64) / 2.0**n_bits / counts[:, None]


def astype(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor as "float32" or "float64"; itself if it is that."""
    return tensor.to(_dtype_of(name))


def _dtype_of(name: str) -> torch.dtype:
    """The torch type called "float32" or "float64"."""
    if name == "float32":
        return torch.float32
    return torch.float64


def with_last(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """[x; value] for every row."""
    return torch.nn.functional.pad(tensor, (0, 1), value=value)


def with_columns(tensor: torch.Tensor, columns: np.ndarray) -> torch.Tensor:
    """Rows with further columns, of NumPy, last."""
    return torch.cat([tensor, as_tensor(columns, tensor)], dim=1)


def to_device(array: Any, device: str) -> torch.Tensor:
    """A NumPy array on a device, in its own type.

    The message says what is missing where there is none.
    """
    return torch.as_tensor(_writeable(array), device=check_device(device))


def filled_on_device(
    shape: tuple[int, int],
    dtype: str,
    device: str,
    fill: Callable[[int, int, np.ndarray], None],
    chunk_bytes: int = 2**25,
) -> torch.Tensor:
    """A matrix on a device whose rows ``fill(start, stop, out)`` writes on the host.

    It moves there some megabytes at a time, so that the host never holds all of it. On CUDA two
    pieces of pinned memory take turns: one is filled while the other moves.
    """
    target = check_device(device)
    n_rows, n_columns = shape
    there = torch.empty(n_rows, n_columns, dtype=_dtype_of(dtype), device=target)
    is_cuda = target.type == "cuda"
    itemsize = np.dtype(dtype).itemsize
    step = max(1, chunk_bytes // max(1, n_columns * itemsize))
    pieces = [
        torch.empty(min(step, n_rows), n_columns, dtype=there.dtype, pin_memory=is_cuda)
        for _ in range(2)
    ]
    moved: list[Any] = [None, None]
    for number, start in enumerate(range(0, n_rows, step)):
        stop = min(start + step, n_rows)
        turn = number % 2
        # the piece is free again once what it held has arrived
        if moved[turn] is not None:
            moved[turn].synchronize()
        piece = pieces[turn][: stop - start]
        fill(start, stop, piece.numpy())
        there[start:stop].copy_(piece, non_blocking=is_cuda)
        if is_cuda:
            moved[turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            moved[turn].record()
    return there


def check_device(device: Any) -> torch.device:
    """Return a torch device that exists here."""
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"`device` must be 'cpu', 'cuda' or 'cuda:i', or None: got {device!r} ({error})."
        ) from None
    if target.type == "cuda":
        count = 0
        if torch.cuda.is_available():
            count = torch.cuda.device_count()
        if (target.index or 0) >= count:
            raise ValueError(
                f"`device` must be one that torch sees here: got {str(target)!r} where torch "
                f"{torch.__version__} sees {count} CUDA devices. Use device=None for NumPy, or "
                "device='cpu' for torch on the host."
            )
    return target


def is_on(device: str, tokens: Any) -> bool:
    """Whether tokens are a tensor on that device; "cuda" is the first of several."""
    if not isinstance(tokens, torch.Tensor):
        return False
    target = torch.device(device)
    same_kind = tokens.device.type == target.type
    return same_kind and (tokens.device.index or 0) == (target.index or 0)


def gpu_or_none() -> str | None:
    """The first CUDA device, or None where there is none."""
    if torch.cuda.is_available():
        return "cuda:0"
    return None


def free_bytes(device: str) -> int:
    """Memory that torch can still have on a CUDA device; without bound elsewhere."""
    target = torch.device(device)
    if target.type != "cuda":
        return 2**62
    # what the driver has, and what torch holds without using it
    cached = torch.cuda.memory_reserved(target) - torch.cuda.memory_allocated(target)
    free, _ = torch.cuda.mem_get_info(target)
    return int(free + cached)


def empty(n: int, m: int, device: torch.device) -> torch.Tensor:
    """A float64 matrix on a device, yet to be filled."""
    return torch.empty(n, m, dtype=torch.float64, device=device)


def zeros(n: int, m: int, device: str) -> torch.Tensor:
    """A float64 matrix of zeros on a device."""
    return torch.zeros(n, m, dtype=torch.float64, device=device)


def empty_like(tensor: torch.Tensor, n: int, dtype: str) -> torch.Tensor:
    """An (n, n) matrix of ``dtype`` on the device of ``tensor``."""
    return torch.empty(n, n, dtype=_dtype_of(dtype), device=tensor.device)
