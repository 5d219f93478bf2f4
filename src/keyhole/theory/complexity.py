"""How hard a target is: the paper's B(f*), a bound with every constant named, and the norm."""

from __future__ import annotations

import math

import numpy as np

from keyhole._checks import check_count
from keyhole.attention.heads import GaussianHeads
from keyhole.theory.blocks import Bias, bias_of, single_block, target_vectors
from keyhole.theory.harmonics import pair_powers
from keyhole.theory.mlp import mlp_eigenvalue, mlp_level_powers
from keyhole.theory.moments import log_choose, whole_coefficients
from keyhole.theory.pairs import pair_eigenvalues
from keyhole.theory.targets import Polynomial


def paper_complexity(target: Polynomial) -> float:
    """B(f*) = Σ_k C_k Σ_{max(r,s)=k} |f_rs|², C_k = max(k^{4.5} 4^k, 1): the paper's complexity.

    It dominates the squared norm up to a universal constant only; :func:`rkhs_norm_bound` names its
    constants.

    Examples
    --------
    >>> from keyhole.theory.targets import Correlation, TokenPower
    >>> paper_complexity(TokenPower(p=1, dim=3))
    4.0
    >>> round(paper_complexity(Correlation(q=1, dim=3)), 3)    # 2 · 2^{4.5} 4²
    724.077
    """
    total = 0.0
    for (r, s), norm in target.coefficient_norms().items():
        degree = max(r, s)
        total += max(degree**4.5 * 4.0**degree, 1.0) * norm
    return total


def rkhs_norm_bound(target: Polynomial) -> float:
    """Σ_rs |f_rs|² / b_rs ≥ |f*|²_H: a bound on the squared norm, every constant named.

    It holds for all unit tokens.

    The pair kernel of zero-mean heads is Σ_rs b_rs <x_0,x'_0>^r <x_i,x'_j>^s with positive b_rs
    (:func:`kernel_coefficient`), and a function <x_0^r ⊗ x_i^s, f_rs> has squared norm |f_rs|²/b_rs
    at most.

    Examples
    --------
    >>> from keyhole.theory.targets import Correlation, TokenPower
    >>> (
    ...     round(rkhs_norm_bound(TokenPower(p=1, dim=3)), 4),
    ...     round(rkhs_norm_bound(Correlation(q=1, dim=3)), 3),
    ... )
    (3.3421, 21.403)
    """
    norms = target.coefficient_norms()
    return math.fsum(norm / kernel_coefficient(r, s) for (r, s), norm in norms.items())


def kernel_coefficient(r: int, s: int) -> float:
    """The coefficient b_rs of u^r t^s in the pair kernel on unit tokens.

    b_rs = Σ_k a_k 4^{−k} C(k, r) C(k+1, s).

    Examples
    --------
    >>> [round(kernel_coefficient(r, s), 6) for r, s in ((0, 0), (0, 1), (1, 0), (1, 2))]
    [0.226655, 0.299209, 0.072554, 0.093443]
    """
    r = check_count(r, "r", minimum=0)
    s = check_count(s, "s", minimum=0)
    # past k = 4 (r+s) the terms at least halve from one k to the next two
    order = np.arange(max(r, s - 1, 0), 4 * (r + s) + 200, dtype=np.float64)
    log = log_choose(order, r) + log_choose(order + 1, s) - order * math.log(4)
    return float(np.sum(whole_coefficients(order) * np.exp(log)))


def rkhs_norm(target: Polynomial, heads: GaussianHeads | None = None) -> float:
    """|f*|²_H: the squared norm under the sphere distribution, for any N.

    Zero-mean heads: Σ_kl |P_kl F|² / μ_kl. Heads with a mean: Σ tᵀ A⁻¹ t over the blocks of
    :mod:`keyhole.theory.blocks`, t the vector of F in the block and A between states p, q ≤ D: a
    number that rises with D = 8, 16, … by ever smaller steps. What lies beyond the last is
    continued as a geometric series, and is below a thousandth.

    It is the limit from below of yᵀK⁻¹y as samples are added; for zero-mean heads never above
    :func:`rkhs_norm_bound`, which holds for the larger space of polynomials on all of R^d.

    Raises
    ------
    ValueError
        Where the degree is so high that a harmonic part or an eigenvalue is lost to floating point,
        or where the norm under biased heads has not settled at the highest D.

    Examples
    --------
    >>> from keyhole.theory.targets import Correlation, TokenPower
    >>> round(rkhs_norm(TokenPower(p=1, dim=3)), 4), round(rkhs_norm(Correlation(q=1, dim=3)), 3)
    (3.2339, 18.489)
    >>> [
    ...     round(rkhs_norm(Correlation(q, dim=6), heads=GaussianHeads(mean=0.5)), 1)
    ...     for q in (0, 1, 2)
    ... ]
    [14.4, 80.7, 543.8]
    """
    bias = bias_of(heads, target.dim)
    if bias:
        return _biased_norm(target, bias)

    # zero-mean heads: the eigenvalues of the degrees that the target has
    powers = pair_powers(target)
    n_rows, n_columns = powers.shape
    table = pair_eigenvalues(target.dim, max(n_rows, n_columns) - 1)
    values = bias.gain * table[:n_rows, :n_columns]
    has_power = powers > 0
    if has_power.any() and values[has_power].min() < 1e-290:
        raise ValueError(
            f"the norm of {target!r} in dimension {target.dim} divides by eigenvalues below "
            "1e-290, the edge of floating point. rkhs_norm_bound(target) needs no eigenvalues and "
            "stays exact."
        )
    return float(np.sum(powers[has_power] / values[has_power]))


NORM_DEGREES = (8, 16, 24, 32, 40)
"""Degrees D at which the norm of biased heads is taken."""

NORM_TOLERANCE = 1e-3
"""The share of the norm of biased heads that may still lie beyond the last degree."""


def _biased_norm(target: Polynomial, bias: Bias) -> float:
    """Σ tᵀ A⁻¹ t over the blocks, at rising degrees until it settles."""
    # columns of a factor keep their relative accuracy as they shrink, but not for ever
    smallest = pair_eigenvalues(target.dim, NORM_DEGREES[-1]).diagonal()
    degrees = []
    for degree in NORM_DEGREES:
        holds_target = degree > max(target.degrees)
        is_accurate = smallest[degree] > 1e-36
        if holds_target and is_accurate:
            degrees.append(degree)

    norms: list[float] = []
    for degree in degrees:
        inverse_forms = []
        try:
            for label, vectors in target_vectors(target, degree).items():
                block = single_block(target.dim, bias.unit, label, degree)
                inverse_forms.append(block.inverse_form(vectors))
        except np.linalg.LinAlgError:
            # an eigenvalue of the block that float64 cannot tell from zero, as those of higher
            # degrees are: the norms so far are all there are
            break
        norms.append(math.fsum(inverse_forms) / bias.gain)

        # settled, if the last step is a hundredth of the tolerance at most
        rises = np.diff(norms[-3:])
        if len(rises) and abs(rises[-1]) <= 0.01 * NORM_TOLERANCE * norms[-1]:
            return norms[-1]

        # or if the steps shrink by half and more: the rest is continued as a geometric series
        if len(rises) == 2 and 0.0 < rises[1] <= rises[0] / 2:
            beyond = float(rises[1] ** 2 / (rises[0] - rises[1]))
            if beyond <= NORM_TOLERANCE * norms[-1]:
                return norms[-1] + beyond

    norm_list = ", ".join(f"{norm:.4g}" for norm in norms) or "none"
    degree_list = ", ".join(str(degree) for degree in degrees[: len(norms)]) or "none"
    raise ValueError(
        f"the norm of {target!r} under heads with mean {bias.slope:g} in units of twice their "
        f"scale does not settle: it is {norm_list} at degrees {degree_list}, where floating point "
        "ends. biased_norm_bound(target, error) bounds a function near it."
    )


def mlp_norm(target: Polynomial, n_keys: int) -> float:
    """The squared norm of f* in the RKHS of the MLP kernel, under the sphere distribution.

    The MLP reads the flattened input. Unlike attention's, its norm depends on N: an MLP has to
    learn every key's place apart.

    Examples
    --------
    >>> from keyhole.theory.targets import TokenPower
    >>> target = TokenPower(p=2, dim=8)
    >>> round(rkhs_norm(target), 2), [round(mlp_norm(target, n), 1) for n in (1, 8, 64)]
    (11.01, [91.5, 136.1, 747.7])
    """
    n_keys = check_count(n_keys, "n_keys")
    level_powers = mlp_level_powers(pair_powers(target), n_keys)
    values = {parts: mlp_eigenvalue(target.dim, n_keys, parts) for parts in level_powers}
    if any(value < 1e-290 for value in values.values()):
        raise ValueError(
            f"the MLP norm of {target!r} divides by eigenvalues below 1e-290, the edge of floating "
            "point. Lower the degree, the dimension or the number of keys."
        )
    return math.fsum(power / values[parts] for parts, power in level_powers.items())
