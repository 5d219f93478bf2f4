"""Ridge by one named route at a time, with every penalty of a path at hand.

keyhole chooses the route by the shape of the problem: a reduced Gram matrix, one factorisation for
one penalty, or the principal axes of a design. Property tests of ridge regression (exact
leave-one-out, posterior variances, routes that agree) call each route here by its name.
"""

import numpy as np

from keyhole._array import MEMORY_BUDGET, block_size, blocks
from keyhole.ridge.design import ridge_rows
from keyhole.ridge.gram import path_route, ridge_gram, weigh_gram
from keyhole.ridge.problem import RidgeProblem


def gram_path(
    gram,
    y,
    alphas=None,
    *,
    rounding=None,
    dtype=None,
    overwrite_gram=False,
    memory_budget=None,
    **options,
):
    """A path from one reduction of the Gram matrix, even if it is a path of one penalty."""
    problem = RidgeProblem.of(y, alphas, **options)
    matrix, weighing = weigh_gram(gram, problem, overwrite=overwrite_gram)
    rounding = float(np.finfo(gram.dtype).eps) if rounding is None else rounding
    dtype = gram.dtype if dtype is None else np.dtype(dtype)
    route = path_route(matrix, weighing, rounding, dtype, memory_budget or MEMORY_BUDGET)
    return problem.fit(route, keep_factor=True)


def gram_fixed(
    gram, y, alpha, *, rounding=None, overwrite_gram=False, memory_budget=MEMORY_BUDGET, **options
):
    """One penalty."""
    given = {"rounding": rounding, "overwrite_gram": overwrite_gram, "memory_budget": memory_budget}
    return ridge_gram(gram, RidgeProblem.of(y, [alpha], **options), **given)


def design_path(design, y, alphas=None, *, memory_budget=MEMORY_BUDGET, **options):
    """A path from the principal axes of a design."""
    size = block_size(8 * 6 * design.shape[1], memory_budget)

    def row_blocks():
        return (design[rows] for rows in blocks(len(design), size))

    return ridge_rows(row_blocks, RidgeProblem.of(y, alphas, **options), keep_factor=True)
