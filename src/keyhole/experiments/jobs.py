"""Jobs: cells that share sets, features and a Gram matrix, computed together with the bits they have alone."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from keyhole.experiments.cells import Cell, Values
from keyhole.experiments.nested_ridge import HEAD_BLOCK, LAWS, FactorisedGram, exact_kernels, nested_grams
from keyhole.features import attention_features
from keyhole.notation import parse_target
from keyhole.sets import SetBatch
from keyhole.targets import Polynomial, sphere_sets
from keyhole.theory import pair_powers

BASE_MEMORY = 2**28
"""Bytes of a worker process before it holds any matrix."""

HEADS_DRAWN = 80
"""The learner "fixed" draws its heads again until this many have been drawn: the luck of few heads is averaged out."""

Done = tuple[Cell, Values, float]
"""A cell, what it came to, and the seconds since the one before it."""

_Label = tuple[str, float, float, float]


@dataclass(frozen=True)
class Job:
    """Cells that share a draw: nested n and M, all targets and labels, one model, one repetition."""

    cells: tuple[Cell, ...]
    """In the order they are computed: by M, then by n, so that the costliest comes last."""

    @property
    def name(self) -> str:
        """A line for people."""
        first = self.cells[0]
        heads = "∞ heads" if first.n_heads is None else f"{max(c.n_heads or 0 for c in self.cells)} heads"
        sizes = f"d = {first.dim}, N = {first.n_keys}, n ≤ {max(c.n_samples for c in self.cells)}"
        return f"{first.model}, {first.learner}, {heads}, {sizes}, repetition {first.repetition + 1}"

    @property
    def cost(self) -> float:
        """Seconds on one core, roughly: what schedules long jobs first and tells the time left."""
        return sum(cell_costs(self.cells).values())

    @property
    def memory(self) -> int:
        """Bytes that computing it takes at most: two n × n matrices, the test kernel, a block of features."""
        first = self.cells[0]
        n, largest = first.most_samples, max(cell.n_samples for cell in self.cells)
        if first.learner == "spectrum":
            return 8 * 5 * n * n + BASE_MEMORY
        # the running sum, a copy where other M follow, and the copy that is factorised
        squares = (2 if len({cell.n_heads for cell in self.cells}) > 1 else 1) * n * n + largest * largest
        features = 3 * HEAD_BLOCK * (first.dim + 1) * (n + first.n_test)
        return 8 * (squares + 2 * n * first.n_test + features) + BASE_MEMORY


def group(cells: Iterable[Cell]) -> list[Job]:
    """Join cells into jobs, longest first; the same cells in any order give the same jobs."""
    shared: dict[tuple[object, ...], list[Cell]] = {}
    for cell in sorted(set(cells), key=_order):
        shared.setdefault(_shared(cell), []).append(cell)
    return sorted((Job(tuple(members)) for members in shared.values()), key=lambda job: (-job.cost, job.name))


def _order(cell: Cell) -> tuple[object, ...]:
    return (cell.n_heads or 0, cell.n_samples, cell.config)


def _shared(cell: Cell) -> tuple[object, ...]:
    draw = (cell.learner, cell.model, cell.dim, cell.n_keys, cell.most_samples, cell.n_test, cell.seed, cell.repetition)
    if cell.learner == "spectrum":
        return draw
    if cell.learner == "fixed":
        return (*draw, cell.n_heads)
    # finite and infinite heads share nothing but the sets; the constrained learner shares nothing at all
    return (*draw, cell.n_heads is None) if cell.learner == "ridge" else (*draw, cell.config)


def cell_costs(cells: Collection[Cell]) -> dict[Cell, float]:
    """Seconds on one core for each cell, roughly, what is shared counted with the first that needs it."""
    costs: dict[Cell, float] = {}
    seen: set[tuple[object, ...]] = set()
    for cell in cells:
        n, most, pairs = cell.n_samples, cell.most_samples, cell.n_keys**2 * (cell.dim + 4) / 20
        if cell.learner in ("absolute", "huber"):
            costs[cell] = (6e-5 if cell.learner == "absolute" else 9e-6) * n * (cell.n_heads or 1) * (cell.dim + 1)
            continue
        cost = 3e-3
        shared = _shared(cell)
        if shared not in seen and (cell.n_heads is None or cell.learner == "spectrum"):
            per_entry = 2e-9 * pairs * (3 if cell.model == "biased" else 1) if cell.model != "mlp" else 2e-8
            cost += (most * most / 2 + most * cell.n_test) * per_entry
        if cell.learner == "spectrum":
            costs[cell] = cost + (13.5 * most**3 / 2.8e10 if shared not in seen else 0.0)
            seen.add(shared)
            continue
        if cell.n_heads is not None and (*shared, cell.n_heads) not in seen:
            width = cell.n_heads * (cell.dim + 1)
            cost += (most * most + 2 * most * cell.n_test) * width / 4e10
        if (*shared, cell.n_heads, n, cell.ridge) not in seen:
            order = 8 * n**3 if cell.ridge is None else _head_draws(cell) * min(n, (cell.n_heads or n) * cell.dim) ** 3
            cost += order / 3 / 1.5e10 + 1e-3
        seen |= {shared, (*shared, cell.n_heads), (*shared, cell.n_heads, n, cell.ridge)}
        costs[cell] = cost
    return costs


def compute(job: Job, wanted: Collection[Cell] | None = None) -> Iterator[Done]:
    """Compute the cells of a job, or those wanted of them: what they share is made anew, with the same bits.

    BLAS is held to one thread: how it splits a sum over several is its own affair, and would show in the last digit.
    """
    from threadpoolctl import ThreadpoolController

    cells = [cell for cell in job.cells if wanted is None or cell in wanted]
    if not cells:
        return
    if cells[0].learner in ("absolute", "huber"):
        import keyhole.estimators  # noqa: F401  (whatever BLAS it brings along has to be seen by the next line)
    libraries = ThreadpoolController()
    steps = {"ridge": _ridge, "fixed": _fixed_ridge, "spectrum": _spectrum}.get(cells[0].learner, _ball)(cells)
    start = time.perf_counter()
    while True:
        # the limit is set for each step and not around the loop: whoever drives this generator has threads of its own
        with libraries.limit(limits=1):
            step = next(steps, None)
        if step is None:
            return
        now = time.perf_counter()
        yield *step, now - start
        start = now


@dataclass(frozen=True)
class Draw:
    """The sets, heads and noise of one repetition."""

    train: SetBatch
    test: SetBatch
    head_seed: int
    noise_seed: int

    @classmethod
    def of(cls, cell: Cell) -> Draw:
        """The draw of a cell: one for all models, so that they are compared on the same sets."""
        words = [cell.seed, cell.dim, cell.n_keys, cell.repetition]
        train, test, heads, noise = (int(s) for s in np.random.SeedSequence(words).generate_state(4))
        return cls(
            sphere_sets(cell.most_samples, cell.n_keys, cell.dim, train),
            sphere_sets(max(cell.n_test, 1), cell.n_keys, cell.dim, test),  # a spectrum is tested on no sets
            heads,
            noise,
        )

    def labels(self, cell: Cell) -> np.ndarray:
        """f* on all training sets, with the noise and the outliers that the cell asks for."""
        target = read_target(cell.target, cell.dim)
        y = target(self.train)
        if cell.noise == 0.0 and cell.outliers == 0.0:
            return y
        rng, n = np.random.default_rng(self.noise_seed), len(y)
        noise, signs, luck = rng.standard_normal(n), rng.choice([-1.0, 1.0], size=n), rng.random(n)
        scale = np.sqrt(target_variance(target, cell.n_keys))
        jumps = np.where(luck < cell.outliers, cell.outlier_size * signs, 0.0)
        return np.asarray(y + scale * (np.sqrt(cell.noise) * noise + jumps))

    def all_labels(self, cells: list[Cell]) -> tuple[dict[_Label, np.ndarray], dict[str, np.ndarray]]:
        """Labels by what makes them differ, and f* on the test sets by target."""
        labels = {_label(cell): cell for cell in cells}
        truths = {cell.target: read_target(cell.target, cell.dim)(self.test) for cell in labels.values()}
        return {label: self.labels(cell) for label, cell in labels.items()}, truths


@lru_cache(maxsize=256)
def read_target(text: str, dim: int) -> Polynomial:
    """The polynomial of a notation."""
    return parse_target(text, dim).target


def target_variance(target: Polynomial, n_keys: int) -> float:
    """Var f* under the sphere law.

    >>> from keyhole.targets import TokenPower
    >>> round(target_variance(TokenPower(1, dim=8), n_keys=4), 6)    # 1/(dN)
    0.03125
    """
    powers = pair_powers(target)
    return float(powers[1:, 0].sum() + powers[:, 1:].sum() / n_keys)


def _ridge(cells: list[Cell]) -> Iterator[tuple[Cell, Values]]:
    draw = Draw.of(cells[0])
    labels, truths = draw.all_labels(cells)
    heads = list(dict.fromkeys(cell.n_heads for cell in cells))
    for m, gram, cross in nested_grams(cells[0].model, draw.train, draw.test, heads, draw.head_seed):
        for n in dict.fromkeys(cell.n_samples for cell in cells if cell.n_heads == m):
            factorised = FactorisedGram.of(gram[:n, :n])
            for cell in cells:
                if cell.n_heads == m and cell.n_samples == n:
                    y = labels[_label(cell)][:n]
                    yield cell, asdict(factorised.outcome(y, cross[:, :n], truths[cell.target]))
            del factorised


def _head_draws(cell: Cell) -> int:
    return 1 if cell.n_heads is None else max(1, round(HEADS_DRAWN / cell.n_heads))


def _fixed_ridge(cells: list[Cell]) -> Iterator[tuple[Cell, Values]]:
    """What the theory describes: no intercept, the raw kernel or features, α = nλ; errors are mean squares."""
    first, draw = cells[0], Draw.of(cells[0])
    labels, truths = draw.all_labels(cells)
    errors = dict.fromkeys(cells, 0.0)
    for k in range(_head_draws(first)):
        if first.n_heads is None:
            gram, cross = exact_kernels(first.model, draw.train, draw.test)
        else:
            heads = LAWS[first.model].sample(first.n_heads, first.dim, draw.head_seed + k)
            features, of_test = attention_features(draw.train, heads), attention_features(draw.test, heads)
        for n, ridge in dict.fromkeys((cell.n_samples, cell.ridge or 0.0) for cell in cells):
            if first.n_heads is None:
                matrix, left, right = gram[:n, :n].copy(), cross[:, :n], None
            elif features.shape[1] < n:
                matrix, left, right = features[:n].T @ features[:n], of_test, features[:n].T
            else:
                matrix, left, right = features[:n] @ features[:n].T, of_test @ features[:n].T, None
            matrix[np.diag_indices_from(matrix)] += n * ridge
            factor = cho_factor(matrix, lower=True, overwrite_a=True, check_finite=False)
            for cell in cells:
                if (cell.n_samples, cell.ridge) == (n, ridge):
                    y = labels[_label(cell)][:n]
                    fitted = left @ cho_solve(factor, y if right is None else right @ y)
                    errors[cell] += float(np.mean(np.square(fitted - truths[cell.target]))) / _head_draws(cell)
    yield from ((cell, {"mean_square": error}) for cell, error in errors.items())


def _label(cell: Cell) -> _Label:
    return cell.target, cell.noise, cell.outliers, cell.outlier_size


def _spectrum(cells: list[Cell]) -> Iterator[tuple[Cell, Values]]:
    from keyhole.experiments.sample_spectrum import SampleSpectrum

    draw = Draw.of(cells[0])
    spectrum = SampleSpectrum.of(cells[0].model, draw.train)
    for text in dict.fromkeys(cell.target for cell in cells):
        y = read_target(text, cells[0].dim)(draw.train)
        for cell in cells:
            if cell.target == text:
                features = np.inf if cell.n_heads is None else cell.n_heads * (cell.dim + 1)
                yield cell, spectrum.best_error(y, cell.n_samples, features)


def _ball(cells: list[Cell]) -> Iterator[tuple[Cell, Values]]:
    import warnings

    from keyhole.estimators import NormBallRegressor
    from keyhole.estimators.norm_ball import NormBallWarning

    for cell in cells:
        draw = Draw.of(cell)
        target = read_target(cell.target, cell.dim)
        truth, y = target(draw.test), draw.labels(cell)[: cell.n_samples]
        scale = np.sqrt(target_variance(target, cell.n_keys))  # the Huber loss bends at 1: labels in units of f*
        model = NormBallRegressor(
            cell.n_heads, law=LAWS[cell.model], loss=cell.learner, tol=0.01, random_state=draw.head_seed
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NormBallWarning)  # the gap it stopped at is kept below
            model.fit(draw.train[: cell.n_samples], y / scale)
        error = float(np.mean((model.predict(draw.test) * scale - truth) ** 2) / np.var(truth))
        gap, active = float(model.duality_gap_), float(len(model.active_heads_))
        yield cell, {"error": error, "gap": gap, "active_heads": active, "radius": float(model.group_radius_)}
