"""One fit: a specification and a training set become a fitted layer.

    fit(spec, data)  =  select keys, if they are to be selected
                        → learn the token rule → prepare the samples
                        → learn the heads, if they are to be learned
                        → solve for the values (solvers/)
                        → where heads were learned, predict samples that they have not seen

Estimators, the lens and the experiments all call `fit`; what a user leaves open is chosen first, by
`keyhole.choose.choose`. Samples that come in batches are summed instead (streaming.py), and share
the solve.

The plain version is the example at the top of `keyhole.textbook` (docs/explanation/textbook.md):
draw heads, make features, solve ridge, predict.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole.attention.activations import check_pointwise
from keyhole.attention.backends import backend_for, device_to_learn_on
from keyhole.attention.descent import DescentSettings
from keyhole.attention.heads import HeadDistribution
from keyhole.attention.learned import MAX_HEADS_TO_JUDGE, LearnedHeads
from keyhole.attention.search import HeldOutPart, Learned
from keyhole.data.sets import SampleBatch
from keyhole.data.tokens import TokenRule
from keyhole.key_selection import SelectedKeys, select_keys
from keyhole.ridge.problem import RidgeFit
from keyhole.solvers.layers import Layer
from keyhole.solvers.solve import LayerFit, solve_values
from keyhole.spec import AUTO, LayerSpec
from keyhole.training import TrainingSet


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
    held_out_error : float or None
        Where heads were learned: the mean squared error on samples that they have not seen. The
        predictions are then those of such samples, and NaN for all others: leave-one-out leaves a
        sample out of the values only, and its error was up to 1.8 times too small.
    """

    spec: LayerSpec
    tokens: TokenRule
    solved: LayerFit = field(repr=False)
    selected: SelectedKeys | None = field(default=None, repr=False)
    held_out_error: float | None = None

    def predict(self, samples: SampleBatch) -> Float[np.ndarray, "n t"]:
        """f of samples as they are given."""
        samples = backend_for(self.spec.device).placed(samples)
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
        """Leave-one-out predictions of the training samples; see ``held_out_error``."""
        return self.solved.predictions

    @property
    def error(self) -> float:
        """The mean squared error of samples that were left out, or held out from learned heads."""
        if self.held_out_error is not None:
            return self.held_out_error
        return self.ridge.error

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
        held_out_error = self.held_out_error
        if held_out_error is not None:
            held_out_error = float(np.ldexp(held_out_error, 2 * exponent))
        return replace(self, solved=self.solved.in_units(exponent), held_out_error=held_out_error)


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

    # samples, where the layer is computed
    data = data.with_samples(backend_for(spec.device).placed(data.samples))

    # keys: of large sets, those that matter most
    if spec.selects_keys:
        if selected is None:
            selected = select_keys(spec, data)
        data = data.with_samples(selected.data.samples)

    # tokens: scaled, with queries, pooled
    if tokens is None:
        tokens = learn_tokens(spec, data)
    ready = data.prepared(tokens)

    # heads: learned if they are to be; several hops extend the queries
    learned = learn_heads(spec, ready)
    rule_before_hops = tokens
    if learned.heads is not spec.heads:
        tokens = tokens.with_hops_of(learned.heads)
        ready = data.prepared(tokens)

    # values: in closed form, or by Newton steps
    complete = replace(spec, heads=learned.heads)
    solved = solve_values(spec, ready, spec.draw(learned.heads, ready.samples), draft=draft)
    fitted = FittedLayer(spec=complete, tokens=tokens, solved=solved, selected=selected)

    # predictions of samples that learned heads have not seen
    if learned.held_out:
        fitted = with_held_out_predictions(fitted, data, rule_before_hops, learned.held_out)
    return fitted.in_units(exponent)


def with_held_out_predictions(
    fitted: FittedLayer,
    data: TrainingSet,
    tokens: TokenRule,
    held_out: tuple[HeldOutPart, ...],
) -> FittedLayer:
    """The fit with predictions of samples by heads and values that have not seen them.

    ``tokens`` is the rule before any hops. The heads of each part were learned on all other samples
    (`HeldOutPart`); here the values are solved for on the same ones. All samples that count are
    predicted if every one was held out in turn, a fifth of them otherwise.
    """
    predictions = np.full(data.outputs.shape, np.nan)
    for part in held_out:
        # samples of the part, or all of their groups; its numbers are among samples with weight
        is_unseen = np.zeros(len(data), bool)
        is_unseen[data.positive_rows[part.rows]] = True
        if data.groups is not None:
            is_unseen |= np.isin(data.groups, data.groups[is_unseen])
        seen = data[np.flatnonzero(~is_unseen)].of_positive_weight()
        unseen = np.flatnonzero(is_unseen)

        # values on the samples seen, in the coordinates that the hops of these heads make
        rule = tokens.with_hops_of(part.heads)
        seen = seen.with_samples(rule.apply(seen.samples))
        spec = replace(fitted.spec, heads=part.heads)
        solved = solve_values(spec, seen, spec.draw(part.heads, seen.samples), draft=True)
        predictions[unseen] = solved.layer.predict(
            rule.apply(data.samples[unseen]), memory_budget=spec.memory_budget
        )

    # their mean squared error, over samples that count
    solved = replace(fitted.solved, predictions=predictions)
    rows = solved.judged_rows()
    residuals = data.outputs[rows] - predictions[rows]
    if fitted.spec.is_logistic:
        # of 2p − 1 with the probability p of each output
        residuals = np.sign(data.outputs[rows]) - np.tanh(predictions[rows] / 2)
    squares = np.square(residuals).mean(axis=1)
    error = float(np.average(squares, weights=data.weights_or_ones()[rows]))
    return replace(fitted, solved=solved, held_out_error=error)


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


def learn_heads(spec: LayerSpec, ready: TrainingSet) -> Learned:
    """The head distribution itself, or what its ``fit`` makes of prepared samples."""
    assert spec.heads is not None
    heads: Any = spec.heads
    if not spec.learns_heads:
        return Learned(heads)

    data = ready.of_positive_weight()

    # a distribution of the user has the arguments that the protocol names
    if not isinstance(heads, LearnedHeads):
        if spec.is_exact:
            check_pointwise(spec.activation)
        fitted_heads = heads.fit(
            data.samples.numpy(),
            data.outputs,
            weights=data.weights,
            groups=data.groups,
            seed=spec.seed,
            activation=spec.activation,
            fit_intercept=spec.fit_intercept,
        )
        return Learned(fitted_heads)

    # infinitely many heads are used through their kernel, which takes a pointwise activation and
    # noise of one scale
    settings = DescentSettings()
    n_heads = MAX_HEADS_TO_JUDGE
    if spec.is_exact:
        check_pointwise(spec.activation)
        settings = DescentSettings(learn_scales=False)
    else:
        n_heads = int(spec.n_heads)

    return heads.learn(
        data.samples,
        data.outputs,
        weights=data.weights,
        groups=data.groups,
        seed=spec.seed,
        activation=spec.activation,
        fit_intercept=spec.fit_intercept,
        n_heads=n_heads,
        device=device_to_learn_on(data.samples),
        settings=settings,
        starts=spec.starts,
    )


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
