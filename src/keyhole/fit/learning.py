"""Members whose heads are learned: once on all samples, and again without each fold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.attention.heads import GaussianHeads, HeadDistribution
from keyhole.attention.learned import LearnedHeads
from keyhole.fit.embedding import learn_rule
from keyhole.fit.member import N_FOLDS, Member, fit_member
from keyhole.fit.samples import TrainingSet
from keyhole.fit.settings import FitOptions, LayerSettings


def learned_heads(
    settings: LayerSettings,
    data: TrainingSet,
    options: FitOptions,
    like: HeadDistribution | None = None,
) -> HeadDistribution:
    """The head distribution that these samples teach, by as many steps as another took."""
    heads: Any = settings.heads
    # frozen heads stand in, to weigh sample-level features beside
    frozen = replace(settings, heads=GaussianHeads())
    prepared = learn_rule(frozen, data, options).apply(data.samples)
    known: dict[str, Any] = {}
    if like is not None and isinstance(heads, LearnedHeads):
        known["like"] = like
    fitted: HeadDistribution = heads.fit(
        prepared,
        data.outputs,
        weights=data.weights,
        groups=data.groups,
        seed=options.seed,
        activation=settings.activation,
        fit_intercept=options.fit_intercept,
        **known,
    )
    return fitted


def fit_learned_member(
    settings: LayerSettings, data: TrainingSet, options: FitOptions, *, loss: str, criterion: str
) -> Member:
    """Learn heads and fit; held-out predictions are of heads and values that have not seen them.

    Leave-one-out would leave a sample out of the values only, while the heads know it. How many
    hops and steps there are is found once, with all samples; each fold then costs one descent.
    """
    quiet = replace(options, tell=None)
    heads = learned_heads(settings, data, quiet)
    member = fit_member(replace(settings, heads=heads), data, quiet, loss=loss, criterion=criterion)
    member = replace(member, learned_note=getattr(heads, "reason", ""))
    if getattr(heads, "chosen", "learned") == "learned":
        held_out = np.full(data.outputs.shape, np.nan)
        for rest, fold in data.folds(N_FOLDS, classifies=options.classifies, seed=options.seed):
            part = data[rest]
            of_part = replace(settings, heads=learned_heads(settings, part, quiet, like=heads))
            without = fit_member(of_part, part, quiet, loss=loss, criterion=criterion)
            held_out[fold] = without.predict(data.samples[fold])
        member = replace(member, held_out=held_out)
    if options.tell is not None:
        options.tell(member)
    return member
