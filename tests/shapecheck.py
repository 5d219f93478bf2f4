"""The checker of shapes and types while testing: beartype, with an int accepted where a float is
asked for.

The first `CHECKED_CALLS` calls of a function are checked in each process. Inner functions are
called a hundred thousand times, and checking all of those took half of the time of all tests.
"""

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

CHECKED_CALLS = 200

UNCHECKED = {
    f"{constructor}.__init__"
    for constructor in (
        "AttentionRegressor",
        "AttentionClassifier",
        "AttentionFeatures",
        "NormBallRegressor",
        "NormBallClassifier",
        "GaussianHeads",
        "QueryKeyHeads",
        "IdentityHeads",
        "LearnedHeads",
        "HeadDraw",
        "ParquetSets",
        "PartedFile",
        "SetBatch",
        "SetGroups",
    )
}
"""Constructors that take whatever they are given. scikit-learn asks that ``fit`` checks parameters;
the others refuse wrong values themselves, in words that tests read.
"""

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check_first_calls(decorator: Callable[..., Any]) -> Callable[..., Any]:
    """`jaxtyping.jaxtyped`, as the import hook applies it, for the first calls of each function."""

    def decorate(*, typechecker: Any) -> Callable[..., Any]:
        def checking(function: Any) -> Any:
            name = function.__qualname__
            if isinstance(function, type):
                name += ".__init__"  # of a class no more than this is checked
            if name in UNCHECKED:
                return function
            checked = decorator(typechecker=typechecker)(function)
            if type(function) is not types.FunctionType:
                return checked  # a class: a dataclass checks its fields when it is made
            calls = itertools.count()

            @functools.wraps(checked)
            def call(*args: Any, **options: Any) -> Any:
                return (checked if next(calls) < CHECKED_CALLS else function)(*args, **options)

            return call

        return checking

    return decorate


jaxtyping.jaxtyped = check_first_calls(jaxtyping.jaxtyped)
