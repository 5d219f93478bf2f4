"""The one place where defaults are chosen: an open specification becomes a complete one.

`choose` drafts the candidates on few samples and few heads, and compares their leave-one-out
losses. What is chosen, one after the other: the number of heads (by predicted cost alone), the
scaling of tokens, the query, the head distribution, the scale of extras. An explicit setting is
never overridden.

docs/choosing.md, "Default settings", says the same for users. `keyhole.textbook` chooses nothing;
the leave-one-out losses that are compared here are means of squares of the e that its `ridge`
returns.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import block_size, thread_count
from keyhole._checks import FeatureOverflowError
from keyhole.attention.activations import POINTWISE
from keyhole.attention.features import attention_features
from keyhole.attention.head_error import improvement
from keyhole.attention.heads import GaussianHeads, HeadDistribution, HeadDraw
from keyhole.attention.kernels import attention_kernel
from keyhole.data.sets import DistinctSamples, SetBatch
from keyhole.data.tokens import SCALINGS, TokenRule
from keyhole.layer import FittedLayer, fit, learn_tokens, with_ranks_if_drawn
from keyhole.ridge.calibration import calibrate, class_scores, labels_of
from keyhole.ridge.gram import ridge_gram
from keyhole.ridge.problem import RidgeProblem
from keyhole.solvers.solve import extras_or_none
from keyhole.spec import AUTO, LayerSpec
from keyhole.training import JoinedSamples, TrainingSet

DRAFT_SAMPLES = (500, 350, 250, 180, 128)
"""Samples that settings are chosen by: the first of these numbers that lets all drafts together
cost no more than one fit. Rules that five hundred cannot tell apart may as well be exchanged (on
digits "standard" and "none" are)."""

MIN_DRAFT_SAMPLES = 8
"""Distinct samples below which nothing is chosen: tokens stay as they are."""

DRAFT_HEADS = 64
"""Heads at most that settings are chosen with."""

AUTO_HEADS = 512
"""Heads of ``n_heads="auto"`` where the exact kernel is not cheaper, and a fit takes at most
`AUTO_SECONDS`.
"""

AUTO_SECONDS = 120.0
"""Predicted seconds of one core that a fit with automatic heads may take: else their number is
halved, and again.
"""

MIN_AUTO_HEADS = 32
"""The number of automatic heads is not halved below this."""

STRENGTHS = (1.0, 3.0, 10.0, 30.0)
"""Multiples of the identity that are tried as mean of the heads where there is a query."""

DRAWN_STRENGTHS = GaussianHeads(mean=(0.3, 20.0), scale=0.1)
"""Heads that differ in the coordinates they compare, tried under softmax: there the multiple is how
sharply a head selects keys. Chosen on the first 80 % of MovieLens; ReLU gains little by it."""

LOSS_ROUNDING = 1e-6
"""Share of a loss below which a difference is rounding, and the candidate that comes first is kept:
on tokens of length one "none" and "sphere" are the same rule, and the order of the samples decides
the last digits of their losses."""

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

LONG_FIT_SECONDS = 60.0
"""Predicted seconds above which a fit says so beforehand."""


@dataclass(frozen=True)
class Candidate:
    """Settings that were tried, with their loss on the samples that were left out."""

    scaling: str
    query: str
    heads: HeadDistribution
    loss: float


@dataclass(frozen=True)
class Choice:
    """A complete specification, and the candidates it was chosen from.

    ``final`` is the final fit where a draft already is it, else None.
    """

    spec: LayerSpec
    candidates: tuple[Candidate, ...]
    final: FittedLayer | None

    def token_rule(self, data: TrainingSet) -> TokenRule:
        """The token rule that was chosen, learned on some samples."""
        return learn_tokens(self.spec, data)


def choose(spec: LayerSpec, data: TrainingSet) -> Choice:
    """Choose the settings that a specification leaves open, apart from the penalty.

    1. The number of heads follows from predicted cost alone.
    2. The scaling of tokens is the one of least loss under the first query. Where coordinates have
       units of their own, tokens are standardised unless another scaling is better by more than one
       standard error of the differences between losses of the same samples.
    3. The mean of the keys becomes the query if its loss is less.
    4. The mean of the heads becomes a multiple of the identity, or under softmax a multiple drawn
       for each coordinate, if that is better by more than one such standard error. Multiples grow
       until one is no better than the one before.
    5. The scale of the sample-level features is chosen last.

    Heads that are to be learned are learned later, by `keyhole.layer.fit`, under the scaling and
    query that were chosen with ``spec.fixed_heads``.
    """
    # outputs of size one, so that no loss overflows; choices then do not depend on the units of y
    exponent = data.output_exponent()
    data = data.with_outputs_in_units(exponent)
    distinct = data.distinct()

    # the number of heads needs no draft: predicted cost decides it
    spec = replace(spec, n_heads=choose_n_heads(spec, data.samples, distinct.rows))
    chosen = _first_settings(spec)
    drafts: list[Draft] = []
    final = None
    search = CandidateSearch.of(spec, data, distinct)
    if search is not None:
        # 1. the scaling of tokens, under the first query
        for scaling in search.scalings:
            drafts.append(search.draft(scaling, search.queries[0], spec.fixed_heads))
        best = search.best_scaling(drafts)

        # 2. another query, if its loss is less: both are equally simple, so that none has to be
        # better by more than a standard error
        for query in search.queries[1:]:
            drafts.append(search.draft(best.spec.scaling, query, spec.fixed_heads))
            if is_lower(drafts[-1].loss, best.loss):
                best = drafts[-1]

        # 3. the head distribution: strengths grow until one is no better than the last
        head_drafts = [best]
        for heads in search.strengths(best):
            draft = search.draft(best.spec.scaling, best.spec.query, heads, best.tokens)
            head_drafts.append(draft)
            if not is_lower(head_drafts[-1].loss, head_drafts[-2].loss):
                break
        for heads in search.drawn_strengths(best):
            draft = search.draft(best.spec.scaling, best.spec.query, heads, best.tokens)
            head_drafts.append(draft)
        drafts += head_drafts[1:]

        # zero-mean heads stay unless another distribution is better by more than a standard error
        leader = best_draft(head_drafts)
        if search.is_better(leader, best):
            best = leader

        # heads that are to be learned stay as they are: they are learned under these settings
        chosen = replace(chosen, scaling=best.spec.scaling, query=best.spec.query)
        if spec.heads is None:
            chosen = replace(chosen, heads=best.spec.heads)

        # a draft that used all samples and all heads need not be fitted again
        if search.is_final and search.has_all_rows:
            assert best.fitted is not None
            final = best.fitted.in_units(exponent)

    # 4. the scale of extras, under the settings that were chosen
    if spec.extras_scale is None:
        chosen = replace(chosen, extras_scale=1.0)
        if data.has_extras:
            chosen = replace(chosen, extras_scale=choose_extras_scale(chosen, data))

    # squared errors have the square of the units of y, the log-loss has none
    if spec.criterion == "log_loss":
        loss_exponent = 0
    else:
        loss_exponent = 2 * exponent
    candidates = tuple(draft.candidate(loss_exponent) for draft in drafts)
    return Choice(spec=chosen, candidates=candidates, final=final)


def _first_settings(spec: LayerSpec) -> LayerSpec:
    """The specification with what is tried first in the place of what is open."""
    settings = spec
    if settings.scaling == AUTO:
        settings = replace(settings, scaling="none")
    if settings.query == AUTO:
        settings = replace(settings, query="given")
    if settings.heads is None:
        settings = replace(settings, heads=GaussianHeads())
    return settings


@dataclass(frozen=True)
class Draft:
    """One candidate: its specification, its token rule and its fit.

    The token rule is learned on all samples; the layer is fitted to the draft's samples only. A
    candidate whose features overflow has no fit, and an infinite loss.
    """

    spec: LayerSpec
    tokens: TokenRule
    fitted: FittedLayer | None
    overflow: FeatureOverflowError | None = None

    @property
    def loss(self) -> float:
        """Loss on the samples that were left out."""
        if self.fitted is None:
            return math.inf
        return self.fitted.loss

    def candidate(self, exponent: int) -> Candidate:
        """What is reported of it, with its loss times 2^exponent."""
        assert self.spec.heads is not None
        with np.errstate(over="ignore", under="ignore"):
            loss = float(np.ldexp(self.loss, exponent))
        return Candidate(
            scaling=self.spec.scaling, query=self.spec.query, heads=self.spec.heads, loss=loss
        )


@dataclass(frozen=True)
class CandidateSearch:
    """A staged search over candidates, each drafted on the same samples: as many as are affordable.

    Attributes
    ----------
    spec : LayerSpec
        What was asked for, with its number of heads chosen.
    draft_spec : LayerSpec
        What drafts are fitted with: as many heads as are affordable, an automatic grid of
        penalties, the direct solver, extras of scale one.
    data, part : TrainingSet
        All samples, and those that drafts are fitted to.
    scalings, queries : tuples of str
        What is tried, the default first.
    chooses_heads : bool
        Whether the head distribution is open, and there may be a query that a mean could act on.
    is_final : bool
        Whether a draft is fitted as the final fit would be: all distinct samples, all heads,
        nothing left to tune, and not by conjugate gradients, because drafts are solved directly.
    has_all_rows : bool
        Whether no sample was joined with a duplicate or left out, so that predictions of a draft
        belong to the samples as they were given, in their order.
    """

    spec: LayerSpec
    draft_spec: LayerSpec
    data: TrainingSet
    part: TrainingSet
    scalings: tuple[str, ...]
    queries: tuple[str, ...]
    chooses_heads: bool
    is_final: bool
    has_all_rows: bool

    @classmethod
    def of(
        cls, spec: LayerSpec, data: TrainingSet, distinct: DistinctSamples
    ) -> CandidateSearch | None:
        """A search for what a specification leaves open.

        None if nothing is open, or if there are too few samples to compare candidates by.
        """
        # drafts are made by NumPy, also of samples that lie on a device
        data = data.with_samples(data.samples.numpy())

        # the candidates: an explicit setting is the only one
        scalings: tuple[str, ...] = (spec.scaling,)
        if spec.scaling == AUTO:
            scalings = SCALINGS
        queries: tuple[str, ...] = (spec.query,)
        if spec.query == AUTO:
            queries = ("given",)
            if not data.samples.has_own_queries:
                queries = ("given", "mean")

        # a mean of the heads multiplies query and key: without a query there is nothing to act on
        may_have_query = data.samples.sets.query is not None or queries[-1] != "given"
        chooses_heads = spec.heads is None and may_have_query

        # the number of drafts to pay for: all scalings under the first query, further queries, at
        # least two strengths of the mean, and under softmax the drawn strengths
        n_drafts = len(scalings) + len(queries) - 1
        if chooses_heads and spec.activation in POINTWISE:
            n_drafts += 2
        elif chooses_heads:  # softmax
            n_drafts += 3
        if n_drafts == 1:
            return None

        # as many distinct samples as are cheap, but enough to compare candidates by
        counts = data.samples.token_counts[distinct.rows]
        n_samples, n_heads = affordable_draft(spec, counts, data.samples.dim, n_drafts)
        if n_samples < MIN_DRAFT_SAMPLES:
            return None

        # they are picked by rank, which depends on what a sample is: neither the order of the
        # samples, nor duplicates, nor rows of weight 0 change the choice
        picked = np.arange(len(distinct))
        if n_samples < len(distinct):
            ranks = data.with_ranks(distinct, spec.seed).ranks
            assert ranks is not None
            picked = np.flatnonzero(ranks[distinct.rows] < n_samples)

        # duplicates are one sample of their joint weight
        joint_weights = None
        if distinct.weights is not None:
            joint_weights = distinct.weights[picked]
        part = replace(data[distinct.rows[picked]], weights=joint_weights)

        # does a draft that uses all of this equal the final fit?
        uses_everything = len(part) == len(distinct) and n_heads == spec.n_heads
        nothing_left_to_fit = spec.alphas is None and not spec.learns_heads and not data.has_extras
        return cls(
            spec=spec,
            draft_spec=replace(
                spec, n_heads=n_heads, alphas=None, solver="direct", extras_scale=1.0
            ),
            data=data,
            part=part,
            scalings=scalings,
            queries=queries,
            chooses_heads=chooses_heads,
            is_final=uses_everything and nothing_left_to_fit and spec.solver != "cg",
            has_all_rows=len(part) == len(data),
        )

    def best_scaling(self, drafts: list[Draft]) -> Draft:
        """The draft of least loss.

        Where units are mixed, standardised tokens unless another is clearly better.
        """
        best = best_draft(drafts)
        if best.overflow is not None:  # an infinite loss is the least: all of them overflow
            raise best.overflow
        if "standard" in self.scalings and has_mixed_units(self.part.samples.sets):
            standard = drafts[self.scalings.index("standard")]
            if not self.is_better(best, standard):
                return standard
        return best

    def strengths(self, base: Draft) -> list[HeadDistribution]:
        """Head distributions around growing multiples of the identity.

        The list is empty where there is nothing to choose.
        """
        if not self._has_heads_to_try(base):
            return []
        return [GaussianHeads(strength, pairs=self._pairs(base)) for strength in STRENGTHS]

    def drawn_strengths(self, base: Draft) -> list[HeadDistribution]:
        """Under softmax, heads that draw a multiple for each coordinate."""
        if self.spec.activation in POINTWISE or not self._has_heads_to_try(base):
            return []
        return [GaussianHeads(DRAWN_STRENGTHS.mean, DRAWN_STRENGTHS.scale, pairs=self._pairs(base))]

    def _has_heads_to_try(self, base: Draft) -> bool:
        """Whether the head distribution is open, and there is a query that a mean could act on."""
        has_query = self.data.samples.sets.query is not None or base.spec.query != "given"
        return self.chooses_heads and has_query

    def _pairs(self, base: Draft) -> Any:
        """Coordinates of query and key that mean the same, where queries are the given ones."""
        if base.spec.query != "given":
            return None
        return self.data.samples.sets.pairs

    def draft(
        self, scaling: str, query: str, heads: HeadDistribution, tokens: TokenRule | None = None
    ) -> Draft:
        """Fit one candidate to the draft's samples.

        Its token rule is learned on all samples, unless ``tokens`` is that rule already.
        """
        spec = replace(self.draft_spec, scaling=scaling, query=query, heads=heads)
        if tokens is None:
            tokens = learn_tokens(spec, self.data)
        try:
            fitted = fit(spec, self.part, tokens=tokens, draft=not self.is_final)
        except FeatureOverflowError as error:
            return Draft(spec=spec, tokens=tokens, fitted=None, overflow=error)
        return Draft(spec=spec, tokens=tokens, fitted=fitted)

    def is_better(self, new: Draft, old: Draft) -> bool:
        """Whether the loss of a draft is lower by more than one standard error, and than rounding.

        The standard error is that of the differences between the losses of the same samples.
        """
        # a draft that overflowed has an infinite loss, and none of every sample
        if old.fitted is None or new.fitted is None:
            return new.loss < old.loss
        gain, standard_error = improvement(
            self._sample_losses(old), self._sample_losses(new), self.part.weights, self.part.groups
        )
        return gain > max(standard_error, LOSS_ROUNDING * old.loss)

    def _sample_losses(self, draft: Draft) -> Float[np.ndarray, " n"]:
        """The loss of every sample by the fit without it, or without its group.

        The loss is the squared error, or the log-loss at the best temperature.
        """
        outputs = self.part.outputs
        assert draft.fitted is not None
        predictions = draft.fitted.predictions
        if self.spec.criterion != "log_loss":
            return np.asarray(np.square(outputs - predictions).mean(axis=1))
        # calibrate takes several sets of scores at once; here there is one
        scores = class_scores(predictions)[None]
        weights = self.part.weights_or_ones()
        _, losses = calibrate(scores, labels_of(outputs), weights, 1e-6)
        return np.asarray(losses[0])


def is_lower(loss: float, other: float) -> bool:
    """Whether a loss is lower than another by more than rounding."""
    if math.isinf(other):
        return loss < other
    return loss < other - LOSS_ROUNDING * abs(other)


def best_draft(drafts: list[Draft]) -> Draft:
    """The draft of least loss; the first of those that differ by rounding alone."""
    best = drafts[0]
    for draft in drafts[1:]:
        if is_lower(draft.loss, best.loss):
            best = draft
    return best


def has_mixed_units(sets: SetBatch) -> bool:
    """Whether a coordinate of keys, or of queries, is `MIXED_UNITS` times as large as the median.

    The size of a coordinate is its largest absolute value; coordinates that are 0 do not count.
    """
    host = sets.numpy()
    for tokens in (host.tokens, host.query):
        if tokens is None:
            continue
        sizes = np.abs(tokens).max(axis=0)
        sizes = sizes[sizes > 0]
        if len(sizes) and sizes.max() > MIXED_UNITS * np.median(sizes):
            return True
    return False


def affordable_draft(
    spec: LayerSpec, token_counts: Int[np.ndarray, " n"], dim: int, n_drafts: int
) -> tuple[int, float]:
    """How many of n distinct samples, and how many heads, drafts are made with.

    As many samples as let all drafts together cost what one fit does; by the exact kernel if that
    is what is asked for and cheaper than few heads.
    """
    n = len(token_counts)
    keys_per_sample = float(token_counts.sum()) / n

    def seconds(n_samples: int, n_heads: float) -> float:
        n_tokens = int(n_samples * keys_per_sample)
        return fit_seconds(n_samples, n_tokens, dim, n_heads, has_query=True)

    # what one fit to all samples costs; an exact kernel, which may cost far more, counts as if it
    # were AUTO_HEADS heads
    assert not isinstance(spec.n_heads, str)
    if spec.is_exact:
        allowed = seconds(n, AUTO_HEADS)
    else:
        allowed = seconds(n, spec.n_heads)

    # the first number of samples that keeps all drafts within that, or the least of them
    few_heads = min(spec.n_heads, DRAFT_HEADS)
    for limit in DRAFT_SAMPLES:
        n_samples = min(n, limit)
        n_heads = few_heads
        if spec.is_exact and seconds(n_samples, math.inf) <= seconds(n_samples, few_heads):
            n_heads = math.inf
        if n_drafts * seconds(n_samples, n_heads) <= allowed:
            break
    return n_samples, n_heads


def choice_seconds(spec: LayerSpec, data: TrainingSet) -> float:
    """Seconds of one core that `choose` takes at most, predicted from sizes alone."""
    distinct = data.distinct()
    spec = replace(spec, n_heads=choose_n_heads(spec, data.samples, distinct.rows))
    search = CandidateSearch.of(spec, data, distinct)
    if search is None:
        return 0.0
    # at most: every strength of the mean, and the drawn strengths
    n_drafts = len(search.scalings) + len(search.queries) - 1
    if search.chooses_heads:
        n_drafts += len(STRENGTHS) + 1
    part = search.part.samples
    n_tokens = int(part.token_counts.sum())
    assert not isinstance(search.draft_spec.n_heads, str)
    one_draft = fit_seconds(
        len(search.part), n_tokens, part.dim, search.draft_spec.n_heads, has_query=True
    )
    return n_drafts * one_draft


def fit_seconds(n: int, n_tokens: int, dim: int, n_heads: float, *, has_query: bool) -> float:
    """Seconds of one core that a fit takes, predicted from sizes alone.

    ``n_heads=math.inf`` stands for the exact kernel.

    Measured at d = 4 … 400 on one core (Zen 4): pairs of keys take 2.2 + 0.075 D ns, entries of W
    that are drawn 30 ns, features 0.1 ns an operation, products of matrices a fifth of that, a path
    of penalties n³/4 ns, and 6 ms all else.
    """
    # all terms are in nanoseconds
    width = dim + 1
    overhead = 6e6
    path = 0.25 * float(n) ** 3

    # the exact kernel: all pairs of keys, of which symmetry spares a half, then n × n matrices
    if math.isinf(n_heads):
        pairs = n_tokens**2 / 2 * (2.2 + 0.075 * width)
        return 1e-9 * (pairs + path + overhead)

    # M heads: without a query only one row of W is ever used, and drawn
    p = n_heads * width
    if has_query:
        entries = width**2
    else:
        entries = width
    features = n_heads * (30 * entries + 0.1 * (2 * n * entries + 4 * n_tokens * width))

    # the smaller of the Gram matrices: ΦΦᵀ, n × n, or ΦᵀΦ, p × p
    if p >= n:
        solve = 0.02 * n**2 * p + path
    else:
        solve = 0.06 * n * p**2 + 0.5 * p**3
    return 1e-9 * (overhead + features + solve)


def choose_n_heads(spec: LayerSpec, samples: Any, rows: Int[np.ndarray, " r"]) -> float:
    """The number of heads: as asked, or infinitely many, or M.

    The exact kernel is taken where it exists and is predicted to be cheaper.

    M is `AUTO_HEADS`, halved until a direct fit without a device is predicted to take
    `AUTO_SECONDS` at most. Only the distinct samples, ``rows``, cost time.
    """
    if not isinstance(spec.n_heads, str):
        return spec.n_heads
    has_query = samples.sets.query is not None or spec.query != "given"
    keys_per_sample = samples.token_counts[rows].astype(float)
    if spec.query == "each":  # every key is a query in turn
        keys_per_sample = keys_per_sample**2

    def seconds(n_heads: float) -> float:
        n_tokens = int(keys_per_sample.sum())
        return fit_seconds(len(rows), n_tokens, samples.dim, n_heads, has_query=has_query)

    # few enough heads for a fit within AUTO_SECONDS; "cg" and devices have costs of their own
    n_heads = AUTO_HEADS
    may_halve = spec.solver != "cg" and spec.device is None
    while may_halve and n_heads > MIN_AUTO_HEADS and seconds(n_heads) > AUTO_SECONDS:
        n_heads //= 2

    # infinitely many heads, where they are the cheaper ones
    can_be_exact = has_kernel(spec.heads) and spec.activation in POINTWISE and spec.solver != "cg"
    if can_be_exact and seconds(math.inf) <= seconds(n_heads):
        return math.inf
    return n_heads


def has_kernel(heads: Any) -> bool:
    """Whether infinitely many heads of a distribution have an exact kernel.

    ``heads=None`` stands for Gaussian heads, which have one.
    """
    if heads is None:
        return True
    is_learned = hasattr(heads, "fit")
    draws_strengths = getattr(heads, "strength_range", None) is not None
    if is_learned or draws_strengths:
        return False
    return hasattr(heads, "moments") or hasattr(heads, "components")


def warn_if_long(spec: LayerSpec, data: TrainingSet) -> None:
    """Say so before a fit that will take long."""
    assert not isinstance(spec.n_heads, str)
    if spec.device is not None:
        return
    n_tokens = int(data.samples.token_counts.sum())
    core_seconds = fit_seconds(len(data), n_tokens, data.samples.dim, spec.n_heads, has_query=True)
    seconds = core_seconds / thread_count()
    if seconds <= LONG_FIT_SECONDS:
        return
    if spec.is_exact:
        kind = "the exact kernel of infinitely many heads"
        remedy = "a finite `n_heads`"
    else:
        kind = f"{spec.n_heads} heads"
        remedy = "fewer heads, a fixed alpha"
    warnings.warn(
        f"this fit will take about {seconds:.0f} s: {kind} on {len(data)} samples of {n_tokens} "
        f"keys in all. For less, use {remedy}, fewer samples, or a GPU.",
        stacklevel=4,
    )


def extras_unit(spread: float, size: float, extras: float) -> float:
    """The scale at which extras vary as much as features, from sums of squares.

    It is 1 where one of them does not vary.
    """
    if spread > 1e-12 * size and extras > 0:
        return math.sqrt(spread / extras)
    return 1.0


def choose_extras_scale(spec: LayerSpec, data: TrainingSet) -> float:
    """The scale of least leave-one-out squared error of ridge on K + scale²·ZZᵀ.

    Z are the standardised extras. K is the kernel of at most `MAX_SAMPLES_FOR_EXTRAS` samples under
    heads that need not be learned, and is made once. Each scale then has a path of penalties: those
    of the specification if these are all samples, else an automatic grid.

    The plain version of one scale is ``textbook.ridge(K + scale**2 * Z @ Z.T, y, alpha)``.
    """
    # at most so many distinct samples, drawn by rank
    data = with_ranks_if_drawn(spec, data)
    tokens = learn_tokens(spec, data)
    samples = JoinedSamples.of(data.with_samples(tokens.apply(data.samples)))
    rows = np.sort(samples.drawn(seed=0)[:MAX_SAMPLES_FOR_EXTRAS])
    if len(rows) < 2:
        return 1.0
    part = samples.data[rows]
    part = part.with_samples(part.samples.numpy())

    # given penalties are for the sum of squares over all samples, and too large for fewer
    alphas = None
    if len(rows) == samples.n_weighted:
        alphas = spec.alphas
    problem = RidgeProblem.of(
        part.outputs,
        alphas,
        fit_intercept=spec.fit_intercept,
        weights=part.weights,
        groups=part.groups,
    )

    # K, and the scale at which extras vary as much as the features do. With an intercept only what
    # varies counts: the trace of the centred K is tr K − 1ᵀK1/n
    gram = _gram_of_features(spec, part.samples)
    extras = extras_or_none(part.samples)
    linear = extras @ extras.T
    spread = float(np.trace(gram))
    if spec.fit_intercept:
        spread -= float(gram.sum() / len(gram))
    unit = extras_unit(spread, float(np.trace(gram)), float(np.trace(linear)))

    # one path of penalties for each scale, in those units
    errors = []
    for ratio in EXTRAS_SCALES:
        errors.append(ridge_gram(gram + (ratio * unit) ** 2 * linear, problem).error)
    return unit * EXTRAS_SCALES[int(np.argmin(errors))]


def _gram_of_features(spec: LayerSpec, samples: Any) -> Float[np.ndarray, "n n"]:
    """K of the heads of a specification, of as many of them as fit a quarter of the budget."""
    heads = spec.draw(spec.fixed_heads, samples)
    if not isinstance(heads, HeadDraw):
        return np.asarray(
            attention_kernel(
                samples, None, heads, spec.activation, memory_budget=spec.memory_budget
            )
        )
    # heads that were drawn from one seed nest: the first of them are a smaller draw
    affordable = block_size(8 * len(samples) * (heads.dim + 1), spec.memory_budget // 4)
    n_heads = min(heads.n_heads, affordable)
    first_heads = HeadDraw(heads.distribution, n_heads, heads.dim, heads.seed, heads.query_dim)
    features = attention_features(samples, first_heads, spec.activation)
    return np.asarray(features @ features.T)
