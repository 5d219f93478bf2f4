"""Sums over samples that are all ridge needs to know of a design, and that add: in any order, on any machine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float

from keyhole._array import unit_exponent
from keyhole._checks import check_count
from keyhole.solvers.grams import add_outer
from keyhole.solvers.penalties import EPS


@dataclass
class DesignMoments:
    """Second moments of features φ and outputs y about their means: a few small arrays, whatever n is.

    They are kept about the means, and two of them are merged by adding the scatter between their means (Chan,
    Golub and LeVeque 1979), so that a large common offset costs no digits. Merging is associative and
    commutative up to rounding.

    Attributes
    ----------
    gram : array (p, p)
        Σ w (φ − φ̄)(φ − φ̄)ᵀ in float64, Fortran order, lower triangle; φ̄ = 0 without an intercept.
    cross : array (p, t)
        Σ w (φ − φ̄)(y − ȳ)ᵀ.
    squares : array (t,)
        Σ w (y − ȳ)².
    means, y_mean : arrays (p,) and (t,)
        φ̄ and ȳ.
    weight : float
        Σ w.
    count : int
        Number of samples.
    y_size : float
        Largest |y|.
    rounding : float
        Unit of rounding of the products.
    fit_intercept : bool
        Whether the fit will have an unpenalised intercept.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.arange(8.0).reshape(4, 2), np.arange(4.0)[:, None]
    >>> first, second = DesignMoments.empty(2, 1), DesignMoments.empty(2, 1)
    >>> first.add_rows(x[:3], y[:3])
    >>> second.add_rows(x[3:], y[3:])
    >>> (first + second).gram[1, 0], (second + first).count
    (np.float64(20.0), 4)
    """

    gram: Float[np.ndarray, "p p"] = field(repr=False)
    cross: Float[np.ndarray, "p t"] = field(repr=False)
    squares: Float[np.ndarray, " t"] = field(repr=False)
    means: Float[np.ndarray, " p"] = field(repr=False)
    y_mean: Float[np.ndarray, " t"]
    weight: float = 0.0
    count: int = 0
    y_size: float = 0.0
    rounding: float = EPS
    fit_intercept: bool = True

    @classmethod
    def empty(cls, n_columns: int, n_outputs: int, *, fit_intercept: bool = True) -> DesignMoments:
        """The moments of no samples: zero, the neutral element of addition."""
        p, t = check_count(n_columns, "n_columns"), check_count(n_outputs, "n_outputs")
        gram = np.zeros((p, p), order="F")
        return cls(gram, np.zeros((p, t)), np.zeros(t), np.zeros(p), np.zeros(t), fit_intercept=fit_intercept)

    def add_rows(
        self,
        rows: Float[np.ndarray, "b p"],
        y: Float[np.ndarray, "b t"],
        weights: Float[np.ndarray, " b"] | None = None,
        *,
        overwrite_rows: bool = False,
    ) -> None:
        """Add samples: features, outputs and positive weights (ones if None). bp² operations.

        The rows are centred on their own mean before they are multiplied, in their own dtype, and added in
        float64. ``overwrite_rows`` lets their memory be used for it.
        """
        weight = float(len(rows)) if weights is None else float(weights.sum())
        self.rounding = max(self.rounding, float(np.finfo(rows.dtype).eps))
        self.y_size = max(self.y_size, float(np.abs(y).max()))
        scaled, mean = scaled_rows(rows, weights, self.fit_intercept, overwrite=overwrite_rows)
        left, y_mean = scaled_rows(y.astype(np.float64, copy=False), weights, self.fit_intercept)
        # between before within: the scatter is then added to a gram that has not yet grown by these rows
        self._shift(mean, y_mean, weight)
        add_outer(self.gram, scaled.T)
        # in units of their own: float32 may not hold the outputs, and a power of two costs no digit
        units = unit_exponent(left, axis=0)
        self.cross += np.ldexp((scaled.T @ np.ldexp(left, -units).astype(rows.dtype)).astype(np.float64), units)
        self.squares += np.einsum("it,it->t", left, left)
        self.count += len(rows)

    def _shift(self, means: Float[np.ndarray, " p"], y_mean: Float[np.ndarray, " t"], weight: float) -> None:
        """Add the scatter between the means so far and those of new samples, and move the means."""
        total = self.weight + weight
        if self.fit_intercept and self.weight == 0:  # set, not added, so that nothing is rounded
            self.means[:], self.y_mean[:] = means, y_mean
        elif self.fit_intercept:
            apart, y_apart = means - self.means, y_mean - self.y_mean
            scale = self.weight * (weight / total)
            add_outer(self.gram, np.sqrt(scale) * apart[:, None])
            self.cross += np.outer(scale * apart, y_apart)
            self.squares += scale * np.square(y_apart)
            self.means += (weight / total) * apart
            self.y_mean += (weight / total) * y_apart
        self.weight = total

    def __iadd__(self, other: DesignMoments) -> DesignMoments:
        """Add the samples behind ``other``. O(p²)."""
        self._check_kin(other)
        if other.count == 0:
            return self
        self._shift(other.means, other.y_mean, other.weight)
        self.gram += other.gram
        self.cross += other.cross
        self.squares += other.squares
        self.count += other.count
        self.y_size = max(self.y_size, other.y_size)
        self.rounding = max(self.rounding, other.rounding)
        return self

    def __add__(self, other: DesignMoments) -> DesignMoments:
        """The moments of all samples behind both."""
        total = self.copy()
        total += other
        return total

    def copy(self) -> DesignMoments:
        """The same moments in memory of their own."""
        arrays = {name: getattr(self, name).copy(order="K") for name in ("gram", "cross", "squares", "means", "y_mean")}
        return replace(self, **arrays)

    def _check_kin(self, other: DesignMoments) -> None:
        if self.cross.shape != other.cross.shape or self.fit_intercept != other.fit_intercept:
            raise ValueError(
                "moments add only if they are of the same features and outputs, with or without an intercept "
                f"alike: got (p, t) = {self.cross.shape} and {other.cross.shape}, fit_intercept "
                f"{self.fit_intercept} and {other.fit_intercept}."
            )


def scaled_rows(
    block: Float[np.ndarray, "b p"], weights: Float[np.ndarray, " b"] | None, centre: bool, *, overwrite: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """√w (φ − mean) of a block in its own dtype, and the mean in float64 (zeros unless asked for)."""
    roots = None if weights is None else np.sqrt(weights).astype(block.dtype)[:, None]
    if not centre:
        return block if roots is None else block * roots, np.zeros(block.shape[1])
    shares = np.full(len(block), 1.0 / len(block)) if weights is None else weights / weights.sum()
    shares = shares.astype(block.dtype)
    mean = shares @ block
    left = np.subtract(block, mean, out=block if overwrite else None)
    # in float32 the first mean is rounded: what it left behind completes it
    mean = mean.astype(np.float64) + (shares @ left).astype(np.float64)
    if roots is not None:
        left *= roots
    return left, mean
