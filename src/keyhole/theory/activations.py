"""Activations of a score in Hermite polynomials: what the spectrum needs to know of σ.

A score on unit tokens is s = τ (m + z): z is standard normal, τ = 2·scale, and m is the mean score
in units of τ. Every activation here is written for τ = 1. With

    h_k(m) = E[σ(m+z) He_k(z)] = E[σ^(k)(m+z)]

two scores whose noise has correlation ρ satisfy E[σ(m+z) σ(m'+z')] = Σ_k ρ^k/k! · h_k(m) h_k(m').
At m = 0 this is the power series κ(ρ) = Σ_k a_k ρ^k with a_k = h_k(0)²/k!.

==========  =====================================  ========================  ==================
σ           h_k(m), k = 0, 1, 2, …                 a_k                       E σ(m+z)²
==========  =====================================  ========================  ==================
relu        mΦ + φ; Φ; (−1)^k He_{k−2} φ           1/2π, 1/4, 1/4π, 0, …     (1+m²)Φ + mφ
linear      m; 1; 0                                a_1 = 1                   m² + 1
square      m²+1; 2m; 2; 0                         a_0 = 1, a_2 = 2          m⁴ + 6m² + 3
step        Φ; h_{k+1} of relu                     1/4, 1/2π, 0, 1/12π, …    Φ
exp         r^k e^{rm + r²/2}                      e^{r²} r^{2k}/k!          e^{2rm + 2r²}
==========  =====================================  ========================  ==================

All but exp are homogeneous, σ(τs) = τ^h σ(s), so that τ^{2h} multiplies the kernel. For exp the
rate r is τ itself: σ(s) = exp(r s).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float
from scipy.special import gammaln, ndtr

from keyhole.attention.activations import check_pointwise
from keyhole.registry import POINTWISE
from keyhole.theory.moments import log_gamma_ratio, series_nodes, tail_nodes


class ScoreActivation(ABC):
    """One activation σ, for scores whose noise has unit variance."""

    name: ClassVar[str]

    has_finite_rank: ClassVar[bool] = False
    """Whether the series in ρ ends: then the kernel has finitely many eigenvalues."""

    tail_power: ClassVar[float] = math.inf
    """h_k²/k! falls like k^{−tail_power}; infinite where it falls faster than any power."""

    first_even_order: ClassVar[int | None] = None
    """The first order from which on h_k(m) is even and odd in m by turns, beginning with even.

    None where h_k has no parity.
    """

    @abstractmethod
    def series_nodes(self, start: int) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
        """Orders n and weights w with Σ_n a_n f(n) = Σ w f(n).

        Single terms up to about ``start``; beyond, for slow series, the nodes of an integral.
        """

    @abstractmethod
    def moments(self, m: Float[np.ndarray, " q"], n_terms: int) -> Float[np.ndarray, "k q"]:
        """h_k(m)/√k! for k < K."""

    @abstractmethod
    def second_moment(self, m: Float[np.ndarray, " q"]) -> Float[np.ndarray, " q"]:
        """E σ(m+z)²."""

    @abstractmethod
    def term_bounds(
        self, order: Float[np.ndarray, " k"], largest_mean: float
    ) -> Float[np.ndarray, " k"]:
        """Bounds on h_k(m)²/k! over |m| ≤ largest_mean, for orders k ≥ 3."""

    @property
    def at_zero(self) -> float:
        """κ(0) = a_0."""
        return float(self.moments(np.zeros(1), 1)[0, 0] ** 2)

    @property
    def at_one(self) -> float:
        """κ(1) = E σ(z)²."""
        return float(self.second_moment(np.zeros(1))[0])


@dataclass(frozen=True)
class ReluScores(ScoreActivation):
    """σ(s) = max(s, 0)."""

    name: ClassVar[str] = "relu"
    tail_power: ClassVar[float] = 2.5
    first_even_order: ClassVar[int | None] = 2

    def series_nodes(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """a_0, a_1 and even orders, the tail as an integral."""
        return series_nodes(start)

    def moments(self, m: Float[np.ndarray, " q"], n_terms: int) -> Float[np.ndarray, "k q"]:
        """mΦ + φ; Φ; (−1)^k He_{k−2} φ, over √k!."""
        return hermite_moments(m, n_terms)

    def second_moment(self, m: Float[np.ndarray, " q"]) -> Float[np.ndarray, " q"]:
        """(1+m²)Φ + mφ."""
        density = np.exp(-m * m / 2) / math.sqrt(2 * math.pi)
        return np.asarray((1 + m * m) * ndtr(m) + m * density)

    def term_bounds(self, order: np.ndarray, largest_mean: float) -> np.ndarray:
        """h_k²/k! ≤ (2/πn)^{1/2} / (2π k (k−1)), n = k−2."""
        # h_k²/k! = He_n² φ²/(n! k (k−1)) with n = k−2, and Hermite functions are largest at 0
        envelope = np.sqrt(2 / (math.pi * np.maximum(order - 2, 1.0)))
        return np.asarray(envelope / (2 * math.pi * np.maximum(order * (order - 1), 1.0)))


@dataclass(frozen=True)
class LinearScores(ScoreActivation):
    """σ(s) = s."""

    name: ClassVar[str] = "linear"
    has_finite_rank: ClassVar[bool] = True
    first_even_order: ClassVar[int | None] = 1

    def series_nodes(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """The term a_1 = 1."""
        return np.array([1.0]), np.array([1.0])

    def moments(self, m: Float[np.ndarray, " q"], n_terms: int) -> Float[np.ndarray, "k q"]:
        """m; 1; 0."""
        values = np.zeros((max(n_terms, 2), len(m)))
        values[0] = m
        values[1] = 1.0
        return values[:n_terms]

    def second_moment(self, m: Float[np.ndarray, " q"]) -> Float[np.ndarray, " q"]:
        """m² + 1."""
        return np.asarray(m * m + 1)

    def term_bounds(self, order: np.ndarray, largest_mean: float) -> np.ndarray:
        """Zero from k = 2 on."""
        return np.where(order <= 1, max(largest_mean**2, 1.0), 0.0)


@dataclass(frozen=True)
class SquareScores(ScoreActivation):
    """σ(s) = s²."""

    name: ClassVar[str] = "square"
    has_finite_rank: ClassVar[bool] = True
    first_even_order: ClassVar[int | None] = 0

    def series_nodes(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """The terms a_0 = 1 and a_2 = 2."""
        return np.array([0.0, 2.0]), np.array([1.0, 2.0])

    def moments(self, m: Float[np.ndarray, " q"], n_terms: int) -> Float[np.ndarray, "k q"]:
        """m²+1; 2m; 2/√2; 0."""
        values = np.zeros((max(n_terms, 3), len(m)))
        values[0] = m * m + 1
        values[1] = 2 * m
        values[2] = math.sqrt(2)
        return values[:n_terms]

    def second_moment(self, m: Float[np.ndarray, " q"]) -> Float[np.ndarray, " q"]:
        """m⁴ + 6m² + 3."""
        return np.asarray(m**4 + 6 * m**2 + 3)

    def term_bounds(self, order: np.ndarray, largest_mean: float) -> np.ndarray:
        """Zero from k = 3 on."""
        return np.where(order <= 2, (largest_mean**2 + 2) ** 2, 0.0)


@dataclass(frozen=True)
class StepScores(ScoreActivation):
    """σ(s) = 1 for s > 0, else 0: the derivative of ReLU, so that its h_k is ReLU's h_{k+1}."""

    name: ClassVar[str] = "step"
    tail_power: ClassVar[float] = 1.5
    first_even_order: ClassVar[int | None] = 1

    def series_nodes(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """a_0 and odd orders, the tail as an integral."""
        # a_0, then odd orders; the tail is an integral
        start = start + 1 - start % 2
        tail, tail_weight = tail_nodes(start)
        order = np.concatenate([np.arange(1.0, start, 2.0), tail])
        weight = np.concatenate([np.ones(start // 2), tail_weight])
        # a_{2i+1} = C(2i, i) / (4^i (2i+1) 2π), and C(2i, i)/4^i = Γ(i+½)/(√π Γ(i+1))
        i = (order - 1) / 2
        central = np.exp(log_gamma_ratio(i + 0.5, 0.5)) / math.sqrt(math.pi)
        weight = weight * central / (order * 2 * math.pi)
        return np.concatenate([[0.0], order]), np.concatenate([[0.25], weight])

    def moments(self, m: Float[np.ndarray, " q"], n_terms: int) -> Float[np.ndarray, "k q"]:
        """Those of ReLU, one order on."""
        of_relu = hermite_moments(m, n_terms + 1)[1:]
        # from 1/√(k+1)! to 1/√k!
        return np.asarray(of_relu * np.sqrt(np.arange(1.0, n_terms + 1))[:, None])

    def second_moment(self, m: Float[np.ndarray, " q"]) -> Float[np.ndarray, " q"]:
        """Φ(m)."""
        return np.asarray(ndtr(m))

    def term_bounds(self, order: np.ndarray, largest_mean: float) -> np.ndarray:
        """Those of ReLU, one order on."""
        return np.asarray((order + 1) * ReluScores().term_bounds(order + 1, largest_mean))


@dataclass(frozen=True)
class ExpScores(ScoreActivation):
    """σ(s) = exp(r s)."""

    rate: float = 1.0
    name: ClassVar[str] = "exp"

    def series_nodes(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Single terms: they fall like 1/n!."""
        # terms r^{2n}/n! beyond ``start`` and 8 r² are below rounding
        order = np.arange(start + math.ceil(8 * self.rate**2) + 1.0)
        log = self.rate**2 + 2 * order * math.log(self.rate) - gammaln(order + 1)
        return order, np.exp(log)

    def moments(self, m: Float[np.ndarray, " q"], n_terms: int) -> Float[np.ndarray, "k q"]:
        """r^k e^{rm + r²/2}/√k!."""
        order = np.arange(float(n_terms))[:, None]
        log = order * math.log(self.rate) - gammaln(order + 1) / 2
        return np.asarray(np.exp(log + self.rate * m + self.rate**2 / 2))

    def second_moment(self, m: Float[np.ndarray, " q"]) -> Float[np.ndarray, " q"]:
        """e^{2rm + 2r²}."""
        return np.asarray(np.exp(2 * self.rate * m + 2 * self.rate**2))

    def term_bounds(self, order: np.ndarray, largest_mean: float) -> np.ndarray:
        """The value at the largest mean."""
        log = 2 * order * math.log(self.rate) - gammaln(order + 1)
        return np.asarray(np.exp(log + 2 * self.rate * largest_mean + self.rate**2))


RELU = ReluScores()

HOMOGENEITY = {"relu": 1, "linear": 1, "square": 2, "step": 0}
"""h of σ(τs) = τ^h σ(s)."""


def score_activation(name: str, spread: float) -> tuple[ScoreActivation, float]:
    """An activation of scores with standard deviation τ, and what multiplies its kernel.

    >>> score_activation("square", spread=2.0), score_activation("exp", spread=2.0)
    ((SquareScores(), 16.0), (ExpScores(rate=2.0), 1.0))
    """
    name = check_pointwise(name)
    if name == "exp":
        return ExpScores(rate=spread), 1.0
    activations: dict[str, ScoreActivation] = {
        "relu": RELU,
        "linear": LinearScores(),
        "square": SquareScores(),
        "step": StepScores(),
    }
    assert set(activations) == set(POINTWISE) - {"exp"}
    return activations[name], spread ** (2 * HOMOGENEITY[name])


def hermite_moments(m: Float[np.ndarray, " q"], n_terms: int) -> Float[np.ndarray, "k q"]:
    """h_k(m)/√k! for k < K, with h_k(m) = E[ReLU^(k)(m + z)].

    >>> h = hermite_moments(np.zeros(1), 5)[:, 0]
    >>> (h**2 * np.array([2 * np.pi, 4, 4 * np.pi, 1, 48 * np.pi])).round(12)    # κ's coefficients
    array([1., 1., 1., 0., 1.])
    """
    m = np.asarray(m, dtype=np.float64)
    density = np.exp(-m * m / 2) / math.sqrt(2 * math.pi)
    values = np.empty((max(n_terms, 2), len(m)))
    values[0] = m * ndtr(m) + density
    values[1] = ndtr(m)
    if n_terms <= 2:
        return values[:n_terms]

    # ψ_j = φ He_j/√j! for j ≤ K−3, by ψ_{j+1} = (m ψ_j − √j ψ_{j−1})/√(j+1)
    j = np.arange(float(n_terms))
    backward = np.sqrt(j / (j + 1)).tolist()
    hermite = values[2:]
    np.divide(m, np.sqrt(j[1 : n_terms - 2, None]), out=hermite[1:])
    hermite[0] = density
    previous = np.empty_like(density)
    for i in range(n_terms - 3):
        # hermite[i + 1] is still m/√(i+1)
        hermite[i + 1] *= hermite[i]
        if i > 0:
            np.multiply(hermite[i - 1], backward[i], out=previous)
            hermite[i + 1] -= previous

    # h_k = (−1)^k He_{k−2} φ
    k = np.arange(2.0, n_terms)[:, None]
    hermite *= (-1) ** k / np.sqrt(k * (k - 1))
    return values
