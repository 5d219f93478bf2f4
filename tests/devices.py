"""The device that tests of torch run on: the host's torch, or what the environment names.

``KEYHOLE_TEST_DEVICE=cuda:0`` runs the same tests on a GPU.
"""

import os

import numpy as np

DEVICE = os.environ.get("KEYHOLE_TEST_DEVICE", "cpu")


def as_array(numbers):
    """A tensor of any device, or an array, as an array."""
    return np.asarray(numbers.cpu() if hasattr(numbers, "cpu") else numbers)
