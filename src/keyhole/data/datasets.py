"""Public data as sets: images, text, molecules, bags, series."""

from __future__ import annotations

import csv
import errno
import io
import itertools
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from keyhole._checks import check_choice, check_count
from keyhole._files import refuse_special_file
from keyhole.data.bags import SyntheticBags as SyntheticBags
from keyhole.data.bags import make_bags as make_bags
from keyhole.data.batches import Batch
from keyhole.data.blocks import SUFFIXES
from keyhole.data.layout import Dataset, TableOptions
from keyhole.data.npz import check_pointer, read_arrays
from keyhole.data.reader import ParquetSets, read_table
from keyhole.data.schema import Schema
from keyhole.data.sets import SetBatch, SetGroups


def read_texts(path: Path, wanted: Callable[[str], bool]) -> dict[str, str]:
    """The files whose name (with its folders, parted by /) is wanted, as text.

    Of a folder, an archive (zip, or tar of any compression), or a file that is neither. Members of
    archives are read in memory: a link, or a name that leads out of the archive, has no way to the
    disk.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path.name!r} is not there: no such file or folder. Check the name and the folder."
        )
    refuse_special_file(path)
    try:
        contents = dict(_files(path, wanted))
    except Exception as error:
        # an error of the disk has its own number; an invalid argument is where damage leads
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise ValueError(
            f"an archive must read back whole: {path.name!r} does not ({str(error)[:200]}). It is "
            "damaged; fetch it again."
        ) from None
    return {name: _decode(content, name) for name, content in contents.items()}


def _files(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """What is wanted of a folder, an archive, or a file that is neither."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path).as_posix()
            if wanted(name) and file.is_file():
                yield name, file.read_bytes()
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in filter(wanted, archive.namelist()):
                yield name, archive.read(name)
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isreg() else None
                if content is not None and wanted(member.name):
                    yield member.name, content.read()
    elif wanted(path.name):
        yield path.name, path.read_bytes()


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text must be UTF-8: {name!r:.100} is not ({error.reason} at byte {error.start}). "
            "Fetch or convert it again."
        ) from None


RECENCY = ("2^-k", "2^-k/2", "1/(1+k)")  # how recent a sentence is: k is 0 for the newest


def babi_tokens(
    sentences: Int[np.ndarray, "s w"],
    stories: Sequence[Int[np.ndarray, " _"]],
    questions: Int[np.ndarray, " n"],
    vocabulary: Sequence[str],
    *,
    newest: int = 80,
    order: float = 0.5,
    shared: float = 1.0,
    ages: bool = True,
    empty: bool = True,
) -> Dataset:
    """Turn stories with a question each into sets of sentences with a query.

    The token of a sentence has five parts. The first is its bag of words, of length one. The second
    has the same words weighed by their place, from −1 for the first word to 1 for the last, and the
    length ``order``. The third has the words that the question has as well, with the weight they
    have there times ``shared``. Then come a one among zeros that says its age, the newest first,
    and three functions of its age. The question has the
    first two parts, and zeros for the others. To every story one ``empty`` token of zeros is added,
    which heads attend to when no sentence concerns them.
    ``order=0, shared=0, ages=False, empty=False`` is the plain bag of words with three functions of
    its age.

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
    ages : bool
        Whether to add a coordinate for each age, as many as the longest story kept has sentences.
        `LearnedHeads` finds them, and further hops learn to attend to what came before or after.
    empty : bool
        Whether to add the token of zeros.

    Returns
    -------
    Dataset
        Without a target. Names are the word, ``word@`` for its place, ``word=`` for a word shared
        with the question, ``age k``, and the three functions of the age k.

    Examples
    --------
    >>> import numpy as np
    >>> words = ["mary", "went", "home", "where", "is"]
    >>> table = np.array([[1, 2, 3], [4, 5, 1]])
    >>> data = babi_tokens(table, [np.array([0])], np.array([1]), words)
    >>> data.sets
    SetBatch(1 set, 2 keys, dim 19, with query, float64)
    >>> data.names[10], data.sets.tokens[0, 10].round(3)       # mary is in both
    ('mary=', np.float64(0.577))
    """
    # parts that sentences and questions have in common
    bags, places = _word_parts(sentences, len(vocabulary))
    words = bags
    names = list(vocabulary)
    if order:
        words = np.hstack([bags, order * places])
        names += [f"{word}@" for word in vocabulary]

    # parts of sentences alone: what the question shares with them, their age, and its functions
    n_ages = 0
    if ages:
        n_ages = max((min(len(story), newest) for story in stories), default=0)
    keys = []
    for story, question in zip(stories, questions, strict=True):
        rows = story[len(story) - min(newest, len(story)) :]
        age = np.arange(len(rows))[::-1]
        parts = [words[rows]]
        if shared:
            parts.append(shared * (bags[rows] > 0) * bags[question])
        if n_ages:
            parts.append(np.eye(n_ages)[age])
        parts.append(np.stack([2.0**-age, 2.0 ** (-age / 2), 1.0 / (1 + age)], axis=1))
        tokens = np.concatenate(parts, axis=1)
        keys.append(np.pad(tokens, ((0, int(empty)), (0, 0))))
    if shared:
        names += [f"{word}=" for word in vocabulary]
    names += [f"age {k}" for k in range(n_ages)]
    names += RECENCY

    # a question has zeros instead of the parts that are of sentences alone
    query = np.pad(words[questions], ((0, 0), (0, len(names) - words.shape[1])))
    return Dataset(
        sets=SetBatch(keys, query),
        target=None,
        names=tuple(names),
        description=f"{len(keys)} stories",
    )


def _word_parts(
    sentences: Int[np.ndarray, "s w"], n_words: int
) -> tuple[Float[np.ndarray, "s v"], Float[np.ndarray, "s v"]]:
    """Bags of words and words weighed by their place, each of length one."""
    bags = np.zeros((len(sentences), n_words))
    places = np.zeros((len(sentences), n_words))
    lengths = (sentences > 0).sum(axis=1)
    # word j of a sentence of L words has the weight (2j − (L − 1)) / (L − 1), from −1 to 1
    for j in range(sentences.shape[1]):
        rows = np.flatnonzero(sentences[:, j] > 0)
        word = sentences[rows, j] - 1
        last = lengths[rows] - 1
        np.add.at(bags, (rows, word), 1.0)
        np.add.at(places, (rows, word), (2 * j - last) / np.maximum(last, 1))
    for part in (bags, places):
        norms = np.linalg.norm(part, axis=1, keepdims=True)
        part /= np.where(norms > 0, norms, 1)
    return bags, places


class StoryQuestion(NamedTuple):
    """A question with the sentences before it, oldest first, and its answer."""

    story: tuple[tuple[str, ...], ...]
    words: tuple[str, ...]
    answer: str


def load_babi(path: Any, task: int = 1, *, folder: str = "en", newest: int = 80) -> Dataset:
    r"""Read one bAbI task: each question is a query, the sentences of its story are the keys.

    Parameters
    ----------
    path : str or Path
        The archive as it is distributed (tar.gz or zip), the folder it unpacks to, or a folder with
        the files ``qaN_…_train.txt`` and ``qaN_…_test.txt``; or one such file.
    task : int
        1 to 20.
    folder : str
        Which folder of the archive, where there are several: "en" has 1000 questions, "en-10k"
        10,000.
    newest : int
        Sentences kept of each story, the newest ones.

    Returns
    -------
    Dataset
        Tokens as `keyhole.data.datasets.babi_tokens` makes them; the target is the answer, as text;
        ``split`` says what is for training. Supporting facts, which the files name, are not used.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> text = "1 Mary went home.\n2 Where is Mary? \thome\t1\n"
    >>> text += "1 John left.\n2 Where is John?\toutside\t1\n"
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
            f"task {task} needs a file qa{task}_…_train.txt: {Path(path).name!r} has none. Give "
            "the archive of the bAbI tasks, or the folder it unpacks to."
        )

    # training files first
    questions: list[StoryQuestion] = []
    split: list[int] = []
    for file in sorted(texts, key=lambda n: (n.endswith("_test.txt"), n)):
        part = parse_stories(texts[file], file)
        questions += part
        split += [int(file.endswith("_test.txt"))] * len(part)
    # sentences of both parts are coded together, with one vocabulary
    tokens = _tokens(questions, newest)
    description = (
        f"bAbI task {task}: {len(questions)} questions, {split.count(0)} of them for training"
    )
    return Dataset(
        sets=tokens.sets,
        target=np.array([question.answer for question in questions], dtype=np.str_),
        names=tokens.names,
        description=description,
        target_name="answer",
        split=np.array(split),
    )


def _one_folder(texts: dict[str, str], folder: str) -> dict[str, str]:
    """The files of one folder, if there are several: that of the given name, or else the first."""
    paths = sorted({name.rpartition("/")[0] for name in texts})
    if len(paths) < 2:
        return texts
    for path in paths:
        if path.rpartition("/")[2] == folder:
            return {n: text for n, text in texts.items() if n.rpartition("/")[0] == path}
    folders = ", ".join(repr(path.rpartition("/")[2]) for path in paths)
    raise ValueError(
        f"`folder` must be one of those in the archive: got {folder!r}, there are {folders}."
    )


def parse_stories(text: str, name: str) -> list[StoryQuestion]:
    """Questions of a file.

    Lines are numbered, a number 1 begins a story, a tab marks a question.
    """
    questions: list[StoryQuestion] = []
    story: list[tuple[str, ...]] = []
    for row, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        number, _, rest = line.strip().partition(" ")
        if not number.isdecimal() or not rest:
            raise ValueError(
                f"a line of a bAbI file is a number and a sentence: line {row} of "
                f"{name.rpartition('/')[2]!r} is {line!r:.60}. Is it a bAbI file?"
            )
        if int(number) == 1:
            story = []

        # a sentence of the story
        if "\t" not in rest:
            story.append(words_of(rest))
            continue

        # a question, its answer, and after another tab the supporting facts, which are not used
        question, answer = (part.strip() for part in rest.split("\t")[:2])
        words = words_of(question)
        if not answer or not words:
            raise ValueError(
                f"a question has an answer after a tab: line {row} of {name!r:.80} is {line!r:.60}."
            )
        questions.append(StoryQuestion(story=tuple(story), words=words, answer=answer.lower()))
    if not questions:
        raise ValueError(
            f"a bAbI file has questions, lines with a tab before the answer: {name!r:.80} has none."
        )
    return questions


def words_of(sentence: str) -> tuple[str, ...]:
    """Words in lower case, without punctuation.

    >>> words_of("Where is Mary? ")
    ('where', 'is', 'mary')
    """
    return tuple(re.findall(r"[^\W_]+(?:['-][^\W_]+)*", sentence.lower()))


def _tokens(questions: Sequence[StoryQuestion], newest: int) -> Dataset:
    """Number sentences and words, and hand them to `babi_tokens`."""
    # distinct sentences, and their words
    numbers: dict[tuple[str, ...], int] = {}
    for question in questions:
        for sentence in (*question.story, question.words):
            numbers.setdefault(sentence, len(numbers))
    vocabulary = sorted({word for sentence in numbers for word in sentence})
    number_of_word = {word: k + 1 for k, word in enumerate(vocabulary)}

    # one row per sentence, 0 where it is shorter than the longest
    width = max(1, *(len(sentence) for sentence in numbers))
    table = np.zeros((len(numbers), width), dtype=np.int64)
    for sentence, row in numbers.items():
        table[row, : len(sentence)] = [number_of_word[word] for word in sentence]
    stories = [np.array([numbers[s] for s in q.story], dtype=np.int64) for q in questions]
    rows_of_questions = np.array([numbers[question.words] for question in questions])
    return babi_tokens(table, stories, rows_of_questions, vocabulary, newest=newest)


def load_bags(path: Any, *, bag: str | int = 0, label: str | int = -1, skip: Any = ()) -> Dataset:
    r"""Read bags from a file with one instance per line.

    A column names its bag, another gives its label.

    A bag is positive if one of its instances is: its label is the largest of theirs. That is the
    rule of the field, and the same as their common label where they agree.

    Parameters
    ----------
    path : str or Path
        Comma separated, with or without a line of names.
    bag, label : str or int
        Column by name or by position; negative positions count from the end. UCI's musk
        (clean1.data) has the bag first, then the name of a conformation, and the class last:
        ``load_bags(path, skip=[1])``.
    skip : sequence of str or int
        Columns that are neither.

    Returns
    -------
    Dataset
        Bags in the order in which they first appear.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "bags.csv")
    ...     _ = file.write_text("a,1,2,0\na,3,4,1\nb,5,6,0\n")
    ...     data = load_bags(file)
    >>> data.sets.lengths, data.target
    (array([2, 1]), array([1, 0]))
    """
    path = Path(path)
    header, cells = _read_cells(path)
    width = cells.shape[1]

    # which column is what
    bag_column = _place(bag, header, width, "bag")
    label_column = _place(label, header, width, "label")
    skipped = [_place(column, header, width, "skip") for column in skip]
    columns = [j for j in range(width) if j not in {bag_column, label_column, *skipped}]
    if bag_column == label_column or not columns:
        raise ValueError(
            "bag and label must be different columns, and one must be left for the instances."
        )
    names = tuple(header[j] if header else f"x{j}" for j in columns)

    # the numbers of all instances
    tokens = _as_numbers(cells[:, columns])
    not_numbers = np.argwhere(~np.isfinite(tokens))
    if len(not_numbers):
        k, j = not_numbers[0]
        raise ValueError(
            f"instances are numbers: column {names[j]!r} of instance {k} is "
            f"{str(cells[k, columns[j]])!r:.40}. Leave the column out with `skip`, or fill it in."
        )

    # bags in the order in which they first appear, each with the largest of its labels
    labels = _labels(np.char.rstrip(cells[:, label_column], "."))
    members_of_bag: dict[str, list[int]] = {}
    for k, name in enumerate(cells[:, bag_column].tolist()):
        members_of_bag.setdefault(name, []).append(k)
    bags = list(members_of_bag.values())
    return Dataset(
        sets=SetBatch([tokens[members] for members in bags]),
        target=np.array([max(labels[members].tolist()) for members in bags]),
        names=names,
        description=f"{path.name}: {len(bags)} bags of {len(cells)} instances",
        target_name="label",
    )


def _read_cells(path: Path) -> tuple[list[str] | None, np.ndarray]:
    """The names of the columns of a file of bags, or None, and the cells of its other lines."""
    text = next(iter(read_texts(path, lambda name: True).values()), "")
    lines = csv.reader(io.StringIO(text, newline=""))
    rows = [[cell.strip() for cell in row] for row in lines if any(cell.strip() for cell in row)]
    widths = {len(row) for row in rows}
    if len(rows) < 2 or len(widths) > 1 or min(widths) < 3:
        raise ValueError(
            f"a file of bags has a line per instance, each with a bag, a label and at least one "
            f"number: {path.name!r} has {len(rows)} lines of {sorted(widths)} cells."
        )
    # a first line without any number is a line of names
    first = np.char.rstrip(np.array(rows[0]), ".")
    if np.isfinite(_as_numbers(first)).any():
        return None, np.array(rows, dtype=np.str_)
    return rows[0], np.array(rows[1:], dtype=np.str_)


def _as_numbers(cells: np.ndarray) -> np.ndarray:
    """Texts as numbers, NaN where one is none."""

    def number(cell: str) -> float:
        try:
            return float(cell)
        except ValueError:
            return float("nan")

    return np.array([number(cell) for cell in cells.ravel().tolist()]).reshape(cells.shape)


def _place(column: str | int, header: list[str] | None, width: int, option: str) -> int:
    """The position of a column that a name or a position names."""
    if isinstance(column, str):
        if header is not None and column in header:
            return header.index(column)
        columns = "no line of names" if header is None else ", ".join(map(repr, header[:30]))
        raise ValueError(f"`{option}` must name a column: got {column!r}, the file has {columns}.")
    if not -width <= column < width:
        raise ValueError(
            f"`{option}` must be the position of a column: got {column} of {width} columns."
        )
    return column % width


def _labels(cells: np.ndarray) -> np.ndarray:
    """Whole numbers where all labels are, else text."""
    values = _as_numbers(cells)
    if np.isfinite(values).all() and (values == np.rint(values)).all():
        return values.astype(np.int64)
    if not np.all(cells != ""):
        raise ValueError(
            f"every instance has a label: instance {int(np.argmax(cells == ''))} has none."
        )
    return cells


def load_digits_sets(position: str = "bumps") -> Dataset:
    """The 1797 handwritten digits that scikit-learn brings along.

    Each is the set of its inked pixels.

    A key is a pixel with some ink: where it is and how dark. Blank pixels are left out, which loses
    nothing, because a pixel that is not in the set is blank. There is no query.

    Parameters
    ----------
    position : "bumps" or "plain"
        How row and column are coded. "plain" is two numbers from −1 to 1. "bumps" is eight numbers
        each, exp(−(row − k)²/2) for k = 0 … 7, scaled to length one, so that neighbouring rows are
        similar. The last coordinate is the ink, from 0 to 1.

    Returns
    -------
    Dataset
        1797 sets of 16 to 42 pixels, labels 0 to 9.

    Examples
    --------
    >>> load_digits_sets().sets
    SetBatch(1797 sets, 16–42 keys each (58736 in all), dim 17, no query, float64)
    """
    from sklearn.datasets import load_digits

    check_choice(position, "position", ("bumps", "plain"))
    images, labels = load_digits(return_X_y=True)
    keys = [pixel_set(image.reshape(8, 8) / 16.0, position) for image in images]
    if position == "bumps":
        names = [f"row {k}" for k in range(8)] + [f"column {k}" for k in range(8)] + ["ink"]
    else:
        names = ["row", "column", "ink"]
    return Dataset(
        sets=SetBatch(keys),
        target=labels.astype(np.int64),
        names=tuple(names),
        description="scikit-learn's digits, 8 × 8 pixels, those with some ink",
        target_name="digit",
    )


def pixel_set(image: Float[np.ndarray, "h w"], position: str = "bumps") -> Float[np.ndarray, "k d"]:
    """The inked pixels of one image: position and ink."""
    rows, columns = np.nonzero(image)
    ink = image[rows, columns][:, None]
    height, width = image.shape
    if position == "plain":
        centre = np.array([height - 1, width - 1]) / 2
        places = np.stack([rows, columns], axis=1)
        return np.concatenate([(places - centre) / np.maximum(centre, 0.5), ink], axis=1)
    return np.concatenate([_bumps(height)[rows], _bumps(width)[columns], ink], axis=1)


def _bumps(size: int) -> Float[np.ndarray, "s s"]:
    """exp(−(i − k)²/2) for all i and k below ``size``, each row of length one."""
    places = np.arange(size)
    bumps = np.exp(-0.5 * np.square(places[:, None] - places))
    return np.asarray(bumps / np.linalg.norm(bumps, axis=1, keepdims=True))


_TABLE = (
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se "
    "Br Kr Rb Sr Y Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe"
)
SYMBOLS = _TABLE.split()


def load_molecules(path: Any, *, n_radial: int = 12) -> Dataset:
    r"""Read molecules from npz: sets of neighbours, grouped by molecule.

    Parameters
    ----------
    path : str or Path
        With ``X`` (atoms, 4), nuclear charge and position in Ångström, ``ptr`` (molecules + 1) and
        ``y``.
    n_radial : int
        Bumps of the radial basis, evenly spread from 0.8 to 6 Å.

    Returns
    -------
    Dataset
        ``sets`` is a SetGroups of one set per atom. Energies are extensive: fit them with
        ``pooling="sum"``.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> water = np.array([[8, 0, 0, 0], [1, 0.76, 0.59, 0], [1, -0.76, 0.59, 0]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "water.npz")
    ...     np.savez(file, X=water, ptr=[0, 3], y=[-1.5])
    ...     data = load_molecules(file, n_radial=4)
    >>> len(data), data.sets.counts, data.target
    (1, array([3]), array([-1.5]))
    """
    path = Path(path)
    charges, positions, ptr, energy = _molecules_of(read_arrays(path, path.name), path.name)
    elements = np.unique(charges)
    sets = molecule_sets(charges, positions, ptr, elements=elements, n_radial=n_radial)

    # names of the coordinates: an element, and an element at a distance
    symbols = [_symbol(charge) for charge in elements.tolist()]
    names = list(symbols)
    for symbol in symbols:
        names += [f"{symbol} at {radius:.2g} Å" for radius in _centres(n_radial)]
    sizes = np.diff(ptr)
    return Dataset(
        sets=sets,
        target=energy,
        names=tuple(names),
        description=f"{path.name}: {len(sets)} molecules of {sizes.min()}–{sizes.max()} atoms",
        target_name="energy",
    )


def _symbol(charge: int) -> str:
    """The symbol of an element, "Z" with its charge for the heavy ones."""
    if charge <= len(SYMBOLS):
        return SYMBOLS[charge - 1]
    return f"Z{charge}"


def molecule_sets(
    charges: Int[np.ndarray, " a"],
    positions: Float[np.ndarray, "a 3"],
    ptr: Int[np.ndarray, " p"],
    *,
    elements: Sequence[int] | np.ndarray | None = None,
    n_radial: int = 12,
) -> SetGroups:
    """The neighbourhoods of all atoms, grouped by molecule.

    Molecule i owns atoms ptr[i] to ptr[i+1].

    There is one set for each atom. The query is its element, one-hot. The keys are all atoms of the
    molecule, itself included, each with its element, one-hot, and its element times a radial basis
    of the distance, so that heads can tell a hydrogen nearby from an oxygen far away. Tokens have
    dimension E·(1 + n_radial) for E elements, in float32.
    """
    if elements is None:
        elements = np.unique(charges)
    kinds = np.asarray(elements)
    is_unknown = ~np.isin(charges, kinds)
    if is_unknown.any():
        i = int(is_unknown.argmax())
        raise ValueError(
            f"`elements` must name all that occur: atom {i} has charge {charges[i]}, not in "
            f"{kinds.tolist()}."
        )
    one_hot = (charges[:, None] == kinds).astype(np.float32)
    centres = _centres(check_count(n_radial, "n_radial", minimum=2))
    width = centres[1] - centres[0]
    keys: list[np.ndarray] = []
    queries: list[np.ndarray] = []
    for first, last in itertools.pairwise(ptr):
        # distances of all pairs of atoms of the molecule, in the radial basis
        place = positions[first:last]
        distances = np.linalg.norm(place[:, None] - place[None, :], axis=2)
        bumps = np.exp(-0.5 * np.square((distances[:, :, None] - centres) / width))
        radial = bumps.astype(np.float32)
        element = one_hot[first:last]
        n_atoms = last - first
        for i in range(n_atoms):
            # keys: element, and element times radial basis; the query has zeros for the latter
            products = (element[:, :, None] * radial[i][:, None, :]).reshape(n_atoms, -1)
            keys.append(np.concatenate([element, products], axis=1))
            queries.append(np.concatenate([element[i], np.zeros(products.shape[1], np.float32)]))
    return SetGroups(SetBatch(keys, np.array(queries)), np.diff(ptr))


def _centres(n_radial: int) -> Float[np.ndarray, " r"]:
    return np.linspace(0.8, 6.0, n_radial)


def _molecules_of(
    arrays: Mapping[str, np.ndarray], name: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Charges, positions, first atoms of molecules, and energies if there are any, all checked."""
    if "X" not in arrays or "ptr" not in arrays:
        raise ValueError(
            f"molecules need arrays 'X' and 'ptr': {name!r} has {', '.join(list(arrays)[:20])}."
        )

    # atoms: a charge and three coordinates each
    atoms = arrays["X"]
    has_shape = atoms.ndim == 2 and atoms.shape[1] == 4
    if not has_shape or atoms.dtype.kind not in "fiu" or not np.isfinite(atoms).all():
        raise ValueError(
            f"'X' must hold charge and position of each atom, (atoms, 4): got {atoms.dtype}, "
            f"{atoms.shape}."
        )
    charges = np.rint(atoms[:, 0]).astype(np.int64)
    if charges.min() < 1 or charges.max() > 118:
        raise ValueError(
            f"nuclear charges lie between 1 and 118: got {charges.min()} to {charges.max()}."
        )

    # molecules: at least one atom each, and an energy for each or none at all
    ptr = check_pointer(arrays["ptr"], len(atoms), "X")
    sizes = np.diff(ptr)
    if (sizes < 1).any():
        raise ValueError(
            f"every molecule must have an atom: molecule {int(sizes.argmin())} of 'ptr' has none."
        )
    energy = arrays.get("y")
    if energy is not None:
        energy = energy.astype(np.float64)
        if energy.shape != (len(sizes),) or not np.isfinite(energy).all():
            raise ValueError(
                f"'y' must have one number per molecule: got shape {energy.shape} for {len(sizes)}."
            )
    return charges, atoms[:, 1:].astype(np.float64), ptr, energy


def load_uea(path: Any, *, time: bool = True) -> Dataset:
    r"""Read time series from a ``.ts`` file: sets of time steps, of any lengths.

    Parameters
    ----------
    path : str or Path
        One file; or an archive or folder with a file ``…_TRAIN.ts`` and a file ``…_TEST.ts``, which
        become the split.
    time : bool
        Whether a token says when it was: a last coordinate from 0, the first step, to 1, the last.
        Without it a series is a bag of values.

    Returns
    -------
    Dataset
        Steps with a missing value ("?" or NaN) are left out. Labels are text, or numbers where the
        file has ``@targetLabel``.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> text = "@univariate false\n@classLabel true a b\n@data\n1,2,3:4,5,6:a\n7,8:9,?:b\n"
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "tiny.ts")
    ...     _ = file.write_text(text)
    ...     data = load_uea(file)
    >>> data.sets.lengths, data.target.tolist()
    (array([3, 1]), ['a', 'b'])
    """
    path = Path(path)
    texts = read_texts(path, lambda name: name.lower().endswith(".ts"))
    if not texts:
        raise ValueError(f"time series are read from .ts files: {path.name!r} has none.")
    are_parts = all(name.upper().endswith(("_TRAIN.TS", "_TEST.TS")) for name in texts)
    if len(texts) > 2 or (len(texts) == 2 and not are_parts):
        names_of_files = ", ".join(repr(name) for name in sorted(texts)[:8])
        raise ValueError(
            f"one file, or one …_TRAIN.ts and one …_TEST.ts: {path.name!r} has {names_of_files}. "
            "Name one of them."
        )

    # the series of one file, or of the file for training and then of that for testing
    series: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    part_of_series: list[int] = []
    ordered = sorted(texts, key=lambda name: name.upper().endswith("_TEST.TS"))
    for part, name in enumerate(ordered):
        series_of_file, labels = parse_ts(texts[name], name, time=time)
        series += series_of_file
        part_of_series += [part] * len(series_of_file)
        if labels is not None:
            targets.append(labels)
    dims = {steps.shape[1] - int(time) for steps in series}
    if len(dims) > 1:
        raise ValueError(f"all series must have as many dimensions: found {sorted(dims)}.")

    # names, and what was read in words
    names = [f"dimension {j}" for j in range(dims.pop())]
    if time:
        names.append("time")
    lengths = [len(steps) for steps in series]
    all_labelled = len(targets) == len(texts)
    return Dataset(
        sets=SetBatch(series),
        target=np.concatenate(targets) if all_labelled else None,
        names=tuple(names),
        description=f"{path.name}: {len(series)} series of {min(lengths)}–{max(lengths)} steps",
        target_name="label",
        split=np.array(part_of_series) if len(texts) == 2 else None,
    )


def parse_ts(
    text: str, name: str, *, time: bool
) -> tuple[list[Float[np.ndarray, "k d"]], np.ndarray | None]:
    """Series and labels of one file."""
    # lines that begin with @ say what is below @data
    in_head = True
    is_labelled = False
    is_numeric = False
    lines: list[tuple[int, str]] = []
    for row, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if not in_head:
            lines.append((row, line))
            continue
        key, _, value = line.lower().partition(" ")
        if key == "@data":
            in_head = False
        elif key in ("@classlabel", "@targetlabel"):
            is_labelled = value.split(" ")[0].strip() == "true"
            is_numeric = key == "@targetlabel"
        elif key == "@timestamps" and value.strip() == "true":
            raise ValueError(
                f"series must be without time stamps: {name!r:.80} has them. Convert it to evenly "
                "spaced ones."
            )
        elif not line.startswith("@"):
            break
    if in_head or not lines:
        raise ValueError(
            f"a .ts file has lines that begin with @, then @data, then series: {name!r:.80} has "
            "not."
        )

    # a line has one field for each dimension, and its label last
    series: list[np.ndarray] = []
    labels: list[str] = []
    for row, line in lines:
        fields = line.split(":")
        if is_labelled:
            labels.append(fields.pop().strip())
        series.append(_series(fields, row, name, time))
    if not is_labelled:
        return series, None
    return series, _class_labels(labels, is_numeric, name)


def _series(fields: list[str], row: int, name: str, time: bool) -> Float[np.ndarray, "k d"]:
    """The steps of one series without those that miss a value; one of zeros if none remains."""

    def number(cell: str) -> float:
        if cell.strip() in ("?", ""):
            return float("nan")
        return float(cell)

    # one list of numbers for each dimension, all of one length
    try:
        columns = [[number(cell) for cell in field.split(",")] for field in fields]
    except ValueError as error:
        raise ValueError(
            f"a series is numbers with commas, dimensions parted by colons: line {row} of "
            f"{name!r:.60} is not ({str(error)[:60]})."
        ) from None
    lengths = {len(column) for column in columns}
    if len(lengths) != 1:
        raise ValueError(
            "the dimensions of a series must be equally long, and there must be one: those on line "
            f"{row} of {name!r:.60} have {', '.join(str(n) for n in sorted(lengths)) or 'no'} "
            "steps."
        )
    # steps as rows, with the time of each if that is wanted
    values = np.array(columns).T
    if time:
        times = np.linspace(0.0, 1.0, len(values))
        values = np.concatenate([values, times[:, None]], axis=1)
    if np.isinf(values).any():
        raise ValueError(f"a series must be finite: that on line {row} of {name!r:.60} is not.")
    # steps with a missing value are left out; a set has at least one key
    observed = values[~np.isnan(values).any(axis=1)]
    if len(observed) == 0:
        return np.zeros((1, values.shape[1]))
    return observed


def _class_labels(labels: list[str], numeric: bool, name: str) -> np.ndarray:
    if not numeric:
        return np.array(labels, dtype=np.str_)
    try:
        values = np.array([float(label) for label in labels])
    except ValueError as error:
        raise ValueError(
            f"targets must be numbers: {name!r:.80} has others ({str(error)[:60]})."
        ) from None
    if not np.isfinite(values).all():
        raise ValueError(f"targets must be finite: those of {name!r:.80} are not.")
    return values


NAMES: dict[str, Callable[[], Dataset]] = {"digits": load_digits_sets}
"""Data that comes with keyhole's own dependencies."""


def load_data(
    data: str, *, tokens: str | None = None, options: TableOptions | None = None
) -> Dataset:
    """Read data by a name that comes with keyhole ("digits"), or from a file.

    The suffix of a file says what it is. A table takes the ``options`` of `read_table`. Time series
    are a .ts file, or a folder with a …_TRAIN.ts and a …_TEST.ts.

    >>> load_data("digits")
    Dataset(1797 sets: scikit-learn's digits, 8 × 8 pixels, those with some ink)
    """
    options = options or TableOptions()

    # a table
    path = Path(data)
    is_series = holds_series(path) or path.suffix.lower() == ".ts"
    if not is_series and (path.suffix.lower() in SUFFIXES or path.is_dir()):
        return read_table(
            path,
            tokens=tokens,
            keys=options.keys,
            query=options.query,
            target=options.target,
            extras=options.extras,
            weight=options.weight,
            groups=options.groups,
            time=options.time,
            split=options.split,
            reference_date=options.reference_date,
            set_id=options.set_id,
            missing=options.missing,
            dim=options.dim,
        )

    # neither a name nor a format of ours
    is_ours = data in NAMES or is_series
    if not is_ours and not path.exists():
        raise FileNotFoundError(
            f"{data!r} is neither a file nor data that comes with keyhole ({', '.join(NAMES)}). "
            "Check the name and the folder."
        )
    if not is_ours:
        raise ValueError(
            f"data is read by its suffix, one of {', '.join((*SUFFIXES, '.ts'))}: got "
            f"{path.name!r}."
        )

    # data that has no columns to choose, and no say in what becomes of missing values
    chosen = []
    for option in fields(options):
        is_given = getattr(options, option.name) is not None
        if is_given and option.name != "missing":
            chosen.append(option.name)
    if tokens is not None:
        chosen.append("tokens")
    if chosen:
        raise ValueError(
            f"only tables have columns to choose: {data!r} takes no {', '.join(sorted(chosen))}."
        )
    if is_series:
        return load_uea(path)
    return NAMES[data]()


def holds_series(path: Path) -> bool:
    """Whether this is a folder of .ts files, and of no Parquet files."""
    return path.is_dir() and not any(path.glob("*.parquet")) and any(path.glob("*.ts"))


def open_data(
    path: Path,
    *,
    schema: Schema,
    tokens: str | None = None,
    keys: str | Sequence[str] | None = None,
    query: str | Sequence[str] | None = None,
    reference_date: str | None = None,
    set_id: str | None = None,
    missing: str | None = None,
    unknown: str = "error",
    dim: int | None = None,
    copied: Sequence[str] = (),
    batch_size: int | None = None,
) -> ParquetSets:
    """A table, or series (.ts), without its target, to be read in parts.

    The options are those of `ParquetSets`; series have no columns, and take ``batch_size`` alone.
    """
    files = sorted(path.glob("*.ts")) if holds_series(path) else [path]
    if files[0].suffix.lower() != ".ts":
        return ParquetSets(
            path,
            tokens=tokens,
            keys=keys,
            query=query,
            target=(),
            reference_date=reference_date,
            set_id=set_id,
            missing=missing,
            dim=dim,
            schema=schema,
            unknown=unknown,
            copied=copied,
            batch_size=batch_size,
        )
    # series are read whole, and go through the same reader as a table in memory
    from keyhole.data.writer import sets_table

    sets = load_uea(path).sets
    assert isinstance(sets, SetBatch)
    source = ParquetSets(sets_table(Batch(sets)), target=(), batch_size=batch_size)
    source.files = files
    return source
