"""The kernels for unit tokens written out plainly: what the theory's laws are checked against."""

import numpy as np


def arc_cosine(rho):
    rho = np.clip(rho, -1, 1)
    return (np.sqrt(1 - rho**2) + (np.pi - np.arccos(rho)) * rho) / (2 * np.pi)


def attention_gram(a, b):
    """K(x, x') = (1/NN') Σ_ij κ((1+<x_0,x_0'>)(1+<x_i,x_j'>)/4) (1+<x_i,x_j'>), in blocks of rows."""
    length_a, length_b = int(a.lengths[0]), int(b.lengths[0])
    gram = np.empty((len(a), len(b)))
    step = max(1, 2_000_000 // (length_a * len(b.tokens)))
    for start in range(0, len(a), step):
        rows = a[start : start + step]
        t = (1 + rows.tokens @ b.tokens.T).reshape(len(rows), length_a, len(b), length_b)
        u = (1 + rows.query @ b.query.T)[:, None, :, None]
        gram[start : start + step] = np.mean(arc_cosine(u * t / 4) * t, axis=(1, 3))
    return gram


def mlp_gram(a, b):
    """κ((Σ_i <x_i, x'_i> + 1)/(N+2)) for sets of one length, in their given order."""
    flat_a = np.concatenate([a.query, a.tokens.reshape(len(a), -1)], axis=1)
    flat_b = np.concatenate([b.query, b.tokens.reshape(len(b), -1)], axis=1)
    return arc_cosine((flat_a @ flat_b.T + 1) / (a.lengths[0] + 2))
