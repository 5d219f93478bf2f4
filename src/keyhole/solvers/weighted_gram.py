"""Weights and the intercept, folded into the Gram matrix: what is left is plain ridge without either.

With s = √w the weighted problem is the plain one on K~ = S K S and S y. The free intercept removes the
direction s: a reflection H = I − 2uuᵀ that takes s to the first axis turns that into deleting the first row
and column, exactly, where a projection would leave an eigenvalue of rounding size among the true ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.linalg import get_blas_funcs

from keyhole._array import block_size, blocks
from keyhole._checks import check_finite
from keyhole.solvers.penalties import EPS

PANEL = 2**25
"""Bytes of a panel in passes over an n × n matrix: beyond the cache, small beside any matrix that matters."""


LARGEST_GRAM = 1e150
"""Largest entry of a Gram matrix: its square, times the number of samples, is still finite."""


@dataclass(frozen=True)
class Weighing:
    """How a ridge problem on a Gram matrix was scaled by √w and reflected, and the way back.

    Attributes
    ----------
    y : array (n, t)
        S (y − ȳ), not reflected.
    roots : array (n,)
        √w.
    normal : array (n,) or None
        The unit vector u of the reflection, None without an intercept.
    y_mean : array (t,)
        Weighted mean of y; zero without an intercept.
    gram_mean : array (n,)
        S K w / Σw, from which the intercept follows.
    removed : float
        sᵀ S K S s / Σw, the size of what centring took away and so of the rounding it left.
    y_size : float
        Largest |y|, before centring.
    """

    y: Float[np.ndarray, "n t"]
    roots: Float[np.ndarray, " n"]
    normal: Float[np.ndarray, " n"] | None
    y_mean: Float[np.ndarray, " t"]
    gram_mean: Float[np.ndarray, " n"]
    removed: float
    y_size: float

    @property
    def weights(self) -> Float[np.ndarray, " n"]:
        """The weights w = s²."""
        return np.asarray(np.square(self.roots))

    def reflect(self, x: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "n t"]:
        """H x; x itself without an intercept."""
        if self.normal is None:
            return x
        return x - np.outer(2 * self.normal, self.normal @ x)

    def unscale(self, dual: Float[np.ndarray, "n t"]) -> tuple[np.ndarray, np.ndarray]:
        """Coefficients a = S c and intercept b of f(x) = Σ a_i K(x, x_i) + b from the scaled ones c."""
        return self.roots[:, None] * dual, self.y_mean - self.gram_mean @ dual


def weigh_gram(
    gram: Float[np.ndarray, "n n"],
    y: Float[np.ndarray, "n t"],
    weights: Float[np.ndarray, " n"] | None,
    *,
    fit_intercept: bool,
    overwrite_gram: bool,
) -> tuple[Float[np.ndarray, "n n"], Weighing]:
    """Check the input, then scale and reflect the Gram matrix; in place if it may be overwritten.

    Returns
    -------
    array (n, n)
        H S K S H in Fortran order, lower triangle; with an intercept, row and column 0 are zero.
    Weighing
        The rest of the problem.
    """
    check_outputs(y)
    n = len(y)
    if gram.shape != (n, n):
        raise ValueError(f"`gram` must have one row and one column per output: got shape {gram.shape} for {n} outputs.")
    roots = np.sqrt(check_weights(weights, n))
    matrix = _fortran_lower(gram, overwrite=overwrite_gram)
    panels = [*blocks(n, block_size(n * matrix.itemsize, PANEL))]
    for columns in panels:  # NaN and infinity are found before any long work
        if not np.isfinite(matrix[columns.start :, columns]).all():
            check_finite(np.tril(matrix), "gram")
    check_gram_size(matrix.diagonal())
    if weights is not None:
        scale = roots.astype(matrix.dtype)
        for columns in panels:
            matrix[:, columns] *= scale[columns]
            matrix[:, columns] *= scale[:, None]
    y_mean = centre_of(y, roots) if fit_intercept else np.zeros(y.shape[1])
    scaled = roots[:, None] * centred(y, y_mean)
    y_size = float(np.abs(y).max())
    if not fit_intercept:
        return matrix, Weighing(scaled, roots, None, y_mean, np.zeros(n), 0.0, y_size)
    normal, mean, removed = _reflect_in_place(matrix, roots)
    return matrix, Weighing(scaled, roots, normal, y_mean, mean, removed, y_size)


def check_outputs(y: Float[np.ndarray, "n t"]) -> None:
    """Raise unless there is at least one sample with one output, and all are finite."""
    if y.size == 0:
        raise ValueError(f"`y` must hold at least one sample and one output: got shape {y.shape}.")
    check_finite(y, "y")


def check_gram_size(diagonal: Float[np.ndarray, " n"]) -> None:
    """Raise if a Gram matrix is so large that its squares overflow, or has overflowed already."""
    largest = float(np.abs(diagonal).max(initial=0.0)) if np.isfinite(diagonal).all() else math.inf
    if not largest < LARGEST_GRAM:
        raise ValueError(
            f"features and kernels must have squares below {LARGEST_GRAM:.0e}, so that sums of their products fit "
            f"float64: the largest on the diagonal of `gram` is {largest:.3g}. Scale the tokens down, for instance by "
            "scaling='standard'; if they are of ordinary size, use another activation, smaller heads or dtype='float64'."
        )


def check_weights(weights: Float[np.ndarray, " n"] | None, n: int) -> Float[np.ndarray, " n"]:
    """Return the weights in float64, ones if there are none; all must be positive."""
    if weights is None:
        return np.ones(n)
    if weights.shape != (n,):
        raise ValueError(f"`weights` must have one entry per sample: got shape {weights.shape} for {n} samples.")
    check_finite(weights, "weights")
    if weights.min() <= 0:
        i = int(weights.argmin())
        raise ValueError(f"`weights` must be positive: got {weights[i]:g} for sample {i}. Drop samples of weight zero.")
    return weights.astype(np.float64)


def centre_of(y: Float[np.ndarray, "n t"], roots: Float[np.ndarray, " n"]) -> Float[np.ndarray, " t"]:
    """Weighted mean of each output."""
    weights = np.square(roots)
    # the second pass removes the rounding of the first
    mean = weights @ y / weights.sum()
    return np.asarray(mean + weights @ (y - mean) / weights.sum(), dtype=np.float64)


def centred(y: Float[np.ndarray, "n t"], mean: Float[np.ndarray, " t"]) -> Float[np.ndarray, "n t"]:
    """Outputs less their mean in float64, exactly zero for one that is constant within rounding."""
    left = np.asarray(y - mean, dtype=np.float64)
    left[:, np.abs(left).max(axis=0) <= 4 * EPS * np.abs(mean)] = 0.0
    return left


def _fortran_lower(gram: Float[np.ndarray, "n n"], *, overwrite: bool) -> Float[np.ndarray, "n n"]:
    """The matrix in Fortran order, itself if it may be overwritten. A C-ordered one is its own transpose."""
    if not gram.flags.f_contiguous and gram.flags.c_contiguous:
        gram = gram.T
    if overwrite and gram.flags.f_contiguous and gram.flags.writeable:
        return gram
    return np.array(gram, order="F")


def _reflect_in_place(
    matrix: Float[np.ndarray, "n n"], roots: Float[np.ndarray, " n"]
) -> tuple[np.ndarray, np.ndarray, float]:
    """Replace K~ by H K~ H without row and column 0; return u, K~s/Σw and sᵀK~s/Σw. Costs two passes."""
    symv, syr2 = get_blas_funcs(("symv", "syr2"), (matrix,))
    length = np.linalg.norm(roots)
    direction = roots / length
    image = symv(1.0, matrix, direction.astype(matrix.dtype), lower=1).astype(np.float64)
    first = matrix[:, 0].astype(np.float64)
    normal = direction.copy()
    normal[0] += 1.0  # no cancellation: every root is positive
    size = np.linalg.norm(normal)
    normal /= size
    product = (image + first) / size  # K~ u
    update = 2 * (product - (normal @ product) * normal)
    syr2(-1.0, normal.astype(matrix.dtype), update.astype(matrix.dtype), lower=1, a=matrix, overwrite_a=1)
    matrix[:, 0] = 0.0
    return normal, image / length, float(direction @ image)
