"""Members whose heads are learned: fitted anew without each fold, and once on all samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.attention.heads import HeadDistribution
from keyhole.fit.embedding import learn_rule
from keyhole.fit.member import N_FOLDS, Member, fit_member
from keyhole.fit.samples import TrainingSet
from keyhole.fit.settings import FitOptions, LayerSettings


def learned_heads(
    settings: LayerSettings, data: TrainingSet, options: FitOptions
) -> HeadDistribution:
    """The head distribution that these samples teach."""
    heads: Any = settings.heads
    prepared = learn_rule(settings, data, options).apply(data.samples)
    fitted: HeadDistribution = heads.fit(
        prepared.numpy(),
        data.outputs,
        weights=data.weights,
        groups=data.groups,
        seed=options.seed,
        activation=settings.activation,
        fit_intercept=options.fit_intercept,
    )
    return fitted


def fit_learned_member(
    settings: LayerSettings, data: TrainingSet, options: FitOptions, *, loss: str, criterion: str
) -> Member:
    """Learn heads and fit; held-out predictions are of heads and values that have not seen them.

    Leave-one-out would leave a sample out of the values only, while the heads know it.
    """
    quiet = replace(options, tell=None)
    held_out = np.full(data.outputs.shape, np.nan)
    for rest, fold in data.folds(N_FOLDS, classifies=options.classifies, seed=options.seed):
        part = data[rest]
        heads = learned_heads(settings, part, quiet)
        member = fit_member(
            replace(settings, heads=heads), part, quiet, loss=loss, criterion=criterion
        )
        held_out[fold] = member.predict(data.samples[fold])

    heads = learned_heads(settings, data, quiet)
    member = fit_member(replace(settings, heads=heads), data, quiet, loss=loss, criterion=criterion)
    member = replace(member, held_out=held_out, learned_note=getattr(heads, "reason", ""))
    if options.tell is not None:
        options.tell(member)
    return member
