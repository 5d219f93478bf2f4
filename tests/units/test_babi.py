import numpy as np
import pytest

from keyhole.data.datasets import babi_tokens

WORDS = ["the", "office", "is", "north", "of", "garden", "what"]
TABLE = np.array([[1, 2, 3, 4, 5, 1, 6], [1, 6, 3, 4, 5, 1, 2], [7, 3, 4, 5, 1, 6, 0]])


@pytest.mark.parametrize(("order", "differ"), [(0.5, True), (0.0, False)])
def test_word_order_is_in_the_token(order, differ):
    made = babi_tokens(TABLE, [np.array([0]), np.array([1])], np.array([2, 2]), WORDS, order=order)
    first, second = (made.sets[i].tokens[0] for i in range(2))
    assert (not np.allclose(first, second)) == differ


def test_parts_and_their_names():
    made = babi_tokens(TABLE, [np.array([0, 1])], np.array([2]), WORDS)
    assert len(made.names) == made.sets.dim == 3 * 7 + 2 + 3
    old, new, empty = made.sets.tokens
    assert not empty.any()
    assert made.names[21:23] == ("age 0", "age 1")
    np.testing.assert_array_equal([old[21:23], new[21:23]], [[0.0, 1.0], [1.0, 0.0]])
    np.testing.assert_allclose(new[-3:], 1.0)
    np.testing.assert_allclose(old[-3:], [0.5, 0.5**0.5, 0.5])
    np.testing.assert_allclose(np.linalg.norm(new[:7]), 1.0)
    np.testing.assert_allclose(np.linalg.norm(new[7:14]), 0.5)
    shared = dict(zip(made.names, new, strict=True))
    assert shared["garden="] > 0
    assert shared["office="] == 0
    assert not made.sets.query[0, 14:].any()


def test_plain_bags_and_the_newest():
    made = babi_tokens(
        TABLE,
        [np.array([0, 1, 0])],
        np.array([2]),
        WORDS,
        newest=2,
        order=0.0,
        shared=0.0,
        ages=False,
        empty=False,
    )
    assert made.sets.tokens.shape == (2, 7 + 3)
    assert made.names[:2] == ("the", "office")
