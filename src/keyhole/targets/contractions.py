"""|f_rs|² of symmetrised coefficient tensors, by counting contractions instead of forming tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from keyhole.targets.polynomial import KEY, PAIR, QUERY

if TYPE_CHECKING:
    from keyhole.targets.polynomial import Polynomial, Term


def coefficient_norms(target: Polynomial) -> dict[tuple[int, int], float]:
    """|f_rs|² by degree, for targets with one term of the families' form in each degree."""
    norms: dict[tuple[int, int], float] = {}
    for term in target.terms:
        if term.degrees in norms:
            raise ValueError(f"two terms of degree {term.degrees}: only one is supported so far.")
        norms[term.degrees] = term.coefficient**2 * _term_norm(term, target.dim)
    return norms


def _term_norm(term: Term, dim: int) -> float:
    pairs = [(f.array, p) for f, p in term.powers if f.kind == PAIR]
    keys = [(f.array, p) for f, p in term.powers if f.kind == KEY]
    query = [(f.array, p) for f, p in term.powers if f.kind == QUERY]
    if not pairs and len(keys) <= 1 and len(query) <= 1:
        return float(np.prod([float(v @ v) ** p for v, p in keys + query if v is not None]))
    if len(pairs) == 1 and len(keys) == 1 and keys[0][1] == 1 and not query:
        matrix, q = pairs[0]
        beta = keys[0][0]
        assert beta is not None
        gram = np.eye(dim) if matrix is None else matrix.T @ matrix
        # permutations of the q+1 key slots: the cycle through β, times cycles that trace powers of AᵀA
        path, traces, power = np.zeros(q + 1), np.zeros(q + 1), np.eye(dim)
        for k in range(q + 1):
            path[k] = beta @ power @ beta
            power = power @ gram
            if k < q:
                traces[k + 1] = np.trace(power)
        cycles = np.zeros(q + 1)
        cycles[0] = 1.0
        for k in range(1, q + 1):
            cycles[k] = sum(traces[j] * cycles[k - j] for j in range(1, k + 1)) / k
        return float(sum(path[k] * cycles[q - k] for k in range(q + 1)) / (q + 1))
    raise ValueError("only the four families are supported so far.")
