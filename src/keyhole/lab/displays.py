"""Diagnostics in one picture each, as matplotlib displays.

Leave-one-out predictions, calibration, coverage, and a map of the keys of one set.

As scikit-learn's displays: ``from_estimator`` and ``from_predictions`` compute and draw, ``plot``
draws again what was computed. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from sklearn.base import is_classifier

LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Nominal coverages that are tried."""
N_BINS = 10


@dataclass
class _Display:
    """What is drawn on: axes, and the figure they are in."""

    ax_: Any = field(default=None, init=False, repr=False)
    figure_: Any = field(default=None, init=False, repr=False)

    def _begin(self, ax: Any, ends: Any) -> None:
        """Axes, and on them the line on which points would lie."""
        self._axes(ax)
        self.ax_.plot(ends, ends, color="0.6", lw=0.8, zorder=0)

    def _axes(self, ax: Any) -> None:
        """The axes that were given, or new ones."""
        if ax is None:
            from keyhole.lab.report.html import check_lab

            check_lab("a display")
            from matplotlib import pyplot

            ax = pyplot.subplots()[1]
        self.ax_ = ax
        self.figure_ = ax.figure

    def _draw_shares(
        self, expected: Float[np.ndarray, " b"], share: Any, error: Any, ax: Any
    ) -> None:
        """Shares with bars of one standard error against those expected."""
        self._begin(ax, [0, 1])
        self.ax_.errorbar(expected, share, yerr=error, marker="o", ms=4, lw=1, capsize=2)


def _share_error(share: Float[np.ndarray, " k"], count: Any) -> Float[np.ndarray, " k"]:
    """Standard errors of shares of so many outcomes."""
    return np.sqrt(share * (1 - share) / np.maximum(count, 1))


@dataclass
class LeftOutDisplay(_Display):
    """Held-out predictions of the training samples, against what was measured.

    Attributes
    ----------
    y_true, y_pred : arrays (n,)
    ax_, figure_ : after `plot`

    Examples
    --------
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(100, n_keys=4, dim=3, seed=0)
    >>> y = kh.targets.TokenPower(2, dim=3)(sets)
    >>> model = kh.AttentionRegressor(random_state=0).fit(sets, y)
    >>> display = LeftOutDisplay.from_estimator(model, sets, y)
    >>> display.ax_.get_xlabel()
    'measured'
    """

    y_true: Float[np.ndarray, " n"]
    y_pred: Float[np.ndarray, " n"]

    @classmethod
    def from_estimator(
        cls, estimator: Any, X: Any, y: Any, *, output: int = 0, ax: Any = None
    ) -> LeftOutDisplay:
        """Of a regressor and the samples it was fitted to; of several outputs, one."""
        found = None
        if not is_classifier(estimator):
            found = getattr(estimator, "held_out_predictions_", None)
        if found is None or len(found) != len(y):
            raise ValueError(
                "held-out predictions are those of the training samples: pass what the model was "
                f"fitted to, by fit; got {len(y)} samples, and "
                f"{'none' if found is None else len(found)} held-out predictions."
            )
        # samples that are fitted exactly have none
        outcomes = np.reshape(y, (len(y), -1))[:, output]
        predictions = found.reshape(len(y), -1)[:, output]
        is_known = np.isfinite(predictions)
        return cls.from_predictions(outcomes[is_known], predictions[is_known], ax=ax)

    @classmethod
    def from_predictions(cls, y_true: Any, y_pred: Any, *, ax: Any = None) -> LeftOutDisplay:
        """Of outcomes and the predictions without them."""
        return cls(np.asarray(y_true, float), np.asarray(y_pred, float)).plot(ax)

    def plot(self, ax: Any = None) -> LeftOutDisplay:
        """Draw points, and the line on which they would lie."""
        self._begin(
            ax,
            [min(self.y_true.min(), self.y_pred.min()), max(self.y_true.max(), self.y_pred.max())],
        )
        self.ax_.plot(self.y_true, self.y_pred, ".", ms=4, alpha=0.6)
        self.ax_.set(xlabel="measured", ylabel="predicted without it")
        return self


@dataclass
class ReliabilityDisplay(_Display):
    """How often labels are right against the probability they were given.

    In bins of as many labels each.

    Attributes
    ----------
    chance, share, error : arrays (bins,)
        Mean probability, share of labels that were right, and its standard error.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> chance = rng.uniform(size=2000)
    >>> display = ReliabilityDisplay.from_predictions(
    ...     rng.uniform(size=2000) < chance, np.c_[1 - chance, chance]
    ... )
    >>> bool((np.abs(display.share - display.chance) < 4 * display.error + 0.01).all())
    True
    """

    chance: Float[np.ndarray, " b"]
    share: Float[np.ndarray, " b"]
    error: Float[np.ndarray, " b"]

    @classmethod
    def from_estimator(
        cls, estimator: Any, X: Any, y: Any, *, ax: Any = None
    ) -> ReliabilityDisplay:
        """Of a classifier and samples it was not fitted to."""
        labels = np.searchsorted(estimator.classes_, y)
        return cls.from_predictions(labels, estimator.predict_proba(X), ax=ax)

    @classmethod
    def from_predictions(
        cls, y_true: Any, y_prob: Any, *, n_bins: int = N_BINS, ax: Any = None
    ) -> ReliabilityDisplay:
        """Of labels, as numbers of columns, and probabilities (n, classes).

        Every class of every sample counts.
        """
        chances = np.asarray(y_prob, float)
        right = np.asarray(y_true).astype(int)[:, None] == np.arange(chances.shape[1])
        if chances.shape[1] == 2:  # the other column says the same
            chances, right = chances[:, 1:], right[:, 1:]
        order = np.argsort(chances, axis=None)
        parts = [part for part in np.array_split(order, n_bins) if len(part)]
        chance = np.array([chances.ravel()[part].mean() for part in parts])
        share = np.array([right.ravel()[part].mean() for part in parts])
        return cls(
            chance, share, _share_error(share, np.array([len(part) for part in parts]))
        ).plot(ax)

    def plot(self, ax: Any = None) -> ReliabilityDisplay:
        """Draw shares with bars of one standard error."""
        self._draw_shares(self.chance, self.share, self.error, ax)
        self.ax_.set(xlabel="probability given", ylabel="share that was right")
        return self


@dataclass
class CoverageDisplay(_Display):
    """Share of outcomes inside their intervals, or sets, against the share asked for.

    Attributes
    ----------
    nominal, share, error : arrays (levels,)
        Coverage asked for, share inside, and its standard error.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> rng = np.random.default_rng(0)
    >>> x = rng.uniform(-1, 1, size=(400, 1))
    >>> y = x[:, 0] + rng.standard_normal(400)
    >>> model = kh.AttentionRegressor(random_state=0).fit(x[:200], y[:200])
    >>> display = CoverageDisplay.from_estimator(model, x[200:], y[200:])
    >>> bool((np.abs(display.share - display.nominal) < 0.15).all())
    True
    """

    nominal: Float[np.ndarray, " l"]
    share: Float[np.ndarray, " l"]
    error: Float[np.ndarray, " l"]

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: Any,
        y: Any,
        *,
        levels: Any = LEVELS,
        width: str = "constant",
        ax: Any = None,
    ) -> CoverageDisplay:
        """Of a model and samples it was not fitted to.

        Intervals of a regressor, sets of a classifier.
        """
        if hasattr(estimator, "classes_"):
            own = np.searchsorted(estimator.classes_, y)
            inside = [estimator.predict_set(X, level)[np.arange(len(own)), own] for level in levels]
            return cls.from_predictions(levels, inside, ax=ax)
        inside = []
        for level in levels:
            ends = estimator.predict_interval(X, level, width=width)
            inside.append((ends[..., 0] <= y) & (y <= ends[..., 1]))
        return cls.from_predictions(levels, inside, ax=ax)

    @classmethod
    def from_predictions(cls, nominal: Any, inside: Any, *, ax: Any = None) -> CoverageDisplay:
        """Of levels, and for each which outcomes were inside."""
        hits = [np.asarray(one, float).ravel() for one in inside]
        share = np.array([one.mean() for one in hits])
        return cls(np.asarray(nominal, float), share, _share_error(share, len(hits[0]))).plot(ax)

    def plot(self, ax: Any = None) -> CoverageDisplay:
        """Draw shares with bars of one standard error."""
        self._draw_shares(self.nominal, self.share, self.error, ax)
        low = max(0.0, min(self.nominal.min(), self.share.min()) - 0.05)
        self.ax_.set(
            xlabel="coverage asked for", ylabel="share inside", xlim=(low, 1), ylim=(low, 1)
        )
        return self


@dataclass
class KeyMapDisplay(_Display):
    """Where the keys of one set lie, coloured by what each adds to the output of a model.

    Attributes
    ----------
    coordinates : array (N, 2)
        Column and row of every key, such as the corner of a patch of a slide; rows count downwards.
    contributions : array (N,)
        What every key adds.
    top_keys : array (k,)
        The numbers of the keys that add most, the largest first; they are circled.

    Examples
    --------
    >>> import numpy as np
    >>> places = np.array([[0, 0], [1, 0], [0, 1], [1, 1]])
    >>> display = KeyMapDisplay.from_contributions(places, [0.1, 0.0, 2.0, -0.5], n_top=2)
    >>> display.top_keys.tolist()
    [2, 0]
    >>> print(display.listing())
    key 2 at (0, 1): +2
    key 0 at (0, 0): +0.1
    """

    coordinates: Float[np.ndarray, "k 2"]
    contributions: Float[np.ndarray, " k"]
    top_keys: Int[np.ndarray, " t"]

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: Any,
        coordinates: Any,
        *,
        output: int = 0,
        n_top: int = 10,
        ax: Any = None,
    ) -> KeyMapDisplay:
        """Of a fitted model and a batch of one set; of several outputs or classes, one."""
        if len(X) != 1:
            raise ValueError(
                f"a map shows the keys of one set: got {len(X)} sets. Choose one, X[i : i + 1]."
            )
        contributions = np.asarray(estimator.contributions(X)[0], float)
        if contributions.ndim == 2:
            contributions = contributions[:, output]
        return cls.from_contributions(coordinates, contributions, n_top=n_top, ax=ax)

    @classmethod
    def from_contributions(
        cls, coordinates: Any, contributions: Any, *, n_top: int = 10, ax: Any = None
    ) -> KeyMapDisplay:
        """Of where keys lie, and what each adds."""
        places = np.asarray(coordinates, float)
        parts = np.asarray(contributions, float)
        if places.shape != (len(parts), 2):
            raise ValueError(
                "`coordinates` must have shape (N, 2), a column and a row for every key: got "
                f"{places.shape} for {len(parts)} keys."
            )
        top_keys = np.argsort(-parts, kind="stable")[:n_top]
        return cls(places, parts, top_keys).plot(ax)

    def listing(self) -> str:
        """The keys that add most, a line each."""
        lines = []
        for key in self.top_keys:
            column, row = self.coordinates[key]
            lines.append(f"key {key} at ({column:g}, {row:g}): {self.contributions[key]:+.3g}")
        return "\n".join(lines)

    def plot(self, ax: Any = None) -> KeyMapDisplay:
        """Draw keys in colours from blue, which lower the output, to red, which raise it."""
        self._axes(ax)
        # the largest contributions would leave all others pale: colours end at the 99th percentile
        strength = float(np.quantile(np.abs(self.contributions), 0.99)) or 1.0
        # a key covers about its share of the picture
        size = 60_000 / max(16, len(self.contributions))
        points = self.ax_.scatter(
            *self.coordinates.T,
            c=self.contributions,
            s=size,
            marker="s",
            cmap="coolwarm",
            vmin=-strength,
            vmax=strength,
            linewidths=0,
        )
        self.ax_.scatter(
            *self.coordinates[self.top_keys].T,
            s=max(30, 3 * size),
            facecolors="none",
            edgecolors="black",
        )
        self.figure_.colorbar(points, ax=self.ax_, label="contribution")
        self.ax_.invert_yaxis()
        self.ax_.set(xlabel="column", ylabel="row", aspect="equal")
        return self
