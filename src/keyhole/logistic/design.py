"""Newton steps of logistic regression from rows of features, p × p: where p is less than n."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Float
from scipy.linalg import solve_triangular

from keyhole.logistic.problem import LogisticProblem, Point, SingularStepError
from keyhole.ridge.design import DesignMoments
from keyhole.solve.matrices import factorise_lower, solve_factor
from keyhole.ridge.problem import RidgeFit, check_gram_size, numerical_floor


class DesignSystem:
    """Weighted ridge on Φ (n, p), whose rows are read block by block, twice for every step.

    With the weighted means φ̄ and z̄, and A = Σ w (φ − φ̄)(φ − φ̄)ᵀ + alpha·I,

        v = A⁻¹ Σ w (φ − φ̄)(z − z̄),     b = z̄ − φ̄ᵀv,     h_i = w_i/Σw + w_i (φ_i − φ̄)ᵀA⁻¹(φ_i − φ̄).

    Every step takes np² + p³/3 operations, the leverages np².
    """

    route = "newton"

    def __init__(
        self,
        row_blocks: Callable[[], Iterable[Float[np.ndarray, "b p"]]],
        problem: LogisticProblem,
    ) -> None:
        self.row_blocks = row_blocks
        self.fit_intercept = problem.fit_intercept

        # the sizes of features, from sums over all samples
        moments = self._moments(problem.weights, np.zeros(len(problem.y)))
        check_gram_size(moments.gram.diagonal())
        self.n = len(problem.y)
        self.p = len(moments.means)
        self.largest = float(np.trace(moments.gram))
        size = self.largest + moments.weight * float(moments.means @ moments.means)
        self.floor = numerical_floor(size, self.p, moments.rounding)

        # of the last solve
        self.weights = problem.weights
        self.factor = moments.gram
        self.means = moments.means

    def _moments(
        self, weights: Float[np.ndarray, " n"], responses: Float[np.ndarray, " n"]
    ) -> DesignMoments:
        """Sums over all samples of products of features and responses, about weighted means."""
        moments: DesignMoments | None = None
        start = 0
        for block in self.row_blocks():
            rows = slice(start, start + len(block))
            start += len(block)
            if moments is None:
                moments = DesignMoments.empty(block.shape[1], 1, fit_intercept=self.fit_intercept)
            moments.add_rows(block, responses[rows, None], weights[rows])
        assert moments is not None
        return moments

    def constant(self, logit: float) -> Point:
        """The point of coefficients 0 and this intercept."""
        return Point(coef=np.zeros(self.p), intercept=logit, outputs=np.full(self.n, logit))

    def squared_norm(self, point: Point) -> float:
        """|v|²."""
        return float(point.coef @ point.coef)

    def solve(
        self, alpha: float, weights: Float[np.ndarray, " n"], responses: Float[np.ndarray, " n"]
    ) -> Point:
        """One Cholesky factorisation of A, which is kept for `left_out`."""
        moments = self._moments(weights, responses)
        factor = moments.gram
        factor.ravel(order="K")[:: self.p + 1] += alpha
        if not factorise_lower(factor):
            raise SingularStepError(
                f"alpha = {alpha:.3g} is too small beside the features: rounding has made the "
                "system of a Newton step singular. Use alpha='loo', or a larger number."
            )
        values = solve_factor(factor, moments.cross)[:, 0]
        intercept = float(moments.y_mean[0] - moments.means @ values)

        # what `left_out` needs
        self.weights = weights
        self.factor = factor
        self.means = moments.means
        outputs = np.concatenate([block @ values for block in self.row_blocks()]) + intercept
        return Point(coef=values, intercept=intercept, outputs=outputs)

    def left_out(self, residuals: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """h_i e_i with e_i = (z_i − f_i)/(1 − h_i); infinite where h_i is 1 within rounding."""
        leverages = np.empty(self.n)
        start = 0
        for block in self.row_blocks():
            rows = slice(start, start + len(block))
            start += len(block)
            # |L⁻¹(φ − φ̄)|² = (φ − φ̄)ᵀA⁻¹(φ − φ̄)
            centred = (block - self.means).T
            solved = solve_triangular(self.factor, centred, lower=True, check_finite=False)
            leverages[rows] = np.einsum("pb,pb->b", solved, solved)
        if self.fit_intercept:
            leverages += 1 / self.weights.sum()
        leverages *= self.weights
        complement = 1 - leverages
        shift = np.full(self.n, np.inf)
        np.divide(leverages * residuals, complement, out=shift, where=complement > 0)
        return shift


def logistic_rows(
    row_blocks: Callable[[], Iterable[Float[np.ndarray, "b p"]]], problem: LogisticProblem
) -> RidgeFit:
    """Logistic regression on rows of features that are read block by block, as often as needed.

    Coefficients are the values v themselves. Groups are left out by `logistic_gram` only.

    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((200, 2))
    >>> y = np.where(x[:, :1] + rng.logistic(size=(200, 1)) > 0, 1.0, -1.0)
    >>> fit = logistic_rows(lambda: [x[:150], x[150:]], LogisticProblem.of(y))
    >>> fit.route, fit.selection, np.round(fit.coef.ravel(), 1)
    ('newton', 'loo', array([ 1.1, -0. ]))
    """
    if problem.groups is not None:
        raise ValueError(
            "samples of one group are left out together by the n × n Gram matrix only: use "
            "logistic_gram on the products of all rows."
        )
    return problem.fit(DesignSystem(row_blocks, problem))
