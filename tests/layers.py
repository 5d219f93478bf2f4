"""A layer from prepared samples in one call, for tests that compare the solvers with refits.

Estimators validate, scale and choose before they solve. `fit_layer` goes straight to
`solve_values` with the heads and penalties that a test names, so that a refit without a sample
differs in that sample alone.
"""

from keyhole.solvers.solve import solve_values
from keyhole.spec import LayerSpec
from keyhole.training import TrainingSet


def fit_layer(
    samples,
    outputs,
    heads,
    alphas=None,
    *,
    weights=None,
    groups=None,
    draft=False,
    keep_factor=False,
    **settings,
):
    """Solve for the values of ``heads`` (a HeadDraw, or a head distribution for infinitely
    many).
    """
    first = {"activation": "relu", "pooling": "mean"}
    spec = LayerSpec(alphas=alphas, **(first | settings))
    data = TrainingSet(samples, outputs, weights, groups)
    return solve_values(spec, data, heads, draft=draft, keep_factor=keep_factor)


def token_losses(model):
    """Leave-one-out loss of every (scaling, query) that a fit tried, under the heads it tried
    first.
    """
    return {(c.scaling, c.query): c.loss for c in reversed(model.candidates_)}
