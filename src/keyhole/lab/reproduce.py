"""Every figure by name, what it is asked to compute, and the report made of all of them."""

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

from keyhole.lab.cells import Cell
from keyhole.lab.figures.transformer import section as transformer_section
from keyhole.lab.measured import Results
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

SHORT = {
    "d": "dim",
    "N": "n_keys",
    "M": "n_heads",
    "n": "largest",
}  # names of the paper for fields of a Config


@dataclass(frozen=True)
class Figure:
    """One figure with its settings.

    Its module has ``PRESETS``, ``cells(config)`` and ``section(config, results)``.
    """

    name: str
    module: Any
    config: Any

    def cells(self) -> list[Cell]:
        """What it needs."""
        return list(self.module.cells(self.config))


def check_names(names: Sequence[str]) -> list[str]:
    """Names of figures, all of them when none is given.

    An unknown one is answered with those that are known.
    """
    for name in names:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"unknown figure {name!r}.{hint} The figures are {', '.join(NAMES)}; none means "
                "all of them."
            )
    return [name for name in NAMES if name in names or not names]


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
            module: Any = importlib.import_module(f"keyhole.lab.figures.{FIGURES[name]}")
            figures.append(Figure(name, module, module.PRESETS[preset]))
    if seed is not None:
        figures = [_with(figure, {"seed": seed}) for figure in figures]
    for text in overrides:
        figures = _override(figures, text)
    return figures


def _override(figures: list[Figure], text: str) -> list[Figure]:
    field, equals, value = text.partition("=")
    field = field.strip()
    field = SHORT.get(field, field)
    if not equals:
        raise ValueError(f"--set takes field=value, such as d=8: got {text!r}.")
    having = [figure for figure in figures if field in _fields(figure.config)]
    if not having:
        known = sorted({name for figure in figures for name in _fields(figure.config)})
        short = ", ".join(f"{short} for {name}" for short, name in SHORT.items())
        near = difflib.get_close_matches(field, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"no figure asked for has a setting {field!r}.{hint} Settings are "
            f"{', '.join(known) or 'none'} ({short})."
        )
    return [
        _with(figure, {field: _read(value.strip(), _fields(figure.config)[field], text)})
        if figure in having
        else figure
        for figure in figures
    ]


def _with(figure: Figure, changes: dict[str, Any]) -> Figure:
    try:
        config = dataclasses.replace(figure.config, **changes)
    except ValueError as error:
        raise ValueError(f"the settings of {figure.name!r} do not go together: {error}") from error
    return dataclasses.replace(figure, config=config)


def _fields(config: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(type(config))
    return {field.name: hints[field.name] for field in dataclasses.fields(config)}


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
"""Least and most that a setting may be; from 1 to 10⁷ where it is a count that is not named
here.
"""


NAME_FIELDS = ("tasks", "learners", "predicted")
"""Settings that are names, of tasks and of learners; other texts are targets."""


def _read(value: str, kind: Any, text: str) -> Any:
    """A value of the type of a field: int, float, str, or a tuple of them with commas between."""
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        values = tuple(_read(part.strip(), item, text) for part in value.split(",") if part.strip())
        if not values:
            raise ValueError(f"--set {text}: there must be at least one value.")
        return values
    words = {int: "a whole number", float: "a number", str: "text"}
    try:
        number = kind(value)
    except ValueError:
        raise ValueError(f"--set {text}: {value!r} must be {words[kind]}.") from None
    field = text.partition("=")[0].strip()
    if kind is str and field in NAME_FIELDS:
        return number  # the settings themselves know their names
    if kind is str:
        parse_target(number, dim=4)  # other text is a target
        return number
    low, high = RANGES.get(SHORT.get(field, field), (1, 10**7))
    if not low <= number <= high:
        raise ValueError(f"--set {text}: {value} must be from {low:g} to {high:g}.")
    return number


def build_report(
    figures: Sequence[Figure], results: Results, *, transformer: bool, provenance: Mapping[str, str]
) -> Report:
    """Sections in order, and a lead that counts the verdicts."""
    sections: list[Section] = [figure.module.section(figure.config, results) for figure in figures]
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

    from keyhole import __version__

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "command": command,
        "preset": preset,
        "seed": str(seed),
        "cells": f"{cells} ({computed} computed now, the others found in the store)",
        "time": f"{seconds:.0f} s in this run",
        "keyhole": __version__,
        "Python": platform.python_version(),
        "NumPy": numpy.__version__,
        "SciPy": scipy.__version__,
        "BLAS": _blas(),
        "machine": f"{platform.system()} {platform.machine()}, {cores} cores, {_processor()}",
    }


def _blas() -> str:
    from threadpoolctl import threadpool_info

    pools = [pool for pool in threadpool_info() if pool.get("user_api") == "blas"]
    return ", ".join(
        dict.fromkeys(f"{pool['internal_api']} {pool.get('version')}" for pool in pools)
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown processor"
