"""The four families of targets: powers of the query, of a key, of their correlation, of a rotated one."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._checks import check_count, check_number, check_seed
from keyhole.targets.polynomial import Polynomial, monomial
from keyhole.targets.sphere import fixed_free_rotation


class QueryPower(Polynomial):
    """A function of the query alone: f_{0,p}(x) = <β, x_0>^p.

    Parameters
    ----------
    p, dim : int
        Degree, at least 0, and token dimension d.
    beta : array (d,), optional
        The direction β, used as it is given; the first basis vector by default.

    Examples
    --------
    >>> QueryPower(p=2, dim=3).coefficient_norms()
    {(2, 0): 1.0}
    """

    def __init__(self, p: int, dim: int, beta: Float[np.ndarray, " d"] | None = None) -> None:
        self.p = check_count(p, "p", minimum=0)
        self.beta = _direction(beta, dim)
        super().__init__(dim, monomial(dim, query=[(self.beta, self.p)]).terms)

    def __repr__(self) -> str:
        return f"QueryPower(p={self.p}, dim={self.dim})"


class TokenPower(Polynomial):
    """The average of a function of the keys: f_{1,p}(x) = (1/N) Σ_i <β, x_i>^p.

    Parameters
    ----------
    p, dim : int
        Degree, at least 0, and token dimension d.
    beta : array (d,), optional
        The direction β, used as it is given; the first basis vector by default.

    Examples
    --------
    >>> TokenPower(p=2, dim=3).coefficient_norms()
    {(0, 2): 1.0}
    """

    def __init__(self, p: int, dim: int, beta: Float[np.ndarray, " d"] | None = None) -> None:
        self.p = check_count(p, "p", minimum=0)
        self.beta = _direction(beta, dim)
        super().__init__(dim, monomial(dim, keys=[(self.beta, self.p)]).terms)

    def __repr__(self) -> str:
        return f"TokenPower(p={self.p}, dim={self.dim})"


class Correlation(Polynomial):
    """Keys weighted by their correlation with the query: f_{2,q}(x) = (1/N) Σ_i <x_0, x_i>^q <β, x_i>.

    Its |f_{q,q+1}|² = (d+1) ⋯ (d+q) / (q+1)! grows like d^q.

    Parameters
    ----------
    q, dim : int
        Power of the correlation, at least 0, and token dimension d.
    beta : array (d,), optional
        The direction β, used as it is given; the first basis vector by default.

    Examples
    --------
    >>> Correlation(q=1, dim=3).coefficient_norms()
    {(1, 2): 2.0}
    """

    def __init__(self, q: int, dim: int, beta: Float[np.ndarray, " d"] | None = None) -> None:
        self.q = check_count(q, "q", minimum=0)
        self.beta = _direction(beta, dim)
        super().__init__(dim, monomial(dim, pairs=[(None, self.q)], keys=[(self.beta, 1)]).terms)

    def __repr__(self) -> str:
        return f"Correlation(q={self.q}, dim={self.dim})"


class RotatedCorrelation(Polynomial):
    """Correlation through a rotation: f_{3,γ}(x) = (1/N) Σ_i <x_0, S_γ x_i>³ <β, x_i>, S_γ = (1−γ) I + γ P.

    P is a random rotation without fixed directions and with trace zero (:func:`fixed_free_rotation`): γ = 0
    is ``Correlation(q=3)``; at γ = 1 the correlation has nothing left in common with <x_0, x_i>. In even
    dimension S_γ is a multiple of a rotation, by √((1−γ)² + γ²), so every γ is equally hard, up to that
    scale, for heads of zero mean.

    Parameters
    ----------
    gamma : float
        How far the key is turned: 0 not at all, 1 by P. Any number is allowed.
    dim, seed : int
        Token dimension d; the seed names P.
    beta : array (d,), optional
        The direction β, as above.

    Examples
    --------
    >>> RotatedCorrelation(gamma=0.0, dim=4, seed=0) == Correlation(q=3, dim=4)
    True
    """

    def __init__(self, gamma: float | int, dim: int, seed: int, beta: Float[np.ndarray, " d"] | None = None) -> None:
        self.gamma = check_number(gamma, "gamma")
        self.seed = check_seed(seed)
        self.beta = _direction(beta, dim)
        self.rotation = (1 - self.gamma) * np.eye(dim) + self.gamma * fixed_free_rotation(dim, seed)
        super().__init__(dim, monomial(dim, pairs=[(self.rotation, 3)], keys=[(self.beta, 1)]).terms)

    def __repr__(self) -> str:
        return f"RotatedCorrelation(gamma={self.gamma:g}, dim={self.dim}, seed={self.seed})"


def _direction(beta: Any, dim: int) -> np.ndarray:
    if beta is None:
        first = np.zeros(check_count(dim, "dim"))
        first[0] = 1.0
        return first
    return np.array(beta, dtype=np.float64)
