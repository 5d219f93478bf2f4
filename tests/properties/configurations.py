"""Random small problems over the product of all options, and the same layer fitted plainly, in
extended precision.

A `Configuration` is a row of plain values: printed by a test that fails, it makes the same problem
again, ``pose(Configuration(...))``. `Plain` scales tokens, makes queries, features and fits by the
formulas of the docs, in long doubles, and says by how much rounding of size u may move each of its
answers.
"""

import itertools
import math
from dataclasses import dataclass, fields, replace

import numpy as np
from paper import PAPER_LAYER

import keyhole as kh

LONG = np.longdouble
EPS64, EPS32 = float(np.finfo(np.float64).eps), float(np.finfo(np.float32).eps)

ROUTES = ("primal", "dual", "kernel", "stream", "cg", "torch dual", "torch kernel")
CHOICES = {
    "route": ROUTES,
    "dtype": ("float64", "float64", "float32"),
    "container": ("sets", "sets", "groups of sets"),
    "queries": (True, False),
    "asked": (0, 0, 1, 2, 4),
    "extras": (False, False, True),
    "query": ("given", "given", "mean", "each", "auto"),
    "scaling": ("none", "none", "sphere", "standard", "auto"),
    "pooling": ("mean", "sum"),
    "activation": ("relu", "relu", "softmax", "linear", "square", "step", "exp"),
    "heads": ("gaussian", "biased", "query-key"),
    "fit_intercept": (True, True, False),
    "weights": ("none", "positive", "zeros", "spread"),
    "groups": (False, False, True),
    "outputs": ("one", "two", "two classes", "three classes", "balanced classes"),
    "penalty": ("fixed", "several", "loo"),
}
"""What is drawn from, each option by itself; repeated where it should be drawn more often.
``asked`` is the dimension of queries, 0 for that of the keys."""

EXTRAS_SCALE = 1.5
"""Of extras, which a configuration names: one that is chosen is a matter of rounding where two are
as good.
"""


@dataclass(frozen=True)
class Configuration:
    """One problem and one way to fit it."""

    seed: int
    n: int
    dim: int
    n_heads: int
    copies: int
    decades: float
    route: str
    dtype: str
    container: str
    queries: bool
    asked: int
    extras: bool
    query: str
    scaling: str
    pooling: str
    activation: str
    heads: str
    fit_intercept: bool
    weights: str
    groups: bool
    outputs: str
    penalty: str

    @classmethod
    def draw(cls, rng):
        """Every option by itself, then what does not go together put right."""
        chosen = {name: choices[rng.integers(len(choices))] for name, choices in CHOICES.items()}
        sizes = {
            "seed": int(rng.integers(2**31)),
            "n": int(rng.integers(6, 15)),
            "dim": int(rng.integers(1, 4)),
            "n_heads": int(rng.integers(1, 20)),
            "copies": int(rng.integers(0, 4)),
            "decades": round(float(rng.uniform(0, 1)), 3),
        }
        return cls(**sizes, **chosen).settled()

    def settled(self):
        """The nearest configuration that is allowed: what a route cannot do is left out."""
        new = {}
        if "kernel" in self.route:
            new |= {"heads": "biased" if self.heads == "query-key" else self.heads}
            new |= {"activation": "relu" if self.activation == "softmax" else self.activation}
            new |= {"dtype": self.dtype if self.route.startswith("torch") else "float64"}
        if self.route == "stream":
            new |= {
                "scaling": "sphere" if self.scaling in ("standard", "auto") else self.scaling,
                "groups": False,
            }
            new |= {
                "outputs": "two classes" if self.outputs == "balanced classes" else self.outputs
            }
            new |= {"query": "mean" if self.query == "auto" else self.query}
        if self.route.startswith("torch"):
            new |= {
                "container": "sets",
                "pooling": "mean",
                "query": "given" if self.query == "each" else self.query,
            }
            new |= {"outputs": self.outputs if self.outputs in ("one", "two") else "one"}
        if self.route == "cg":
            new |= {"penalty": "several" if self.penalty == "loo" else self.penalty}
        if new.get("container", self.container) == "groups of sets":
            new |= {"query": "given"}
        if self.route == "primal":
            new |= {
                "n_heads": 1 + self.n_heads % max(1, (self.n - self.copies - 4) // (self.dim + 1))
            }
        elif self.route == "dual":
            new |= {"n_heads": max(self.n_heads, -(-self.n // (self.dim + 1)))}
        return replace(self, **new)

    def __repr__(self):
        settings = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
        return f"Configuration({settings})"

    @property
    def rounding(self):
        """The unit of rounding of features or kernel."""
        unit = EPS32 if self.dtype == "float32" else EPS64
        moved = self.scaling != "none" or self.query != "given" or self.dtype == "float32"
        # the kernel of the step has a cusp at equal tokens: κ(1 − u) is off by √u
        return (
            math.sqrt(unit)
            if "kernel" in self.route and self.activation == "step" and moved
            else unit
        )

    @property
    def bound(self):
        """The row of a table of rounding bounds that this configuration belongs to."""
        if self.route == "cg" and not self.groups:
            return f"cg {self.dtype}"
        if self.groups:
            return f"{'kernel' if 'kernel' in self.route else 'finite'} by groups {self.dtype}"
        return f"{self.route} {self.dtype}"


@dataclass(frozen=True)
class Problem:
    """Samples for a configuration: what `fit` takes, which of them are copies, and sets that are
    not fitted.
    """

    config: Configuration
    sets: object
    y: np.ndarray
    weights: np.ndarray | None
    groups: np.ndarray | None
    new: object

    @property
    def columns(self):
        """The outputs as columns: numbers, or ±1 for each class, one column for two classes."""
        if self.y.dtype.kind != "U":
            return self.y.reshape(len(self.y), -1)
        names = np.unique(self.y)
        columns = np.where(self.y[:, None] == names, 1.0, -1.0)
        return columns[:, 1:] if len(names) == 2 else columns

    @property
    def joint_weights(self):
        """Weights of samples times those of their classes."""
        w = np.ones(len(self.y)) if self.weights is None else self.weights
        if self.config.outputs != "balanced classes":
            return w
        _, member = np.unique(self.y, return_inverse=True)
        totals = np.bincount(member, weights=w)
        share = w.sum() / (totals > 0).sum()
        return w * share / np.where(totals > 0, totals, 1.0)[member]


def pose(config):
    """Draw the samples of a configuration."""
    rng = np.random.default_rng(config.seed)
    n, d = config.n, config.dim
    many = config.container == "groups of sets"
    drawn = [_sample(rng, d, many, config.queries, config.asked or d) for _ in range(n + 4)]
    first = n - config.copies
    source = np.concatenate([np.arange(first), rng.integers(0, first, config.copies)])
    samples = [_shuffled(rng, drawn[i]) if k >= first else drawn[i] for k, i in enumerate(source)]
    y = _outputs(rng, config.outputs, first)[source]
    order = rng.permutation(n)
    samples, y, source = [samples[i] for i in order], y[order], source[order]
    extras = rng.standard_normal((n + 4, 2)) * [1.0, 5.0] + [0.5, -3.0] if config.extras else None
    own = (None, None) if extras is None else (extras[source], extras[n:])
    groups = None
    if config.groups:
        groups = rng.integers(0, max(3, n // 3), n)
        groups[:3] = [0, 1, 2]
    weights = None
    if config.weights != "none":
        weights = (
            rng.uniform(0.2, 3.0, n)
            if config.weights != "spread"
            else 10.0 ** rng.uniform(-2, 2, n)
        )
        if config.weights == "zeros":
            weights[rng.permutation(np.arange(3, n))[: rng.integers(1, n - 3)]] = 0.0
            weights[np.flatnonzero(source == source[0])[1:]] = 0.0
            if not weights[1:].any():  # nothing would be left to learn from without it
                weights[np.flatnonzero(source != source[0])[0]] = 1.0
            # a class without weight is none of the outputs (tests/units/test_weightless_classes.py)
            for label in np.unique(y) if "classes" in config.outputs else ():
                if not weights[y == label].any():
                    weights[np.flatnonzero(y == label)[0]] = 1.0
    return Problem(
        config, _batch(samples, many, own[0]), y, weights, groups, _batch(drawn[n:], many, own[1])
    )


def _sample(rng, d, many, queries, asked):
    """A sample: a list of (query or None, keys)."""
    count = int(rng.integers(1, 4)) if many else 1
    return [
        (
            rng.standard_normal(asked) if queries else None,
            rng.standard_normal((int(rng.integers(1, 5)), d)) + 0.5,
        )
        for _ in range(count)
    ]


def _shuffled(rng, sample):
    """The same sample with its keys, and its sets, in another order."""
    return [
        (q, keys[rng.permutation(len(keys))])
        for q, keys in (sample[i] for i in rng.permutation(len(sample)))
    ]


def _batch(samples, many, extras):
    flat = [pair for sample in samples for pair in sample]
    query = None if flat[0][0] is None else np.stack([q for q, _ in flat])
    sets = kh.SetBatch([keys for _, keys in flat], query=query)
    return (kh.SetGroups(sets, [len(sample) for sample in samples]) if many else sets).with_extras(
        extras
    )


def _outputs(rng, kind, n):
    if kind in ("one", "two"):
        y = rng.standard_normal((n, 2)) * [1.0, 20.0] + [3.0, -50.0]
        return y[:, 0] if kind == "one" else y
    names = np.array(["ash", "beech", "cedar"])[: 3 if kind == "three classes" else 2]
    return names[
        np.concatenate([np.arange(len(names)), rng.integers(0, len(names), n - len(names))])
    ]


def heads_of(config):
    distributions = {
        "gaussian": kh.GaussianHeads(),
        "biased": kh.GaussianHeads(mean=1.0),
        "query-key": kh.QueryKeyHeads(2),
    }
    return distributions[config.heads]


def estimator(config, alpha):
    """The estimator of a configuration, not fitted."""
    options = {
        name: getattr(config, name)
        for name in ("activation", "fit_intercept", "dtype", "pooling", "scaling")
    }
    options |= {
        "query": config.query,
        "heads": heads_of(config),
        "alpha": alpha,
        "random_state": config.seed % 1000,
    }
    options["extras_scale"] = EXTRAS_SCALE
    options["n_heads"] = math.inf if "kernel" in config.route else config.n_heads
    if config.route == "cg":
        options["solver"] = "cg"
    if config.route.startswith("torch"):
        options["device"] = "cpu"
    if "classes" not in config.outputs:
        return kh.AttentionRegressor(**{**PAPER_LAYER, "n_heads": 512, **options})
    return kh.AttentionClassifier(
        **{**PAPER_LAYER, "n_heads": 512, **options},
        loss="squared_error",  # what the plain refits minimise
        class_weight="balanced" if "balanced" in config.outputs else None,
    )


def fit(problem, alpha):
    """The estimator fitted by its route: at once, or in batches that are gone through twice."""
    config, model = problem.config, estimator(problem.config, alpha)
    if config.route != "stream":
        return model.fit(
            problem.sets, problem.y, sample_weight=problem.weights, groups=problem.groups
        )
    cut = 1 + config.seed % (config.n - 1)
    w = np.ones(config.n) if problem.weights is None else problem.weights
    parts = [slice(0, cut), slice(cut, config.n)]
    return model.fit_batches([(problem.sets[rows], problem.y[rows], w[rows]) for rows in parts])


def penalties(problem, size):
    """What to pass as alpha: in units of the size of the weighted Gram matrix, from 1e-9 (float32:
    1e-2) to 10.
    """
    config = problem.config
    low = math.log10(max(1e-9, 1e5 * config.rounding))
    alpha = float(size) * 10.0 ** (low + config.decades * (1 - low))
    return {"fixed": alpha, "several": [alpha, 3 * alpha, 0.5 * alpha], "loo": "loo"}[
        config.penalty
    ]


def decisions(model, sets):
    """Predictions as columns."""
    scores = model.decision_function(sets) if hasattr(model, "classes_") else model.predict(sets)
    return scores.reshape(len(sets), -1)


@dataclass(frozen=True)
class Refit:
    """Predictions (m, t) and how far they may move, per unit of rounding.

    Attributes
    ----------
    stable : array
        To first order, by an error of one unit of what was given: what a backward stable method
        stays within.
    by_condition : array
        The same with |y|/α for |a|: what may be lost where (K + α)⁻¹ is made, of condition |K|/α.
    by_residual : array
        By a residual r of what an iteration certifies, one unit of |y|, which moves predictions by
        cᵀr in dual form; in primal form by qᵀr, and there the certificate allows for 2√α of it.
    """

    predictions: np.ndarray
    stable: np.ndarray
    by_condition: np.ndarray
    by_residual: np.ndarray


class Plain:
    """Features or kernel of a problem by the book, in long doubles, and every fit that leaves
    something out.

    Attributes
    ----------
    gram : array (n + new, n + new)
        K of the training samples, then of the new ones.
    sizes : array (n + new,)
        A bound on the length of the features of each sample with every sign made positive: what
        their rounding is in proportion to.
    undecided : bool
        Whether a score lies within rounding of the jump of the step, so that no precision can tell
        its side.
    """

    def __init__(self, problem, scaling=None, query=None):
        config = problem.config
        self.problem = problem
        self.config = config
        self.weights = problem.joint_weights
        scaling = config.scaling if scaling is None else scaling
        query = config.query if query is None else query
        pairs = [_pairs(batch) for batch in (problem.sets, problem.new)]
        scale, of_query = _scalings(pairs[0], self.weights, scaling)
        samples = [
            _ready(sample, scale, of_query, query, config.pooling)
            for sample in (*pairs[0], *pairs[1])
        ]
        self.undecided = False
        if "kernel" in config.route:
            self._kernel(samples)
        else:
            self._features(samples)
        if config.extras:
            self._add_extras()

    def _add_extras(self):
        """The columns of samples beside their features: K + s² ZZᵀ."""
        config = self.config
        extras = np.concatenate([self.problem.sets.extras, self.problem.new.extras]).astype(LONG)
        share = self.weights.astype(LONG) / self.weights.sum()
        centre = share @ extras[: config.n] if config.fit_intercept else np.zeros(2, LONG)
        factor = EXTRAS_SCALE / np.sqrt(share @ np.square(extras[: config.n] - centre))
        columns = (extras - centre) * factor
        self.gram = self.gram + columns @ columns.T
        reach = (np.abs(extras) + np.abs(centre)) * factor
        self.sizes = np.sqrt(np.square(self.sizes) + np.square(reach).sum(axis=1))

    def _features(self, samples):
        config = self.config
        asked = len(samples[0][0][0]) - 1
        heads = (
            heads_of(config)
            .sample(config.n_heads, config.dim, config.seed % 1000, asked)
            .astype(LONG)
        )
        rows, sizes = [], []
        for sample in samples:
            row, size = 0, 0
            for q, keys, c in sample:
                scores = np.einsum("d,mde,ke->mk", q, heads, keys)
                reach = np.einsum("d,mde,ke->mk", np.abs(q), np.abs(heads), np.abs(keys))
                if config.activation == "step":
                    self.undecided |= bool((np.abs(scores) < 8 * config.rounding * reach).any())
                weights, reach = _weigh(config.activation, scores, reach)
                row = row + c * np.einsum("mk,ke->me", weights, keys)
                size = size + c * np.einsum("mk,ke->me", reach, np.abs(keys))
            rows.append(row.ravel() / np.sqrt(LONG(config.n_heads)))
            sizes.append(np.sqrt(np.square(size).sum() / config.n_heads))
        self.design = np.stack(rows)
        self.gram, self.sizes = self.design @ self.design.T, np.array(sizes)

    def _kernel(self, samples):
        config = self.config
        flat = [part for sample in samples for part in sample]
        owner = np.repeat(np.arange(len(samples)), [len(sample) for sample in samples])
        query = _kernel_queries(flat)
        shares = np.array([c * len(keys) for _, keys, c in flat])
        sets = kh.SetBatch([keys[:, :-1].astype(np.float64) for _, keys, _ in flat], query=query)
        pairs = kh.attention_kernel(sets, None, heads_of(config), config.activation).astype(LONG)
        mix = np.zeros((len(samples), len(flat)), LONG)
        mix[owner, np.arange(len(flat))] = shares
        self.gram = mix @ pairs @ mix.T
        # K(k, k) of every key alone bounds what its products with any other can be
        alone = [
            keys[i : i + 1, :-1].astype(np.float64) for _, keys, _ in flat for i in range(len(keys))
        ]
        lengths = np.array([len(keys) for _, keys, _ in flat])
        single = kh.SetBatch(
            alone, query=None if query is None else np.repeat(query, lengths, axis=0)
        )
        root = np.sqrt(
            kh.attention_kernel(single, None, heads_of(config), config.activation).diagonal()
        )
        self.sizes = np.bincount(
            np.repeat(owner, lengths), (np.repeat(shares / lengths, lengths) * root).astype(float)
        )

    @property
    def size(self):
        """Σ w |Φ|², which bounds the weighted Gram matrix and is what its rounding is in proportion
        to.
        """
        return float(self.weights @ np.square(self.sizes[: self.config.n]))

    def fit_without(self, out, who, alpha):
        """Predictions for samples ``who`` of the fit without samples ``out``, and what rounding may
        do to them.

        In the coordinates of √w, with K~ = W^½ K W^½ and s = √w, the fit solves

            [K~ + α  s] [a]   [W^½ y]             [K~ + α  s] [c]   [W^½ k]
            [sᵀ      0] [b] = [  0  ],            [sᵀ      0] [·] = [  1  ]

        and predicts kᵀW^½ a + b = cᵀ W^½ y. To first order an error of u|K~| in K~ moves that by u
        |K~| |a| |c|, one of as much in k, which has passed through 1/√w_i, by u |K~| |a| / √w_i;
        one of u|K~| in the p × p matrix ΦᵀWΦ by u |K~| |v| |q| with v = Φᵀa and q = (φ − Φᵀc)/α;
        one of u|y| in y by u |W^½ y| (|c| + 1/√w_i).
        """
        config, y = self.config, self.problem.columns.astype(LONG)
        w = self.weights.astype(LONG)
        rest = np.setdiff1d(np.flatnonzero(w > 0), out)
        roots = np.sqrt(w[rest])
        k, t, m = len(rest), y.shape[1], len(who)
        gram = roots[:, None] * self.gram[np.ix_(rest, rest)] * roots
        matrix, right = np.zeros((k + 1, k + 1), LONG), np.zeros((k + 1, t + m), LONG)
        matrix[:k, :k] = gram + alpha * np.eye(k)
        right[:k, :t] = roots[:, None] * y[rest]
        right[:k, t:] = rows = roots[:, None] * self.gram[np.ix_(rest, who)]
        if config.fit_intercept:
            matrix[:k, k] = matrix[k, :k] = roots
            right[k, t:] = 1
        else:
            matrix[k, k] = 1
        solved = solve(matrix, right)
        a, b, c = solved[:k, :t], solved[k, :t], solved[:k, t:]
        predictions = rows.T @ a + b
        size, known = self.size, np.append(w, np.zeros(len(self.gram) - config.n, LONG))[who]
        # a sample without weight enters by its own row of the kernel alone
        steep = np.where(
            known > 0, 1 / np.sqrt(np.where(known > 0, known, 1)), self.sizes[who] / math.sqrt(size)
        )
        sent = steep + np.sqrt(np.square(c).sum(axis=0))
        y_size = np.sqrt(w @ np.square(y))
        squares = self.gram[who, who] - 2 * (rows * c).sum(axis=0) + (c * (gram @ c)).sum(axis=0)
        v, q = np.sqrt(np.abs((a * (gram @ a)).sum(axis=0))), np.sqrt(np.abs(squares)) / alpha
        moved = size * (np.outer(sent, np.sqrt(np.square(a).sum(axis=0))) + np.outer(q, v))
        moved += np.outer(sent, y_size) + np.abs(predictions) + np.abs(y).max(axis=0)
        left = (
            np.zeros(t, LONG)
            if who[0] >= config.n
            else np.sqrt(known @ np.square(y[who] - predictions))
        )
        worst = size / alpha * np.outer(sent, y_size + left) + moved
        by_residual = np.outer(
            np.maximum(np.sqrt(np.square(c).sum(axis=0)), 2 * np.sqrt(alpha) * q), y_size
        )
        return Refit(*(x.astype(float) for x in (predictions, moved, worst, by_residual)))

    def left_out(self, alpha, together=None):
        """Each sample predicted by the fit without it and without all of its number in
        ``together``.
        """
        if together is None:
            together = np.arange(self.config.n)
            if self.problem.groups is not None:
                together = self.problem.groups
        found = Refit(*(np.empty(self.problem.columns.shape) for _ in fields(Refit)))
        for number in np.unique(together):
            out = np.flatnonzero(together == number)
            part = self.fit_without(out, out, alpha)
            for field in fields(Refit):
                getattr(found, field.name)[out] = getattr(part, field.name)
        return found

    def judged(self, alpha):
        """Whether first-order bounds mean anything: rounding far below the penalty."""
        return self.config.rounding * self.size < 1e-4 * alpha


def solve(matrix, right):
    """The solution of a linear system in long doubles: elimination with pivots, then back
    substitution.

    Not Gauss and Jordan at once, whose residual grows with the condition: predictions would be off
    by its square.
    """
    work = np.concatenate([matrix, right], axis=1)
    k = len(matrix)
    for i in range(k):
        pivot = i + int(np.abs(work[i:, i]).argmax())
        work[[i, pivot]] = work[[pivot, i]]
        work[i + 1 :] -= np.outer(work[i + 1 :, i] / work[i, i], work[i])
    upper, x = work[:, :k], work[:, k:]
    for i in reversed(range(k)):
        x[i] = (x[i] - upper[i, i + 1 :] @ x[i + 1 :]) / upper[i, i]
    return x


def _pairs(batch):
    """Every sample as a list of (query or None, keys) in long doubles."""
    sets = batch.sets if isinstance(batch, kh.SetGroups) else batch
    ends = batch.offsets if isinstance(batch, kh.SetGroups) else np.arange(len(batch) + 1)
    keys = [
        sets.tokens[sets.offsets[i] : sets.offsets[i + 1]].astype(LONG) for i in range(len(sets))
    ]
    queries = [None if sets.query is None else sets.query[i].astype(LONG) for i in range(len(sets))]
    return [list(zip(queries[a:b], keys[a:b], strict=True)) for a, b in itertools.pairwise(ends)]


def _scalings(samples, weights, scaling):
    """tokens → scaled tokens, for keys and for queries, which are scaled on their own if they are
    of another kind.
    """
    if scaling == "none":
        return (lambda x: x,) * 2
    if scaling == "sphere":
        return (lambda x: x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True)),) * 2
    keys = [np.concatenate([keys for _, keys in sample]) for sample in samples]
    of_keys = _standard(keys, weights)
    first = samples[0][0][0]
    if first is None or len(first) == keys[0].shape[1]:
        return of_keys, of_keys
    return of_keys, _standard([np.stack([q for q, _ in sample]) for sample in samples], weights)


def _standard(tokens, weights):
    """tokens → tokens of mean zero and length one on average, over those of the samples given."""
    share = np.repeat(weights, [len(some) for some in tokens]).astype(LONG)
    share, tokens = share / share.sum(), np.concatenate(tokens)
    mean = share @ tokens
    spread = np.sqrt(share @ np.square(tokens - mean))
    return lambda x: (x - mean) / (spread * np.sqrt(LONG(len(mean))))


def _ready(sample, scale, scale_query, query, pooling):
    """(x~_0, x~ keys, coefficient of the sum over keys) of every set that a sample stands for."""
    sets = []
    for q, keys in sample:
        keys = scale(keys)
        ones = np.ones((len(keys), 1), LONG)
        tilde = np.concatenate([keys, ones], axis=1)
        if query == "mean":
            queries = [np.append(keys.mean(axis=0), 1)]
        elif query == "each":
            queries = list(tilde)
        elif q is None:
            queries = [np.append(np.zeros(keys.shape[1], LONG), np.sqrt(LONG(2)))]
        else:
            queries = [np.append(scale_query(q), 1)]
        sets += [(one, tilde) for one in queries]
    if pooling == "sum":
        return [(q, tilde, LONG(1)) for q, tilde in sets]
    return [(q, tilde, 1 / LONG(len(sets) * len(tilde))) for q, tilde in sets]


def _kernel_queries(flat):
    """Queries for the kernel function: None where all are the constant one."""
    queries = np.stack([q for q, _, _ in flat])
    return None if (queries[:, -1] > 1.2).all() else queries[:, :-1].astype(np.float64)


def _weigh(activation, scores, reach):
    """σ of the scores, times N for softmax, and how far rounding in proportion to ``reach`` may
    carry it.
    """
    if activation == "softmax":
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights *= scores.shape[1] / weights.sum(axis=1, keepdims=True)
        return weights, weights * (1 + 2 * reach)
    if activation == "exp":
        return np.exp(scores), np.exp(scores) * (1 + reach)
    if activation == "step":
        return (scores > 0).astype(LONG), np.ones_like(reach)
    return {
        "relu": (np.maximum(scores, 0), reach),
        "linear": (scores, reach),
        "square": (np.square(scores), np.square(reach)),
    }[activation]
