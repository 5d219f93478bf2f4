"""From a list of members to a fitted combination."""

from __future__ import annotations

from collections.abc import Sequence

from keyhole.fit.combine import Combination, combine, single
from keyhole.fit.embedding import Embedding
from keyhole.fit.member import Member, fit_member
from keyhole.fit.samples import TrainingSet
from keyhole.fit.settings import FitOptions, LayerSettings


def fit_combination(
    layers: Sequence[LayerSettings], data: TrainingSet, options: FitOptions
) -> Combination:
    """Fit every layer of a list to the same samples, and combine them by least held-out loss.

    One layer alone minimises the loss of the options. Members of a combination minimise squared
    errors, and their weights the squared error or, of classes, the log-loss. Neighbours in the list
    that differ in their readout alone share features and kernels, which are forgotten then.
    """
    if len(layers) == 1:
        criterion = "log_loss" if options.classifies else "squared_error"
        member = fit_member(layers[0], data, options, loss=options.loss, criterion=criterion)
        return single(member, data, classifies=options.classifies)
    members: list[Member] = []
    embedding: Embedding | None = None
    for settings in layers:
        if embedding is not None and embedding.settings != settings.embedding():
            embedding.forget()
            embedding = None
        if embedding is None and not settings.learns_heads:
            embedding = Embedding.fit(settings.embedding(), data, options)
        members.append(fit_member(settings, data, options, embedding=embedding))
    if embedding is not None:
        embedding.forget()
    return combine(members, data, classifies=options.classifies)
