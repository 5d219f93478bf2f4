"""Infinitely many heads: the exact kernels K = E[φφᵀ] of attention and of the MLP baseline."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from keyhole._array import MEMORY_BUDGET, block_size, blocks, run_threads, set_blocks
from keyhole._checks import FeatureOverflowError
from keyhole.attention.activations import POINTWISE, check_pointwise
from keyhole.attention.features import check_equal_lengths, flatten_sets
from keyhole.attention.heads import GaussianHeads, HeadDistribution
from keyhole.data.sets import SampleBatch, SetBatch, check_samples, check_sets

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
    head distribution of W, where u = x~_0ᵀ W x~_i and v are jointly Gaussian: variances scale²
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
        kernels. `QueryKeyHeads` has no closed-form kernel.
    activation : {"relu", "linear", "square", "step", "exp"}
    memory_budget : int
        Bound in bytes on temporaries: scaled copies of the keys, made for as many sets at a time as
        fit.

    Returns
    -------
    array (n, m), float64
        float32 input is computed in float64. For batches of torch tensors, a tensor of their type
        on their device; on CUDA in float32 by a fused kernel whose error is at most 1e-6
        (docs/gpu.md).

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
    parts = getattr(heads, "components", None)
    components = (heads,) if parts is None else parts(*_dims(a))
    kernel = _sets_kernel if a.is_plain and (b is None or b.is_plain) else _pooled_kernel
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
    a, b = a_samples.sets, None if b_samples is None else b_samples.sets
    code, mean, scale = _check_arguments(a, b, heads, activation)
    if a.device is not None:
        from keyhole.attention.dispatch import attention_gram

        return _check_overflow(
            attention_gram(a, b, mean, scale, activation, memory_budget), activation
        )
    biased = True if mean is not None and activation in ("relu", "step") else None
    rows = _panels(a, memory_budget)
    columns = rows if b is None else _panels(b, memory_budget)
    out = np.zeros((len(a), len(a if b is None else b)))
    for i, row in enumerate(rows):
        left = _prepare(a[row], mean, scale, code)
        for column in columns[i:] if b is None else columns:
            same = b is None and column == row
            right = left if same else _prepare((a if b is None else b)[column], mean, scale, code)
            _fill(code, biased, same, left, right, out, row.start, column.start)
    if b is None:
        _mirror(out)
    return _check_overflow(out, activation)


def _pooled_kernel(
    a: SampleBatch,
    b: SampleBatch | None,
    heads: HeadDistribution | None,
    activation: str,
    memory_budget: int,
) -> Float[np.ndarray, "n m"]:
    """K_ij = Σ c_s c_t K(set s, set t) over the sets s of sample i and t of sample j.

    All of these are evaluated.
    """
    a = a.numpy()
    columns_of = a if b is None else b.numpy()
    out = np.empty((len(a), len(columns_of)))
    most = max(int(batch.set_counts.max()) for batch in (a, columns_of))
    # a tile of samples is a matrix of all pairs of their sets
    size = max(1, math.isqrt(block_size(8 * most**2, min(memory_budget // 4, 2**26))))
    for rows in blocks(len(a), size):
        left = a[rows].written_out()
        for columns in blocks(len(columns_of), size):
            if b is None and columns.start < rows.start:
                continue
            same = b is None and columns == rows
            right = left if same else columns_of[columns].written_out()
            pairs = _sets_kernel(
                left.sets, None if same else right.sets, heads, activation, memory_budget
            )
            tile = right.pool(left.pool(pairs), axis=1)
            out[rows, columns] = tile
            if b is None:
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
        b = None if b is a else b.sets.numpy()
    a = a.sets.numpy()
    if b is not None:
        _check_alike(a, b)
    n_keys = check_equal_lengths({"a": a} if b is None else {"a": a, "b": b})
    columns_of, symmetric = (a, True) if b is None else (b, False)
    out = np.empty((len(a), len(columns_of)))
    step = block_size(2 * 8 * ((n_keys + 1) * a.dim + 1), memory_budget)
    for row in blocks(len(a), step):
        units, norms = _flat_units(a[row])
        for column in blocks(len(columns_of), step):
            if symmetric and column.start < row.start:
                continue
            others = (
                (units, norms) if symmetric and column == row else _flat_units(columns_of[column])
            )
            np.matmul(units, others[0].T, out=out[row, column])
            _apply_arc(out, row, column, norms, others[1] / (n_keys + 2))
    if symmetric:
        _mirror(out)
    return out


def tensor_kernel(
    a: SetBatch, heads: HeadDistribution | None, activation: str, dtype: str, memory_budget: int
) -> Any:
    """The Gram matrix of torch tensors, computed in their type and stored in ``dtype``.

    Ridge needs float64.
    """
    from keyhole._tensors import empty_like
    from keyhole.attention.dispatch import attention_gram

    _, mean, scale = _check_arguments(a, None, heads, activation)
    out = empty_like(a.tokens, len(a), dtype)
    return _check_overflow(
        attention_gram(a, None, mean, scale, activation, memory_budget, out), activation
    )


def _dims(batch: SampleBatch) -> tuple[int, ...]:
    """d, and d_q where it is another."""
    return (batch.dim,) if batch.query_dim == batch.dim else (batch.dim, batch.query_dim)


def _check_alike(a: SetBatch, b: SetBatch) -> None:
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
) -> tuple[int, np.ndarray | None, float]:
    """Return the code of the activation and the moments of the head distribution."""
    code = POINTWISE.index(check_pointwise(activation))
    if b is not None:
        _check_alike(a, b)
    heads = GaussianHeads() if heads is None else heads
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
    return code, mean, scale


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
    bytes_per_key = 8 * (1 + 4 * -(-max(batch.dim, batch.query_dim) // 4) + 5)
    return set_blocks(batch.offsets, block_size(4 * bytes_per_key, memory_budget))


def _prepare(batch: SetBatch, mean: np.ndarray | None, scale: float, code: int) -> Panel:
    """Unit vectors, weights and score moments of every key: all that the compiled loops need."""
    from keyhole.attention.compiled_gram import Panel

    batch = batch.astype(np.float64)
    unit, norm = _units(batch.extended_keys())
    query, query_norm = _units(batch.extended_query())
    lengths = batch.lengths
    owner = np.repeat(np.arange(len(batch)), lengths)
    std = scale * query_norm[owner] * norm
    shift = np.zeros_like(std)
    if mean is not None:
        # x~ with its one first, to match the packed layout
        rows, columns = (np.roll(np.arange(size), 1) for size in mean.shape)
        pulled = query[:, : len(rows)] @ mean[np.ix_(rows, columns)] / scale
        shift = np.einsum("te,te->t", pulled[owner], unit[:, : batch.dim + 1])
    name = POINTWISE[code]
    power = {"relu": 1, "linear": 1, "square": 2}.get(name, 0)
    if name == "exp":
        shift = shift * std + 0.5 * std**2
    return Panel(
        unit, query, norm * std**power / lengths[owner], shift, std, owner, batch.offsets.copy()
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


def _fill(
    code: int,
    biased: bool | None,
    upper: bool,
    left: Panel,
    right: Panel,
    out: np.ndarray,
    row: int,
    column: int,
) -> None:
    """Fill the panel of K whose first entry is (row, column), or its upper triangle.

    Tile by tile on all threads.
    """
    from keyhole.attention import compiled_gram as gram
    from keyhole.attention.compiled import announce_compilation

    announce_compilation(gram.fill_tile)
    tiles = [
        (rows.start, rows.stop, span.start, span.stop)
        for rows in set_blocks(left.offsets, _STRIP)
        for span in set_blocks(right.offsets, _SPAN)
        if not upper or span.stop > rows.start
    ]
    # a view of some columns has another memory layout, for which the loops would be compiled afresh
    flat, stride = out.reshape(-1), out.shape[1]
    origin = row * stride + column

    def work(tile: tuple[int, int, int, int]) -> None:
        gram.fill_tile(code, biased, upper, left, right, *tile, flat, origin, stride)

    run_threads(work, tiles)


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
    """Replace cosines by |z||z'|κ in some rows and columns, on all threads."""
    from keyhole.attention.compiled_moments import fill_relu_arc

    def work(part: slice) -> None:
        norms = row_norms[part.start - row.start : part.stop - row.start]
        fill_relu_arc(out[part], column.start, norms, column_norms)

    run_threads(
        work,
        [slice(row.start + p.start, row.start + p.stop) for p in blocks(row.stop - row.start, 64)],
    )
