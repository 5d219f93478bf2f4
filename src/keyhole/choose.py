"""The one place where defaults are chosen: an open specification becomes a complete one.

`choose` drafts candidates on few samples and few heads, and compares their losses on samples that
were left out. What is chosen, one after the other: the scaling of tokens, the pooling, the query,
the head distribution, the activation; whether a few keys of large sets are selected; then the
number of heads, by predicted cost alone, and the scale of extras. An explicit setting is never
overridden.

Two kinds of candidates. Those of *fixed* features are ridge on features that do not depend on y:
their leave-one-out losses are exact, and cost nothing. *Fitted* candidates learn something of y
before the ridge, such as heads or the keys to see: each is fitted anew without every fold of the
samples, and its losses on the folds are paired, sample by sample, with those of the best fixed
candidate on the same folds (`choose_fitted`).

docs/explanation/defaults.md, "Default settings", says the same for users. `keyhole.textbook`
chooses nothing; for one output under the squared error, the losses that are compared here are
means of squares of the e that its `ridge` returns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int
from scipy.special import softmax

from keyhole._array import block_size
from keyhole._checks import FeatureOverflowError, NoPenaltyError
from keyhole.attention.activations import SOFTMAX
from keyhole.attention.backends import backend_for, device_to_learn_on
from keyhole.attention.descent import DescentSettings
from keyhole.attention.features import attention_features
from keyhole.attention.head_error import improvement
from keyhole.attention.heads import GaussianHeads, HeadDistribution, HeadDraw
from keyhole.attention.hops import Ages, UsedCoordinates
from keyhole.attention.kernels import attention_kernel
from keyhole.attention.learned import LearnedHeads
from keyhole.attention.search import MIN_SAMPLES_FOR_ONE_SPLIT, SCREENING_STEPS, race_cost
from keyhole.costs import (
    AUTO_HEADS,
    ChoiceBudget,
    can_be_exact,
    choose_n_heads,
    fit_seconds,
    keys_seen,
    newton_seconds,
    step_seconds,
)
from keyhole.data.arrays import on_host
from keyhole.data.sets import SetBatch
from keyhole.data.tokens import (
    ADDS_FEATURES,
    POOLINGS,
    SCALINGS,
    TokenRule,
    coordinate_sizes,
    coordinate_sizes_of_queries,
)
from keyhole.folds import N_FOLDS, Folds
from keyhole.key_selection import ALL_KEYS, SelectedKeys, select_keys, selection_seconds
from keyhole.layer import FittedLayer, fit, learn_tokens
from keyhole.logistic.gram import logistic_gram
from keyhole.logistic.problem import LogisticProblem
from keyhole.ridge.calibration import calibrate, class_scores, labels_of
from keyhole.ridge.gram import ridge_gram
from keyhole.ridge.problem import RidgeProblem
from keyhole.solvers.solve import extras_or_none
from keyhole.spec import AUTO, LayerSpec
from keyhole.training import TrainingSet

DRAFT_SAMPLES = (500, 350, 250, 180, 128)
"""Samples that settings are chosen by: the first of these numbers that lets all drafts together
cost no more than `costs.DRAFTS_COST` fits. Rules that five hundred cannot tell apart may as well be
exchanged (on digits "standard" and "none" are)."""

MIN_DRAFT_SAMPLES = 8
"""Samples below which nothing is chosen: tokens stay as they are."""

DRAFT_HEADS = 64
"""Heads at least that settings are chosen with, unless the user asks for fewer."""

MOST_DRAFT_HEADS = 256
"""Heads at most that settings are chosen with, where they are affordable: candidates that have no
exact kernel are compared with some that have one."""

GUARD = 2.0
"""Standard errors by which a candidate must be better than a simpler one that it would replace."""

STRENGTHS = (1.0, 3.0, 10.0, 30.0)
"""Multiples of the identity that are tried as mean of the heads where there is a query."""

DRAWN_STRENGTHS = GaussianHeads(mean=(0.3, 20.0), scale=0.1)
"""Heads that differ in the coordinates they compare, tried under softmax: there the multiple is how
sharply a head selects keys. Chosen on the first 80 % of MovieLens; ReLU gains little by it."""

SOFTMAX_SCALES = (0.5, 2.0, 8.0)
"""Scales of zero-mean heads that are tried under softmax, from near an average to near a maximum,
until one is no better than the one before."""

EACH_COST = 4.0
EACH_SECONDS = 5.0
"""What a fit with every key as a query may cost to be tried at all: so many times a fit without, or
so many predicted seconds of one core."""

NEWTON_COST = 3.0
NEWTON_SECONDS = 2.0
"""What Newton steps of the log-loss may cost to be tried at all: so many times a fit in closed
form, or so many predicted seconds of one core."""

STAGE_SHARE = 0.25
"""Share of what choosing may cost that one stage of expensive drafts may take."""

SCREENING_SAMPLES = (300, 200, 128)
"""Samples of a step of short descents: the first of these numbers that is affordable."""

CHECKS_COST = 1.3
"""What a descent costs with the checks of its held-out error, in units of its steps."""

LARGE_SETS = 32
"""Keys of the median set from which on a selection of keys is tried."""

SELECTED_KEYS = 8
"""Keys of each set that are kept where a selection is tried. On bags of 200 to 600 keys of which
one in seventy matters, 4, 8 and 16 keys gave AUC 1.000, .998 and .998 (six draws)."""

LOSS_ROUNDING = 1e-6
"""Share of the variance of y below which a difference of losses is not worth a choice, and the
candidate that comes first is kept: on tokens of length one "none" and "sphere" are the same rule,
and the order of the samples decides the last digits of their losses."""

MIXED_UNITS = 100.0
"""Factor between the sizes of the largest coordinate and of the median one from which on
coordinates have units of their own, such as years and stars: without standardising only the largest
counts, and few samples may not show it."""

MAX_SAMPLES_FOR_EXTRAS = 500
"""Samples that the scale of extras is chosen by: one Gram matrix of so many serves every scale."""

EXTRAS_SCALES = (0.1, 1.0, 10.0, 100.0)
"""Scales of extras that are tried, in units in which extras vary as much as the features of sets
do.
"""


@dataclass(frozen=True)
class Candidate:
    """Settings that were tried, with their loss on the samples that were left out.

    ``n_heads`` are those of the draft, ``seconds`` what it took, by the clock, and ``objective`` is
    what its values minimise: "squared_error" or "log_loss". ``held_out`` is what was left out at a
    time, "samples" or "folds", or "first folds" of a candidate that was given up: losses of the one
    kind are not compared with losses of the other.
    """

    scaling: str
    query: str
    heads: HeadDistribution
    loss: float
    activation: str = "relu"
    pooling: str = "mean"
    n_heads: float = math.inf
    seconds: float = field(default=0.0, compare=False)
    objective: str = "squared_error"
    keys: int | str = ALL_KEYS
    held_out: str = "samples"


@dataclass(frozen=True)
class Choice:
    """A complete specification, and the candidates it was chosen from.

    ``final`` is the final fit where a draft already is it, else None. ``selected`` are the keys of
    the training samples that the layer sees, where some are selected.
    """

    spec: LayerSpec
    candidates: tuple[Candidate, ...]
    final: FittedLayer | None
    selected: SelectedKeys | None = None

    def with_selected_keys(self, selected: SelectedKeys) -> Choice:
        """What was chosen on samples of selected keys, as a choice for all their keys."""
        keys = selected.selection.n_keys
        final = self.final
        if final is not None:
            final = replace(final, spec=replace(final.spec, keys=keys), selected=selected)
        candidates = tuple(replace(candidate, keys=keys) for candidate in self.candidates)
        return Choice(
            spec=replace(self.spec, keys=keys),
            candidates=candidates,
            final=final,
            selected=selected,
        )

    def fit(self, data: TrainingSet) -> FittedLayer:
        """The final fit, to the samples that settings were chosen on."""
        if self.final is not None:
            return self.final
        return fit(self.spec, data, selected=self.selected)

    def token_rule(self, data: TrainingSet) -> TokenRule:
        """The token rule that was chosen, learned on some samples."""
        return learn_tokens(self.spec, data)


def choose(
    spec: LayerSpec, data: TrainingSet, tell: Callable[[Candidate], None] | None = None
) -> Choice:
    """Choose the settings that a specification leaves open, apart from the penalty.

    1. The scaling of tokens is the one of least loss under the first query. Where coordinates have
       units of their own, tokens are standardised unless another scaling is clearly better.
    2. Features are added up instead of averages, or the number of keys, or statistics of the
       keys, become sample-level features, if that is clearly better.
    3. The mean of the keys becomes the query, under any scaling, if its loss is less; each key in
       turn, where that is affordable, if it is clearly better.
    4. The mean of the heads becomes a multiple of the identity if that is clearly better. Multiples
       grow until one is no better than the one before.
    5. Softmax, under heads, a scaling, a pooling and a query of its own, takes the place of ReLU if
       it is clearly better.
    6. Values of classes minimise the log-loss instead of squared errors if that is clearly
       better, and affordable.
    7. Of large sets only a few keys are seen, those that a scoring layer finds to matter most, if
       that is clearly better on held-out folds. All else is then chosen anew.
    8. Heads are learned, if short descents gain, and if the whole of it is then clearly better on
       the samples that it holds out.
    9. The number of heads follows from predicted cost alone, and the scale of the sample-level
       features is chosen last.

    "Clearly better" is better by more than `GUARD` standard errors of the differences between the
    losses of the same samples. Heads that are to be learned are learned later, by
    `keyhole.layer.fit`, under the settings that were chosen with ``spec.fixed_heads``.

    ``tell`` is called with every candidate as soon as its loss is known.
    """
    # samples move to a device once, for all drafts
    data = data.with_samples(backend_for(spec.device).placed(data.samples))

    # keys that were asked for are selected first: all else is chosen for what the layer sees
    if spec.selects_keys:
        selected = select_keys(spec, data)
        choice = choose(replace(spec, keys=ALL_KEYS), selected.data, tell)
        return choice.with_selected_keys(selected)

    # outputs of size one, so that no loss overflows; choices then do not depend on the units of y
    given = data
    exponent = data.output_exponent()
    data = data.with_outputs_in_units(exponent)

    # squared errors of one output have the square of its units; log-losses, and errors of several
    # outputs, each in units of its variance, have none
    loss_exponent = 0
    if spec.criterion == "squared_error" and data.outputs.shape[1] == 1:
        loss_exponent = 2 * exponent

    chosen = first_settings(spec)
    candidates: tuple[Candidate, ...] = ()
    best: Draft | None = None
    search = CandidateSearch.of(spec, data, loss_exponent, tell)
    if search is not None:
        # the stages ask for one draft after the other, and end with the best of them
        stages = all_stages(search)
        trial = next(stages)
        while best is None:
            draft = search.draft(trial)
            try:
                trial = stages.send(draft)
            except StopIteration as end:
                best = end.value
        candidates = tuple(search.candidates)

        # a selection of keys won: everything else is chosen anew for the keys that are seen
        if best.spec.selects_keys:
            choice = choose(replace(spec, keys=best.spec.keys), given, tell)
            return replace(choice, candidates=candidates + choice.candidates)
        chosen = replace(
            chosen,
            scaling=best.spec.scaling,
            pooling=best.spec.pooling,
            query=best.spec.query,
            activation=best.spec.activation,
            loss=best.spec.loss,
        )
        # heads that the user gave stay, fixed or to be learned under these settings
        if spec.heads is None:
            chosen = replace(chosen, heads=best.spec.heads, starts=best.spec.starts)

    # the number of heads, for the activation and the query that were chosen
    chosen = replace(chosen, n_heads=final_n_heads(spec, chosen, data))

    # a draft that used all samples and all heads need not be fitted again; where the scale of
    # extras is still to be chosen, it must be
    final = None
    if search is not None and best is not None and search.is_final(best, chosen):
        assert best.fitted is not None
        final = best.fitted.in_units(exponent)

    # the scale of extras, under the settings that were chosen
    if spec.extras_scale is None:
        chosen = replace(chosen, extras_scale=1.0)
        if has_extras(chosen, data):
            chosen = replace(chosen, extras_scale=choose_extras_scale(chosen, data))
    return Choice(spec=chosen, candidates=candidates, final=final)


def first_settings(spec: LayerSpec) -> LayerSpec:
    """The specification with what is tried first instead of what is open."""
    settings = spec
    if settings.activation == AUTO:
        settings = replace(settings, activation="relu")
    if settings.pooling == AUTO:
        settings = replace(settings, pooling="mean")
    if settings.scaling == AUTO:
        settings = replace(settings, scaling="none")
    if settings.query == AUTO:
        settings = replace(settings, query="given")
    if settings.heads is None:
        settings = replace(settings, heads=GaussianHeads())
    if settings.loss == AUTO:
        settings = replace(settings, loss="squared_error")
    if settings.keys == AUTO:
        settings = replace(settings, keys=ALL_KEYS)
    return settings


def final_n_heads(spec: LayerSpec, chosen: LayerSpec, data: TrainingSet) -> float:
    """The number of heads of the final fit.

    A query that is open costs as much as one that is given: the number must not depend on whether
    the mean of the keys has won. Every key as a query costs more, and softmax has no exact kernel.
    """
    query = spec.query
    if chosen.query == "each":
        query = "each"
    priced = replace(spec, activation=chosen.activation, query=query)
    return choose_n_heads(priced, data.samples, data.positive_rows)


def has_extras(spec: LayerSpec, data: TrainingSet) -> bool:
    """Whether the layer sees sample-level features: given ones, or some made of the keys."""
    return data.has_extras or spec.pooling in ADDS_FEATURES


# ---- the stages ----------------------------------------------------------------------------------
#
# A stage yields the trials it wants to have made, is sent the draft of each, and returns the best
# draft so far. `choose` makes the drafts, so that a fit is few calls deep.


def all_stages(search: CandidateSearch) -> Stage:
    """Setting after setting, each under the best of those before it."""
    best = yield from choose_scaling(search)
    search.simplest = best
    for stage in (choose_pooling, choose_query, choose_head_mean, choose_activation, choose_loss):
        # a loss of nothing leaves nothing to gain
        if best.loss > search.negligible:
            best = yield from stage(search, best)

    # what learns something of y before the ridge, after everything that does not
    for fitted_stage in (choose_keys, choose_learned_heads):
        if best.loss > search.negligible and not best.spec.selects_keys:
            best = yield from fitted_stage(search, best)
    return best


def choose_scaling(search: CandidateSearch) -> Stage:
    """The scaling of least loss, under what is tried first of all else.

    Where units are mixed, standardised tokens unless another scaling is clearly better.
    """
    first = search.first
    drafts = []
    for scaling in search.scalings:
        drafts.append((yield CandidateTrial(replace(first, scaling=scaling))))
    best = search.best(drafts)
    if best.failure is not None:  # an infinite loss is the least: all of them failed
        raise best.failure
    if "standard" in search.scalings and has_mixed_units(search.part.samples.sets):
        standard = drafts[search.scalings.index("standard")]
        if not search.is_better(best, standard):
            return standard
    return best


def choose_pooling(search: CandidateSearch, best: Draft) -> Stage:
    """Sums, or means beside the size or statistics of a set, if clearly better than means alone."""
    drafts = []
    for pooling in search.poolings[1:]:
        # what a scaling removes, such as the lengths of tokens, may matter to sums alone
        scalings: Sequence[str] = (best.spec.scaling,)
        if pooling == "sum":
            scalings = search.scalings
        for scaling in scalings:
            spec = replace(best.spec, pooling=pooling, scaling=scaling)
            drafts.append((yield CandidateTrial(spec)))
    return search.replaced(best, drafts)


def choose_query(search: CandidateSearch, best: Draft) -> Stage:
    """The mean of the keys, or each key in turn, as the query."""
    if "mean" in search.queries[1:]:
        # products of means need lengths of tokens, which the scaling that was best without a query
        # may have removed
        drafts = []
        for scaling in search.scalings_from(best.spec.scaling):
            spec = replace(best.spec, query="mean", scaling=scaling)
            drafts.append((yield CandidateTrial(spec)))
        # no more complicated than the constant query, so the least loss decides, without a guard
        draft = search.best(drafts)
        if search.is_lower(draft, best):
            best = draft
    each = replace(best.spec, query="each")
    if "each" in search.queries[1:] and search.can_afford(each, n_drafts=1):
        draft = yield CandidateTrial(each)
        best = search.replaced(best, [draft])
    return best


def choose_head_mean(search: CandidateSearch, best: Draft) -> Stage:
    """A multiple of the identity as the mean of the heads, if that is clearly better than zero.

    Multiples grow until one is no better than the one before. Under softmax, heads that draw a
    multiple for each coordinate are tried as well.
    """
    if not search.may_have_mean(best):
        return best
    pairs = search.pairs(best)
    drafts = [best]
    for strength in STRENGTHS:
        heads = GaussianHeads(strength, pairs=pairs)
        drafts.append((yield CandidateTrial(replace(best.spec, heads=heads))))
        if not search.is_lower(drafts[-1], drafts[-2]):
            break
    if best.spec.activation == SOFTMAX:
        heads = GaussianHeads(DRAWN_STRENGTHS.mean, DRAWN_STRENGTHS.scale, pairs=pairs)
        drafts.append((yield CandidateTrial(replace(best.spec, heads=heads))))
    return search.replaced(best, drafts[1:])


def choose_activation(search: CandidateSearch, best: Draft) -> Stage:
    """Softmax, if it is clearly better than what was chosen for the first activation."""
    if not search.chooses_activation:
        return best

    # a softmax averages over keys by itself: instead of sums it has the size beside the mean
    pooling = best.spec.pooling
    if pooling == "sum" and search.spec.pooling == AUTO:
        pooling = "mean+size"
    # each key as a query is for sums over pairs, and costs most: without it
    query = best.spec.query
    if query == "each" and search.spec.query == AUTO:
        query = "given"
    base = replace(best.spec, activation=SOFTMAX, pooling=pooling, query=query)
    # heads of a query have D² entries to draw, those of a constant query D: in many dimensions
    # softmax is tried without a query that was made of the keys
    n_drafts = len(SOFTMAX_SCALES) + len(search.scalings) - 1
    if query == "mean" and search.spec.query == AUTO and not search.can_afford(base, n_drafts):
        base = replace(base, query="given")

    # the heads that were asked for, as they are
    if search.spec.heads is not None:
        draft = yield CandidateTrial(base)
        return search.replaced(best, [draft])

    # zero-mean heads of growing scales
    drafts: list[Draft] = []
    for scale in SOFTMAX_SCALES:
        drafts.append((yield CandidateTrial(replace(base, heads=GaussianHeads(scale=scale)))))
        if len(drafts) > 1 and not search.is_lower(drafts[-1], drafts[-2]):
            break

    # other scalings of the tokens, at the scale of the heads that was best
    best_heads = search.best(drafts).spec.heads
    for scaling in search.scalings:
        if scaling != base.scaling:
            drafts.append((yield CandidateTrial(replace(base, scaling=scaling, heads=best_heads))))

    # heads with a mean, of the usual scale, under the other settings of the best of these
    leader = search.best(drafts)
    if leader.failure is None:
        drafts.append((yield from choose_head_mean(search, leader)))
    return search.replaced(best, drafts)


def choose_loss(search: CandidateSearch, best: Draft) -> Stage:
    """The log-loss instead of squared errors, for classes, if it is clearly better.

    It finds a linear rule for a rare class, which squared errors do not: they are dominated by the
    other class. So statistics of the keys are tried anew. Where squared errors have left the
    simplest settings already, the log-loss need not be clearly better than what they came to: it
    must be so than the simplest, and lower than the best. What was best of many by squared errors
    owes some of its loss to chance.
    """
    if not search.chooses_loss:
        return best
    base = replace(best.spec, loss="log_loss")
    drafts = [(yield CandidateTrial(base))]
    if "mean+statistics" in search.poolings[1:] and base.pooling != "mean+statistics":
        drafts.append((yield CandidateTrial(replace(base, pooling="mean+statistics"))))
    leader = search.best(drafts)
    assert search.simplest is not None
    if search.is_lower(leader, best) and search.is_better(leader, search.simplest):
        return leader
    return best


def choose_keys(search: CandidateSearch, best: Draft) -> Stage:
    """A few keys of each set, if the sets are large and that is clearly better."""
    if not search.may_select_keys():
        return best
    candidate = replace(best.spec, keys=SELECTED_KEYS)
    return (yield from choose_fitted(search, best, [candidate]))


def choose_learned_heads(search: CandidateSearch, best: Draft) -> Stage:
    """Learned heads, of one hop or more, if short descents gain and the whole is clearly better.

    The whole procedure is made once, with all samples. It holds a part of them out (all of them in
    turn where they are few), and its losses there are paired with the leave-one-out losses of the
    best candidate of fixed features on the same samples.
    """
    candidate = search.screened_heads(best)
    if candidate is None:
        return best
    reference = yield CandidateTrial(search.as_final(best.spec), held_out="part")
    draft = yield CandidateTrial(candidate, held_out="part")
    if search.is_better_where_held_out(draft, reference):
        return draft
    return best


def choose_fitted(search: CandidateSearch, best: Draft, candidates: Sequence[LayerSpec]) -> Stage:
    """A candidate that is fitted to y before the ridge, if it is clearly better on held-out folds.

    Every candidate is a complete specification, of which `keyhole.layer.fit` makes a whole
    procedure: it is fitted without each fold in turn. The best candidate of fixed features is
    judged on the same folds, and the losses of the two are paired sample by sample. A candidate
    that is clearly worse on the first folds is not fitted for the others.
    """
    reference = yield CandidateTrial(best.spec, held_out="folds")
    drafts = []
    for candidate in candidates:
        drafts.append((yield CandidateTrial(candidate, held_out="folds", reference=reference)))
    winner = search.replaced(reference, drafts)
    if winner is reference:
        # the draft that later stages compare with: the losses of the reference are those of folds
        return best
    return winner


@dataclass(frozen=True)
class CandidateTrial:
    """Settings to try, and what is left out of a fit at a time to judge them.

    ``held_out`` is "samples", for exact leave-one-out of settings whose features do not depend on
    y; or "folds", for whole procedures, and for settings that they are compared with; or "part",
    for the final fit itself, which predicts the samples that it holds out. ``reference`` is the
    draft to beat on folds.
    """

    spec: LayerSpec
    held_out: Literal["samples", "folds", "part"] = "samples"
    reference: Draft | None = None


@dataclass(frozen=True)
class Draft:
    """One candidate that was tried.

    Attributes
    ----------
    spec : LayerSpec
    tokens : TokenRule
        Learned on all samples.
    loss : float
        Mean loss of the draft's samples by fits without them; infinite after a failure.
    predictions : array (n, t) or None
        Of the draft's samples, by fits without them; None after a failure.
    fitted : FittedLayer or None
        The fit to the draft's samples, where one fit gave all predictions.
    failure : FeatureOverflowError, NoPenaltyError or None
        Why the candidate could not be fitted: features overflow, or none of the penalties that the
        user gave can be judged.
    held_out : "samples", "folds", "first folds" or "part"
        What was left out at a time. Predictions of a part are of all samples, not only of the
        draft's, and NaN for samples that were never held out.
    """

    spec: LayerSpec
    tokens: TokenRule
    loss: float = math.inf
    predictions: Float[np.ndarray, "n t"] | None = field(default=None, repr=False)
    fitted: FittedLayer | None = field(default=None, repr=False)
    failure: FeatureOverflowError | NoPenaltyError | None = None
    held_out: str = "samples"

    def candidate(self, exponent: int, seconds: float) -> Candidate:
        """What is reported of it, with its loss times 2^exponent."""
        assert self.spec.heads is not None
        assert not isinstance(self.spec.n_heads, str)
        with np.errstate(over="ignore", under="ignore"):
            loss = float(np.ldexp(self.loss, exponent))
        return Candidate(
            scaling=self.spec.scaling,
            query=self.spec.query,
            heads=self.spec.heads,
            loss=loss,
            activation=self.spec.activation,
            pooling=self.spec.pooling,
            n_heads=float(self.spec.n_heads),
            seconds=seconds,
            objective=self.spec.loss,
            keys=self.spec.keys,
            held_out=self.held_out,
        )


Stage = Generator[CandidateTrial, Draft, Draft]
"""Yields the trials that drafts are wanted of, is sent each draft, and returns the best one."""


@dataclass(frozen=True)
class DraftSize:
    """How large drafts are: samples, and heads with and without an exact kernel.

    Attributes
    ----------
    n_samples : int
    n_heads : int
        Heads of candidates that have no kernel, or whose kernel would cost more.
    may_be_exact : bool
        Whether candidates that have a kernel are compared by it where that is cheaper.
    seconds : float
        What all drafts together take of one core, as predicted.
    budget : ChoiceBudget
        What choosing may cost.
    """

    n_samples: int
    n_heads: int
    may_be_exact: bool
    seconds: float
    budget: ChoiceBudget


@dataclass
class CandidateSearch:
    """A staged search over candidates, each drafted on the same samples: as many as are affordable.

    Attributes
    ----------
    spec : LayerSpec
        What was asked for.
    first : LayerSpec
        What is tried first of everything, as drafts are fitted: `draft_penalties`, the direct
        solver, extras of scale one.
    size : DraftSize
    data, part : TrainingSet
        All samples, and those that drafts are fitted to.
    scalings, poolings, queries : tuples of str
        What is tried, the default first.
    chooses_heads, chooses_activation, chooses_loss : bool
        Whether the mean of the heads, the activation, and what values minimise, are open.
    n_weighted : int
        Samples of positive weight among all of them.
    loss_exponent : int
        Losses that are reported are 2^exponent times as large.
    tell : function, optional
        Called with every candidate.
    candidates : list of Candidate
        What was tried so far.
    simplest : Draft or None
        The draft of the scaling that was chosen, with the simplest of everything else.
    """

    spec: LayerSpec
    first: LayerSpec
    size: DraftSize
    data: TrainingSet
    part: TrainingSet
    scalings: tuple[str, ...]
    poolings: tuple[str, ...]
    queries: tuple[str, ...]
    chooses_heads: bool
    chooses_activation: bool
    chooses_loss: bool
    n_weighted: int
    loss_exponent: int = 0
    tell: Callable[[Candidate], None] | None = None
    candidates: list[Candidate] = field(default_factory=list)
    simplest: Draft | None = field(default=None, repr=False)
    token_rules: dict[tuple[str, str, str], TokenRule] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        spec: LayerSpec,
        data: TrainingSet,
        loss_exponent: int = 0,
        tell: Callable[[Candidate], None] | None = None,
    ) -> CandidateSearch | None:
        """A search for what a specification leaves open.

        None if nothing is open, or if there are too few samples to compare candidates by.
        """
        scalings = open_scalings(spec)
        poolings = open_poolings(spec, data)
        queries = open_queries(spec, data)

        # a mean of the heads multiplies query and key: without a query there is nothing to act on
        may_have_query = data.samples.sets.query is not None or queries[-1] != "given"
        chooses_heads = spec.heads is None and may_have_query

        # softmax has no exact kernel, and heads that are to be learned are learned for ReLU
        chooses_activation = spec.activation == AUTO and not spec.is_exact and not spec.learns_heads

        # the number of drafts to pay for; multiples of the identity and scales of softmax are
        # counted as far as they usually go, because they end with the first that is no better
        n_drafts = len(scalings) + len(queries) - 1
        if "mean" in queries[1:]:
            n_drafts += len(scalings) - 1
        if "sum" in poolings[1:]:
            n_drafts += len(scalings)
        n_drafts += len([pooling for pooling in poolings[1:] if pooling in ADDS_FEATURES])
        if chooses_heads:
            n_drafts += 2
        if chooses_heads and spec.activation == SOFTMAX:
            n_drafts += 1
        if chooses_activation:
            n_drafts += len(SOFTMAX_SCALES) + len(scalings) - 1
        if chooses_activation and chooses_heads:
            n_drafts += 3
        # the two drafts of the log-loss are not counted: what they may cost is NEWTON_COST
        chooses_loss = may_minimise_log_loss(spec, data)
        if n_drafts == 1 and not chooses_loss:
            return None

        # as many samples as are cheap, but enough to compare candidates by
        counts = data.samples.token_counts[data.positive_rows]
        size = affordable_draft(spec, counts, data.samples.dim, n_drafts)
        if size.n_samples < MIN_DRAFT_SAMPLES:
            return None

        # they are drawn at random
        part = data.of_positive_weight()
        n_weighted = len(part)
        if size.n_samples < n_weighted:
            part = drawn_part(spec, part, part.shuffled_rows(spec.seed), size.n_samples)
        return cls(
            spec=spec,
            first=replace(
                first_settings(spec),
                alphas=draft_penalties(spec, data, part),
                solver="direct",
                extras_scale=1.0,
            ),
            size=size,
            data=data,
            part=part,
            scalings=scalings,
            poolings=poolings,
            queries=queries,
            chooses_heads=chooses_heads,
            chooses_activation=chooses_activation,
            chooses_loss=chooses_loss,
            n_weighted=n_weighted,
            loss_exponent=loss_exponent,
            tell=tell,
        )

    @property
    def has_all_rows(self) -> bool:
        """Whether the predictions of a draft belong to the samples as they were given.

        So it is where none was left out.
        """
        return len(self.part) == len(self.data)

    @cached_property
    def variances(self) -> Float[np.ndarray, " t"]:
        """The variance of each output of the draft's samples; 1 of one that does not vary."""
        problem = RidgeProblem.of(
            self.part.outputs, fit_intercept=self.spec.fit_intercept, weights=self.part.weights
        )
        spread = problem.spread
        return np.where(spread > 0, np.square(spread), 1.0)

    @property
    def negligible(self) -> float:
        """A difference of losses that is not worth a choice.

        That is `LOSS_ROUNDING` of the variance of y; log-losses, and errors of several outputs in
        units of their variances, have no units.
        """
        has_units = self.spec.criterion == "squared_error" and self.part.outputs.shape[1] == 1
        if has_units:
            return LOSS_ROUNDING * float(self.variances[0])
        return LOSS_ROUNDING

    def scalings_from(self, first: str) -> tuple[str, ...]:
        """The scalings to try, one of them first: of several that are as good it is kept."""
        return (first, *[scaling for scaling in self.scalings if scaling != first])

    def is_lower(self, new: Draft, old: Draft) -> bool:
        """Whether the loss of a draft is lower by more than is negligible."""
        if math.isinf(old.loss):
            return new.loss < old.loss
        return new.loss < old.loss - self.negligible

    def best(self, drafts: Sequence[Draft]) -> Draft:
        """The draft of least loss; the first of those whose difference is negligible."""
        best = drafts[0]
        for draft in drafts[1:]:
            if self.is_lower(draft, best):
                best = draft
        return best

    def draft(self, trial: CandidateTrial) -> Draft:
        """Try one candidate on the draft's samples.

        Its token rule is learned on all samples.
        """
        began = time.perf_counter()
        spec = trial.spec
        if trial.held_out != "part":
            spec = replace(spec, n_heads=self.draft_heads(spec))
        if trial.held_out == "samples":
            spec = replace(spec, heads=spec.fixed_heads)
        draft = Draft(spec=spec, tokens=self.token_rule(spec), held_out=trial.held_out)
        try:
            if trial.held_out == "samples":
                fitted = fit(
                    spec, self.part, tokens=draft.tokens, draft=not self.may_be_final(spec)
                )
                predictions = fitted.predictions
                draft = replace(draft, fitted=fitted, predictions=predictions, loss=fitted.loss)
            elif trial.held_out == "part":
                fitted = fit(spec, self.data, draft=not spec.learns_heads)
                predictions = fitted.predictions
                draft = replace(draft, fitted=fitted, predictions=predictions)
                draft = replace(draft, loss=self.mean_loss_where_finite(self.data, predictions))
            else:
                predictions = self.predictions_on_folds(spec, trial.reference)
                draft = replace(draft, loss=self.mean_loss_where_finite(self.part, predictions))
                if np.isfinite(predictions).all():
                    draft = replace(draft, predictions=predictions)
                else:
                    # it was given up: it has a loss, and no predictions to compare
                    draft = replace(draft, held_out="first folds")
        except (FeatureOverflowError, NoPenaltyError) as error:
            draft = replace(draft, failure=error)
        candidate = draft.candidate(self.loss_exponent, time.perf_counter() - began)
        self.candidates.append(candidate)
        if self.tell is not None:
            self.tell(candidate)
        return draft

    def as_final(self, spec: LayerSpec) -> LayerSpec:
        """The settings of a draft, as the final fit would have them."""
        spec = replace(spec, alphas=self.spec.alphas, solver=self.spec.solver, n_heads=AUTO)
        if not isinstance(self.spec.n_heads, str):
            spec = replace(spec, n_heads=self.spec.n_heads)
        asked = replace(self.spec, heads=spec.heads)
        return replace(spec, n_heads=final_n_heads(asked, spec, self.data))

    def screened_heads(self, best: Draft) -> LayerSpec | None:
        """Learned heads with starts in the order that short descents say, if any of these gained.

        None also where heads are not open, or learning them would cost more than is allowed. Below
        `MIN_SAMPLES_FOR_ONE_SPLIT` samples it takes five descents instead of one.
        """
        is_open = self.spec.heads is None and self.spec.may_learn
        if not is_open or self.n_weighted < MIN_SAMPLES_FOR_ONE_SPLIT:
            return None
        spec = self.learned_spec(best)
        if has_extras(spec, self.data) and self.spec.extras_scale is None:
            return None
        heads = LearnedHeads()
        ready = self.part.with_samples(self.token_rule(spec).apply(self.part.samples))

        # descents cost what the coordinates cost that are not zero throughout
        sets = ready.samples.sets
        coordinates = UsedCoordinates.of(sets, Ages.of(sets), has_query=ready.samples.has_query)
        in_use = ready.with_samples(ready.samples.with_sets(coordinates.of_sets(sets)))

        # as many samples a step as all short descents together are allowed to take
        for max_samples in SCREENING_SAMPLES:
            settings = DescentSettings(max_samples=max_samples)
            if self.screening_seconds(in_use, settings) <= self.size.budget.screening:
                break
        else:
            return None
        screening = heads.screen(
            ready.samples,
            ready.outputs,
            activation=spec.activation,
            fit_intercept=spec.fit_intercept,
            weights=ready.weights,
            groups=ready.groups,
            seed=spec.seed,
            settings=settings,
            device=device_to_learn_on(ready.samples),
        )

        if screening is None or not screening.gains:
            return None

        # short descents must already be ahead of the best fixed features on the same samples: on
        # digits they gain, and never get so far. With a leeway of a quarter a default fit there
        # took 7.2 times as long as without learning, in vain; without it 1.5 times
        if screening.error >= self.error_share(best, screening.rows):
            return None

        # all starts, as many of the best as a race of them is affordable with all samples and all
        # steps. What has not gained in a few steps is among them: on long stories those starts came
        # out best that were last after the screening
        costs = [
            self.descent_seconds(in_use, start.hops, heads.max_iter, DescentSettings())
            for start in screening.starts
        ]
        n_starts = len(costs)
        while n_starts and race_cost(costs[:n_starts]) > self.size.budget.expensive:
            n_starts -= 1
        if n_starts == 0:
            return None
        return self.as_final(replace(spec, heads=heads, starts=screening.starts[:n_starts]))

    def error_share(self, draft: Draft, rows: Int[np.ndarray, " r"]) -> float:
        """The mean squared error of some of the draft's samples, as a share of the variance."""
        assert draft.predictions is not None
        outputs = self.part.outputs
        predictions = draft.predictions
        if draft.spec.is_logistic:
            # logits: of 2p − 1 with the probability p of each output
            outputs = np.sign(outputs)
            predictions = np.tanh(predictions / 2)
        weights = self.part.weights_or_ones()
        centre = np.average(outputs, axis=0, weights=weights)
        variance = np.average(np.square(outputs - centre).mean(axis=1), weights=weights)
        squares = np.square(outputs[rows] - predictions[rows]).mean(axis=1)
        return float(np.average(squares, weights=weights[rows]) / variance)

    def learned_spec(self, best: Draft) -> LayerSpec:
        """The settings that heads are learned under, beside the best of those that are open.

        Softmax, where it is open: what a hop finds is an average of keys. Tokens that say the age
        of a key stay as they are, so that ages are found.
        """
        spec = replace(best.spec, heads=LearnedHeads())
        if self.spec.activation == AUTO:
            spec = replace(spec, activation=SOFTMAX)
        if self.spec.pooling == AUTO:
            spec = replace(spec, pooling="mean")
        if self.spec.query == AUTO and spec.query == "each":
            spec = replace(spec, query="given")
        if self.spec.loss == AUTO:
            spec = replace(spec, loss="squared_error")
        if self.spec.scaling == AUTO and Ages.of(self.part.samples.sets) is not None:
            spec = replace(spec, scaling="none")
        return spec

    def screening_seconds(self, ready: TrainingSet, settings: DescentSettings) -> float:
        """Predicted seconds of one core for short descents from all starts."""
        # the hops of every start, as `keyhole.attention.search.starts_of` has them
        numbers_of_hops = [1]
        if ready.samples.sets.query is not None:
            numbers_of_hops += [2, 3, 2, 3]
            if Ages.of(ready.samples.sets) is not None:
                numbers_of_hops += [2, 3]
        return sum(
            self.descent_seconds(ready, hops, SCREENING_STEPS, settings) for hops in numbers_of_hops
        )

    def descent_seconds(
        self, ready: TrainingSet, hops: int, n_steps: int, settings: DescentSettings
    ) -> float:
        """Predicted seconds of one core for one descent, its checks included."""
        samples = ready.samples
        width = samples.dim + 1
        n = min(self.n_weighted, round(settings.max_samples / math.sqrt(hops)))
        query_dim = samples.query_dim if samples.has_query else 0
        one_step = step_seconds(
            n,
            keys_per_set=float(np.minimum(samples.token_counts, settings.max_keys).mean()),
            dim=samples.dim,
            query_dim=query_dim,
            n_heads=max(16 // hops, min(256, -(-n // width))),
            hops=hops,
        )
        return CHECKS_COST * n_steps * one_step

    def is_better_where_held_out(self, new: Draft, old: Draft) -> bool:
        """`is_better` of drafts of all samples, where the new one has held samples out.

        The mean loss must be lower, and the squared error by more than `GUARD` standard errors: of
        numbers the loss itself, of classes the Brier score. Few samples are held out, and the
        log-losses of one or two of them, of a rare class, hide any gain.
        """
        if new.predictions is None or old.predictions is None:
            return False
        rows = np.flatnonzero(np.isfinite(new.predictions).all(axis=1))
        if len(rows) < MIN_DRAFT_SAMPLES:
            return False
        part = self.data[rows]
        gain, _ = improvement(
            self.losses_of(part, old.predictions[rows]),
            self.losses_of(part, new.predictions[rows]),
            part.weights,
            part.groups,
        )
        bounded_gain, standard_error = improvement(
            self.bounded_losses_of(part, old.predictions[rows]),
            self.bounded_losses_of(part, new.predictions[rows]),
            part.weights,
            part.groups,
        )
        return gain > self.negligible and bounded_gain > GUARD * standard_error

    def bounded_losses_of(
        self, part: TrainingSet, predictions: Float[np.ndarray, "n t"]
    ) -> Float[np.ndarray, " n"]:
        """`losses_of`, with the Brier score of calibrated probabilities for the log-loss."""
        if self.spec.criterion != "log_loss":
            return self.losses_of(part, predictions)
        scores = class_scores(predictions)
        labels = labels_of(part.outputs)
        temperatures, _ = calibrate(scores[None], labels, part.weights_or_ones(), 1e-6)
        probabilities = softmax(temperatures[0] * scores, axis=1)
        probabilities[np.arange(len(labels)), labels] -= 1.0
        return np.asarray(np.square(probabilities).sum(axis=1))

    def mean_loss_where_finite(
        self, data: TrainingSet, predictions: Float[np.ndarray, "n t"]
    ) -> float:
        """The mean loss of all samples that were left out, or held out: others are NaN."""
        rows = np.flatnonzero(np.isfinite(predictions).all(axis=1))
        if not len(rows):
            return math.inf
        part = data[rows]
        losses = self.losses_of(part, predictions[rows])
        return float(np.average(losses, weights=part.weights_or_ones()))

    @cached_property
    def folds(self) -> Folds:
        """The folds that whole procedures are judged on."""
        return Folds.of(self.part, seed=self.spec.seed, classifies=self.spec.classifies)

    def predictions_on_folds(
        self, spec: LayerSpec, reference: Draft | None = None
    ) -> Float[np.ndarray, "n t"]:
        """Predictions of the draft's samples by fits without the fold of each.

        Features that do not depend on y are made once: the exact formula for groups that are left
        out together serves for folds. What is fitted to y is fitted anew for every fold, as long as
        it is not clearly worse than a reference; predictions of further folds are then NaN.
        """
        if not spec.learns_heads and not spec.selects_keys:
            in_folds = replace(self.part, groups=self.folds.numbers)
            return fit(spec, in_folds, tokens=self.token_rule(spec), draft=True).predictions
        predictions = np.full(self.part.outputs.shape, np.nan)
        for rest, held_out in self.folds.splits():
            fitted = fit(spec, self.part[rest], draft=True)
            predictions[held_out] = fitted.predict(self.part.samples[held_out])
            if reference is not None and self.is_clearly_worse(predictions, reference):
                break
        return predictions

    def is_clearly_worse(self, predictions: Float[np.ndarray, "n t"], reference: Draft) -> bool:
        """Whether predictions are worse than those of a reference by `GUARD` standard errors.

        Samples whose predictions are NaN do not count.
        """
        if reference.predictions is None:
            return False
        rows = np.flatnonzero(np.isfinite(predictions).all(axis=1))
        part = self.part[rows]
        gain, standard_error = improvement(
            self.losses_of(part, reference.predictions[rows]),
            self.losses_of(part, predictions[rows]),
            part.weights,
            part.groups,
        )
        return gain < -max(GUARD * standard_error, self.negligible)

    def token_rule(self, spec: LayerSpec) -> TokenRule:
        """The token rule of a candidate; several candidates share one."""
        key = (spec.scaling, spec.query, spec.pooling)
        if key not in self.token_rules:
            self.token_rules[key] = learn_tokens(spec, self.data)
        return self.token_rules[key]

    def draft_heads(self, spec: LayerSpec) -> float:
        """How many heads a candidate is drafted with; infinitely many where that is cheaper."""
        if not (self.size.may_be_exact and can_be_exact(spec)):
            return self.size.n_heads
        n_tokens = keys_seen(self.part.samples.token_counts, spec.query)

        def seconds(n_heads: float) -> float:
            dim = self.part.samples.dim
            return fit_seconds(len(self.part), n_tokens, dim, n_heads, has_query=True)

        if seconds(math.inf) <= seconds(self.size.n_heads):
            return math.inf
        return self.size.n_heads

    def can_afford(self, spec: LayerSpec, n_drafts: int) -> bool:
        """Whether so many drafts of such settings take no more than choosing may cost.

        One stage of several may take a part of it: `STAGE_SHARE`.
        """
        n_tokens = keys_seen(self.part.samples.token_counts, spec.query)
        has_query = spec.query != "given" or self.part.samples.query is not None
        one_draft = fit_seconds(
            len(self.part),
            n_tokens,
            self.part.samples.dim,
            self.draft_heads(spec),
            has_query=has_query,
        )
        return n_drafts * one_draft <= STAGE_SHARE * self.size.budget.choosing

    def may_be_final(self, spec: LayerSpec) -> bool:
        """Whether a draft of these settings is fitted as the final fit would be.

        All samples, all heads, nothing left to tune, and not by conjugate gradients,
        because drafts are solved directly.
        """
        uses_all_samples = len(self.part) == self.n_weighted
        nothing_left = self.spec.alphas is None and not self.spec.learns_heads
        tunes_extras = has_extras(spec, self.data) and self.spec.extras_scale != 1.0
        if not uses_all_samples or not nothing_left or tunes_extras or self.spec.solver == "cg":
            return False
        if isinstance(self.spec.n_heads, str):
            return spec.n_heads in (math.inf, AUTO_HEADS)
        return spec.n_heads == self.spec.n_heads

    def is_final(self, draft: Draft, chosen: LayerSpec) -> bool:
        """Whether a draft is the final fit, and its predictions are of the samples as given."""
        if draft.held_out == "part":
            return True
        has_all_heads = draft.spec.n_heads == chosen.n_heads
        return self.may_be_final(draft.spec) and has_all_heads and self.has_all_rows

    def may_have_mean(self, base: Draft) -> bool:
        """Whether the head distribution is open, and there is a query that a mean could act on."""
        has_query = self.data.samples.sets.query is not None or base.spec.query != "given"
        return self.chooses_heads and has_query

    def may_select_keys(self) -> bool:
        """Whether a selection of keys is open, sets are large, and its folds are affordable."""
        if self.spec.keys != AUTO or self.spec.learns_heads:
            return False
        lengths = self.part.samples.sets.lengths
        if np.median(lengths) < LARGE_SETS or self.folds.count < N_FOLDS:
            return False
        counts = self.part.samples.token_counts
        one_procedure = selection_seconds(len(counts), int(counts.sum()), self.part.samples.dim)
        return self.folds.count * one_procedure <= self.size.budget.expensive

    def pairs(self, base: Draft) -> Any:
        """Coordinates of query and key that mean the same, where queries are the given ones."""
        if base.spec.query != "given":
            return None
        return self.data.samples.sets.pairs

    def replaced(self, best: Draft, drafts: Sequence[Draft]) -> Draft:
        """The best of some drafts if it is clearly better than the best so far, else the latter."""
        if not drafts:
            return best
        leader = self.best(drafts)
        if self.is_better(leader, best):
            return leader
        return best

    def is_better(self, new: Draft, old: Draft) -> bool:
        """Whether the loss of a draft is lower by more than `GUARD` standard errors.

        The standard error is that of the differences between the losses of the same samples.
        """
        # a draft that failed has an infinite loss, and none of every sample; one that fits a sample
        # exactly, within rounding, has an infinite one for that sample
        if old.predictions is None or new.predictions is None:
            return new.loss < old.loss
        is_finite = np.isfinite(old.predictions).all() and np.isfinite(new.predictions).all()
        if not is_finite:
            return new.loss < old.loss
        gain, standard_error = improvement(
            self.sample_losses(old.predictions),
            self.sample_losses(new.predictions),
            self.part.weights,
            self.part.groups,
        )
        return gain > max(GUARD * standard_error, self.negligible)

    def sample_losses(self, predictions: Float[np.ndarray, "n t"]) -> Float[np.ndarray, " n"]:
        """The loss of every sample of the draft by a fit without it."""
        return self.losses_of(self.part, predictions)

    def losses_of(
        self, part: TrainingSet, predictions: Float[np.ndarray, "n t"]
    ) -> Float[np.ndarray, " n"]:
        """The loss of each of some samples: the squared error, or the log-loss.

        The log-loss is that at the best temperature.
        """
        outputs = part.outputs
        if self.spec.criterion != "log_loss":
            squares = np.square(outputs - predictions)
            if outputs.shape[1] > 1:  # each in units of its own variance
                squares = squares / self.variances
            return np.asarray(squares.mean(axis=1))
        # calibrate takes several sets of scores at once; here there is one
        scores = class_scores(predictions)[None]
        weights = part.weights_or_ones()
        _, losses = calibrate(scores, labels_of(outputs), weights, 1e-6)
        return np.asarray(losses[0])


# ---- what is tried -------------------------------------------------------------------------------


def drawn_part(
    spec: LayerSpec, data: TrainingSet, order: Int[np.ndarray, " n"], count: int
) -> TrainingSet:
    """About ``count`` of some samples, the first of an order; of rare classes more than others.

    A class of one in a hundred would have five samples among five hundred. So each of K classes has
    count // 2K samples at least, if there are as many, and samples of such a class weigh less in
    return: the share of every class is what it is among all samples. Where no class is that rare,
    the first ``count`` samples are taken as they come.
    """
    if not spec.classifies:
        return data[np.sort(order[:count])]

    # how many samples of each class are drawn
    labels = labels_of(data.outputs)
    class_sizes = np.bincount(labels)
    n_classes = np.count_nonzero(class_sizes)
    in_proportion = np.round(count * class_sizes / len(labels)).astype(int)
    at_least = np.minimum(class_sizes, count // (2 * n_classes))
    n_drawn = np.maximum(in_proportion, at_least)
    if (n_drawn == in_proportion).all():
        return data[np.sort(order[:count])]

    # the first of each class, and the weight that makes up for its share
    rows = []
    for label, n_of_class in enumerate(n_drawn):
        rows.append(order[labels[order] == label][:n_of_class])
    drawn = np.sort(np.concatenate(rows))
    shares = class_sizes / class_sizes.sum()
    drawn_shares = n_drawn / n_drawn.sum()
    factors = np.divide(shares, drawn_shares, out=np.ones(len(shares)), where=n_drawn > 0)
    part = data[drawn]
    return replace(part, weights=part.weights_or_ones() * factors[labels[drawn]])


def draft_penalties(
    spec: LayerSpec, data: TrainingSet, part: TrainingSet
) -> Float[np.ndarray, " a"] | None:
    """The penalties that drafts are fitted with; None for an automatic grid.

    Settings are chosen for the penalties that the user gave. These stand beside a sum of squares
    over all samples, and a draft sums over a part of them: it has the same share of the penalty.
    Without a penalty (alpha = 0) some drafts have no leave-one-out loss: so the grid is automatic.
    """
    if spec.alphas is None or spec.alphas.min() == 0:
        return None
    share = part.weights_or_ones().sum() / data.weights_or_ones().sum()
    return spec.alphas * share


def open_scalings(spec: LayerSpec) -> tuple[str, ...]:
    """The scalings of tokens to try; an explicit one alone."""
    if spec.scaling != AUTO:
        return (spec.scaling,)
    return SCALINGS


def open_poolings(spec: LayerSpec, data: TrainingSet) -> tuple[str, ...]:
    """The poolings to try.

    Samples of weight 0 may have any size.
    """
    if spec.pooling != AUTO:
        return (spec.pooling,)
    # drafts are made with frozen heads, and say little about the pooling of learned ones
    if spec.learns_heads:
        return ("mean",)

    # how many sets the samples with weight have, and how many keys each of these sets
    has_weight = data.weights_or_ones() > 0
    set_counts = data.samples.set_counts
    lengths = data.samples.sets.lengths[np.repeat(has_weight, set_counts)]
    set_counts = set_counts[has_weight]

    # of one key alone there are no statistics; where all samples have the same size, sums and means
    # are the same, and the size says nothing
    same_lengths = bool((lengths == lengths[0]).all())
    same_counts = bool((set_counts == set_counts[0]).all())
    if same_lengths and same_counts and lengths[0] * set_counts[0] == 1:
        return ("mean",)
    if same_lengths and same_counts:
        return ("mean", "mean+statistics")
    return POOLINGS


def open_queries(spec: LayerSpec, data: TrainingSet) -> tuple[str, ...]:
    """The queries to try: those of the samples, if they have any."""
    if spec.query != AUTO:
        return (spec.query,)
    samples = data.samples
    if samples.has_own_queries:
        return ("given",)

    # each key in turn, where that does not cost much more. Hops extend a query, and cannot then
    has_hops = spec.learns_heads or bool(getattr(spec.heads, "hops_", ()))
    if not samples.is_plain or has_hops:
        return ("given", "mean")
    rows = data.positive_rows
    counts = samples.token_counts[rows]

    def seconds(query: str) -> float:
        n_heads = choose_n_heads(replace(spec, query=query), samples, rows)
        n_tokens = keys_seen(counts, query)
        return fit_seconds(len(counts), n_tokens, samples.dim, n_heads, has_query=True)

    if seconds("each") > max(EACH_SECONDS, EACH_COST * seconds("mean")):
        return ("given", "mean")
    return ("given", "mean", "each")


def may_minimise_log_loss(spec: LayerSpec, data: TrainingSet) -> bool:
    """Whether the log-loss is tried: for classes, where its fit is affordable.

    Newton steps are made on the host, from a Gram matrix that a device may have made.
    """
    is_open = spec.loss == AUTO and spec.classifies and spec.criterion == "log_loss"
    if not is_open or spec.solver == "cg":
        return False
    # a penalty that was given is one for squared errors
    if spec.alphas is not None:
        return False
    samples = data.samples
    rows = data.positive_rows
    n = len(rows)
    n_tokens = keys_seen(samples.token_counts[rows], spec.query)
    n_heads = choose_n_heads(spec, samples, rows)
    ridge = fit_seconds(n, n_tokens, samples.dim, n_heads, has_query=True)
    newton = newton_seconds(n, samples.dim, n_heads, data.outputs.shape[1])
    return newton <= max(NEWTON_SECONDS, NEWTON_COST * ridge)


def has_mixed_units(sets: SetBatch) -> bool:
    """Whether a coordinate of keys, or of queries, is `MIXED_UNITS` times as large as the median.

    The size of a coordinate is its largest absolute value; coordinates that are 0 do not count.
    """
    for sizes in (coordinate_sizes(sets), coordinate_sizes_of_queries(sets)):
        sizes = sizes[sizes > 0]
        if len(sizes) and sizes.max() > MIXED_UNITS * np.median(sizes):
            return True
    return False


# ---- what it costs -------------------------------------------------------------------------------


def affordable_draft(
    spec: LayerSpec, token_counts: Int[np.ndarray, " n"], dim: int, n_drafts: int
) -> DraftSize:
    """How many of n samples, and how many heads, drafts are made with.

    As many samples as let all drafts together cost no more than `DRAFTS_COST` fits; then as many
    heads as that leaves room for, between `DRAFT_HEADS` and `MOST_DRAFT_HEADS`.
    """
    n = len(token_counts)
    keys_per_sample = float(token_counts.sum()) / n

    def seconds(n_samples: int, n_heads: float) -> float:
        n_tokens = int(n_samples * keys_per_sample)
        return fit_seconds(n_samples, n_tokens, dim, n_heads, has_query=True)

    # what fits to all samples cost; an exact kernel, which may cost far more, counts as if it were
    # AUTO_HEADS heads
    most_heads = AUTO_HEADS
    if not isinstance(spec.n_heads, str) and not spec.is_exact:
        most_heads = int(spec.n_heads)
    allowed = ChoiceBudget(final_fit=seconds(n, most_heads)).drafts

    # T: an exact kernel that is cheaper than so many heads will be used in their place
    may_be_exact = spec.is_exact or isinstance(spec.n_heads, str)
    final_fit = seconds(n, most_heads)
    if may_be_exact:
        final_fit = min(final_fit, seconds(n, math.inf))
    budget = ChoiceBudget(final_fit=final_fit)

    # the first number of samples that keeps all drafts within that, or the least of them
    few_heads = min(most_heads, DRAFT_HEADS)
    for limit in DRAFT_SAMPLES:
        n_samples = min(n, limit)
        one_draft = seconds(n_samples, few_heads)
        if may_be_exact:
            one_draft = min(one_draft, seconds(n_samples, math.inf))
        if n_drafts * one_draft <= allowed:
            break

    # more heads, while all drafts are affordable with them
    n_heads = few_heads
    while 2 * n_heads <= min(most_heads, MOST_DRAFT_HEADS):
        if n_drafts * seconds(n_samples, 2 * n_heads) > allowed:
            break
        n_heads *= 2
    return DraftSize(
        n_samples=n_samples,
        n_heads=n_heads,
        may_be_exact=may_be_exact,
        seconds=n_drafts * seconds(n_samples, n_heads),
        budget=budget,
    )


def choice_seconds(spec: LayerSpec, data: TrainingSet) -> float:
    """Seconds of one core that `choose` takes, predicted from sizes alone."""
    search = CandidateSearch.of(spec, data)
    if search is None:
        return 0.0
    return search.size.seconds


def procedure_seconds(spec: LayerSpec, data: TrainingSet) -> float:
    """Seconds of one core that `choose` and the fit after it take, predicted from sizes alone.

    Without the learning of heads, which has a budget of its own.
    """
    rows = data.positive_rows
    n_heads = choose_n_heads(spec, data.samples, rows)
    counts = data.samples.token_counts[rows]
    n_tokens = keys_seen(counts, spec.query)
    total = fit_seconds(len(counts), n_tokens, data.samples.dim, n_heads, has_query=True)
    search = CandidateSearch.of(spec, data)
    if search is None:
        return total
    total += search.size.seconds
    if search.may_select_keys():
        counts = search.part.samples.token_counts
        one_fold = selection_seconds(len(counts), int(counts.sum()), data.samples.dim)
        total += search.folds.count * one_fold
    return total


# ---- the scale of sample-level features ----------------------------------------------------------


def extras_unit(spread: float, size: float, extras: float) -> float:
    """The scale at which extras vary as much as features, from sums of squares.

    It is 1 where one of them does not vary.
    """
    if spread > 1e-12 * size and extras > 0:
        return math.sqrt(spread / extras)
    return 1.0


def choose_extras_scale(spec: LayerSpec, data: TrainingSet) -> float:
    """The scale of least leave-one-out loss of ridge on K + scale²·ZZᵀ.

    Z are the standardised extras. K is the kernel of at most `MAX_SAMPLES_FOR_EXTRAS` samples under
    heads that need not be learned, and is made once. Each scale then has a path of penalties: those
    of the specification if these are all samples, else an automatic grid.

    The plain version of one scale is ``textbook.ridge(K + scale**2 * Z @ Z.T, y, alpha)``.
    """
    # at most so many samples, drawn at random
    tokens = learn_tokens(spec, data)
    weighted = data.prepared(tokens).of_positive_weight()
    if len(weighted) < 2:
        return 1.0
    n_drawn = min(len(weighted), MAX_SAMPLES_FOR_EXTRAS)
    part = drawn_part(spec, weighted, weighted.shuffled_rows(spec.seed), n_drawn)

    # given penalties are for the sum of squares over all samples, and too large for fewer
    alphas = None
    if len(part) == len(weighted):
        alphas = spec.alphas

    # values of least log-loss have a rule of their own
    if spec.is_logistic:
        return _extras_scale_of_log_loss(spec, part, alphas)

    problem = RidgeProblem.of(
        part.outputs,
        alphas,
        fit_intercept=spec.fit_intercept,
        weights=part.weights,
        groups=part.groups,
        criterion=spec.criterion,
    )
    gram, linear, unit = _grams_and_unit(spec, part)

    # one path of penalties for each scale, in those units
    losses = []
    for ratio in EXTRAS_SCALES:
        losses.append(ridge_gram(gram + (ratio * unit) ** 2 * linear, problem).loss)
    return unit * EXTRAS_SCALES[int(np.argmin(losses))]


def _extras_scale_of_log_loss(
    spec: LayerSpec, part: TrainingSet, alphas: Float[np.ndarray, " a"] | None
) -> float:
    """The largest scale whose log-loss is within one standard error of the least.

    The larger the scale, the nearer the fit to logistic regression on the extras alone, which is
    the simplest: few samples of a rare class must not choose a more flexible one by chance.
    """
    gram, linear, unit = _grams_and_unit(spec, part)
    problem = LogisticProblem.of(
        part.outputs,
        alphas,
        fit_intercept=spec.fit_intercept,
        weights=part.weights,
        groups=part.groups,
        draft=True,
    )

    # the leave-one-out loss of every sample, at each scale
    sample_losses = []
    losses = []
    for ratio in EXTRAS_SCALES:
        fitted = logistic_gram(gram + (ratio * unit) ** 2 * linear, problem)
        assert fitted.left_out is not None
        scores = class_scores(problem.y - fitted.left_out)[None]
        _, of_samples = calibrate(scores, labels_of(problem.y), part.weights_or_ones(), 1e-6)
        sample_losses.append(of_samples[0])
        losses.append(fitted.loss)

    # from the largest scale down to the one of least loss
    least = int(np.argmin(losses))
    for position in reversed(range(least + 1, len(EXTRAS_SCALES))):
        excess, standard_error = improvement(
            sample_losses[position], sample_losses[least], part.weights, part.groups
        )
        if excess <= standard_error:
            return unit * EXTRAS_SCALES[position]
    return unit * EXTRAS_SCALES[least]


def _grams_and_unit(
    spec: LayerSpec, part: TrainingSet
) -> tuple[Float[np.ndarray, "n n"], Float[np.ndarray, "n n"], float]:
    """K of the heads, ZZᵀ of the extras, and the scale at which both vary alike."""
    # K, and the scale at which extras vary as much as the features do. With an intercept only what
    # varies counts: the trace of the centred K is tr K − 1ᵀK1/n
    gram = _gram_of_features(spec, part.samples)
    extras = extras_or_none(part.samples)
    linear = extras @ extras.T
    spread = float(np.trace(gram))
    if spec.fit_intercept:
        spread -= float(gram.sum() / len(gram))
    unit = extras_unit(spread, float(np.trace(gram)), float(np.trace(linear)))
    return gram, linear, unit


def _gram_of_features(spec: LayerSpec, samples: Any) -> Float[np.ndarray, "n n"]:
    """K of the heads of a specification, of as many of them as fit a quarter of the budget."""
    heads = spec.draw(spec.fixed_heads, samples)
    if not isinstance(heads, HeadDraw):
        kernel = attention_kernel(
            samples, None, heads, spec.activation, memory_budget=spec.memory_budget
        )
        return on_host(kernel).astype(np.float64, copy=False)
    # heads that were drawn from one seed nest: the first of them are a smaller draw
    affordable = block_size(8 * len(samples) * (heads.dim + 1), spec.memory_budget // 4)
    n_heads = min(heads.n_heads, affordable)
    first_heads = HeadDraw(heads.distribution, n_heads, heads.dim, heads.seed, heads.query_dim)
    features = attention_features(samples, first_heads, spec.activation, dtype="float64")
    return on_host(features @ features.T)
