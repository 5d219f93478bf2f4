"""Newton steps of logistic regression from a Gram matrix, n × n: finite heads and exact kernels.

`GramSystem` has the formulas. The matrices themselves are those of a `WeightedGram`: `HostGram`
with LAPACK, or `keyhole.logistic.device.DeviceGram` with torch, where K was made on a device.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import block_size, blocks
from keyhole.logistic.problem import LogisticProblem, Point, SingularStepError
from keyhole.solve.matrices import factorise_lower, invert_lower, solve_factor
from keyhole.ridge.problem import RidgeFit, check_gram_size, numerical_floor

PANEL_BYTES = 2**25  # of a panel of columns in passes over an n × n matrix


@runtime_checkable
class WeightedGram(Protocol):
    """K (n, n), and one factorisation at a time of B = rKr + alpha·I.

    Vectors are NumPy arrays, wherever the matrices are.
    """

    def __len__(self) -> int:
        """n, the number of samples."""

    def diagonal(self) -> Float[np.ndarray, " n"]:
        """K_ii."""

    def rows(self, rows: Int[np.ndarray, " k"]) -> Float[np.ndarray, "k n"]:
        """Some rows of K."""

    def product(self, vector: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """K a."""

    def factorise(self, roots: Float[np.ndarray, " n"], alpha: float) -> bool:
        """The Cholesky factor of B, which replaces the last one; False if it has none."""

    def solve(self, targets: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "n t"]:
        """B⁻¹ targets."""

    def inverse_diagonal(self) -> Float[np.ndarray, " n"]:
        """The diagonal of B⁻¹. The factor is used up."""

    def inverse(self) -> Float[np.ndarray, "n n"]:
        """B⁻¹. The factor is used up."""


class HostGram:
    """A `WeightedGram` in host memory: LAPACK, panel of columns by panel.

    Beside K there is one matrix of its size, and one more for all of B⁻¹.
    """

    def __init__(self, gram: Float[np.ndarray, "n n"]) -> None:
        self.gram = np.asarray(gram, dtype=np.float64)
        self.factor = np.empty_like(self.gram, order="F")

    def __len__(self) -> int:
        """n, the number of samples."""
        return len(self.gram)

    def diagonal(self) -> Float[np.ndarray, " n"]:
        """K_ii."""
        return self.gram.diagonal()

    def rows(self, rows: Int[np.ndarray, " k"]) -> Float[np.ndarray, "k n"]:
        """Some rows of K."""
        return self.gram[rows]

    def product(self, vector: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """K a."""
        return np.asarray(self.gram @ vector)

    def factorise(self, roots: Float[np.ndarray, " n"], alpha: float) -> bool:
        """The Cholesky factor of B, which replaces the last one; False if it has none."""
        n = len(self.gram)
        for columns in blocks(n, block_size(8 * n, PANEL_BYTES)):
            np.multiply(self.gram[:, columns], roots[columns], out=self.factor[:, columns])
            self.factor[:, columns] *= roots[:, None]
        self.factor.ravel(order="K")[:: n + 1] += alpha
        return factorise_lower(self.factor)

    def solve(self, targets: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "n t"]:
        """B⁻¹ targets."""
        return solve_factor(self.factor, targets)

    def inverse_diagonal(self) -> Float[np.ndarray, " n"]:
        """The diagonal of B⁻¹ = L⁻ᵀL⁻¹. The factor is used up."""
        invert_lower(self.factor)
        # sums of squares of the columns of L⁻¹, below the diagonal
        n = len(self.gram)
        diagonal = np.empty(n)
        for columns in blocks(n, block_size(8 * n, PANEL_BYTES)):
            below = np.tril(self.factor[columns.start :, columns])
            diagonal[columns] = np.einsum("ij,ij->j", below, below)
        return diagonal

    def inverse(self) -> Float[np.ndarray, "n n"]:
        """B⁻¹ = L⁻ᵀL⁻¹. The factor is used up."""
        invert_lower(self.factor)
        lower = np.tril(self.factor)
        return np.asarray(lower.T @ lower)


class GramSystem:
    """Weighted ridge on K = ΦΦᵀ: f = K a + b.

    With r = √w and B = rKr + alpha·I, whose eigenvalues are at least alpha whatever the weights,

        a = r B⁻¹ r (z − b),     b = qᵀ(r z) / qᵀr  with  q = B⁻¹ r  so that  Σ_j a_j = 0,
        1 − h_i = alpha (B⁻¹_ii − q_i² / qᵀr).

    Every step takes one Cholesky factorisation, n³/3, and the leverages as much again.
    """

    route = "newton"

    def __init__(self, matrices: WeightedGram, problem: LogisticProblem, rounding: float) -> None:
        diagonal = matrices.diagonal()
        check_gram_size(diagonal)
        self.matrices = matrices
        self.groups = problem.groups
        self.fit_intercept = problem.fit_intercept
        weights = problem.weights
        n = len(matrices)

        # Σ s |φ − φ̄|²; sums of products of features, of which centring removes the larger part
        size = float(weights @ diagonal)
        self.largest = size
        if self.fit_intercept:
            self.largest -= float(weights @ matrices.product(weights)) / float(weights.sum())
        self.floor = numerical_floor(size, n, rounding)

        # of the last solve
        self.alpha = 0.0
        self.roots = np.zeros(n)
        self.intercept_response = np.zeros(n)

    def constant(self, logit: float) -> Point:
        """The point of coefficients 0 and this intercept."""
        n = len(self.matrices)
        return Point(coef=np.zeros(n), intercept=logit, outputs=np.full(n, logit))

    def squared_norm(self, point: Point) -> float:
        """|v|² = aᵀKa."""
        return float(point.coef @ (point.outputs - point.intercept))

    def solve(
        self, alpha: float, weights: Float[np.ndarray, " n"], responses: Float[np.ndarray, " n"]
    ) -> Point:
        """One Cholesky factorisation of B, which is kept for `left_out`."""
        roots = np.sqrt(weights)
        if not self.matrices.factorise(roots, alpha):
            raise SingularStepError(
                f"alpha = {alpha:.3g} is too small beside the kernel of the samples: rounding has "
                "made the system of a Newton step singular. Use alpha='loo', or a larger number."
            )

        # B⁻¹ r z and q = B⁻¹ r; the intercept makes the coefficients add up to 0
        solved = self.matrices.solve(np.stack([roots * responses, roots], axis=1))
        of_responses = solved[:, 0]
        of_ones = solved[:, 1]
        intercept = 0.0
        if self.fit_intercept:
            intercept = float(roots @ of_responses) / float(roots @ of_ones)
        coef = roots * (of_responses - intercept * of_ones)

        # what `left_out` needs
        self.alpha = alpha
        self.roots = roots
        self.intercept_response = of_ones
        outputs = self.matrices.product(coef) + intercept
        return Point(coef=coef, intercept=intercept, outputs=outputs)

    def left_out(self, residuals: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """h_i e_i with e_i = (z_i − f_i)/(1 − h_i); of a group H_gg e_g, e_g = (I − H_gg)⁻¹(z − f).

        Infinite where the leverage is 1 within rounding.
        """
        if self.groups is not None:
            return self._left_out_groups(residuals)
        diagonal = self.matrices.inverse_diagonal()
        complement = self.alpha * (diagonal - self._intercept_part())
        shift = np.full(len(diagonal), np.inf)
        is_known = complement > 0
        np.divide((1 - complement) * residuals, complement, out=shift, where=is_known)
        return shift

    def _intercept_part(self) -> Float[np.ndarray, " n"]:
        """q_i² / qᵀr of every sample, 0 without an intercept."""
        q = self.intercept_response
        if not self.fit_intercept:
            return np.zeros(len(q))
        return np.square(q) / float(q @ self.roots)

    def _left_out_groups(self, residuals: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Whole groups left out, from blocks of B⁻¹.

        With P = alpha (B⁻¹ − q qᵀ/qᵀr), r (I − H) r⁻¹ = P on samples that have weight. A sample of
        weight 0 has no part in the fit: it is predicted with K(x_i, ·) like any new sample.
        """
        assert self.groups is not None
        n = len(self.matrices)
        roots = self.roots
        projector = self.alpha * self.matrices.inverse()
        response = np.zeros(n)
        if self.fit_intercept:
            q = self.intercept_response
            projector -= self.alpha * np.outer(q, q) / float(q @ roots)
            response = roots * q / float(q @ roots)

        shift = np.empty(n)
        order = np.argsort(self.groups, kind="stable")
        starts = np.flatnonzero(np.diff(self.groups[order])) + 1
        for members in np.split(order, starts):
            has_weight = roots[members] > 0
            weighted = members[has_weight]
            others = members[~has_weight]
            # e_g of those that have weight
            block = projector[np.ix_(weighted, weighted)]
            scaled = np.linalg.solve(block, roots[weighted] * residuals[weighted])
            errors = scaled / roots[weighted]
            shift[weighted] = errors - residuals[weighted]
            # Σ_j H_ij e_j of those that have none
            if len(others) > 0:
                kernel = self.matrices.rows(others)
                hat = (kernel * roots) @ projector[:, weighted] * roots[weighted]
                shift[others] = (hat / self.alpha + response[weighted]) @ errors
        return shift


def logistic_gram(
    gram: Float[np.ndarray, "n n"], problem: LogisticProblem, *, rounding: float | None = None
) -> RidgeFit:
    """Logistic regression on a Gram matrix K = ΦΦᵀ or an exact kernel, both triangles of it.

    ``rounding`` is the unit of rounding of the arithmetic that computed it, by default that of its
    dtype. Coefficients are dual: f(x) = Σ_i a_i K(x, x_i) + b, and v = Φᵀa.

    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((200, 2))
    >>> y = np.where(x[:, :1] + rng.logistic(size=(200, 1)) > 0, 1.0, -1.0)
    >>> fit = logistic_gram(x @ x.T, LogisticProblem.of(y))
    >>> fit.route, fit.selection, np.round((x.T @ fit.coef).ravel(), 1)
    ('newton', 'loo', array([ 1.1, -0. ]))
    """
    if rounding is None:
        rounding = float(np.finfo(gram.dtype).eps)
    return problem.fit(GramSystem(HostGram(gram), problem, rounding))
