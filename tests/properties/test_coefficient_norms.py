"""|f_rs|² counted by contractions is the norm of the symmetrised tensor, written out."""

import itertools
import math

import numpy as np
import pytest

from keyhole.theory.targets import KEY, PAIR, Correlation, RotatedCorrelation, TokenPower, monomial


def tensor(term, dim, symmetrise=True):
    """The coefficient tensor of a term: query slots, then key slots, averaged over permutations of
    each.
    """
    r, s = term.degrees
    entries, query_slots, key_slots = np.array(term.coefficient), [], []
    for factor, power in term.powers:
        for _ in range(power):
            array = np.eye(dim) if factor.array is None else factor.array
            first = entries.ndim
            entries = np.multiply.outer(entries, array)
            if factor.kind == PAIR:
                query_slots.append(first)
                key_slots.append(first + 1)
            else:
                (key_slots if factor.kind == KEY else query_slots).append(first)
    entries = entries.transpose(query_slots + key_slots)
    if not symmetrise:
        return entries
    total = sum(
        entries.transpose([*a, *(r + i for i in b)])
        for a in itertools.permutations(range(r))
        for b in itertools.permutations(range(s))
    )
    return total / (math.factorial(r) * math.factorial(s))


def targets(rng, dim):
    A, B = rng.standard_normal((2, dim, dim))
    b, c, g, h = rng.standard_normal((4, dim))
    mixed = monomial(dim, 1.0, [(A, 1), (B, 1)], [(b, 1)], [(g, 1)])
    mixed = mixed - monomial(dim, 1.0, [(None, 1), (B, 1)], [(b, 1)], [(g, 1)])
    mixed = mixed + monomial(dim, 1.0, [(B, 2)], [(c, 1)], [(h, 1)])
    mixed = mixed + 0.7 * monomial(dim, 1.0, [], [(b, 1), (c, 2)], [(g, 2), (h, 1)])
    return [
        Correlation(3, dim, b),
        RotatedCorrelation(0.3, dim, seed=0, beta=c),
        monomial(dim, 2.0, [(A, 2)], [(b, 1), (c, 1)], [(g, 1)]),
        monomial(dim, 1.0, [(A, 3)]),
        mixed,
    ]


def norms_by_tensors(target, symmetrise=True):
    sums = {}
    for term in target.terms:
        sums[term.degrees] = sums.get(term.degrees, 0) + tensor(term, target.dim, symmetrise)
    return {degree: float(np.sum(entries**2)) for degree, entries in sums.items()}


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_contractions_give_the_norm_of_the_symmetrised_tensor(dim, rng):
    for target in targets(rng, dim):
        got = target.coefficient_norms()
        want = norms_by_tensors(target)
        assert got.keys() == want.keys()
        for degree in want:
            assert math.isclose(got[degree], want[degree], rel_tol=1e-9, abs_tol=1e-12)


def test_without_symmetrising_the_norm_is_wrong(rng):
    target = Correlation(2, 3)
    assert norms_by_tensors(target, symmetrise=False)[2, 3] > 1.5 * target.coefficient_norms()[2, 3]


def test_norms_of_equal_degree_do_not_add(rng):
    """The broken sum of norms misses the cross term of two targets of one degree."""
    first, second = (
        Correlation(1, 3),
        monomial(3, 1.0, [(rng.standard_normal((3, 3)), 1)], [(np.ones(3), 1)]),
    )
    together = (first + second).coefficient_norms()[1, 2]
    apart = first.coefficient_norms()[1, 2] + second.coefficient_norms()[1, 2]
    assert math.isclose(together, norms_by_tensors(first + second)[1, 2], rel_tol=1e-9)
    assert abs(together - apart) > 1e-6


@pytest.mark.parametrize(("dim", "q"), [(2, 1), (5, 4), (64, 8), (512, 8), (3, 40)])
def test_correlation_has_its_closed_form(dim, q):
    """|f_{q,q+1}|² = (d+1) ⋯ (d+q) / (q+1)!."""
    want = math.prod(range(dim + 1, dim + q + 1)) / math.factorial(q + 1)
    assert math.isclose(Correlation(q, dim).coefficient_norms()[q, q + 1], want, rel_tol=1e-12)


def test_high_powers_neither_overflow_nor_underflow():
    assert math.isclose(TokenPower(400, 8).coefficient_norms()[0, 400], 1.0, rel_tol=1e-12)


def test_degree_eight_at_dimension_512_is_counted_and_not_formed():
    assert np.isfinite(list(Correlation(8, 512).coefficient_norms().values())).all()
