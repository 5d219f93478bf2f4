"""The whole method in plain NumPy, in the order of the paper. Read this file first.

The paper is Fu, Guo, Bai and Mei, "What can a Single Attention Layer Learn? A Study Through the
Random Features Lens" (arXiv:2307.11353). The rest of keyhole computes these formulas faster and
for more kinds of data; its tests compare every fast routine with this file.

A sample x is a query x_0 in R^d and a set of keys x_1, …, x_N in R^d, whose order never matters.
Here it is a pair of arrays (x_0, x) of shapes (d,) and (N, d). The letters are those of the paper:

    x~ = [x; 1]       a token with a one appended; it has D = d + 1 coordinates
    n, N, M           number of samples, of keys in a set, of heads
    W   (M, D, D)     query-key matrix of each head: random, then frozen
    v   (M, D)        value vector of each head: trained, together with the intercept b
    Φ   (n, M·D)      features of the samples
    K   (n, n)        kernel of the samples: ΦΦᵀ, or its limit for infinitely many heads
    α                 ridge penalty

Five lines fit a layer and predict:

>>> rng = np.random.default_rng(0)
>>> samples = [(rng.normal(size=3), rng.normal(size=(5, 3))) for _ in range(300)]
>>> y = np.array([np.maximum(x @ x_0, 0).mean() for x_0, x in samples])
>>> W = draw_heads(100, mean=np.diag([1.0, 1.0, 1.0, 0.0]), seed=0)
>>> Phi = features(samples[:200], W)
>>> a, b, e = ridge(Phi @ Phi.T, y[:200], alpha=0.01)
>>> v = (Phi.T @ a).reshape(100, 4)
>>> residuals = y[200:] - predict(samples[200:], W, v, b)
>>> print(f"R² {1 - np.mean(residuals**2) / np.var(y[200:]):.2f} on samples that were not fitted")
R² 0.98 on samples that were not fitted
>>> print(f"R² {1 - np.mean(e**2) / np.var(y[:200]):.2f} by leave-one-out")
R² 0.97 by leave-one-out
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtr, ndtri, owens_t

Sample = tuple[np.ndarray | None, np.ndarray]
Numbers = np.ndarray | float


# ---- 1. Heads: draw W at random, and freeze it ---------------------------------------------------


def draw_heads(n_heads: int, mean: np.ndarray, seed: int, scale: float = 0.5) -> np.ndarray:
    """W_m = mean + scale · G_m with independent standard normal entries of G_m, (M, D, D).

    ``mean`` is zero, or W_0 = [[I, 0], [0, 0]] for biased heads, whose mean score is <x_0, x_i>.
    Every head takes the next random words that the seed names, so that a longer draw begins with
    the same heads. They are those of ``kh.GaussianHeads(mean, scale).sample(n_heads, d, seed)``.
    """
    n_words = 4 * math.ceil(mean.size / 4)  # one per entry; the generator makes four at a time
    key = np.random.SeedSequence(seed).generate_state(2, np.uint64)
    words = np.random.Philox(key=key).random_raw(n_heads * n_words).reshape(n_heads, n_words)
    # 52 bits of a word are a uniform number, and the normal quantile of that is a normal number
    uniform = ((words[:, : mean.size] >> np.uint64(12)) + 0.5) / 2.0**52
    return mean + scale * ndtri(uniform).reshape(n_heads, *mean.shape)


# ---- 2. Features: what frozen heads see of a set -------------------------------------------------


def extend(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """x~ = [x; 1] of the query, (D,), and of every key, (N, D).

    Without a query (None) x~_0 = [0; √2], which is as long as that of a query of length one.
    """
    x_0, x = sample
    keys = np.hstack([x, np.ones((len(x), 1))])
    if x_0 is None:
        return np.append(np.zeros(x.shape[1]), math.sqrt(2.0)), keys
    return np.append(x_0, 1.0), keys


def attention_weights(sample: Sample, W: np.ndarray) -> np.ndarray:
    """σ(s_mi)/N with s_mi = x~_0ᵀ W_m x~_i and σ = ReLU: the weight of key i in head m, (M, N)."""
    x_0, x = extend(sample)
    scores = np.einsum("d,mde,ie->mi", x_0, W, x)
    return np.maximum(scores, 0.0) / len(x)


def features(samples: Sequence[Sample], W: np.ndarray) -> np.ndarray:
    """φ_m(x) = M^{-1/2} Σ_i σ(s_mi)/N x~_i, for all heads one after the other: Φ, (n, M·D)."""
    rows = []
    for sample in samples:
        _, x = extend(sample)
        phi = attention_weights(sample, W) @ x  # (M, D)
        rows.append(phi.ravel())
    return np.array(rows) / math.sqrt(len(W))


# ---- 3. Kernel: infinitely many heads ------------------------------------------------------------


def kernel(
    a: Sequence[Sample],
    b: Sequence[Sample],
    mean: np.ndarray,
    scale: float = 0.5,
) -> np.ndarray:
    """K(x, z) = 1/(N N') Σ_ij E[σ(s) σ(t)] <x~_i, z~_j>, the limit of ΦΦᵀ, (n, n').

    The scores s = x~_0ᵀ W x~_i and t = z~_0ᵀ W z~_j are jointly Gaussian: their means are
    x~_0ᵀ E[W] x~_i and likewise, their standard deviations τ = scale·|x~_0||x~_i| and likewise, and
    their correlation is ρ = cos(x~_0, z~_0) cos(x~_i, z~_j).
    """
    # all pairs of keys at once: rows belong to the sets of a, columns to those of b
    x, x_0, average_rows = stack(a)
    z, z_0, average_columns = stack(b)
    tau_s = scale * np.linalg.norm(x_0, axis=1) * np.linalg.norm(x, axis=1)
    tau_t = scale * np.linalg.norm(z_0, axis=1) * np.linalg.norm(z, axis=1)
    tau = np.outer(tau_s, tau_t)
    rho = scale**2 * (x_0 @ z_0.T) * (x @ z.T) / tau
    if not mean.any():
        moments = tau * arc_cosine(rho)
    else:
        h = np.sum((x_0 @ mean) * x, axis=1) / tau_s
        k = np.sum((z_0 @ mean) * z, axis=1) / tau_t
        moments = tau * relu_moment(h[:, None], k[None, :], rho)
    return average_rows @ (moments * (x @ z.T)) @ average_columns.T


def stack(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The keys of all samples, the query of each key, and the matrix that averages over keys."""
    extended = [extend(sample) for sample in samples]
    lengths = np.array([len(x) for _, x in extended])
    keys = np.vstack([x for _, x in extended])
    queries = np.repeat([x_0 for x_0, _ in extended], lengths, axis=0)
    return keys, queries, np.repeat(np.diag(1 / lengths), lengths, axis=1)


def arc_cosine(rho: Numbers) -> Numbers:
    """κ(ρ) = [√(1−ρ²) + (π − arccos ρ) ρ]/2π = E[σ(z) σ(z')], z and z' normal of correlation ρ."""
    rho = np.clip(rho, -1.0, 1.0)
    return (np.sqrt(1 - rho**2) + (np.pi - np.arccos(rho)) * rho) / (2 * np.pi)


def relu_moment(h: Numbers, k: Numbers, rho: Numbers) -> Numbers:
    """E[σ(h + z) σ(k + z')] for normal z and z' of correlation ρ; κ(ρ) if h = k = 0.

    With r = √(1−ρ²), A = (h − ρk)/r and B = (k − ρh)/r it is

        (hk + ρ) Φ₂(h, k; ρ) + h φ(k) Φ(A) + k φ(h) Φ(B) + r φ(k) φ(A).

    Tiny numbers instead of h = 0, k = 0 and r = 0 give the limits there.
    """

    def phi(z: Numbers) -> Numbers:
        return np.exp(-(z**2) / 2) / math.sqrt(2 * np.pi)

    h = np.where(h == 0, 1e-100, h)
    k = np.where(k == 0, 1e-100, k)
    rho = np.where(np.abs(rho) > 1 - 1e-13, np.sign(rho), rho)  # within rounding of ±1
    r = np.sqrt(np.maximum(1 - rho**2, 1e-200))
    A = (h - rho * k) / r
    B = (k - rho * h) / r
    # Φ₂(h, k; ρ) = P(z < h, z' < k), through Owen's function T
    opposite_signs = (h < 0) != (k < 0)
    Phi_2 = (ndtr(h) + ndtr(k) - opposite_signs) / 2 - owens_t(h, B / h) - owens_t(k, A / k)
    sides = h * phi(k) * ndtr(A) + k * phi(h) * ndtr(B)
    return (h * k + rho) * Phi_2 + sides + r * phi(k) * phi(A)


# ---- 4. Ridge: fit the values, and leave out every sample ----------------------------------------


def ridge_inverse(K: np.ndarray, alpha: float) -> np.ndarray:
    """S = [[K + αI, 1], [1ᵀ, 0]]⁻¹, which takes (y, 0) to (a, b)."""
    n = len(K)
    system = np.ones((n + 1, n + 1))
    system[:n, :n] = K + alpha * np.eye(n)
    system[n, n] = 0.0
    return np.linalg.inv(system)


def ridge(K: np.ndarray, y: np.ndarray, alpha: float) -> tuple[np.ndarray, float, np.ndarray]:
    """Minimise Σ_i (y_i − f(x_i))² + α|v|² over v and b; return a, b, leave-one-out residuals e.

    f(x) = b + Σ_j a_j K(x, x_j), so that v = Φᵀa where heads are finitely many, and

        (K + αI) a + b 1 = y,     Σ_j a_j = 0,     or (a, b) = S (y, 0).

    Why e_i = a_i/S_ii: replace y_i by the number y_i − e_i for which a_i, which is linear in y with
    slope S_ii, becomes zero. Then sample i has no part in f, so this is the fit without it; and the
    equation of sample i says f(x_i) = y_i − e_i, so that number is its prediction.
    """
    n = len(y)
    S = ridge_inverse(K, alpha)
    a = S[:n, :n] @ y
    b = S[n, :n] @ y
    e = a / np.diag(S)[:n]
    return a, float(b), e


def logistic(
    K: np.ndarray, y: np.ndarray, alpha: float, n_steps: int = 30
) -> tuple[np.ndarray, float, np.ndarray]:
    """Minimise Σ_i log(1 + exp(−y_i f(x_i))) + α/2 |v|² for y = ±1; return a, b, f_{−i}(x_i).

    Newton's method. With p = 1/(1 + e^{−f}), w = p (1 − p) and the working responses
    z = f + (t − p)/w, t being 1 for y = +1 and 0 for y = −1, a step is the ridge fit to z under
    weights w,

        (K + α W⁻¹) a + b 1 = z,     Σ_j a_j = 0,     or (a, b) = S (z, 0).

    As in `ridge`, z_i − a_i/S_ii is the prediction of the last ridge fit without sample i: that is
    the approximate leave-one-out prediction of the logistic fit, one Newton step from it.
    """
    n = len(y)
    f = np.zeros(n)
    for _ in range(n_steps):
        p = 1 / (1 + np.exp(-f))
        w = p * (1 - p)
        z = f + ((y > 0) - p) / w
        system = np.ones((n + 1, n + 1))
        system[:n, :n] = K + alpha * np.diag(1 / w)
        system[n, n] = 0.0
        S = np.linalg.inv(system)
        a = S[:n, :n] @ z
        b = S[n, :n] @ z
        f = K @ a + b
    return a, float(b), z - a / np.diag(S)[:n]


# ---- 5. Prediction, what each key adds to it, and how sure it is ---------------------------------


def predict(samples: Sequence[Sample], W: np.ndarray, v: np.ndarray, b: float) -> np.ndarray:
    """f(x) = b + Σ_m <v_m, φ_m(x)>, (n,); for infinitely many heads b + K(x, x_j) @ a."""
    return b + features(samples, W) @ v.ravel()


def contributions(sample: Sample, W: np.ndarray, v: np.ndarray) -> np.ndarray:
    """c_i = M^{-1/2} Σ_m σ(s_mi)/N <v_m, x~_i>, (N,): what key i adds to f(x) = b + Σ_i c_i.

    With infinitely many heads it is f of the set of key i alone, less b, divided by N.
    """
    _, x = extend(sample)
    return np.sum(attention_weights(sample, W) * (v @ x.T), axis=0) / math.sqrt(len(W))


def jackknife_interval(
    k: np.ndarray, K: np.ndarray, y: np.ndarray, alpha: float, coverage: float
) -> tuple[float, float]:
    """Jackknife+: from the ranks of f_{−i}(x) ± |e_i|, for a new sample x with k_j = K(x, x_j).

    The fit is linear in y, f(x) = Σ_j h_j(x) y_j, and without sample i it is the fit to y_i − e_i,
    so f_{−i}(x) = f(x) − h_i(x) e_i. With rank ⌈coverage·(n+1)⌉ the upper end is that smallest of
    f_{−i}(x) + |e_i|, the lower end that largest of f_{−i}(x) − |e_i|; beyond n they are infinite.
    """
    n = len(y)
    _, _, e = ridge(K, y, alpha)
    S = ridge_inverse(K, alpha)
    h = np.append(k, 1.0) @ S[:, :n]
    f_without = h @ y - h * e
    rank = math.ceil(coverage * (n + 1))
    if rank > n:
        return -math.inf, math.inf
    lower = np.sort(f_without - np.abs(e))[n - rank]
    upper = np.sort(f_without + np.abs(e))[rank - 1]
    return float(lower), float(upper)


# ---- 6. The learner of the paper's theorems: a norm ball instead of a penalty ---------------


def norm_ball_objective(
    samples: Sequence[Sample],
    y: np.ndarray,
    W: np.ndarray,
    v: np.ndarray,
    b: float,
) -> float:
    """(1/n) Σ_i ℓ(y_i − f(x_i)), to be minimised over b and the v with `norms` up to K_1, √(K_2/M).

    Huber's loss ℓ(r) is r²/2 up to |r| = 1, and |r| − 1/2 beyond. This v is in the scaling of the
    paper, whose features have no M^{-1/2}.
    """
    residuals = np.abs(y - predict(samples, W, math.sqrt(len(W)) * v, b))
    losses = np.where(residuals <= 1, residuals**2 / 2, residuals - 1 / 2)
    return float(np.mean(losses))


def norms(v: np.ndarray) -> tuple[float, float]:
    """Σ_m |v_m|, which is to be at most K_1, and (Σ_m |v_m|²)^{1/2}, at most √(K_2/M)."""
    lengths = np.linalg.norm(v, axis=1)
    return float(np.sum(lengths)), float(np.linalg.norm(lengths))
