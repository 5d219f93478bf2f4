"""The bAbI question answering tasks, from their text files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keyhole._checks import check_count
from keyhole.datasets.archives import read_texts
from keyhole.datasets.babi import babi_tokens
from keyhole.tables import Dataset


@dataclass(frozen=True)
class Question:
    """A question with the sentences before it, oldest first, and its answer."""

    story: tuple[tuple[str, ...], ...]
    words: tuple[str, ...]
    answer: str


def load_babi(path: Any, task: int = 1, *, folder: str = "en", newest: int = 40) -> Dataset:
    r"""Read one bAbI task: each question is a query, the sentences of its story are the keys.

    Parameters
    ----------
    path : str or Path
        The archive as it is distributed (tar.gz or zip), the folder it unpacks to, or a folder with the files
        ``qaN_…_train.txt`` and ``qaN_…_test.txt``; or one such file.
    task : int
        1 to 20.
    folder : str
        Which folder of the archive, where there are several: "en" has 1000 questions, "en-10k" 10,000.
    newest : int
        Sentences kept of each story, the newest ones.

    Returns
    -------
    Dataset
        Tokens as `keyhole.datasets.babi.babi_tokens` makes them; the target is the answer, as text; ``split`` says
        what is for training. Supporting facts, which the files name, are not used.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> text = "1 Mary went home.\n2 Where is Mary? \thome\t1\n1 John left.\n2 Where is John?\toutside\t1\n"
    >>> with tempfile.TemporaryDirectory() as place:
    ...     _ = pathlib.Path(place, "qa1_single_train.txt").write_text(text)
    ...     data = load_babi(place, task=1)
    >>> data.target.tolist(), data.sets.lengths
    (['home', 'outside'], array([2, 2]))
    """
    task = check_count(task, "task")
    name = re.compile(rf"(?:^|/)qa{task}_[^/]*_(?:train|test)\.txt$")
    texts = read_texts(Path(path), lambda n: bool(name.search(n)))
    texts = _one_folder(texts, folder)
    if not texts:
        raise FileNotFoundError(
            f"task {task} needs a file qa{task}_…_train.txt: {Path(path).name!r} has none. Give the archive of the "
            "bAbI tasks, or the folder it unpacks to."
        )
    parts = [(0 if not n.endswith("_test.txt") else 1, parse_stories(text, n)) for n, text in sorted(texts.items())]
    parts.sort(key=lambda part: part[0])
    questions = [q for _, part in parts for q in part]
    split = np.concatenate([np.full(len(part), which) for which, part in parts])
    made = _tokens(questions, newest)
    answers = np.array([q.answer for q in questions], dtype=np.str_)
    words = f"bAbI task {task}: {len(questions)} questions, {int((split == 0).sum())} of them for training"
    return Dataset(made.sets, answers, made.names, words, "answer", split)


def _one_folder(texts: dict[str, str], folder: str) -> dict[str, str]:
    """The files of one folder, if there are several: that of the given name, or else the first."""
    places = sorted({n.rpartition("/")[0] for n in texts})
    if len(places) < 2:
        return texts
    chosen = next((p for p in places if p.rpartition("/")[2] == folder), None)
    if chosen is None:
        found = ", ".join(repr(p.rpartition("/")[2]) for p in places)
        raise ValueError(f"`folder` must be one of those in the archive: got {folder!r}, there are {found}.")
    return {n: text for n, text in texts.items() if n.rpartition("/")[0] == chosen}


def parse_stories(text: str, name: str) -> list[Question]:
    """Questions of a file: lines are numbered, a number 1 begins a story, a tab marks a question."""
    questions: list[Question] = []
    story: list[tuple[str, ...]] = []
    for row, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        number, _, rest = line.strip().partition(" ")
        if not number.isdecimal() or not rest:
            raise ValueError(
                f"a line of a bAbI file is a number and a sentence: line {row} of {name.rpartition('/')[2]!r} is "
                f"{line!r:.60}. Is it a bAbI file?"
            )
        if int(number) == 1:
            story = []
        if "\t" not in rest:
            story.append(words_of(rest))
            continue
        asked, answer = (part.strip() for part in rest.split("\t")[:2])
        if not answer or not words_of(asked):
            raise ValueError(f"a question has an answer after a tab: line {row} of {name!r:.80} is {line!r:.60}.")
        questions.append(Question(tuple(story), words_of(asked), answer.lower()))
    if not questions:
        raise ValueError(f"a bAbI file has questions, lines with a tab before the answer: {name!r:.80} has none.")
    return questions


def words_of(sentence: str) -> tuple[str, ...]:
    """Words in lower case, without punctuation.

    >>> words_of("Where is Mary? ")
    ('where', 'is', 'mary')
    """
    return tuple(re.findall(r"[^\W_]+(?:['-][^\W_]+)*", sentence.lower()))


def _tokens(questions: Sequence[Question], newest: int) -> Any:
    """Number sentences and words, and hand them to `babi_tokens`."""
    sentences: dict[tuple[str, ...], int] = {}
    for question in questions:
        for sentence in (*question.story, question.words):
            sentences.setdefault(sentence, len(sentences))
    vocabulary = sorted({word for sentence in sentences for word in sentence})
    number = {word: k + 1 for k, word in enumerate(vocabulary)}
    table = np.zeros((len(sentences), max(1, *(len(s) for s in sentences))), dtype=np.int64)
    for sentence, k in sentences.items():
        table[k, : len(sentence)] = [number[word] for word in sentence]
    stories = [np.array([sentences[s] for s in q.story], dtype=np.int64) for q in questions]
    asked = np.array([sentences[q.words] for q in questions])
    return babi_tokens(table, stories, asked, vocabulary, newest=newest)
