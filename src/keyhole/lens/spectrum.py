"""The spectrum of a Gram matrix on this data, and how the target loads on it."""

from __future__ import annotations

import numpy as np

from keyhole.lens.findings import Measured, TargetLoading


def spectrum_of(m: Measured, gram: np.ndarray, columns: np.ndarray) -> TargetLoading:
    """Eigenvalues of the centred matrix over n, and what share of the target's power lies along each direction."""
    centred = gram - gram.mean(axis=0) - gram.mean(axis=1)[:, None] + gram.mean()
    values, vectors = np.linalg.eigh(centred / len(gram))
    target = columns - columns.mean(axis=0)
    power = np.square(vectors.T @ target).sum(axis=1) / np.square(target).sum()
    return TargetLoading(
        m.name, "pooled" if m.family == "pooled" else m.role, np.maximum(values[::-1], 0.0), power[::-1]
    )
