"""Ridge with leave-one-out in one call: `keyhole.ridge`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._checks import as_groups, check_finite, check_float_array
from keyhole.solve.cholesky import fit_features, fit_gram
from keyhole.solve.problem import Alphas, RidgeFit, RidgeProblem


def ridge(
    y: Any,
    *,
    features: Any = None,
    gram: Any = None,
    alphas: Alphas | None = None,
    weights: Float[np.ndarray, " n"] | None = None,
    groups: Any = None,
    fit_intercept: bool = True,
) -> RidgeFit:
    """Fit ridge on features or on a Gram matrix, with exact leave-one-out at every penalty.

    Parameters
    ----------
    y : array (n,) or (n, t)
        One output or several.
    features : array (n, p), optional
    gram : array (n, n), optional
        K = ΦΦᵀ or any kernel matrix. One of the two must be given.
    alphas : sequence of penalties, optional
        To choose from by leave-one-out; an automatic grid if None. One alone is used as it is.
    weights : array (n,), optional
        Positive; a weight of two is the sample given twice.
    groups : array (n,), optional
        Samples of one group are left out together.
    fit_intercept : bool

    Returns
    -------
    RidgeFit
        With ``alpha``, ``coef`` (values of features, or dual coefficients), ``intercept``,
        ``left_out`` residuals and the ``errors`` of all penalties.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> x = np.random.default_rng(0).normal(size=(50, 3))
    >>> fit = kh.ridge(x @ [1.0, 2.0, 0.0] + 3.0, features=x, alphas=[1e-6, 1.0])
    >>> fit.alpha, fit.coef.ravel().round(3), fit.intercept.round(3)
    (1e-06, array([ 1.,  2., -0.]), array([3.]))
    """
    outputs = check_float_array(y, "y").astype(np.float64)
    outputs = outputs.reshape(len(outputs), -1)
    if (features is None) == (gram is None):
        raise ValueError("ridge takes either `features` (n, p) or `gram` (n, n): pass one of them.")
    name = "features" if gram is None else "gram"
    matrix = check_float_array(features if gram is None else gram, name).astype(np.float64)
    if matrix.ndim != 2 or len(matrix) != len(outputs):
        raise ValueError(
            f"`{name}` must have one row for each of the {len(outputs)} samples: got shape "
            f"{matrix.shape}."
        )
    check_finite(matrix, name)
    problem = RidgeProblem.of(
        outputs,
        alphas,
        fit_intercept=fit_intercept,
        weights=weights,
        groups=as_groups(groups, outputs, weights),
    )
    if gram is not None:
        return fit_gram(matrix, problem)
    if matrix.shape[1] < len(matrix):
        return fit_features(lambda: [matrix], problem)
    fit = fit_gram(matrix @ matrix.T, problem)
    return _with_values(fit, matrix)


def _with_values(fit: RidgeFit, features: Float[np.ndarray, "n p"]) -> RidgeFit:
    """The fit with values v = Φᵀa in the place of dual coefficients."""
    return replace(fit, coef=features.T @ fit.coef, factor=None)
