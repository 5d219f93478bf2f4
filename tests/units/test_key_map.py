"""A map of the keys of one set: where they lie, and what each adds."""

import matplotlib as mpl
import numpy as np
import pytest

import keyhole as kh
from keyhole.lab.displays import KeyMapDisplay

mpl.use("Agg")


def test_a_map_of_keys_circles_those_that_add_most():
    bags = kh.datasets.make_bags(40, (60, 80), dim=4, share=0.2, random_state=0)
    model = kh.AttentionClassifier(64, kh.GaussianHeads(), scaling="standard", random_state=0)
    model.fit(bags.sets, bags.target)
    row = int(np.flatnonzero(bags.target)[0])
    display = KeyMapDisplay.from_estimator(
        model, bags.sets[row : row + 1], bags.coordinates[row], n_top=5
    )
    contributions = model.contributions(bags.sets[row : row + 1])[0]
    assert display.top_keys.tolist() == np.argsort(-contributions)[:5].tolist()
    assert len(display.listing().splitlines()) == 5
    drawn, circled = display.ax_.collections[:2]
    np.testing.assert_array_equal(drawn.get_offsets(), bags.coordinates[row])
    np.testing.assert_array_equal(circled.get_offsets(), bags.coordinates[row][display.top_keys])


def test_a_map_is_of_one_set_and_of_all_its_keys():
    bags = kh.datasets.make_bags(3, 9, dim=2)
    with pytest.raises(ValueError, match="one set: got 3"):
        KeyMapDisplay.from_estimator(None, bags.sets, bags.coordinates)
    with pytest.raises(ValueError, match=r"\(9, 2\) for 8 keys"):
        KeyMapDisplay.from_contributions(bags.coordinates[0], np.zeros(8))
