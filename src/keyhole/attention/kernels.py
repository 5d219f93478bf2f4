"""Infinitely many heads: the exact kernels K = E[φφᵀ] of attention and of the MLP baseline."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from keyhole._array import MEMORY_BUDGET, block_size, blocks, run_threads, set_blocks
from keyhole._checks import FeatureOverflowError
from keyhole.attention.activations import check_pointwise
from keyhole.attention.mlp import check_equal_lengths, flatten_sets
from keyhole.attention.heads import GaussianHeads, HeadDistribution
from keyhole.data.arrays import astype, empty_matrix
from keyhole.data.sets import SampleBatch, SetBatch, check_samples, check_sets
from keyhole.registry import ACTIVATIONS

if TYPE_CHECKING:
    from keyhole.attention.compiled_gram import Panel


_STRIP = 512
"""Row keys per piece of work: enough to pay for packing the columns, and many pieces for the
threads to share.
"""

_SPAN = 16384
"""Column keys per piece of work, so that a few rows against many columns still occupy every
thread.
"""


def attention_kernel(
    a: SampleBatch,
    b: SampleBatch | None = None,
    heads: HeadDistribution | None = None,
    activation: str = "relu",
    *,
    memory_budget: int = MEMORY_BUDGET,
) -> Float[Any, "n m"]:
    r"""Return the exact kernel of infinitely many attention heads.

    K(x, x') = 1/(N N') Σ_ij m(x_0, x_i; x'_0, x'_j) <x~_i, x~'_j> with m = E[σ(u)σ(v)] over the
    distribution of W, where u = x~_0ᵀ W x~_i and v are jointly Gaussian: variances scale²
    |x~_0|² |x~_i|², correlation ρ = cos(x~_0, x~'_0) cos(x~_i, x~'_j), means x~_0ᵀ W_0 x~_i. It is
    the limit of ΦΦᵀ as M grows.

    Parameters
    ----------
    a, b : SetBatch
        Without b, the Gram matrix of a: half the work, and exactly symmetric. For `SetGroups` the
        kernel of two samples is the mean over all pairs of their sets.
    heads : GaussianHeads, optional
        Zero mean by default. Any object whose ``moments(dim)`` returns the mean of W and the
        standard deviation of its independent Gaussian entries will do; so does one whose
        ``components(dim)`` are several such head distributions, which has the average of their
        kernels.
    activation : {"relu", "linear", "square", "step", "exp"}
    memory_budget : int
        Bound in bytes on temporaries: scaled copies of the keys, made for as many sets at a time as
        fit.

    Returns
    -------
    array (n, m), float64
        float32 input is computed in float64. For batches of torch tensors, a float64 tensor on
        their device; on CUDA by a fused kernel in float32 whose error is at most 1e-6
        (docs/howto/gpu.md).

    Notes
    -----
    Cost: D multiply-adds and one evaluation of m per pair of keys, about 2 ns together at d = 16
    and mean zero on one thread and three times that around a mean. Only pairs of real keys count,
    so ragged sets cost what they hold, and no array of all pairs is ever held.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> sets = kh.SetBatch([np.eye(3)[:2], np.eye(3)[1:], np.eye(3)])
    >>> kh.attention_kernel(sets).round(3)
    array([[0.652, 0.478, 0.536],
           [0.478, 0.652, 0.536],
           [0.536, 0.536, 0.536]])
    >>> kh.attention_kernel(sets, sets[:1], kh.GaussianHeads(mean=1.0), "linear").round(3)
    array([[1.25 ],
           [0.875],
           [1.   ]])
    """
    check_samples(a, "a")
    if b is a:
        b = None
    elif b is not None:
        check_samples(b, "b")

    # A mixture of head distributions has the average of their kernels.
    components = _components(a, heads)

    # Samples of several sets have the mean over the pairs of their sets.
    one_set_each = a.is_plain and (b is None or b.is_plain)
    kernel: Callable[..., Float[Any, "n m"]]
    if one_set_each:
        kernel = _sets_kernel
    else:
        kernel = _pooled_kernel

    total = kernel(a, b, components[0], activation, memory_budget)
    for component in components[1:]:
        total += kernel(a, b, component, activation, memory_budget)
    if len(components) > 1:
        total /= len(components)
    return total


def _sets_kernel(
    a_samples: SampleBatch,
    b_samples: SampleBatch | None,
    heads: HeadDistribution | None,
    activation: str,
    memory_budget: int,
) -> Float[Any, "n m"]:
    """The kernel of samples of one set each."""
    a = a_samples.sets
    b = None
    if b_samples is not None:
        b = b_samples.sets
    mean, scale = _check_arguments(a, b, heads, activation)
    if a.device is None:
        return _check_overflow(host_kernel(a, b, mean, scale, activation, memory_budget), activation)
    from keyhole.attention.device_kernels import tensor_kernel

    return _check_overflow(tensor_kernel(a, b, mean, scale, activation, memory_budget), activation)


def host_kernel(
    a: SetBatch,
    b: SetBatch | None,
    mean: np.ndarray | None,
    scale: float,
    activation: str,
    memory_budget: int,
) -> Float[np.ndarray, "n m"]:
    """The kernel of NumPy arrays in float64, by compiled loops."""
    from keyhole._compiled import announce_compilation
    from keyhole.attention.compiled_gram import fill_tile

    announce_compilation(fill_tile)
    code = tuple(ACTIVATIONS).index(activation)
    # None rather than False: numba compiles the longer code for means only where it is True.
    biased = None
    if mean is not None and activation in ("relu", "step"):
        biased = True

    # Panel by panel, so that the prepared keys fit the budget; without b only those on and above
    # the diagonal.
    symmetric = b is None
    column_sets = a if b is None else b
    row_panels = _panels(a, memory_budget)
    column_panels = _panels(column_sets, memory_budget)
    out = np.zeros((len(a), len(column_sets)))
    # The loops get the whole output flat: a view of a few columns has another memory layout, for
    # which they would be compiled afresh.
    flat = out.reshape(-1)
    stride = out.shape[1]
    for row in row_panels:
        left = _prepare(a[row], mean, scale, code)
        for column in column_panels:
            if symmetric and column.start < row.start:
                continue
            on_diagonal = symmetric and column == row
            if on_diagonal:
                right = left
            else:
                right = _prepare(column_sets[column], mean, scale, code)
            # tile by tile on all threads
            origin = row.start * stride + column.start
            fill = partial(_fill_tile, code, biased, on_diagonal, left, right, flat, origin, stride)
            run_threads(fill, _tiles(left, right, upper=on_diagonal))
    if symmetric:
        _mirror(out)
    return out


def _pooled_kernel(
    a: SampleBatch,
    b: SampleBatch | None,
    heads: HeadDistribution | None,
    activation: str,
    memory_budget: int,
) -> Float[Any, "n m"]:
    """K_ij = Σ c_s c_t K(set s, set t) over the sets s of sample i and t of sample j.

    All of these are evaluated, and summed in float64.
    """
    symmetric = b is None
    column_samples = a if b is None else b
    out = empty_matrix(len(a), len(column_samples), a.sets.stored)

    # A tile of samples needs a matrix of all pairs of their sets, within a part of the budget.
    sets_per_sample = max(int(a.set_counts.max()), int(column_samples.set_counts.max()))
    tile_budget = min(memory_budget // 4, 2**26)
    pairs_of_samples = block_size(8 * sets_per_sample**2, tile_budget)
    size = max(1, math.isqrt(pairs_of_samples))

    for rows in blocks(len(a), size):
        left = a[rows].written_out()
        for columns in blocks(len(column_samples), size):
            if symmetric and columns.start < rows.start:
                continue
            if symmetric and columns == rows:
                right = left
                pairs = _sets_kernel(left.sets, None, heads, activation, memory_budget)
            else:
                right = column_samples[columns].written_out()
                pairs = _sets_kernel(left.sets, right.sets, heads, activation, memory_budget)
            pairs = astype(pairs, np.float64)
            tile = right.pool(left.pool(pairs), axis=1)
            out[rows, columns] = tile
            if symmetric:
                out[columns, rows] = tile.T
    return out


def mlp_kernel(
    a: SetBatch, b: SetBatch | None = None, *, memory_budget: int = MEMORY_BUDGET
) -> Float[np.ndarray, "n m"]:
    """Return the exact kernel of the MLP baseline with infinitely many hidden units.

    K(x, x') = |z||z'|/(N + 2) κ(ρ) with z = [x_0; x_1; …; x_N; 1] in the order the keys are stored,
    ρ = cos(z, z') and κ(ρ) = [√(1−ρ²) + (π − arccos ρ) ρ]/2π: the limit of ΦΦᵀ for `mlp_features`
    with w ~ N(0, I/(N+2)).

    Parameters
    ----------
    a, b : SetBatch
        All sets must have the same number of keys N. Without a query, x_0 is the zero vector.
        Without b, the Gram matrix of a, exactly symmetric.
    memory_budget : int
        Bound in bytes on temporaries: scaled copies of z, for as many sets at a time as fit.

    Returns
    -------
    array (n, m), float64

    Notes
    -----
    Cost: one product of matrices with (N+1)d + 1 columns, and about 1 ns per entry for κ.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> sets = kh.SetBatch(np.eye(3)[:, None, :], query=np.eye(3))
    >>> mlp_kernel(sets).round(4)
    array([[0.5   , 0.2514, 0.2514],
           [0.2514, 0.5   , 0.2514],
           [0.2514, 0.2514, 0.5   ]])
    """
    check_sets(a, "a")
    if b is not None:
        check_sets(b, "b")
    symmetric = b is None or b is a
    row_sets = a.sets.numpy()
    if b is None or symmetric:
        column_sets = row_sets
        n_keys = check_equal_lengths({"a": row_sets})
    else:
        column_sets = b.sets.numpy()
        _check_alike(row_sets, column_sets)
        n_keys = check_equal_lengths({"a": row_sets, "b": column_sets})

    # Block by block; without b only the blocks on and above the diagonal.
    out = np.empty((len(row_sets), len(column_sets)))
    step = block_size(2 * 8 * ((n_keys + 1) * row_sets.dim + 1), memory_budget)
    for row in blocks(len(row_sets), step):
        units, norms = _flat_units(row_sets[row])
        for column in blocks(len(column_sets), step):
            if symmetric and column.start < row.start:
                continue
            if symmetric and column == row:
                column_units = units
                column_norms = norms
            else:
                column_units, column_norms = _flat_units(column_sets[column])
            # cosines first, then |z||z'|/(N + 2) κ of them in place
            np.matmul(units, column_units.T, out=out[row, column])
            _apply_arc(out, row, column, norms, column_norms / (n_keys + 2))
    if symmetric:
        _mirror(out)
    return out


def _components(batch: SampleBatch, heads: HeadDistribution | None) -> tuple[Any, ...]:
    """The head distributions that a mixture is made of; the distribution itself if it is none."""
    components_of = getattr(heads, "components", None)
    if components_of is None:
        return (heads,)
    return tuple(components_of(*_dims(batch)))


def _dims(batch: SampleBatch) -> tuple[int, ...]:
    """d, and d_q where it is another."""
    if batch.query_dim == batch.dim:
        return (batch.dim,)
    return (batch.dim, batch.query_dim)


def _check_alike(a: SetBatch, b: SetBatch) -> None:
    """Raise unless the sets of both batches are from one space and in one place."""
    if a.dim != b.dim:
        raise ValueError(
            f"`a` and `b` must share their token dimension: got {a.dim} and {b.dim}. "
            "A kernel compares sets from one space."
        )
    if a.query_dim != b.query_dim:
        raise ValueError(
            f"`a` and `b` must share the dimension of their queries: got {a.query_dim} and "
            f"{b.query_dim} (that of the keys for sets without a query). A kernel compares sets "
            "from one space."
        )
    if a.device != b.device:
        raise ValueError(
            f"`a` and `b` must live in one place: got {a.device or 'NumPy'} and "
            f"{b.device or 'NumPy'}. Move one of them with .to(device) or .numpy()."
        )


def _check_arguments(
    a: SetBatch, b: SetBatch | None, heads: Any, activation: str
) -> tuple[np.ndarray | None, float]:
    """Return mean and scale of the head distribution."""
    check_pointwise(activation)
    if b is not None:
        _check_alike(a, b)
    if heads is None:
        heads = GaussianHeads()
    if isinstance(heads, type):
        raise TypeError(
            f"`heads` must be a head distribution, not its class: got {heads.__name__}. Write "
            f"{heads.__name__}()."
        )
    if not hasattr(heads, "moments"):
        raise ValueError(
            "`heads` must be Gaussian for an exact kernel, with a method moments(dim): got "
            f"{heads!r}, for which no closed form is known. Use finite heads with it: "
            "attention_features(batch, heads.sample(n_heads, dim, seed)), or n_heads=512 in an "
            "estimator."
        )
    mean, scale = heads.moments(*_dims(a))
    return mean, scale


def _check_overflow(out: Any, activation: str) -> Any:
    """Return ``out``, which is finite unless the moments of exp outgrew its precision."""
    if activation == "exp" and not bool((abs(out) < np.inf).all()):
        raise FeatureOverflowError(
            "the kernel of activation 'exp' exceeds the range of "
            f"{str(out.dtype).removeprefix('torch.')}: E[exp(u + v)] grows with the exponential of "
            "the variance scale² |x~_0|² |x~_i|². Scale the tokens down, or use a smaller "
            "heads.scale."
        )
    return out


def _panels(batch: SetBatch, memory_budget: int) -> list[slice]:
    """Cut a batch into slices of consecutive sets whose prepared copies fit the budget.

    A slice has at least one set.
    """
    # a unit vector as `_units` stores it, and the five other numbers of a key in a Panel
    vector_length = 1 + 4 * -(-max(batch.dim, batch.query_dim) // 4)
    bytes_per_key = 8 * (vector_length + 5)
    return set_blocks(batch.offsets, block_size(4 * bytes_per_key, memory_budget))


def _prepare(batch: SetBatch, mean: np.ndarray | None, scale: float, code: int) -> Panel:
    """Unit vectors, weights and score moments of every key: all that the compiled loops need."""
    from keyhole.attention.compiled_gram import Panel

    # directions and lengths of x~_i and x~_0
    batch = batch.astype(np.float64)
    unit, norm = _units(batch.extended_keys())
    query, query_norm = _units(batch.extended_query())
    lengths = batch.lengths
    owner = np.repeat(np.arange(len(batch)), lengths)

    # the standard deviation scale |x~_0| |x~_i| of every score, and its mean in units of that
    std = scale * query_norm[owner] * norm
    shift = np.zeros_like(std)
    if mean is not None:
        # the appended one comes first in unit vectors, so it does in rows and columns of the mean
        rows = np.roll(np.arange(mean.shape[0]), 1)
        columns = np.roll(np.arange(mean.shape[1]), 1)
        projected = query[:, : len(rows)] @ mean[np.ix_(rows, columns)] / scale
        shift = np.einsum("te,te->t", projected[owner], unit[:, : batch.dim + 1])

    # E[σ(u)σ(v)] is (τ_u τ_v)^power times a function of shifts and ρ; for exp the exponent of
    # E[exp(u)], mean + variance/2, replace the shift
    activation = tuple(ACTIVATIONS)[code]
    power = ACTIVATIONS[activation].power
    if activation == "exp":
        shift = shift * std + 0.5 * std**2
    return Panel(
        unit=unit,
        query=query,
        weight=norm * std**power / lengths[owner],
        shift=shift,
        std=std,
        owner=owner,
        offsets=batch.offsets.copy(),
    )


def _units(extended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split vectors into direction and length.

    Directions with the last coordinate first and zeros at the end.
    """
    dim = extended.shape[1] - 1
    norm = np.sqrt(np.einsum("te,te->t", extended, extended))
    unit = np.zeros((len(extended), 1 + 4 * -(-dim // 4)))
    unit[:, 0] = extended[:, -1]
    unit[:, 1 : dim + 1] = extended[:, :-1]
    unit /= norm[:, None]
    return unit, norm


def _tiles(left: Panel, right: Panel, *, upper: bool) -> list[tuple[slice, slice]]:
    """Row and column sets of the pieces of work of a panel of K, or of its upper triangle."""
    return [
        (rows, columns)
        for rows in set_blocks(left.offsets, _STRIP)
        for columns in set_blocks(right.offsets, _SPAN)
        if not upper or columns.stop > rows.start
    ]


def _fill_tile(
    code: int,
    biased: bool | None,
    upper: bool,
    left: Panel,
    right: Panel,
    flat: np.ndarray,
    origin: int,
    stride: int,
    tile: tuple[slice, slice],
) -> None:
    """Fill one tile of the panel of K whose first entry is ``flat[origin]``."""
    from keyhole.attention.compiled_gram import fill_tile

    rows, columns = tile
    fill_tile(
        code,
        biased,
        upper,
        left,
        right,
        rows.start,
        rows.stop,
        columns.start,
        columns.stop,
        flat,
        origin,
        stride,
    )


def _mirror(square: np.ndarray) -> None:
    """Copy the upper triangle to the lower one, in blocks that fit the cache."""
    for rows in blocks(len(square), 256):
        square[rows, : rows.start] = square[: rows.start, rows].T
        corner = square[rows, rows]
        corner[:] = np.triu(corner) + np.triu(corner, 1).T


def _flat_units(batch: SetBatch) -> tuple[np.ndarray, np.ndarray]:
    """Split z = [x_0; …; x_N; 1] of every set into direction and length."""
    flat = flatten_sets(batch.astype(np.float64))
    norms = np.sqrt(np.einsum("nz,nz->n", flat, flat))
    flat /= norms[:, None]
    return flat, norms


def _apply_arc(
    out: np.ndarray, row: slice, column: slice, row_norms: np.ndarray, column_norms: np.ndarray
) -> None:
    """Replace cosines by |z||z'|κ in a block of rows and columns, on all threads."""
    from keyhole.attention.compiled_moments import fill_relu_arc

    rows_of_block = out[row]

    def work(part: slice) -> None:
        fill_relu_arc(rows_of_block[part], column.start, row_norms[part], column_norms)

    run_threads(work, blocks(len(rows_of_block), 64))
