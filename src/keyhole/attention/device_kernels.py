"""The exact Gram matrix of torch tensors: fused on CUDA, plain torch elsewhere.

The plain version works on any device, tile by tile within a memory budget, in float64. On CUDA the
kernel of ReLU heads on tokens of at most 256 coordinates is fused (triton_loops.py), in float32
whatever the type of the tokens: its error is at most 1e-6 of the kernel.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from keyhole._array import block_size, blocks, set_blocks
from keyhole._tensors import as_tensor
from keyhole.data.sets import SetBatch
from keyhole.registry import ACTIVATIONS

WIDEST_FUSED = 256
"""Coordinates of keys and queries up to which there is a fused Gram matrix. It takes 3.9 ms there
for 1,000 sets of 16 keys, and plain torch 30 (H200); at 300 its tiles outgrow the shared memory of
a multiprocessor."""

FUSED_BYTES = 2**31
"""Bytes of a fused panel of K while K itself is float64."""


@cache
def has_triton() -> bool:
    """Whether the compiler of the fused kernel is there. It comes with torch for CUDA on Linux."""
    return importlib.util.find_spec("triton") is not None


def tensor_kernel(
    a: SetBatch,
    b: SetBatch | None,
    mean: np.ndarray | None,
    scale: float,
    activation: str,
    memory_budget: int,
) -> torch.Tensor:
    """K of sets of tensors, in float64 on the device of their tokens; without b, their Gram."""
    left = prepare_panel(a.tokens, a.offsets, a.query, mean, scale, activation)
    right = None
    n_columns = len(a)
    if b is not None:
        right = prepare_panel(b.tokens, b.offsets, b.query, mean, scale, activation)
        n_columns = len(b)
    device = a.tokens.device
    out = torch.empty(len(a), n_columns, dtype=torch.float64, device=device)
    biased = mean is not None and activation in ("relu", "step")
    width = max(a.dim, a.query_dim)
    is_fused = device.type == "cuda" and activation == "relu" and width <= WIDEST_FUSED
    if is_fused and has_triton():
        return _stream(left, right, biased, out)
    return fill_gram(left, right, activation, biased, out, memory_budget)


def _stream(
    left: TensorPanel, right: TensorPanel | None, biased: bool, out: torch.Tensor
) -> torch.Tensor:
    """Fused tiles of up to 2 GiB, each converted or copied to where ``out`` is.

    One triangle if symmetric.
    """
    from keyhole.attention.triton_loops import fused_gram

    symmetric = right is None
    columns = left if right is None else right
    device = left.unit.device
    # a square tile of float32
    side = max(1, math.isqrt(FUSED_BYTES // 4))
    for row in blocks(len(out), side):
        for column in blocks(out.shape[1], side):
            if symmetric and column.start < row.start:
                continue
            on_diagonal = symmetric and column == row
            other = None
            if not on_diagonal:
                other = columns.part(column)
            tile = torch.empty(row.stop - row.start, column.stop - column.start, device=device)
            fused_gram(left.part(row), other, biased, tile)
            out[row, column] = tile.to(out)
            if symmetric and not on_diagonal:
                out[column, row] = tile.T.to(out)
    return out


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

    For h < 0 the two terms of h Φ(h) + φ(h) cancel: φ(x) (1 − x·Φ(−x)/φ(x)) with x = −h loses x²
    units of rounding.
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
    """E[(h+U)_+^p (k+V)_+^p]: the ReLU moment at p = 1, Φ₂(h, k; ρ) at p = 0.

    h and k broadcast against ρ.
    """
    # the integral everywhere, then the closed form where |ρ| is too large for its nodes
    near = torch.clamp(rho, -FAR, FAR)
    result = _near_moment(power, h, k, near)
    far = torch.nonzero(rho.abs() > FAR, as_tuple=True)
    if far[0].numel():
        far_h = torch.broadcast_to(h, rho.shape)[far]
        far_k = torch.broadcast_to(k, rho.shape)[far]
        result[far] = _far_moment(power, far_h, far_k, rho[far], gap[far])
    return result


def _near_moment(power: int, h: torch.Tensor, k: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
    """The moment at correlation zero plus the integral of its derivatives up to ρ.

    With t = sin θ the bivariate density is smooth in θ, and 24 Gauss–Legendre nodes suffice.
    """
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    angle = torch.asin(rho)
    # a density of e⁻⁸⁰⁰ is nothing, and its square would be NaN times infinity
    h_near = torch.clamp(h, -37.0, 37.0)
    k_near = torch.clamp(k, -37.0, 37.0)
    squares = 0.5 * (h_near * h_near + k_near * k_near)
    product = h_near * k_near

    # the integral over the angle, of the density for p = 0 and of (ρ − t) times it for p = 1
    total = torch.zeros_like(rho)
    for node, weight in zip(nodes, weights, strict=True):
        part = (0.5 + 0.5 * float(node)) * angle
        sine = torch.sin(part)
        cosine = torch.cos(part)
        term = torch.exp((product * sine - squares) / (cosine * cosine))
        if power == 1:
            term = term * (rho - sine)
        total += 0.5 * float(weight) * term
    total *= angle / (2.0 * math.pi)

    # what is there at correlation zero, and for p = 1 its slope in ρ
    masses = torch.special.ndtr(h) * torch.special.ndtr(k)
    if power == 0:
        return total + masses
    return total + rectified_mean(h) * rectified_mean(k) + rho * masses


def _far_moment(
    power: int, h: torch.Tensor, k: torch.Tensor, rho: torch.Tensor, gap: torch.Tensor
) -> torch.Tensor:
    """The closed form. ``gap`` = 1 − |ρ| may be better known than ρ."""
    # zero counts as positive, and two zeros as equal: the angle between them must survive the
    # division by h
    h = torch.where(h.abs() < _TINY, _TINY, h)
    k = torch.where(k.abs() < _TINY, _TINY, k)
    sign = torch.sign(rho)
    r = torch.sqrt(gap * (2.0 - gap)).clamp(min=_TINY)
    # k − ρh without cancellation: ρ = sign·(1 − gap)
    k_given = (k - sign * h) + sign * gap * h
    h_given = (h - sign * k) + sign * gap * k

    # Φ₂(h, k; ρ) by Owen's T, which is all of it for p = 0
    opposed = torch.where((h >= 0) == (k >= 0), 0.0, 0.5)
    both = 0.5 * (torch.special.ndtr(h) + torch.special.ndtr(k)) - opposed
    both = (both - _owen(h, k_given / r) - _owen(k, h_given / r)).clamp(min=0.0)
    if power == 0:
        return both

    # E(h+U)_+(k+V)_+ = (hk + ρ) Φ₂ + h φ(k) Φ(·) + k φ(h) Φ(·) + r² φ₂
    density = torch.exp(-0.5 * (h * h + torch.square(k_given / r))) * r / (2.0 * math.pi)
    tails = h * normal_density(k) * torch.special.ndtr(h_given / r)
    tails = tails + k * normal_density(h) * torch.special.ndtr(k_given / r)
    return ((h * k + rho) * both + tails + density).clamp(min=0.0)


def _owen(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Owen's T(h, y/h), h = 0 counted as positive.

    The ratio is brought into [0, 1], where 20 nodes give 1e-16.
    """
    # T is odd in its second argument and even in its first
    odd = torch.where((h >= 0) == (y >= 0), 1.0, -1.0)
    h = h.abs()
    y = y.abs()

    # T(large, small/large) by Gauss–Legendre quadrature
    small = torch.minimum(h, y)
    large = torch.maximum(h, y)
    nodes, weights = np.polynomial.legendre.leggauss(20)
    ratio = small / large
    total = torch.zeros_like(h)
    for node, weight in zip(nodes, weights, strict=True):
        square = 1.0 + torch.square((0.5 + 0.5 * float(node)) * ratio)
        total += 0.5 * float(weight) * torch.exp(-0.5 * large * large * square) / square
    total *= ratio / (2.0 * math.pi)

    # where y is the larger, that is T(y, h/y), and T(h, y/h) follows from it
    at_h = torch.special.ndtr(-h)
    at_y = torch.special.ndtr(-y)
    swapped = 0.5 * (at_h + at_y) - at_h * at_y - total
    return odd * torch.where(y <= h, total, swapped)


_TEMPORARIES = 20
"""float64 numbers that one pair of keys takes while its moment is computed."""

_NEAR = 0.99
"""Beyond, 1 − |ρ| is taken from differences of unit vectors."""


@dataclass(frozen=True)
class TensorPanel:
    """What the tiles need of a batch of sets.

    The fields of ``keyhole.attention.compiled_gram.Panel``, as float64 tensors.
    """

    unit: torch.Tensor  # (t, D) extended keys, scaled to unit length
    query: torch.Tensor  # (n, D_q) extended queries, scaled to unit length
    weight: torch.Tensor  # (t,) what multiplies c·m: lengths, standard deviations and 1/N
    shift: torch.Tensor  # (t,) mean/std of the score; for exp, mean + std²/2
    std: torch.Tensor  # (t,) standard deviation of the score
    owner: torch.Tensor  # (t,) the set of each key
    offsets: np.ndarray  # (n + 1,)

    def part(self, sets: slice) -> TensorPanel:
        """The panel of consecutive sets."""
        first = int(self.offsets[sets.start])
        last = int(self.offsets[sets.stop])
        rows = slice(first, last)
        return TensorPanel(
            unit=self.unit[rows],
            query=self.query[sets],
            weight=self.weight[rows],
            shift=self.shift[rows],
            std=self.std[rows],
            owner=self.owner[rows] - sets.start,
            offsets=self.offsets[sets.start : sets.stop + 1] - first,
        )


def prepare_panel(
    tokens: torch.Tensor,
    offsets: np.ndarray,
    query: torch.Tensor | None,
    mean: np.ndarray | None,
    scale: float,
    activation: str,
) -> TensorPanel:
    """Unit vectors, weights and score moments of every key.

    In float64 on the device of ``tokens``.
    """
    # directions and lengths of x~_i and x~_0; without a query, x~_0 = [0; √2]
    n_sets = len(offsets) - 1
    device = tokens.device
    unit, norm = units(tokens, 1.0)
    if query is None:
        directions = torch.zeros(n_sets, tokens.shape[1] + 1, dtype=torch.float64, device=device)
        directions[:, -1] = 1.0
        query_norm = torch.full((n_sets,), 2.0**0.5, dtype=torch.float64, device=device)
    else:
        directions, query_norm = units(query, 1.0)
    lengths = as_tensor(np.diff(offsets), tokens)
    owner = torch.repeat_interleave(
        torch.arange(n_sets, device=device), lengths, output_size=len(tokens)
    )

    # the standard deviation scale |x~_0| |x~_i| of every score, and its mean in units of that
    std = scale * query_norm[owner] * norm
    shift = torch.zeros_like(std)
    if mean is not None:
        projected = directions @ as_tensor(mean, tokens, torch.float64) / scale
        shift = (projected[owner] * unit).sum(dim=1)

    # E[σ(u)σ(v)] is (τ_u τ_v)^power times a function of shifts and ρ; for exp the exponent of
    # E[exp(u)], mean + variance/2, replace the shift
    power = ACTIVATIONS[activation].power
    if activation == "exp":
        shift = shift * std + 0.5 * std**2
    return TensorPanel(
        unit=unit,
        query=directions,
        weight=norm * std**power / lengths[owner],
        shift=shift,
        std=std,
        owner=owner,
        offsets=offsets,
    )


def units(vectors: torch.Tensor, last: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Directions and lengths of [x; last], in float64."""
    extended = torch.nn.functional.pad(vectors.to(torch.float64), (0, 1), value=last)
    norm = torch.linalg.vector_norm(extended, dim=1)
    return extended / norm[:, None], norm


def fill_gram(
    left: TensorPanel,
    right: TensorPanel | None,
    activation: str,
    biased: bool,
    out: torch.Tensor,
    memory_budget: int,
) -> torch.Tensor:
    """Fill ``out`` (n, m), of any type and device, with K.

    Without ``right`` one triangle is computed and mirrored.

    Cost: D multiply-adds and about a dozen passes over float64 temporaries per pair of keys
    (140 around a mean), no temporary beyond the budget unless two single sets exceed it.
    """
    symmetric = right is None
    columns = left if right is None else right
    # keys along each side of a tile, so that its pairs of keys fit the budget
    side = max(1, int(block_size(8 * _TEMPORARIES, memory_budget) ** 0.5))
    for row in set_blocks(left.offsets, side):
        a = left.part(row)
        for column in set_blocks(columns.offsets, side):
            if symmetric and column.start < row.start:
                continue
            tile = gram_tile(a, columns.part(column), activation, biased)
            # on the diagonal the upper triangle counts, elsewhere the tile has a mirror image
            if symmetric and column == row:
                tile = torch.triu(tile) + torch.triu(tile, 1).T
            out[row, column] = tile.to(out)
            if symmetric and column != row:
                out[column, row] = tile.T.to(out)
    return out


def gram_tile(a: TensorPanel, b: TensorPanel, activation: str, biased: bool) -> torch.Tensor:
    """K of the sets of ``a`` against those of ``b``, at once."""
    cosine = a.unit @ b.unit.T
    query = a.query @ b.query.T
    spread = query[a.owner][:, b.owner]
    moments = pair_moments(a, b, cosine, spread, activation, biased)
    return _indicator(a) @ (moments * cosine) @ _indicator(b).T


def pair_moments(
    a: TensorPanel,
    b: TensorPanel,
    cosine: torch.Tensor,
    query: torch.Tensor,
    activation: str,
    biased: bool,
) -> torch.Tensor:
    """m/(τ_u τ_v)^p for all pairs of keys, p the power of τ that the weights carry."""
    rho = (cosine * query).clamp(-1.0, 1.0)
    h = a.shift[:, None]
    k = b.shift[None, :]

    # moments that are elementary for any mean
    if activation == "linear":
        return h * k + rho
    if activation == "square":
        return (h * h + 1.0) * (k * k + 1.0) + 2.0 * rho * (2.0 * h * k + rho)
    if activation == "exp":
        tau_u = a.std[:, None]
        tau_v = b.std[None, :]
        return torch.exp(h + k + rho * tau_u * tau_v)

    # ReLU and step, around a mean or around zero
    gap = _gap(a, b, cosine, query, rho)
    if activation == "relu":
        return rectified_moment(1, h, k, rho, gap) if biased else relu_arc(rho, gap)
    if activation == "step":
        return rectified_moment(0, h, k, rho, gap) if biased else step_arc(rho, gap)
    raise ValueError(f"activation {activation!r} has no Gaussian moment in torch.")


def _gap(
    a: TensorPanel, b: TensorPanel, cosine: torch.Tensor, query: torch.Tensor, rho: torch.Tensor
) -> torch.Tensor:
    """1 − |ρ|, from differences of unit vectors where ρ is close to ±1.

    There ρ itself tells it to 1e-16 only.
    """
    gap = (1.0 - rho.abs()).clamp(min=0.0)
    i, j = torch.nonzero(rho.abs() > _NEAR, as_tuple=True)
    if i.numel():
        keys = a.unit[i] - torch.sign(cosine[i, j])[:, None] * b.unit[j]
        queries = a.query[a.owner[i]] - torch.sign(query[i, j])[:, None] * b.query[b.owner[j]]
        key_gap = 0.5 * keys.square().sum(dim=1)
        query_gap = 0.5 * queries.square().sum(dim=1)
        # 1 − |q||c| with |q| = 1 − query_gap and |c| = 1 − key_gap
        gap[i, j] = query_gap + query[i, j].abs() * key_gap
    return gap


def _indicator(panel: TensorPanel) -> torch.Tensor:
    """(n, t): the weight of each key in the row of its set.

    Sums over sets are then matrix products.
    """
    n_sets = len(panel.offsets) - 1
    n_keys = len(panel.weight)
    device = panel.weight.device
    matrix = torch.zeros(n_sets, n_keys, dtype=torch.float64, device=device)
    matrix[panel.owner, torch.arange(n_keys, device=device)] = panel.weight
    return matrix
