"""The loss of a whole procedure on new samples: settings and penalty chosen, values solved.

Leave-one-out of a fitted model is exact for the settings it has. But these were chosen as the best
of many on the same samples, so that their loss is the least of many, and too good to be true where
samples are few.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from keyhole.attention.head_error import improvement
from keyhole.choose import choose
from keyhole.estimators.uncertainty import Calibration
from keyhole.folds import Folds
from keyhole.layer import FittedLayer
from keyhole.ridge.calibration import class_scores, fit_temperature, labels_of
from keyhole.spec import LayerSpec
from keyhole.training import TrainingSet


@dataclass(frozen=True)
class ProcedureLoss:
    """What a procedure loses on samples that had no part in any of its choices.

    Attributes
    ----------
    loss : float
        The mean over samples: the log-loss of calibrated probabilities, or the squared error.
    standard_error : float
        Of that mean, over samples, or over groups.
    criterion : "log_loss" or "squared_error"
    n_folds : int
        How many times the procedure was repeated, each time without one fold.
    """

    loss: float
    standard_error: float
    criterion: str
    n_folds: int


def loss_of_procedure(spec: LayerSpec, data: TrainingSet, n_folds: int) -> ProcedureLoss:
    """Repeat choice and fit without each fold, and judge them on it.

    ``spec`` is what the user asked for, with everything open that was open.
    """
    data = data.of_positive_weight()
    folds = Folds.of(data, n_folds, seed=spec.seed, classifies=spec.classifies)
    if folds.count < 2:
        raise ValueError(
            "procedure_loss holds folds out, which takes two samples, or groups, of positive "
            f"weight: got {len(data)} samples in one. Give more samples."
        )
    losses = np.empty(len(data))
    for rest, held_out in folds.splits():
        training = data[rest]
        fitted = choose(spec, training).fit(training)
        predictions = fitted.predict(data.samples[held_out])
        if spec.classifies:
            losses[held_out] = log_losses(fitted, training, predictions, data.outputs[held_out])
        else:
            losses[held_out] = np.square(data.outputs[held_out] - predictions).mean(axis=1)

    # the mean, and its standard error: a gain over a loss of zero, with its sign turned
    gain, standard_error = improvement(np.zeros(len(data)), losses, data.weights, data.groups)
    criterion = "log_loss" if spec.classifies else "squared_error"
    return ProcedureLoss(
        loss=-gain, standard_error=standard_error, criterion=criterion, n_folds=folds.count
    )


def log_losses(
    fitted: FittedLayer,
    training: TrainingSet,
    scores: Float[np.ndarray, "m t"],
    outputs: Float[np.ndarray, "m t"],
) -> Float[np.ndarray, " m"]:
    """−log p of the right label of held-out samples.

    The temperature is fitted to the leave-one-out scores of the training samples, as in a fit.
    """
    is_known = np.isfinite(fitted.predictions).all(axis=1)
    weights = None
    if training.weights is not None:
        weights = training.weights[is_known]
    temperature = fit_temperature(
        class_scores(fitted.predictions[is_known]), labels_of(training.outputs[is_known]), weights
    )
    log_probabilities = Calibration(temperature).log_probabilities(scores)
    of_label = np.take_along_axis(log_probabilities, labels_of(outputs)[:, None], axis=1)
    return np.minimum(-of_label[:, 0], -math.log(np.finfo(float).tiny))
