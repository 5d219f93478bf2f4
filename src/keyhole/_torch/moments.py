"""Gaussian moments E[σ(u)σ(v)] in float64, tensor by tensor: plain torch, accurate to 1e-14 of τ_u τ_v.

Notation of _fused/moments.py: u ~ h + U, v ~ k + V with U, V standard normal of correlation ρ. By Price's theorem the
ReLU moment m has m' = Φ₂(h, k; ρ) and m'' = φ₂(h, k; ρ) as a function of ρ, so that

    m(ρ) = ψ(h)ψ(k) + ρ Φ(h)Φ(k) + ∫_0^ρ (ρ − t) φ₂(h, k; t) dt,

where no term is negative for ρ ≥ 0. With t = sin θ the integrand is smooth, and 24 nodes give 1e-15 up to |ρ| = 0.9.
Beyond, the closed form with Owen's T serves, whose integrals are smooth for every ρ, ±1 included.
"""

from __future__ import annotations

import math

import numpy as np
import torch

FAR = 0.9
"""|ρ| up to which the integral in the correlation is used."""

NODES = 24
_TINY = 1e-150
_ROOT_TWO_PI = math.sqrt(2.0 * math.pi)


def normal_density(h: torch.Tensor) -> torch.Tensor:
    """φ(h)."""
    return torch.exp(-0.5 * h * h) / _ROOT_TWO_PI


def rectified_mean(h: torch.Tensor) -> torch.Tensor:
    """ψ(h) = E(h + U)_+, accurate relative to its size in both tails.

    For h < 0 the two terms of h Φ(h) + φ(h) cancel: φ(x) (1 − x·Φ(−x)/φ(x)) with x = −h loses x² units of rounding.
    """
    density = normal_density(h)
    x = torch.clamp(-h, min=0.0)
    mills = torch.special.erfcx(x / math.sqrt(2.0)) * math.sqrt(math.pi / 2.0)
    return torch.where(h < 0.0, density * (1.0 - x * mills), h * torch.special.ndtr(h) + density)


def relu_arc(rho: torch.Tensor, gap: torch.Tensor) -> torch.Tensor:
    """κ(ρ) = [√(1−ρ²) + (π − arccos ρ) ρ]/2π, given gap = 1 − |ρ|."""
    angle = 2.0 * torch.asin(torch.sqrt(0.5 * gap))  # arccos|ρ|, of full relative accuracy
    fold = (torch.sqrt(gap * (2.0 - gap)) - (1.0 - gap) * angle) / (2.0 * math.pi)
    return 0.5 * torch.clamp(rho, min=0.0) + fold


def step_arc(rho: torch.Tensor, gap: torch.Tensor) -> torch.Tensor:
    """P(U > 0, V > 0) = 1/4 + arcsin(ρ)/2π, given gap = 1 − |ρ|."""
    tail = torch.asin(torch.sqrt(0.5 * gap)) / math.pi
    return torch.where(rho >= 0.0, 0.5 - tail, tail)


def rectified_moment(
    power: int, h: torch.Tensor, k: torch.Tensor, rho: torch.Tensor, gap: torch.Tensor
) -> torch.Tensor:
    """E[(h+U)_+^p (k+V)_+^p]: the ReLU moment at p = 1, Φ₂(h, k; ρ) at p = 0; h, k broadcast against ρ."""
    near = torch.clamp(rho, -FAR, FAR)
    result = _near_moment(power, h, k, near)
    far = torch.nonzero(rho.abs() > FAR, as_tuple=True)
    if far[0].numel():
        h, k = torch.broadcast_to(h, rho.shape)[far], torch.broadcast_to(k, rho.shape)[far]
        result[far] = _far_moment(power, h, k, rho[far], gap[far])
    return result


def _near_moment(power: int, h: torch.Tensor, k: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    angle = torch.asin(rho)
    # a density of e⁻⁸⁰⁰ is nothing, and its square would be NaN times infinity
    h_kept, k_kept = torch.clamp(h, -37.0, 37.0), torch.clamp(k, -37.0, 37.0)
    squares, product = 0.5 * (h_kept * h_kept + k_kept * k_kept), h_kept * k_kept
    total = torch.zeros_like(rho)
    for node, weight in zip(nodes, weights, strict=True):
        part = (0.5 + 0.5 * float(node)) * angle
        sine, cosine = torch.sin(part), torch.cos(part)
        term = torch.exp((product * sine - squares) / (cosine * cosine))
        total += 0.5 * float(weight) * (term * (rho - sine) if power == 1 else term)
    total *= angle / (2.0 * math.pi)
    if power == 1:
        return total + rectified_mean(h) * rectified_mean(k) + rho * (torch.special.ndtr(h) * torch.special.ndtr(k))
    return total + torch.special.ndtr(h) * torch.special.ndtr(k)


def _far_moment(power: int, h: torch.Tensor, k: torch.Tensor, rho: torch.Tensor, gap: torch.Tensor) -> torch.Tensor:
    """The closed form. ``gap`` = 1 − |ρ| may be better known than ρ."""
    # zero counts as positive, and two zeros as equal: the angle between them must survive the division by h
    h, k = torch.where(h.abs() < _TINY, _TINY, h), torch.where(k.abs() < _TINY, _TINY, k)
    sign = torch.sign(rho)
    r = torch.sqrt(gap * (2.0 - gap)).clamp(min=_TINY)
    # k − ρh without cancellation: ρ = sign·(1 − gap)
    k_given, h_given = (k - sign * h) + sign * gap * h, (h - sign * k) + sign * gap * k
    opposed = torch.where((h >= 0) == (k >= 0), 0.0, 0.5)
    both = 0.5 * (torch.special.ndtr(h) + torch.special.ndtr(k)) - opposed
    both = (both - _owen(h, k_given / r) - _owen(k, h_given / r)).clamp(min=0.0)
    if power == 0:
        return both
    density = torch.exp(-0.5 * (h * h + torch.square(k_given / r))) * r / (2.0 * math.pi)
    tails = h * normal_density(k) * torch.special.ndtr(h_given / r)
    tails = tails + k * normal_density(h) * torch.special.ndtr(k_given / r)
    return ((h * k + rho) * both + tails + density).clamp(min=0.0)


def _owen(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Owen's T(h, y/h), h = 0 counted as positive; the ratio is brought into [0, 1], where 20 nodes give 1e-16."""
    odd = torch.where((h >= 0) == (y >= 0), 1.0, -1.0)
    h, y = h.abs(), y.abs()
    small, large = torch.minimum(h, y), torch.maximum(h, y)
    nodes, weights = np.polynomial.legendre.leggauss(20)
    ratio = small / large
    total = torch.zeros_like(h)
    for node, weight in zip(nodes, weights, strict=True):
        square = 1.0 + torch.square((0.5 + 0.5 * float(node)) * ratio)
        total += 0.5 * float(weight) * torch.exp(-0.5 * large * large * square) / square
    total *= ratio / (2.0 * math.pi)
    # total is T(large, small/large); where y is the larger that is T(y, h/y), and T(h, y/h) follows from it
    at_h, at_y = torch.special.ndtr(-h), torch.special.ndtr(-y)
    swapped = 0.5 * (at_h + at_y) - at_h * at_y - total
    return odd * torch.where(y <= h, total, swapped)
