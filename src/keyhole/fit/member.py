"""One layer, fitted: an embedding with a readout, its penalty, and its leave-one-out predictions.

A readout is linear, f(x) = φ(x)ᵀv + b, or the second, Gaussian kernel on the pooled vector,

    K₂(x, x') = exp(−|μ_x − μ_x'|²/(τ·median)),    |μ_x − μ_x'|² = K(x,x) + K(x',x') − 2K(x,x'),

which is what infinitely many random features of an MLP on the pooled vector make of it. Both are
ridge, on features where these are fewer than samples, on a Gram matrix elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._array import blas_threads_for, block_size, blocks
from keyhole.fit.embedding import Embedding, kernel_parts_of_keys
from keyhole.fit.samples import TrainingSet
from keyhole.fit.second_kernel import SecondKernel
from keyhole.fit.settings import FitOptions, LayerSettings
from keyhole.solve.cholesky import fit_features, fit_gram
from keyhole.solve.matrices import as_like, on_host
from keyhole.solve.newton import LOG_LOSS, fit_newton, working_problem
from keyhole.solve.problem import Factor, RidgeFit, RidgeProblem
from keyhole.solve.spectral import Spectrum

N_FOLDS = 5
"""Folds in which heads are learned anew, so that every sample is predicted by heads that have not
seen it."""


@dataclass
class Member:
    """A fitted layer.

    Attributes
    ----------
    settings : LayerSettings
    embedding : Embedding
    ridge : RidgeFit
    coef : array (q, t)
        Values v of the features where there are some and the readout is linear; else the dual
        coefficients a of f(x) = Σ_j a_j K(x, x_j) + b.
    intercept : array (t,)
    held_out : array (n, t)
        The prediction of each training sample by the fit without it, or without its group; where
        heads were learned, by heads and values that have not seen it.
    loss : str
        What the values minimise.
    second : SecondKernel or None
        The Gaussian kernel on the pooled vectors, None for a linear readout.
    compares_features : bool
        Whether its factor compares features of samples, and not rows of a kernel.
    factors : tuple of Factor
        One for all outputs; of the log-loss one for each.
    learned_note : str
        What learning its heads has gained, if they were learned.
    gram : array (n, n) or None
        The Gram matrix of its readout, where that is to be used again.
    """

    settings: LayerSettings
    embedding: Embedding
    ridge: RidgeFit
    coef: Float[np.ndarray, "q t"] = field(repr=False)
    intercept: Float[np.ndarray, " t"]
    held_out: Float[np.ndarray, "n t"] = field(repr=False)
    loss: str = "squared_error"
    second: SecondKernel | None = None
    compares_features: bool = True
    factors: tuple[Factor, ...] = field(default=(), repr=False)
    learned_note: str = ""
    gram: Float[np.ndarray, "n n"] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return self.settings.name

    @property
    def alpha(self) -> float:
        """The penalty."""
        return self.ridge.alpha

    @property
    def is_linear(self) -> bool:
        """Whether the readout is linear."""
        return self.second is None

    def predict(self, samples: Any) -> Float[np.ndarray, "n t"]:
        """f of samples as they were given."""
        return self.predict_prepared(self.embedding.prepared(samples))

    def predict_prepared(self, prepared: Any) -> Float[np.ndarray, "n t"]:
        """f of samples that the token rule has prepared."""
        if self.is_linear and self.embedding.is_finite:
            return self.embedding.outputs(prepared, self.coef) + self.intercept
        outputs = np.empty((len(prepared), self.coef.shape[1]))
        for rows in self._row_blocks(len(prepared)):
            compared = self.compared(prepared[rows])
            outputs[rows] = on_host(compared @ as_like(self.coef, compared))
        return outputs + self.intercept

    def _row_blocks(self, n: int) -> Any:
        """Blocks of new samples whose comparison with the training samples is within the budget."""
        n_compared = max(len(self.embedding.train), 1)
        budget = self.embedding.options.memory_budget
        return blocks(n, block_size(4 * 8 * n_compared, budget))

    def compared(self, prepared: Any) -> Any:
        """What the factor compares of new samples: features, or rows of the kernel."""
        if self.second is not None:
            return self.second.rows(self.embedding, prepared)
        if self.compares_features:
            return self.embedding.features(prepared)
        return self.embedding.cross(prepared)

    def squares(self, prepared: Any) -> Float[np.ndarray, " n"]:
        """K(x, x), of which variances need those of new samples."""
        if self.second is not None:
            return np.ones(len(prepared))
        if self.compares_features:
            return np.zeros(len(prepared))
        return self.embedding.squares(prepared)

    def contributions(
        self, samples: Any
    ) -> tuple[Float[np.ndarray, "k t"], Float[np.ndarray, "n t"]]:
        """What every key adds to f, and what is left of f for every sample.

        Both add up to `predict` exactly. What is left are the intercept and the sample-level
        features; for a second kernel, f at the mean training embedding.
        """
        prepared = self.embedding.prepared(samples)
        if self.second is not None:
            return self.second.contributions(self, prepared)
        if self.embedding.is_finite:
            parts = self.embedding.parts_of_keys(prepared, self.coef)
        else:
            others = self.embedding.train
            parts = kernel_parts_of_keys(self.embedding, prepared, others, self.coef)
        rest = np.tile(self.intercept, (len(prepared), 1))
        if prepared.extras is not None:
            parts, of_extras = self._parts_of_extras(prepared, parts)
            rest = rest + of_extras
        return parts, rest

    @property
    def extras_values(self) -> Float[np.ndarray, "c t"] | None:
        """Coefficients of the scaled sample-level features of a linear readout, None without."""
        extras = self.embedding.train.extras
        if extras is None or not self.is_linear:
            return None
        if self.embedding.is_finite:
            return self.coef[len(self.coef) - extras.shape[1] :]
        return extras.T @ self.coef

    def _parts_of_extras(
        self, prepared: Any, parts: Float[np.ndarray, "k t"]
    ) -> tuple[Float[np.ndarray, "k t"], Float[np.ndarray, "n t"]]:
        """What sample-level features add: statistics of rows to the rows, others to the rest."""
        values = self.extras_values
        assert values is not None
        shares, centre = self.embedding.rule.shares_of_statistics(prepared)
        n_statistics = shares.shape[1]
        if n_statistics == 0:
            return parts, prepared.extras @ values
        # the last columns are statistics of the rows: (S − centre)/spread, S a sum over rows
        of_samples = prepared.extras[:, :-n_statistics] @ values[:-n_statistics]
        constant = -centre @ values[-n_statistics:]
        return parts + shares @ values[-n_statistics:], of_samples + constant


def fit_member(
    settings: LayerSettings,
    data: TrainingSet,
    options: FitOptions,
    *,
    loss: str = "squared_error",
    criterion: str = "squared_error",
    embedding: Embedding | None = None,
) -> Member:
    """Fit one layer: its embedding unless it is given, and its values at the best penalty.

    ``criterion`` is what the penalty is chosen by: squared errors, or the log-loss of classes.
    """
    if settings.learns_heads:
        from keyhole.fit.learning import fit_learned_member

        return fit_learned_member(settings, data, options, loss=loss, criterion=criterion)
    if embedding is None:
        embedding = Embedding.fit(settings.embedding(), data, options)
    problem = RidgeProblem.of(
        data.outputs,
        options.alphas,
        fit_intercept=options.fit_intercept,
        weights=data.weights,
        groups=data.groups,
        criterion=criterion,
    )
    n = len(data)
    second = None
    if settings.mlp_width is not None:
        second = SecondKernel.fit(embedding, settings.mlp_width)
        compares_features = second.has_centres
    else:
        compares_features = embedding.is_finite and embedding.n_features < n
    kept_gram = None
    with blas_threads_for(n):
        if compares_features:
            if options.keeps_grams:
                kept_gram = on_host(embedding.gram())
            blocks_of_rows = embedding.row_blocks
            if second is not None:
                blocks_of_rows = second.row_blocks
            ridge, factors = _solve_features(blocks_of_rows, problem, loss)
        else:
            gram = embedding.gram() if second is None else second.gram()
            if options.keeps_grams:
                kept_gram = on_host(gram).copy()
            ridge, factors = _solve_gram(gram, problem, loss)
    coef = ridge.coef
    if second is None and embedding.is_finite and not compares_features:
        coef = embedding.values_of_dual(coef)
    assert ridge.left_out is not None
    member = Member(
        settings=settings,
        embedding=embedding,
        ridge=ridge,
        coef=coef,
        intercept=ridge.intercept,
        held_out=data.outputs - ridge.left_out,
        loss=loss,
        second=second,
        compares_features=compares_features,
        factors=factors,
        gram=kept_gram,
    )
    if options.tell is not None:
        options.tell(member)
    return member


def _solve_features(
    row_blocks: Any, problem: RidgeProblem, loss: str
) -> tuple[RidgeFit, tuple[Factor, ...]]:
    """Ridge or Newton steps in the dimension of the features."""
    if loss == "squared_error":
        ridge = fit_features(row_blocks, problem)
        assert ridge.factor is not None
        return ridge, (ridge.factor,)
    if loss != "log_loss":
        raise ValueError(f"a member minimises 'squared_error' or 'log_loss': got {loss!r}.")
    spectrum = Spectrum.of_features(row_blocks, problem)
    ridge = fit_newton(spectrum, LOG_LOSS)
    logits = np.concatenate([on_host(block) @ ridge.coef for block in row_blocks()])
    factors = []
    for working in _working_problems(problem, logits + ridge.intercept, ridge.alpha):
        factor = fit_features(row_blocks, working).factor
        assert factor is not None
        factors.append(factor)
    return ridge, tuple(factors)


def _solve_gram(gram: Any, problem: RidgeProblem, loss: str) -> tuple[RidgeFit, tuple[Factor, ...]]:
    """Ridge or Newton steps in the dimension of the samples; the Gram matrix is overwritten."""
    if loss == "squared_error":
        ridge = fit_gram(gram, problem)
        assert ridge.factor is not None
        return ridge, (ridge.factor,)
    if loss != "log_loss":
        raise ValueError(f"a member minimises 'squared_error' or 'log_loss': got {loss!r}.")
    kept = on_host(gram).copy()
    ridge = fit_newton(Spectrum.of_gram(gram, problem), LOG_LOSS)
    logits = kept @ ridge.coef + ridge.intercept
    factors = []
    for working in _working_problems(problem, logits, ridge.alpha):
        factor = fit_gram(kept.copy(), working).factor
        assert factor is not None
        factors.append(factor)
    return ridge, tuple(factors)


def _working_problems(
    problem: RidgeProblem, logits: Float[np.ndarray, "n t"], alpha: float
) -> list[RidgeProblem]:
    """The ridge problem of the last Newton step of every output: its factor is that of the fit."""
    problems = []
    for output in range(logits.shape[1]):
        curvature, responses = working_problem(logits[:, output], problem.y[:, output])
        problems.append(
            RidgeProblem.of(
                responses[:, None],
                [alpha],
                fit_intercept=problem.fit_intercept,
                weights=problem.weights * curvature,
                groups=problem.groups,
            )
        )
    return problems


def with_held_out(member: Member, held_out: Float[np.ndarray, "n t"]) -> Member:
    """The same member with other held-out predictions."""
    return replace(member, held_out=held_out)
