"""The procedure on samples that it has not seen: the members' penalties, and the weights.

A combination is chosen on the same leave-one-out predictions that are then shown: they are too good
where samples are few. Penalties and weights are chosen again without each fold. Kernels are those
of all samples: of y they know the strength of sample-level features alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from keyhole.fit.combine import Combination, weights_of
from keyhole.fit.samples import TrainingSet
from keyhole.fit.settings import FitOptions
from keyhole.solve.calibration import fit_temperature, labels_of
from keyhole.solve.cholesky import fit_gram
from keyhole.solve.problem import RidgeProblem

FEW_SAMPLES = 300
"""Samples below which the procedure is repeated."""

N_FOLDS = 10


def with_honest_predictions(
    combination: Combination, data: TrainingSet, options: FitOptions
) -> Combination:
    """The combination with held-out predictions of the procedure, repeated on ten folds.

    They calibrate the probabilities of a classifier as well. Members must have kept their Gram
    matrices, which are dropped.
    """
    held_out = np.full(data.outputs.shape, np.nan)
    for rest, fold in data.folds(N_FOLDS, classifies=options.classifies, seed=options.seed):
        held_out[fold] = _predictions_of_fold(combination, data, options, rest, fold)
    tried = tuple(replace(member, gram=None) for member in combination.tried)
    places = [_place(member, combination.tried) for member in combination.members]
    combination = replace(combination, members=tuple(tried[place] for place in places), tried=tried)
    if not options.classifies:
        return replace(combination, held_out=held_out)
    # logits that are too sure of themselves on new samples are made smaller
    temperature = fit_temperature(
        combination.logits(held_out), labels_of(data.outputs), data.shares * len(data)
    )
    return replace(
        combination,
        weights=combination.weights * temperature,
        intercept=combination.intercept * temperature,
        held_out=held_out * temperature,
    )


def _predictions_of_fold(
    combination: Combination,
    data: TrainingSet,
    options: FitOptions,
    rest: Int[np.ndarray, " r"],
    fold: Int[np.ndarray, " h"],
) -> Float[np.ndarray, "h t"]:
    """What the procedure, fitted to the other samples, predicts for a fold."""
    part = data[rest]
    left_out = []
    predicted = []
    for member in combination.tried:
        assert member.gram is not None
        problem = RidgeProblem.of(
            part.outputs,
            options.alphas,
            fit_intercept=options.fit_intercept,
            weights=part.weights,
            groups=part.groups,
        )
        fit = fit_gram(member.gram[np.ix_(rest, rest)], problem)
        assert fit.left_out is not None
        left_out.append(part.outputs - fit.left_out)
        predicted.append(member.gram[np.ix_(fold, rest)] @ fit.coef + fit.intercept)
    kept, weights, intercept = weights_of(np.stack(left_out), part, classifies=options.classifies)
    return intercept + np.einsum("c,cnt->nt", weights, np.stack(predicted)[kept])


def _place(member: object, members: tuple[object, ...]) -> int:
    """The position of a member among all that were tried."""
    return next(i for i, other in enumerate(members) if other is member)
