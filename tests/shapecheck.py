"""The checker of shapes and types while testing: beartype, with an int accepted where a float is
asked for.

The first `CHECKED_CALLS` calls of a function are checked in each process, and as many objects of a
dataclass. Inner functions are called a hundred thousand times, and checking all of those took half
of the time of all tests.

A function within a function is defined anew by each call of the outer one. Making its checker takes
about a millisecond, more than most calls, so only its first `CHECKED_DEFINITIONS` definitions are
checked. A fit of 40 samples with default settings took 95 ms with checkers made for all.
"""

import collections
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

CHECKED_CALLS = 200
CHECKED_DEFINITIONS = 20

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
        "TableOptions",
        "SetBatch",
        "SetGroups",
    )
}
"""Constructors that take whatever they are given. scikit-learn asks that ``fit`` checks parameters;
the others refuse wrong values themselves, in words that tests read.
"""

checker = beartype(conf=BeartypeConf(is_pep484_tower=True))


def call_checked_first(checked: Callable[..., Any], plain: Callable[..., Any]) -> Any:
    """One function of two: the checked one for its first calls, the plain one from then on."""
    calls = itertools.count()

    @functools.wraps(checked)
    def call(*args: Any, **options: Any) -> Any:
        if next(calls) < CHECKED_CALLS:
            return checked(*args, **options)
        return plain(*args, **options)

    return call


def check_first_calls(decorator: Callable[..., Any]) -> Callable[..., Any]:
    """`jaxtyping.jaxtyped`, as the import hook applies it, for the first calls of each function."""
    definitions: collections.Counter[types.CodeType] = collections.Counter()

    def decorate(*, typechecker: Any) -> Callable[..., Any]:
        check = decorator(typechecker=typechecker)

        def checking(function: Any) -> Any:
            name = function.__qualname__
            if isinstance(function, type):
                name += ".__init__"  # of a class no more than this is checked
            if name in UNCHECKED:
                return function

            # a dataclass checks its fields when it is made; of other classes nothing is changed
            if isinstance(function, type):
                plain_init = function.__init__
                checked_class = check(function)
                if checked_class.__init__ is not plain_init:
                    checked_class.__init__ = call_checked_first(checked_class.__init__, plain_init)
                return checked_class

            if type(function) is not types.FunctionType:
                return check(function)

            # a function: all definitions of an inner one have the same code
            definitions[function.__code__] += 1
            if definitions[function.__code__] > CHECKED_DEFINITIONS:
                return function
            return call_checked_first(check(function), function)

        return checking

    return decorate


jaxtyping.jaxtyped = check_first_calls(jaxtyping.jaxtyped)
