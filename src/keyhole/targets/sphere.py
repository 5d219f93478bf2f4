"""The sphere law: query and keys i.i.d. uniform on the unit sphere, and the rotations that live on it."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

from keyhole._checks import check_count, check_seed
from keyhole.sets import SetBatch


def sphere_sets(n_sets: int, n_keys: int, dim: int, seed: int) -> SetBatch:
    """Draw sets whose query and keys are i.i.d. uniform on the unit sphere of R^d.

    Parameters
    ----------
    n_sets, n_keys, dim : int
        n, N and d. For d = 1 the sphere is {−1, 1}.
    seed : int
        The same seed is the same sequence of sets: the first n of a longer draw are the draw of n.

    Returns
    -------
    SetBatch
        n sets of N keys, with query.

    Notes
    -----
    Cost: n (N+1) d Gaussian draws.

    Examples
    --------
    >>> batch = sphere_sets(n_sets=4, n_keys=2, dim=3, seed=0)
    >>> batch
    SetBatch(4 sets, 2 keys each (8 in all), dim 3, with query, float64)
    >>> bool((batch.query[:2] == sphere_sets(2, 2, 3, seed=0).query).all())   # draws nest
    True
    """
    n_sets, n_keys = check_count(n_sets, "n_sets"), check_count(n_keys, "n_keys")
    dim, seed = check_count(dim, "dim"), check_seed(seed)
    # a Generator fills arrays in order, set after set: that is why draws nest
    tokens = np.random.default_rng(seed).standard_normal((n_sets, 1 + n_keys, dim))
    tokens /= np.linalg.norm(tokens, axis=-1, keepdims=True)
    return SetBatch.from_tokens(tokens)


def fixed_free_rotation(dim: int, seed: int) -> Float[np.ndarray, "d d"]:
    """Draw an orthogonal matrix without fixed directions: no x ≠ 0 has P x = x, and tr P = 0 for d ≥ 2.

    Quarter turns in random orthogonal planes. An odd dimension leaves three directions over, which get a turn
    by 60° and a reflection: eigenvalues e^{±iπ/3} and −1, whose sum is zero too. In dimension one P = −1.

    Examples
    --------
    >>> import numpy as np
    >>> P = fixed_free_rotation(dim=5, seed=0)
    >>> bool(np.allclose(P @ P.T, np.eye(5))), bool(abs(np.trace(P)) < 1e-12)
    (True, True)
    """
    dim, seed = check_count(dim, "dim"), check_seed(seed)
    if dim == 1:
        return np.array([[-1.0]])
    turns = np.zeros((dim, dim))
    planes = dim - 3 if dim % 2 else dim
    for i in range(0, planes, 2):
        turns[i, i + 1], turns[i + 1, i] = -1.0, 1.0
    if dim % 2:
        cosine, sine = math.cos(math.pi / 3), math.sin(math.pi / 3)
        turns[planes:, planes:] = [[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, -1.0]]
    basis, triangle = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))
    basis *= np.sign(np.diag(triangle))  # QR's own signs would bias the basis; with these it is uniform
    return np.asarray(basis @ turns @ basis.T)
