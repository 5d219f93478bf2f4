import math

import numpy as np
import pytest

import keyhole as kh
from keyhole.attention.heads import FittedHeads
from keyhole.attention.looks import Ages, LookTrace, starting_looks
from keyhole.data.tokens import look_weights, looked_through

LAW = {"steps": 20, "learning_rate": 0.3, "n_heads": 8, "hops": 2, "scale": 0.1, "strengths": (1.0,)}
OPTIONS = {"activation": "softmax", "scaling": "none", "query": "given", "random_state": 0}


def carried(rng, n=160):
    """Three things, each carried by somebody, and three people, each somewhere: where is the thing asked for?"""
    eye = np.eye(3)
    who, where = rng.integers(3, size=(2, n, 3))
    things = np.concatenate([np.broadcast_to(eye, (n, 3, 3)), eye[who], np.zeros((n, 3, 3))], axis=2)
    people = np.concatenate([np.zeros((n, 3, 3)), np.broadcast_to(eye, (n, 3, 3)), eye[where]], axis=2)
    asked, rows = rng.integers(3, size=n), np.arange(n)
    sets = kh.SetBatch(np.concatenate([things, people], axis=1), eye[asked])
    return sets, where[rows, who[rows, asked]], asked, 3 + who[rows, asked]


def two_looks(rng, dim=3, asked=2, patterns=2):
    looks = (rng.normal(size=(patterns, asked + 1, dim + 1)),)
    means = rng.normal(size=(2, asked + patterns * dim + 1, dim + 1))
    return FittedHeads(means, 0.3, looks_=looks)


@pytest.fixture
def sets(rng):
    return kh.SetBatch([rng.normal(size=(k, 3)) for k in rng.integers(1, 5, 30)], rng.normal(size=(30, 2)))


def test_two_facts_need_two_looks_and_are_shown(rng):
    sets, y, thing, person = carried(rng)
    two, one = (
        kh.AttentionClassifier(32, kh.LearnedHeads(**LAW | {"hops": hops}), **OPTIONS).fit(sets[:120], y[:120])
        for hops in ("auto", 1)
    )
    assert two.law_.hops >= 2
    assert two.law_.chosen == "learned"
    assert two.score(sets[120:], y[120:]) > max(0.8, one.score(sets[120:], y[120:]) + 0.2)
    first, *_, last = two.hop_weights(sets)
    np.testing.assert_allclose([w.sum() for w in first], 1.0)
    assert np.mean([w[0].argmax() for w in first] == thing) > 0.9, "the first look finds who has it"
    assert np.mean([w[0].argmax() for w in last] == person) > 0.9, "the last one finds where they are"
