"""One fit: a specification and a training set become a fitted layer.

    fit(spec, data)  =  select keys, if they are to be selected
                        → learn the token rule → prepare the samples
                        → learn the heads, if they are to be learned
                        → solve for the values (solvers/)

Estimators, the lens and the experiments all call `fit`; what a user leaves open is chosen first, by
`keyhole.choose.choose`. Samples that come in batches are summed instead (streaming.py), and share
the solve.

The plain version is the example at the top of `keyhole.textbook` (docs/explanation/textbook.md):
draw heads, make features, solve ridge, predict.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole.attention.activations import check_pointwise
from keyhole.attention.heads import HeadDistribution
from keyhole.attention.learned import MAX_HEADS_TO_JUDGE, LearnedHeads
from keyhole.data.sets import SampleBatch
from keyhole.data.tokens import ADDS_FEATURES, TokenRule
from keyhole.key_selection import SelectedKeys, select_keys
from keyhole.ridge.problem import RidgeFit
from keyhole.solvers.layers import Layer
from keyhole.solvers.solve import LayerFit, exceeds_memory, solve_values
from keyhole.spec import AUTO, LayerSpec
from keyhole.training import JoinedSamples, TrainingSet


@dataclass(frozen=True)
class FittedLayer:
    """What a fit gives: the complete specification, the token rule, and the solved values.

    Attributes
    ----------
    spec : LayerSpec
        What was fitted; ``spec.heads`` is what the head distribution became on the training set.
    tokens : TokenRule
        What is done to the tokens of every sample first.
    solved : LayerFit
        The layer, its ridge fit and its leave-one-out predictions.
    selected : SelectedKeys or None
        The keys that the layer sees, and how those of new samples are selected; None where it sees
        all of them.
    """

    spec: LayerSpec
    tokens: TokenRule
    solved: LayerFit = field(repr=False)
    selected: SelectedKeys | None = field(default=None, repr=False)

    def predict(self, samples: SampleBatch) -> Float[np.ndarray, "n t"]:
        """f of samples as they are given."""
        if self.selected is not None:
            samples = self.selected.selection.apply(samples)
        ready = self.tokens.apply(samples)
        return self.layer.predict(ready, memory_budget=self.spec.memory_budget)

    @property
    def heads(self) -> HeadDistribution:
        """The fitted head distribution."""
        assert self.spec.heads is not None
        return self.spec.heads

    @property
    def layer(self) -> Layer:
        """The layer itself, which takes samples that the token rule has prepared."""
        return self.solved.layer

    @property
    def ridge(self) -> RidgeFit:
        """Penalties and their errors."""
        return self.solved.ridge

    @property
    def predictions(self) -> Float[np.ndarray, "n t"]:
        """Leave-one-out predictions of the training samples."""
        return self.solved.predictions

    @property
    def loss(self) -> float:
        """The leave-one-out squared error, or log-loss, at the penalty used.

        The penalty was chosen by it.
        """
        return self.ridge.loss

    def in_units(self, exponent: int) -> FittedLayer:
        """The fit to outputs 2^exponent times as large; logits have no units."""
        if self.spec.is_logistic:
            return self
        return replace(self, solved=self.solved.in_units(exponent))


def fit(
    spec: LayerSpec,
    data: TrainingSet,
    *,
    tokens: TokenRule | None = None,
    draft: bool = False,
    selected: SelectedKeys | None = None,
) -> FittedLayer:
    """Fit a layer whose specification leaves nothing to choose.

    Parameters
    ----------
    spec : LayerSpec
        Complete: see `keyhole.choose.choose`.
    data : TrainingSet
        Samples as they were given.
    tokens : TokenRule, optional
        A rule that was learned on more samples than these; learned here if None.
    draft : bool
        Whether the fit only serves to be compared with others: its grid of penalties is coarse.
    selected : SelectedKeys, optional
        The keys that the layer sees, where they were selected before.
    """
    _check_complete(spec)
    assert spec.heads is not None

    # outputs of size one, so that squares neither overflow nor vanish; undone at the end
    exponent = data.output_exponent()
    data = data.with_outputs_in_units(exponent)
    if _needs_host_arrays(spec, data):
        data = data.with_samples(data.samples.numpy())

    # keys: of large sets, those that matter most
    if spec.selects_keys:
        if selected is None:
            selected = select_keys(spec, data)
        data = data.with_samples(selected.data.samples)

    # ranks, where samples are drawn; drafts are given few samples, and use all of them
    if not draft:
        data = with_ranks_if_drawn(spec, data)

    # tokens: scaled, with queries, pooled
    if tokens is None:
        tokens = learn_tokens(spec, data)
    ready = data.with_samples(tokens.apply(data.samples))

    # heads: learned if they are to be; several hops extend the queries
    heads = learn_heads(spec, ready)
    if heads is not spec.heads:
        tokens = tokens.with_hops_of(heads)
        ready = data.with_samples(tokens.apply(data.samples))

    # values: in closed form, or by Newton steps
    solved = solve_values(spec, ready, spec.draw(heads, ready.samples), draft=draft)
    fitted = FittedLayer(
        spec=replace(spec, heads=heads), tokens=tokens, solved=solved, selected=selected
    )
    return fitted.in_units(exponent)


def with_ranks_if_drawn(spec: LayerSpec, data: TrainingSet) -> TrainingSet:
    """The samples with ranks where a fit draws some of them.

    It draws samples to choose the scale of extras, to hold them out, and to stand for their group.
    Ranks are made of samples as they were given: tokens that were scaled differ in their last
    digits.
    """
    if data.ranks is not None:
        return data
    # conjugate gradients hold samples out to choose a penalty
    by_gradients = spec.solver == "cg"
    if spec.solver == "auto" and not spec.is_exact:
        n_features = int(spec.n_heads) * (data.samples.dim + 1)
        by_gradients = exceeds_memory(len(data), n_features, spec.dtype)
    has_extras = data.has_extras or spec.pooling in ADDS_FEATURES
    if by_gradients or data.groups is not None or has_extras:
        return data.with_ranks(data.distinct())
    return data


def learn_tokens(spec: LayerSpec, data: TrainingSet) -> TokenRule:
    """The token rule that a specification asks for.

    Its centre and spread are learned on the training samples.
    """
    rule = TokenRule.learn(
        data.samples,
        spec.scaling,
        spec.query,
        spec.pooling,
        weights=data.weights,
        fit_intercept=spec.fit_intercept,
    )
    rule = rule.with_hops_of(spec.fixed_heads)
    if spec.extras_scale is None:
        return rule
    return rule.with_extras_scale(spec.extras_scale)


def learn_heads(spec: LayerSpec, ready: TrainingSet) -> HeadDistribution:
    """The head distribution itself, or what its ``fit`` makes of prepared samples."""
    assert spec.heads is not None
    if not spec.learns_heads:
        return spec.heads
    # infinitely many heads are used through their kernel, which learned heads must then have
    heads: Any = spec.heads
    if spec.is_exact:
        heads = _with_a_kernel(heads, spec.activation)

    # duplicates count as one sample of their joint weight, here as in the layer; with groups every
    # sample counts
    if ready.groups is None:
        data = JoinedSamples.of(ready).data
    else:
        data = ready[ready.positive_rows]

    # a distribution of the user has the arguments that the protocol names
    if not isinstance(heads, LearnedHeads):
        return heads.fit(
            data.samples,
            data.outputs,
            weights=data.weights,
            groups=data.groups,
            seed=spec.seed,
            activation=spec.activation,
            fit_intercept=spec.fit_intercept,
        )

    # LearnedHeads also takes the number of heads it is judged with, and a device, which knows
    # samples of one averaged set only
    if spec.is_exact:
        n_heads = MAX_HEADS_TO_JUDGE
    else:
        n_heads = int(spec.n_heads)
    device = None
    if data.samples.is_plain:
        device = spec.device
    return heads.fit(
        data.samples,
        data.outputs,
        weights=data.weights,
        groups=data.groups,
        seed=spec.seed,
        activation=spec.activation,
        fit_intercept=spec.fit_intercept,
        n_heads=n_heads,
        device=device,
    )


def _with_a_kernel(heads: Any, activation: str) -> Any:
    """Heads to learn whose result has a kernel; without one they are refused before the work.

    A kernel needs a pointwise activation and noise of one scale in all directions.
    """
    check_pointwise(activation)
    covariance = getattr(heads, "covariance", "none")
    if covariance == "auto":
        heads = copy.copy(heads)
        heads.covariance = "none"
    elif covariance != "none":
        raise ValueError(
            f"infinitely many heads need noise of one scale: got {heads}. Use covariance='none', "
            "or a finite `n_heads`."
        )
    return heads


def _check_complete(spec: LayerSpec) -> None:
    """Raise if something is left to choose."""
    open_settings = []
    for name, value in spec.settings().items():
        if value is None or (isinstance(value, str) and value == AUTO):
            open_settings.append(name)
    if open_settings:
        raise ValueError(
            f"a fit needs a complete specification, and {', '.join(open_settings)} are still to be "
            "chosen. Pass the specification through keyhole.choose.choose first."
        )


def _needs_host_arrays(spec: LayerSpec, data: TrainingSet) -> bool:
    """Whether torch tensors must come to the host: tokens are prepared, heads learned, in NumPy."""
    leaves_tokens_alone = (spec.scaling, spec.query, spec.pooling) == ("none", "given", "mean")
    is_plain = data.samples.is_plain and data.groups is None
    can_stay = leaves_tokens_alone and is_plain and not spec.learns_heads
    return not can_stay
