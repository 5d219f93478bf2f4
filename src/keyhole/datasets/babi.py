"""Stories and questions as tokens: words, their order, what a sentence shares with the question, and its age."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int

from keyhole.sets import SetBatch

RECENCY = ("2^-k", "2^-k/2", "1/(1+k)")
"""How recent a sentence is: k is 0 for the newest."""


@dataclass(frozen=True)
class NamedSets:
    """Sets whose token coordinates have names.

    Attributes
    ----------
    sets : SetBatch
    names : tuple of d strings
    """

    sets: SetBatch
    names: tuple[str, ...] = field(repr=False)


def babi_tokens(
    sentences: Int[np.ndarray, "s w"],
    stories: Sequence[Int[np.ndarray, " _"]],
    questions: Int[np.ndarray, " n"],
    vocabulary: Sequence[str],
    *,
    newest: int = 40,
    order: float = 0.5,
    shared: float = 1.0,
    empty: bool = True,
) -> NamedSets:
    """Turn stories with a question each into sets of sentences with a query.

    The token of a sentence has four parts: its bag of words, of length one; the same words weighed by their place,
    from −1 for the first word to 1 for the last, of length ``order``; its words that the question has as well, with
    the weight they have there times ``shared``; and three functions of its age. The question has the first two parts,
    and zeros for the others. To every story one ``empty`` token of zeros is added, for heads to turn to when no
    sentence concerns them. ``order=0, shared=0, empty=False`` is the plain bag of words with its age.

    Parameters
    ----------
    sentences : array (s, w)
        Words of each distinct sentence, 1-based into ``vocabulary``, 0 where it is shorter.
    stories : n arrays
        Rows of ``sentences`` before each question, oldest first.
    questions : array (n,)
        Row of each question.
    vocabulary : sequence of str
    newest : int
        Sentences kept, the newest ones.
    order : float
        Length of the part that holds the order of words; 0 leaves it out.
    shared : float
        Weight of the part that holds what sentence and question share; 0 leaves it out.
    empty : bool
        Whether to add the token of zeros.

    Returns
    -------
    NamedSets
        Names are the word, ``word@`` for its place, ``word=`` for a word shared with the question.

    Examples
    --------
    >>> import numpy as np
    >>> words = ["mary", "went", "home", "where", "is"]
    >>> table = np.array([[1, 2, 3], [4, 5, 1]])
    >>> made = babi_tokens(table, [np.array([0])], np.array([1]), words)
    >>> made.sets
    SetBatch(1 set, 2 keys, dim 18, with query, float64)
    >>> made.names[10], made.sets.tokens[0, 10].round(3)       # mary is in both
    ('mary=', np.float64(0.577))
    """
    bags, places = _word_parts(sentences, len(vocabulary))
    keys = []
    for story, question in zip(stories, questions, strict=True):
        rows = story[-newest:] if newest else story[:0]
        age = np.arange(len(rows))[::-1]
        parts = [bags[rows]]
        if order:
            parts.append(order * places[rows])
        if shared:
            parts.append(shared * (bags[rows] > 0) * bags[question])
        parts.append(np.stack([2.0**-age, 2.0 ** (-age / 2), 1.0 / (1 + age)], axis=1))
        block = np.concatenate(parts, axis=1)
        keys.append(np.concatenate([block, np.zeros((1, block.shape[1]))]) if empty else block)
    names = list(vocabulary)
    if order:
        names += [f"{word}@" for word in vocabulary]
    asked = np.concatenate([bags[questions], order * places[questions]], axis=1)[:, : len(names)]
    if shared:
        names += [f"{word}=" for word in vocabulary]
    names += RECENCY
    query = np.zeros((len(questions), len(names)))
    query[:, : asked.shape[1]] = asked
    return NamedSets(SetBatch(keys, query), tuple(names))


def _word_parts(
    sentences: Int[np.ndarray, "s w"], n_words: int
) -> tuple[Float[np.ndarray, "s v"], Float[np.ndarray, "s v"]]:
    """Bags of words and words weighed by their place, each of length one."""
    bags, places = np.zeros((2, len(sentences), n_words))
    lengths = (sentences > 0).sum(axis=1)
    for j in range(sentences.shape[1]):
        rows = np.flatnonzero(sentences[:, j] > 0)
        word = sentences[rows, j] - 1
        np.add.at(bags, (rows, word), 1.0)
        np.add.at(places, (rows, word), (2 * j - (lengths[rows] - 1)) / np.maximum(lengths[rows] - 1, 1))
    for part in (bags, places):
        size = np.linalg.norm(part, axis=1, keepdims=True)
        part /= np.where(size > 0, size, 1)
    return bags, places
