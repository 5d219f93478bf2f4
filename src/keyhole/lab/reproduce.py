"""Every figure by name, its settings, and the report made of all of them."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
import platform
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyhole.lab.cells import Cell, Row
from keyhole.lab.figures.transformer import section as transformer_section
from keyhole.lab.report.document import Report, Section
from keyhole.theory.notation import parse_target

FIGURES = {
    "averages": "averages",
    "correlation": "correlation",
    "rotation": "rotation",
    "head-count": "head_count",
    "complexity": "complexity_order",
    "dimension": "dimension_length",
    "learner": "theorem_learner",
    "prediction": "prediction",
    "tasks": "tasks",
}
"""Figures made of cells, in the order of the report, and their modules here."""

TRANSFORMER = "transformer"  # the figure about a real checkpoint: no cells, one section

NAMES = (*FIGURES, TRANSFORMER)
PRESETS = ("quick", "full")

SHORT = {"d": "dim", "N": "n_keys", "M": "n_heads", "n": "largest"}
"""Names of the paper for fields of a Config."""

NAME_FIELDS = ("tasks", "learners", "predicted")
"""Settings that are names, of tasks and of learners; other texts are targets."""

RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**63 - 1),
    "powers": (1, 64),
    **dict.fromkeys(("dim", "dims", "slope_dim", "far_dims", "ratio_dim"), (1, 4096)),
    **dict.fromkeys(("gammas", "outliers"), (0, 1)),
    "level": (1e-6, 1),
    **dict.fromkeys(("noise", "outlier_size", "noises", "ridges", "factors"), (0, 1e6)),
    "repetitions": (1, 200),
    "more_repetitions": (0, 200),
}
"""Least and most that a setting may be; a count that is not named here is from 1 to 10⁷."""


@dataclass(frozen=True)
class Figure:
    """One figure with its settings.

    Its module has ``PRESETS``, ``RULE``, ``cells(config)`` and ``section(config, rows)``.
    """

    name: str
    module: Any
    config: Any

    def cells(self) -> list[Cell]:
        """What has to be measured."""
        return list(self.module.cells(self.config))

    def section(self, results: Mapping[Cell, list[Row]]) -> Section:
        """Charts, tables and verdict, from the rows of its cells."""
        rows = [row for cell in self.cells() for row in results[cell]]
        section: Section = self.module.section(self.config, rows)
        return section


def module_of(name: str) -> Any:
    """The module of a figure that is made of cells."""
    return importlib.import_module(f"keyhole.lab.figures.{FIGURES[name]}")


def check_names(names: Sequence[str]) -> list[str]:
    """Names of figures, all of them when none is given.

    An unknown one is answered with those that are known.
    """
    for name in names:
        if name not in NAMES:
            raise ValueError(
                f"unknown figure {name!r}.{_did_you_mean(name, NAMES)} The figures are "
                f"{', '.join(NAMES)}; none means all of them."
            )
    return [name for name in NAMES if name in names or not names]


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def choose_figures(
    names: Sequence[str], preset: str, seed: int | None = None, overrides: Sequence[str] = ()
) -> list[Figure]:
    """The figures made of cells among ``names``, with their settings.

    ``overrides`` are "field=value" each, for every figure that has the field: "d=8",
    "sizes=64,128".

    >>> [figure] = choose_figures(["averages"], "quick", overrides=["d=4", "powers=1,2"])
    >>> figure.config.dim, figure.config.powers
    (4, (1, 2))
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}: it must be one of {', '.join(PRESETS)}.")
    figures = []
    for name in names:
        if name in FIGURES:
            module = module_of(name)
            figures.append(Figure(name, module, module.PRESETS[preset]))
    if seed is not None:
        figures = [_with(figure, {"seed": seed}) for figure in figures]
    for text in overrides:
        figures = _override(figures, text)
    return figures


def _override(figures: list[Figure], text: str) -> list[Figure]:
    """The figures with a setting changed, in those that have it."""
    field, equals, value = text.partition("=")
    field = SHORT.get(field.strip(), field.strip())
    if not equals:
        raise ValueError(f"--set takes field=value, such as d=8: got {text!r}.")
    known = sorted({name for figure in figures for name in _types(figure.config)})
    if field not in known:
        short = ", ".join(f"{short} for {name}" for short, name in SHORT.items())
        raise ValueError(
            f"no figure asked for has a setting {field!r}.{_did_you_mean(field, known)} Settings "
            f"are {', '.join(known) or 'none'} ({short})."
        )
    changed = []
    for figure in figures:
        kind = _types(figure.config).get(field)
        if kind is not None:
            figure = _with(figure, {field: _read(value.strip(), kind, text)})
        changed.append(figure)
    return changed


def _with(figure: Figure, changes: dict[str, Any]) -> Figure:
    try:
        config = dataclasses.replace(figure.config, **changes)
    except ValueError as error:
        raise ValueError(f"the settings of {figure.name!r} do not go together: {error}") from error
    return dataclasses.replace(figure, config=config)


def _types(config: Any) -> dict[str, Any]:
    """The settings of a figure and their types."""
    hints = typing.get_type_hints(type(config))
    return {field.name: hints[field.name] for field in dataclasses.fields(config)}


def _read(value: str, kind: Any, text: str) -> Any:
    """A value of the type of a field: int, float, str, or a tuple of them with commas between."""
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        values = tuple(_read(part.strip(), item, text) for part in value.split(",") if part.strip())
        if not values:
            raise ValueError(f"--set {text}: there must be at least one value.")
        return values
    field = text.partition("=")[0].strip()
    field = SHORT.get(field, field)
    if kind is str:
        # the settings themselves know their names; other text is a target
        if field not in NAME_FIELDS:
            parse_target(value, dim=4)
        return value
    try:
        number = kind(value)
    except ValueError:
        words = {int: "a whole number", float: "a number"}[kind]
        raise ValueError(f"--set {text}: {value!r} must be {words}.") from None
    low, high = RANGES.get(field, (1, 10**7))
    if not low <= number <= high:
        raise ValueError(f"--set {text}: {value} must be from {low:g} to {high:g}.")
    return number


def build_report(
    figures: Sequence[Figure],
    results: Mapping[Cell, list[Row]],
    *,
    transformer: bool,
    provenance: Mapping[str, str],
) -> Report:
    """Sections in order, and a lead that counts the verdicts."""
    sections = [figure.section(results) for figure in figures]
    if transformer:
        sections.append(transformer_section())
    states = [section.verdict.state for section in sections if section.verdict is not None]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    lead = (
        "Each claim of Fu, Guo, Bai and Mei, “What can a Single Attention Layer Learn? A Study "
        "Through the Random Features Lens” (arXiv:2307.11353), the figure that tests it, theory's "
        "prediction on the same axes, and what came out. The settings are ours, and each section "
        f"says them. Verdicts: {counts}."
    )
    return Report(
        "What a single attention layer can learn, redrawn", lead, sections, dict(provenance)
    )


def provenance_of(
    command: str, seed: int, preset: str, seconds: float, cells: int, computed: int
) -> dict[str, str]:
    """Versions, machine, seed and command: all that is needed to do it again."""
    import numpy
    import scipy
    from threadpoolctl import threadpool_info

    from keyhole import __version__

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    blas = {f"{pool['internal_api']} {pool.get('version')}" for pool in threadpool_info()}
    return {
        "command": command,
        "preset": preset,
        "seed": str(seed),
        "cells": f"{cells} ({computed} computed now, the others were finished before)",
        "time": f"{seconds:.0f} s in this run",
        "keyhole": __version__,
        "Python": platform.python_version(),
        "NumPy": numpy.__version__,
        "SciPy": scipy.__version__,
        "BLAS": ", ".join(sorted(blas)),
        "machine": f"{platform.system()} {platform.machine()}, {cores} cores",
    }
