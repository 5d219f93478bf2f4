"""A start that ignores ages: nothing it says depends on them."""

import numpy as np

import keyhole as kh
from keyhole.attention.hops import CHAIN, Ages, Start
from keyhole.attention.learned import Descent, best_without_learning, make_task
from keyhole.data.tokens import with_ages


def test_hops_without_ages_do_not_see_them():
    rng = np.random.default_rng(0)
    keys = [(rng.random((4, 3)) < 0.5).astype(float) for _ in range(60)]
    queries = np.zeros((60, 7))
    queries[:, :3] = np.eye(3)[rng.integers(3, size=60)]
    sets = kh.SetBatch(with_ages(keys, n_ages=4), queries)
    task = make_task(
        sets,
        rng.normal(size=60),
        activation="softmax",
        fit_intercept=True,
        weights=None,
        groups=None,
    )
    plan = kh.LearnedHeads(max_iter=10)._plan(sets, "softmax", 0)
    assert [start.ignores_ages for start in plan.starts()] == [False, False, False, True]
    start = Start(3, CHAIN, ignores_ages=True)
    descent = Descent(task, start, best_without_learning(task, plan), plan)
    descent.step()
    heads = descent.distribution()
    ages = Ages.of(sets).columns
    drawn = heads.sample(5, 7, 0, query_dim=heads.means_.shape[1] - 1)
    for matrix in (*heads.hops_, drawn):
        assert not matrix[:, :, ages].any()
        # rows of what was found follow the seven of the query
        for first_row in range(7, matrix.shape[1] - 1, 7):
            assert not matrix[:, first_row + ages].any()
            assert matrix[:, first_row].any()
