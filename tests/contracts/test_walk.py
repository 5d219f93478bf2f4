"""The walk from a fit to LAPACK, and from a prediction to its loops, is at most nine frames of
ours.
"""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from paper import paper_regressor

import keyhole as kh
from keyhole.ridge import design, gram, matrices

SOURCE = str(Path(kh.__file__).parent)
MOST_FRAMES = 9


def own_frames():
    """Functions of this package that are under way, outermost first.

    What checks shapes while testing is not ours.
    """
    frame, names = sys._getframe(1), []
    while frame is not None:
        if frame.f_code.co_filename.startswith(SOURCE):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[::-1]


@pytest.fixture
def walks(monkeypatch):
    """Name of a LAPACK routine → the frames of ours that led to it."""
    found = {}

    def watched(name, routine):
        def call(*arguments, **options):
            found[name] = max(found.get(name, []), own_frames(), key=len)
            return routine(*arguments, **options)

        return call

    for module in (gram, matrices):
        honest = module.get_lapack_funcs
        monkeypatch.setattr(
            module,
            "get_lapack_funcs",
            lambda names, arrays, honest=honest: [
                watched(n, f) for n, f in zip(names, honest(names, arrays), strict=True)
            ],
        )
    monkeypatch.setattr(design, "eigh", watched("syevd", design.eigh))
    return found


@pytest.mark.parametrize(
    ("n_heads", "alpha", "route", "routines"),
    [
        (40, 1.0, "dual", {"potrf", "potrs", "trtri"}),
        (40, "loo", "dual", {"sytrd", "orghr"}),
        (4, "loo", "primal", {"syevd"}),
        (math.inf, 1.0, "kernel", {"potrf", "potrs", "trtri"}),
        (math.inf, "loo", "kernel", {"sytrd", "orghr"}),
    ],
)
def test_a_fit_reaches_lapack_in_nine_frames(walks, n_heads, alpha, route, routines):
    sets = kh.targets.sphere_sets(60, n_keys=3, dim=3, seed=0)
    model = paper_regressor(n_heads, alpha=alpha, random_state=0).fit(sets, np.arange(60.0))
    assert model.solver_ == route
    assert routines <= set(walks)
    for routine in routines:
        walk = walks[routine]
        assert walk[0] == "fit"
        assert len(walk) <= MOST_FRAMES, f"{routine}: {' → '.join(walk)}"


def test_a_fit_with_default_settings_reaches_lapack_in_nine_frames(walks):
    sets = kh.targets.sphere_sets(60, n_keys=3, dim=3, seed=0)  # too few to learn heads from
    model = kh.AttentionRegressor(random_state=0).fit(sets, np.arange(60.0))
    assert len(model.candidates_) > 1, "settings were chosen on the way"
    factorisations = {"potrf", "sytrd", "syevd"} & set(walks)
    assert factorisations
    for routine in factorisations:
        walk = walks[routine]
        assert walk[0] == "fit"
        assert len(walk) <= MOST_FRAMES, f"{routine}: {' → '.join(walk)}"


@pytest.mark.parametrize("n_heads", [40, 4, math.inf])
def test_a_prediction_is_made_in_nine_frames(n_heads):
    sets = kh.targets.sphere_sets(60, n_keys=3, dim=3, seed=0)
    model = paper_regressor(n_heads, alpha=1.0, random_state=0).fit(sets, np.arange(60.0))
    walk = []

    def watch(frame, event, _):
        nonlocal walk
        if (
            event == "call"
            and frame.f_code.co_filename.startswith(SOURCE)
            and frame.f_code.co_name == "run_threads"
        ):
            names = own_frames()
            if (
                "standard_normals" not in names
            ):  # heads are drawn by threads too: another walk, to other loops
                walk = max(walk, [*names, "the loop"], key=len)

    sys.setprofile(watch)
    try:
        model.predict(sets)
    finally:
        sys.setprofile(None)
    assert walk[0] == "predict"
    assert len(walk) <= MOST_FRAMES, " → ".join(walk)
