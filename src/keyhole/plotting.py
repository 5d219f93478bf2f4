"""Figures from rows. Nothing is computed here that a row does not hold, but means and their standard errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_COLOURS = ("#2b6cb0", "#c05621", "#6b7280", "#2f855a", "#805ad5", "#b83280")
_STYLES: dict[bool, dict[str, Any]] = {
    False: {"ls": "-", "lw": 1.8, "marker": "o", "ms": 3.5},
    True: {"ls": "--", "lw": 1.2, "alpha": 0.8},
}


def mean_and_error(rows: Sequence[dict[str, Any]], x: str, y: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group rows by ``x``; return the distinct values of ``x``, the means of ``y`` and their standard errors."""
    places = np.array(sorted({row[x] for row in rows}))
    groups = [np.array([row[y] for row in rows if row[x] == place]) for place in places]
    means = np.array([group.mean() for group in groups])
    errors = np.array([group.std(ddof=1) / np.sqrt(len(group)) if len(group) > 1 else 0.0 for group in groups])
    return places, means, errors


def plot_learning_curves(rows: Sequence[dict[str, Any]], path: Path, *, title: str) -> list[Path]:
    """Draw relative test error against n, one panel per target and one line per model, as SVG and PNG.

    Parameters
    ----------
    rows : sequence of dict
        With keys target, model, exact (bool: infinite heads or width, drawn dashed), n, error.
    path : Path
        Where to write, without suffix.

    Returns
    -------
    list of Path
        The files written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    targets = list(dict.fromkeys(row["target"] for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(
        1, len(targets), figsize=(3.4 * len(targets), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, target in zip(axes[0], targets, strict=True):
        for model, colour in zip(models, _COLOURS, strict=False):
            for exact in (False, True):
                chosen = [r for r in rows if (r["target"], r["model"], r["exact"]) == (target, model, exact)]
                if not chosen:
                    continue
                n, means, errors = mean_and_error(chosen, "n", "error")
                label = f"{model}, infinite" if exact else model
                axis.errorbar(n, means, yerr=errors, color=colour, capsize=2, label=label, **_STYLES[exact])
        axis.set(xscale="log", yscale="log", title=target, xlabel="training sets n")
        axis.set_xticks(n, [str(int(v)) for v in n])
        axis.minorticks_off()
        axis.grid(True, which="major", color="#e5e7eb", lw=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("test error / variance of the target")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    written = []
    for suffix in (".svg", ".png"):
        target_path = path.with_suffix(suffix)
        figure.savefig(target_path, dpi=150, metadata={"Date": None} if suffix == ".svg" else None)
        written.append(target_path)
    plt.close(figure)
    return written


def plot_prediction(rows: Sequence[dict[str, Any]], path: Path, tolerance: dict[int, float]) -> list[Path]:
    """Draw predicted over measured test error against the measured one, a panel per target, a colour per d.

    Parameters
    ----------
    rows : sequence of dict
        With keys d, target, M ("inf" is drawn hollow), predicted, measured, standard_error, relative_error.
    path : Path
        Where to write, without suffix.
    tolerance : dict
        The band drawn for every d.

    Returns
    -------
    list of Path
        The files written.
    """
    plt = _pyplot()
    targets = list(dict.fromkeys(row["target"] for row in rows))
    dims = sorted({row["d"] for row in rows})
    figure, axes = plt.subplots(
        1, len(targets), figsize=(3.8 * len(targets), 3.8), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, target in zip(axes[0], targets, strict=True):
        for share in sorted(set(tolerance.values()), reverse=True):
            axis.axhspan(1 - share, 1 + share, color="#9ca3af", alpha=0.18, lw=0)
        axis.axhline(1.0, color="#374151", lw=0.8)
        for dim, colour in zip(dims, _COLOURS, strict=False):
            for infinite in (False, True):
                cells = [r for r in rows if (r["target"], r["d"], r["M"] == "inf") == (target, dim, infinite)]
                if not cells:
                    continue
                ratio = np.array([r["predicted"] / r["measured"] for r in cells])
                bars = ratio * np.array([r["standard_error"] / r["measured"] for r in cells])
                axis.errorbar(
                    [r["relative_error"] for r in cells],
                    ratio,
                    yerr=bars,
                    color=colour,
                    fmt="o",
                    ms=3.5,
                    lw=0.6,
                    mfc="white" if infinite else colour,
                    label=f"d = {dim}, {'infinitely many' if infinite else 'finite'} heads",
                )
        axis.set(xscale="log", title=f"${target}$", xlabel="measured test error / variance of the target")
        axis.grid(True, which="major", color="#e5e7eb", lw=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("predicted / measured")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return _save(figure, path)


def plot_predicted_curves(rows: Sequence[dict[str, Any]], path: Path, *, title: str) -> list[Path]:
    """Draw predicted test error against n, a line per model, as SVG and PNG.

    Parameters
    ----------
    rows : sequence of dict
        With keys model, n, error.
    path : Path
        Where to write, without suffix.

    Returns
    -------
    list of Path
        The files written.
    """
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(5.2, 3.8), layout="constrained")
    for model, colour in zip(dict.fromkeys(row["model"] for row in rows), _COLOURS, strict=False):
        curve = sorted((row["n"], row["error"]) for row in rows if row["model"] == model)
        axis.plot(*zip(*curve, strict=True), color=colour, marker="o", ms=3.5, label=model)
    axis.set(xscale="log", yscale="log", xlabel="training sets n", ylabel="predicted test error")
    axis.grid(True, which="major", color="#e5e7eb", lw=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    axis.set_title(title, fontsize=10)
    return _save(figure, path)


def plot_means(means: np.ndarray, names: Sequence[str], path: Path, *, title: str, most: int = 30) -> list[Path]:
    """Draw the means of a law as heat maps, query coordinates down and key coordinates across, as SVG and PNG.

    Parameters
    ----------
    means : array (K, D, D)
        ``means_`` of a fitted law.
    names : sequence of d strings
        Of the token coordinates; the appended one is called "1".
    path : Path
        Where to write, without suffix.
    most : int
        Coordinates shown on either side, those with the largest entries, in their order.

    Returns
    -------
    list of Path
        The files written.
    """
    plt = _pyplot()
    labels = np.array([*names, "1"])
    size = np.abs(means).max(axis=0)
    rows, columns = (np.sort(np.argsort(-size.max(axis=axis), kind="stable")[:most]) for axis in (1, 0))
    top = float(size.max()) or 1.0
    shape = (1, len(means))
    width, height = 1.6 + 0.2 * len(columns), 1.4 + 0.2 * len(rows)
    figure, axes = plt.subplots(*shape, figsize=(width * len(means), height), squeeze=False, layout="constrained")
    for number, (axis, mean) in enumerate(zip(axes[0], means, strict=True)):
        image = axis.imshow(mean[np.ix_(rows, columns)], cmap="RdBu_r", vmin=-top, vmax=top)
        axis.set_xticks(range(len(columns)), labels[columns], rotation=90, fontsize=7)
        axis.set_yticks(range(len(rows)), labels[rows], fontsize=7)
        axis.set(xlabel="key", ylabel="query", title=f"mean {number}" if len(means) > 1 else "")
    figure.colorbar(image, ax=axes[0].tolist(), shrink=0.6, label="entry of the mean")
    figure.suptitle(title, fontsize=10)
    return _save(figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, path: Path) -> list[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for suffix in (".svg", ".png"):
        written.append(path.with_suffix(suffix))
        figure.savefig(written[-1], dpi=150, metadata={"Date": None} if suffix == ".svg" else None)
    _pyplot().close(figure)
    return written
