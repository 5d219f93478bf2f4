"""Public data as sets: images, text, molecules, bags, series."""

from __future__ import annotations

import bz2
import csv
import errno
import gzip
import io
import itertools
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from keyhole._checks import check_choice, check_count
from keyhole._files import refuse_special_file
from keyhole.data.bags import SyntheticBags as SyntheticBags
from keyhole.data.bags import make_bags as make_bags
from keyhole.data.batches import Batch
from keyhole.data.layout import Dataset, TableOptions
from keyhole.data.npz import UNREADABLE, NpzFile, check_pointer
from keyhole.data.reader import SUFFIXES, ParquetSets, read_table
from keyhole.data.schema import Schema
from keyhole.data.sets import SetBatch, SetGroups

LARGEST = 200_000_000  # bytes of all text files together; more are refused before they are read
# bytes of a tar archive that are decompressed on the way to what is wanted
MOST_PASSED = 1_000_000_000
MOST_MEMBERS = 100_000  # members of a tar archive, wanted or not: each takes a kilobyte of memory

DAMAGED = (tarfile.TarError, *UNREADABLE)
TextFile = tuple[str, int, Callable[[], bytes]]  # name of a file, its size, and how to read it


def read_texts(path: Path, wanted: Callable[[str], bool]) -> dict[str, str]:
    """The files whose name (with its folders, parted by /) is wanted, as text.

    Members of archives are read in memory and only if they are plain files: a link, or a name that
    leads out of the archive, has no way to the disk. Limits hold for all files together.

    ``zipfile`` and ``tarfile`` read the archives. What is ours are the limits, which neither has:
    on a size that a zip lies about, on the bytes and members of a tar, on compressions that let a
    small file ask for all memory.
    """
    contents: dict[str, bytes] = {}
    total = 0
    try:
        with ExitStack() as stack:
            for name, size, read in _files(path, wanted, stack):
                total += size
                if total > LARGEST:
                    raise ValueError(
                        f"text files may have {LARGEST:,} bytes together: {path.name!r} has "
                        f"{total:,} with {name!r:.100}. Is it the right one?"
                    )
                contents[name] = read()
    except (*DAMAGED, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        # an invalid argument is a place before the beginning of the file, where a damaged header
        # leads; all other numbers are errors of the disk
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise ValueError(
            f"an archive must read back whole: {path.name!r} does not ({str(error)[:200]}). It is "
            "damaged; fetch it again."
        ) from None
    return {name: _decode(content, name) for name, content in contents.items()}


def _files(path: Path, wanted: Callable[[str], bool], stack: ExitStack) -> Iterator[TextFile]:
    """What is wanted of a folder, an archive, or a file that is neither."""
    if path.exists():
        refuse_special_file(path)
    if path.is_dir():
        yield from _in_folder(path, wanted)
    elif not path.is_file():
        raise FileNotFoundError(
            f"{path.name!r} is not there: no such file or folder. Check the name and the folder."
        )
    elif zipfile.is_zipfile(path):
        yield from _in_zip(path, wanted, stack)
    else:
        yield from _in_tar(path, wanted, stack)


def _in_folder(path: Path, wanted: Callable[[str], bool]) -> Iterator[TextFile]:
    """Files of a folder and of those below it; links that lead out of it are passed over."""
    root = path.resolve()
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if wanted(name) and file.is_file() and file.resolve().is_relative_to(root):
            yield name, file.stat().st_size, file.read_bytes


def _in_zip(path: Path, wanted: Callable[[str], bool], stack: ExitStack) -> Iterator[TextFile]:
    archive = stack.enter_context(zipfile.ZipFile(path))
    for info in archive.infolist():
        if info.filename.endswith("/") or not wanted(info.filename):
            continue
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise _other_compression(path)
        # as much memory would be allocated before a byte is read
        if info.compress_size > path.stat().st_size:
            raise zipfile.BadZipFile(
                f"{info.filename!r:.100} is said to be larger than the archive"
            )
        yield info.filename, info.file_size, partial(_read_member, archive, info)


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """The content of a member of a zip, and no more of it than the zip says that it has.

    ``ZipFile.read`` would unpack all of it first: a few kilobytes may unpack to gigabytes.
    """
    with archive.open(info) as member:
        return member.read(info.file_size)


def _in_tar(path: Path, wanted: Callable[[str], bool], stack: ExitStack) -> Iterator[TextFile]:
    """Members of a tar archive; a file that is none is a text file itself."""
    unpacked: Any = _Passed(stack.enter_context(_decompressed(path)), path)
    try:
        # next to nothing may be read in one piece but a text: a name of a gigabyte is a name in bad
        # faith
        archive = stack.enter_context(tarfile.open(fileobj=unpacked, mode="r:"))  # noqa: SIM115
    except tarfile.TarError:
        if wanted(path.name):
            yield path.name, path.stat().st_size, path.read_bytes
        return
    for count, member in enumerate(archive, 1):
        if count > MOST_MEMBERS:
            raise ValueError(
                f"an archive may have {MOST_MEMBERS:,} members: {path.name!r} has more. Unpack it "
                "first."
            )
        if member.isreg() and wanted(member.name):
            file: Any = archive.extractfile(member)
            yield member.name, member.size, partial(file.read, member.size)


def _decompressed(path: Path) -> Any:
    """A file opened by its first bytes: compressed by bzip2 or gzip, or as it is."""
    with path.open("rb") as file:
        magic = file.read(6)
    if magic == b"\xfd7zXZ\x00":
        raise _other_compression(path)
    if magic[:3] == b"BZh":
        return bz2.open(path)
    if magic[:2] == b"\x1f\x8b":
        return gzip.open(path)
    return path.open("rb")


def _other_compression(path: Path) -> ValueError:
    return ValueError(
        f"an archive must be a zip, or a tar compressed by gzip or bzip2: {path.name!r} is "
        "compressed by other means, some of which let a small file ask for all memory. Unpack it, "
        "and pass the folder."
    )


class _Passed:
    """A decompressed file with limits.

    It ends in an error where more is read or passed over than they allow.
    """

    def __init__(self, file: Any, path: Path) -> None:
        self._file = file
        self._path = path
        self.tell = file.tell

    def seek(self, place: int, whence: int = 0) -> int:
        self._check(place, MOST_PASSED)
        return int(self._file.seek(place, whence))

    def read(self, size: int = -1) -> bytes:
        self._check(size, LARGEST)
        self._check(self._file.tell() + size, MOST_PASSED)
        return bytes(self._file.read(size))

    def _check(self, size: int, limit: int) -> None:
        if size > limit:
            raise ValueError(
                f"an archive may have {limit:,} bytes in one piece, and {MOST_PASSED:,} in all "
                f"before what is wanted: {self._path.name!r} has {size:,}. Is it the right one? If "
                "so, unpack it and pass the folder."
            )


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
    header, rows = _read_cells(path)
    width = len(header or rows[0])

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
    cells = np.array([[cell.strip() for cell in row] for row in rows], dtype=np.str_)
    tokens = _as_numbers(cells[:, columns])
    not_numbers = np.argwhere(~np.isfinite(tokens))
    if len(not_numbers):
        k, j = not_numbers[0]
        raise ValueError(
            f"instances are numbers: column {names[j]!r} of instance {k} is "
            f"{rows[k][columns[j]]!r:.40}. Leave the column out with `skip`, or fill it in."
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
        description=f"{path.name}: {len(bags)} bags of {len(rows)} instances",
        target_name="label",
    )


def _read_cells(path: Path) -> tuple[list[str] | None, list[list[str]]]:
    """The names of the columns of a file of bags, or None, and the cells of its other lines.

    There is at least one such line, and all have as many cells.
    """
    text = next(iter(read_texts(path, lambda name: True).values()), "")
    try:
        lines = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise ValueError(
            f"a file of bags is comma separated: {path.name!r} is not ({error}). Is it damaged?"
        ) from None
    rows = [row for row in lines if any(cell.strip() for cell in row)]
    if not rows:
        raise ValueError(f"a file of bags has a line per instance: {path.name!r} has none.")

    # a first line without any number is a line of names
    header = None
    first = np.array([cell.strip().rstrip(".") for cell in rows[0]])
    if not np.isfinite(_as_numbers(first)).any():
        header = [cell.strip() for cell in rows[0]]
        rows = rows[1:]
    if not rows:
        raise ValueError(
            f"a file of bags has a line per instance: {path.name!r} has none below its names."
        )
    width = len(header or rows[0])
    first_line = 1 if header is None else 2
    for line, row in enumerate(rows, start=first_line):
        if len(row) != width or width < 3:
            raise ValueError(
                f"every line has a bag, a label and at least one number: line {line} of "
                f"{path.name!r} has {len(row)} cells, the first has {width}."
            )
    return header, rows


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
        if header is None:
            columns = "no line of names"
        else:
            columns = ", ".join(map(repr, header[:30]))
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
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"


def load_molecules(path: Any, *, n_radial: int = 12) -> Dataset:
    r"""Read molecules from npz or xyz: sets of neighbours, grouped by molecule.

    Parameters
    ----------
    path : str or Path
        An npz file has ``X`` (atoms, 4), nuclear charge and position in Ångström, ``ptr``
        (molecules + 1) and ``y``. An xyz file has one molecule after the other. Its comment lines
        give the energy, alone or as ``energy=…``. A folder or archive of xyz files has the energies
        in their comments, or in a text file beside them of lines "name energy".
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
    >>> water = "3\nenergy=-1.5\nO 0 0 0\nH 0.76 0.59 0\nH -0.76 0.59 0\n"
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "water.xyz")
    ...     _ = file.write_text(water)
    ...     data = load_molecules(file, n_radial=4)
    >>> len(data), data.sets.counts, data.target
    (1, array([3]), array([-1.5]))
    """
    path = Path(path)
    if path.suffix.lower() == ".npz":
        charges, positions, ptr, energy = _read_npz(path)
    else:
        charges, positions, ptr, energy = _read_xyz(path)
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


def _read_npz(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Charges, positions, first atoms of molecules, and energies if there are any, all checked."""
    file = NpzFile(path)
    for name in ("X", "ptr"):
        if name not in file.names:
            raise ValueError(
                f"molecules need arrays 'X' and 'ptr': {path.name!r} has "
                f"{', '.join(file.names[:20])}."
            )

    # atoms: a charge and three coordinates each
    atoms = file["X"]
    has_shape = atoms.ndim == 2 and atoms.shape[1] == 4
    if not has_shape or atoms.dtype.kind not in "fiu" or not np.isfinite(atoms).all():
        raise ValueError(
            f"'X' must hold charge and position of each atom, (atoms, 4): got {atoms.dtype}, "
            f"{atoms.shape}."
        )

    # molecules: at least one atom each
    ptr = check_pointer(file["ptr"], len(atoms), "X")
    sizes = np.diff(ptr)
    if (sizes < 1).any():
        raise ValueError(
            f"every molecule must have an atom: molecule {int(sizes.argmin())} of 'ptr' has none."
        )
    charges = np.rint(atoms[:, 0]).astype(np.int64)
    if charges.min() < 1 or charges.max() > 118:
        raise ValueError(
            f"nuclear charges lie between 1 and 118: got {charges.min()} to {charges.max()}."
        )
    positions = atoms[:, 1:].astype(np.float64)

    # energies: one for each molecule, or none at all
    if "y" not in file.names:
        return charges, positions, ptr, None
    energy = file["y"].astype(np.float64)
    if energy.shape != (len(sizes),) or not np.isfinite(energy).all():
        raise ValueError(
            f"'y' must have one number per molecule: got shape {energy.shape} for {len(sizes)}."
        )
    return charges, positions, ptr, energy


def _read_xyz(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Charges, positions, first atoms of molecules, and energies if there are any."""
    # all molecules of all files, in the order of their names
    texts = read_texts(path, lambda name: name.endswith((".xyz", ".txt")))
    charges: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    energies: list[float | None] = []
    names: list[str] = []
    for file in sorted(texts):
        if not file.endswith(".xyz"):
            continue
        for charges_of_one, positions_of_one, energy, name in parse_xyz(texts[file], file):
            charges.append(charges_of_one)
            positions.append(positions_of_one)
            energies.append(energy)
            names.append(name)
    if not charges:
        raise ValueError(f"molecules are read from .npz and .xyz files: {path.name!r} has none.")

    # energies: in the comments, else in a text file beside
    if None in energies:
        listed = _energies(texts)
        for i, name in enumerate(names):
            if energies[i] is None:
                energies[i] = listed.get(name)
    missing = [name for name, energy in zip(names, energies, strict=True) if energy is None]
    if missing and len(missing) < len(names):
        raise ValueError(
            f"all molecules must have an energy, or none: {missing[0]!r} has none, {len(missing)} "
            "in all."
        )
    ptr = np.cumsum([0, *map(len, charges)])
    target = None if missing else np.array(energies, dtype=np.float64)
    return np.concatenate(charges), np.concatenate(positions), ptr, target


def _energies(texts: dict[str, str]) -> dict[str, float]:
    """Lines "name energy" of text files: by the name without folder and suffix."""
    energies: dict[str, float] = {}
    for name, text in texts.items():
        if not name.endswith(".txt"):
            continue
        for line in text.splitlines():
            match = re.match(rf"\s*(\S+)\s+({_NUMBER})(?:\s|$)", line)
            if match:
                molecule = match[1].rpartition("/")[2].removesuffix(".xyz")
                energies[molecule] = float(match[2])
    return energies


def parse_xyz(text: str, name: str) -> list[tuple[np.ndarray, np.ndarray, float | None, str]]:
    """Frames of an xyz file: charges, positions, energy, and the name of the molecule.

    The energy is there if the comment has one.
    """
    lines = text.splitlines()
    stem = name.rpartition("/")[2].removesuffix(".xyz")
    frames = []
    row = 0
    while row < len(lines):
        if not lines[row].strip():
            row += 1
            continue

        # the number of atoms; the lines after it are a comment and one line for each atom
        count = lines[row].strip()
        lines_of_atoms = len(lines) - row - 2
        is_count = count.isdecimal() and len(count) <= 9
        if not is_count or not 1 <= int(count) <= lines_of_atoms:
            raise ValueError(
                "a molecule in an xyz file begins with its number of atoms, a comment and as many "
                f"lines: line {row + 1} of {stem!r:.60} is {lines[row]!r:.40}, with "
                f"{len(lines) - row - 1} lines left."
            )
        n_atoms = int(count)
        atoms = [_atom(lines[k], k + 1, stem) for k in range(row + 2, row + 2 + n_atoms)]
        charges = np.array([atom[0] for atom in atoms])
        positions = np.array([atom[1:] for atom in atoms])
        frames.append((charges, positions, _energy(lines[row + 1]), stem))
        row += 2 + n_atoms
    return frames


def _atom(line: str, row: int, stem: str) -> tuple[int, float, float, float]:
    """Charge and position of an atom; its element is a charge or a symbol."""
    parts = line.split()
    try:
        if parts[0].isdecimal():
            charge = int(parts[0])
        else:
            charge = SYMBOLS.index(parts[0].capitalize()) + 1
        x, y, z = (float(part) for part in parts[1:4])
    except (ValueError, IndexError):
        raise ValueError(
            f"an atom is an element and three numbers: line {row} of {stem!r:.60} is {line!r:.60}."
        ) from None
    if not np.isfinite([x, y, z]).all() or not 1 <= charge <= 118:
        raise ValueError(
            f"an atom has an element and a finite position: line {row} of {stem!r:.60} is "
            f"{line!r:.60}."
        )
    return charge, x, y, z


def _energy(comment: str) -> float | None:
    """The energy that a comment gives, as ``energy=…`` or alone; None if it is not finite."""
    match = re.search(rf"(?i)energy\s*=\s*['\"]?({_NUMBER})", comment)
    if match is None:
        match = re.fullmatch(rf"\s*({_NUMBER})\s*", comment)
    if match is None:
        return None
    energy = float(match[1])
    return energy if np.isfinite(energy) else None


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
    are a .ts file, or a folder with a …_TRAIN.ts and a …_TEST.ts. Molecules are .xyz files.

    >>> load_data("digits")
    Dataset(1797 sets: scikit-learn's digits, 8 × 8 pixels, those with some ink)
    """
    options = options or TableOptions()

    # a table
    path = Path(data)
    loaders: dict[str, Callable[[Path], Dataset]] = {".ts": load_uea, ".xyz": load_molecules}
    suffix = ".ts" if holds_series(path) else path.suffix.lower()
    if suffix in SUFFIXES or (path.is_dir() and suffix not in loaders):
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
    is_ours = data in NAMES or suffix in loaders
    if not is_ours and not path.exists():
        raise FileNotFoundError(
            f"{data!r} is neither a file nor data that comes with keyhole ({', '.join(NAMES)}). "
            "Check the name and the folder."
        )
    if not is_ours:
        raise ValueError(
            f"data is read by its suffix, one of {', '.join((*SUFFIXES, *loaders))}: got "
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
    if suffix in loaders:
        return loaders[suffix](path)
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
