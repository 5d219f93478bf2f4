"""The whole procedure on samples that it has not seen: members' penalties, weights and all.

A combination is chosen on the same leave-one-out predictions that are then shown, which flatters it
where samples are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from keyhole.fit.combine import Combination
from keyhole.fit.fit import fit_combination
from keyhole.fit.samples import TrainingSet
from keyhole.fit.settings import FitOptions, LayerSettings
from keyhole.solve.calibration import fit_temperature, labels_of

FEW_SAMPLES = 300
"""Samples below which the procedure is repeated."""

N_FOLDS = 10


def with_honest_predictions(
    combination: Combination,
    layers: Sequence[LayerSettings],
    data: TrainingSet,
    options: FitOptions,
) -> Combination:
    """The combination with held-out predictions of the procedure, repeated on ten folds.

    They calibrate the probabilities of a classifier as well.
    """
    quiet = replace(options, tell=None)
    held_out = np.full(data.outputs.shape, np.nan)
    for rest, fold in data.folds(N_FOLDS, classifies=options.classifies, seed=options.seed):
        repeated = fit_combination(layers, data[rest], quiet)
        held_out[fold] = repeated.predict(data.samples[fold])
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
