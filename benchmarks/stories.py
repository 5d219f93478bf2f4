"""Fifty generated tasks of questions about stories, thirty to tune on and twenty held back.

    python benchmarks/stories.py                      # one question of every family
    python benchmarks/stories.py --run held-back      # the table of docs/benchmarks/stories.md
    python benchmarks/stories.py --descents --device cuda --tasks 1 4 8       # wall seconds alone

Learned heads were once tuned on tasks that everybody could see. These tasks are drawn instead:
`draw_task(k)` is task k of 50, the same for everybody. Tasks 0 to 29 are for choosing a design.
Tasks 30 to 49 are looked at once, at the end.

A task belongs to one of ten families (`FAMILIES`), which say what must be found to answer:

    newest          one fact, the newest of several about the person
    carried         two facts: who carries the object, and where that person is
    containers      three facts: the object is in a box, the box in a cupboard, that in a room
    earlier         where somebody was before the last place
    induction       no fact about the person: another one of the same class shows the answer
    deduction       two facts: the class of the person, and what is said of the class
    combination     two attributes of a person; only the pair of both decides the answer
    negation        yes, no or maybe: a fact may deny what an earlier one says
    counting        how many objects somebody holds
    distractors     two facts among many sentences of the same people that decide nothing

The k-th task of a family draws its own numbers of people, places and sentences, and one of two
languages: English words in English order, or invented words with the verb at the end.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import keyhole as kh
from keyhole.data.datasets import Dataset, babi_tokens

N_TASKS = 50
TUNING = range(30)
HELD_BACK = range(30, 50)

N_TRAIN = 1000
N_TEST = 500

NAMES = ("mary", "john", "sandra", "daniel", "julie", "fred", "bill", "jeff")
PLACES = ("kitchen", "garden", "office", "hallway", "bathroom", "bedroom", "school", "park")
OBJECTS = ("milk", "football", "apple", "key", "book", "lamp", "cup", "ring")
BOXES = ("box", "basket", "bag", "drawer", "chest", "jar")
CUPBOARDS = ("cupboard", "wardrobe", "trunk", "shelf", "cabinet", "rack")
CLASSES = ("swan", "lion", "frog", "rhino", "wolf", "mouse", "cat", "sheep")
COLOURS = ("white", "green", "grey", "yellow", "black", "brown")
CLOTHES = ("hat", "coat", "scarf", "cloak", "cap", "apron")
ROLES = ("doctor", "baker", "sailor", "judge", "clown", "farmer")
DRINKS = ("tea", "juice", "coffee", "water", "soup", "cocoa")

Sentence = tuple[str, ...]


@dataclass(frozen=True)
class World:
    """The words of one task, and how long its stories are."""

    names: tuple[str, ...]
    places: tuple[str, ...]
    objects: tuple[str, ...]
    classes: tuple[str, ...]
    colours: tuple[str, ...]
    shortest: int
    longest: int
    role_of: dict[tuple[str, str], str]
    """Which role a colour and a piece of clothing together mean: neither alone decides it."""

    def length(self, rng: np.random.Generator) -> int:
        """The number of sentences of one story."""
        return int(rng.integers(self.shortest, self.longest + 1))


@dataclass(frozen=True)
class Question:
    """A story, oldest sentence first, a question about it, and the answer."""

    story: list[Sentence]
    words: Sentence
    answer: str


def words(text: str) -> Sentence:
    """The words of a sentence."""
    return tuple(text.split())


def pick(rng: np.random.Generator, items: Any) -> Any:
    """One of some items."""
    return items[int(rng.integers(len(items)))]


def several(rng: np.random.Generator, items: Any, count: int) -> list[Any]:
    """Some different ones of some items, in random order."""
    return [items[i] for i in rng.permutation(len(items))[:count]]


def newest(rng: np.random.Generator, world: World) -> Question:
    """People go to places; where somebody is, the newest of their moves says."""
    story: list[Sentence] = []
    place_of = {}
    for _ in range(world.length(rng)):
        name = pick(rng, world.names)
        place_of[name] = pick(rng, world.places)
        verb = pick(rng, ("went", "moved", "travelled"))
        story.append(words(f"{name} {verb} to the {place_of[name]}"))
    name = pick(rng, sorted(place_of))
    return Question(story, words(f"where is {name}"), place_of[name])


def carried(rng: np.random.Generator, world: World) -> Question:
    """Objects are where their owner is: the question names the object alone."""
    story: list[Sentence] = []
    place_of: dict[str, str] = {}
    owner_of: dict[str, str] = {}
    while len(story) < world.length(rng) or not set(owner_of.values()) & set(place_of):
        name = pick(rng, world.names)
        if rng.random() < 0.6:
            place_of[name] = pick(rng, world.places)
            story.append(words(f"{name} went to the {place_of[name]}"))
        else:
            thing = pick(rng, world.objects)
            owner_of[thing] = name
            story.append(words(f"{name} {pick(rng, ('took', 'got'))} the {thing}"))
    thing = pick(rng, sorted(t for t, name in owner_of.items() if name in place_of))
    return Question(story, words(f"where is the {thing}"), place_of[owner_of[thing]])


def containers(rng: np.random.Generator, world: World) -> Question:
    """An object is in a box, the box in a cupboard, the cupboard in a room: three facts."""
    count = min(len(world.objects), 4)
    things = several(rng, world.objects, count)
    boxes = several(rng, BOXES, count)
    cupboards = several(rng, CUPBOARDS, count)
    rooms = [pick(rng, world.places) for _ in range(count)]
    facts = []
    for thing, box, cupboard, room in zip(things, boxes, cupboards, rooms, strict=True):
        facts.append(words(f"the {thing} is in the {box}"))
        facts.append(words(f"the {box} stands in the {cupboard}"))
        facts.append(words(f"the {cupboard} belongs to the {room}"))
    story = [facts[i] for i in rng.permutation(len(facts))]
    asked = int(rng.integers(count))
    return Question(story, words(f"which room has the {things[asked]}"), rooms[asked])


def earlier(rng: np.random.Generator, world: World) -> Question:
    """Where somebody was before the place where they are now."""
    story: list[Sentence] = []
    places_of: dict[str, list[str]] = {name: [] for name in world.names}
    while len(story) < world.length(rng) or max(map(len, places_of.values())) < 2:
        name = pick(rng, world.names)
        others = [place for place in world.places if place not in places_of[name][-1:]]
        places_of[name].append(pick(rng, others))
        story.append(words(f"{name} went to the {places_of[name][-1]}"))
    name = pick(rng, sorted(n for n, places in places_of.items() if len(places) > 1))
    question = words(f"where was {name} before the {places_of[name][-1]}")
    return Question(story, question, places_of[name][-2])


def induction(rng: np.random.Generator, world: World) -> Question:
    """Colours go with classes; that of the person is shown by another one of the class."""
    names = several(rng, NAMES, 5)
    colour_of = dict(zip(world.classes, rng.permutation(len(world.classes)), strict=True))
    class_of = {name: pick(rng, world.classes) for name in names[:-1]}
    asked = names[-1]
    class_of[asked] = pick(rng, sorted(set(class_of.values())))
    story = []
    for name, kind in class_of.items():
        colour = world.colours[colour_of[kind] % len(world.colours)]
        story.append(words(f"{name} is a {kind}"))
        if name != asked:
            story.append(words(f"{name} is {colour}"))
    story = [story[i] for i in rng.permutation(len(story))]
    answer = world.colours[colour_of[class_of[asked]] % len(world.colours)]
    return Question(story, words(f"what colour is {asked}"), answer)


def deduction(rng: np.random.Generator, world: World) -> Question:
    """What a class fears is said of the class, and the class of a person in another sentence."""
    names = several(rng, NAMES, 4)
    kinds = several(rng, world.classes, 4)
    feared = [pick(rng, [k for k in world.classes if k != kind]) for kind in kinds]
    story = [words(f"a {kind} fears a {other}") for kind, other in zip(kinds, feared, strict=True)]
    story += [words(f"{name} is a {kind}") for name, kind in zip(names, kinds, strict=True)]
    story = [story[i] for i in rng.permutation(len(story))]
    asked = int(rng.integers(4))
    return Question(story, words(f"what does {names[asked]} fear"), feared[asked])


def combination(rng: np.random.Generator, world: World) -> Question:
    """Colour and clothing of a person: the pair of both decides the role."""
    story = []
    role_of = {}
    for name in several(rng, world.names, 3):
        colour = pick(rng, world.colours)
        cloth = pick(rng, CLOTHES[: len(world.colours)])
        role_of[name] = world.role_of[colour, cloth]
        story.append(words(f"{name} likes {colour}"))
        story.append(words(f"{name} wears a {cloth}"))
    story = [story[i] for i in rng.permutation(len(story))]
    name = pick(rng, sorted(role_of))
    return Question(story, words(f"what is the role of {name}"), role_of[name])


def negation(rng: np.random.Generator, world: World) -> Question:
    """The newest fact may say that somebody is, is not, or is perhaps in a place."""
    story: list[Sentence] = []
    state_of: dict[str, tuple[str, str]] = {}
    for _ in range(world.length(rng)):
        name = pick(rng, world.names)
        place = pick(rng, world.places)
        kind = rng.random()
        if kind < 0.5:
            state_of[name] = (place, "yes")
            story.append(words(f"{name} is in the {place}"))
        elif kind < 0.75:
            state_of[name] = (place, "no")
            story.append(words(f"{name} is no longer in the {place}"))
        else:
            state_of[name] = (place, "maybe")
            story.append(words(f"{name} is perhaps in the {place}"))
    name = pick(rng, sorted(state_of))
    place, answer = state_of[name]
    if rng.random() < 0.3:
        # another place: nothing is known of it, unless the person surely is elsewhere
        place = pick(rng, [p for p in world.places if p != place])
        answer = "no" if answer == "yes" else "maybe"
    return Question(story, words(f"is {name} in the {place}"), answer)


def counting(rng: np.random.Generator, world: World) -> Question:
    """Objects are taken and put down; how many somebody holds at the end, three at most."""
    story: list[Sentence] = []
    holds: dict[str, list[str]] = {name: [] for name in world.names[:3]}
    while len(story) < world.length(rng):
        name = pick(rng, sorted(holds))
        free = [t for t in world.objects if not any(t in held for held in holds.values())]
        puts_down = bool(holds[name]) and (rng.random() < 0.35 or len(holds[name]) == 3)
        if puts_down:
            thing = pick(rng, holds[name])
            holds[name].remove(thing)
            story.append(words(f"{name} dropped the {thing}"))
        elif free:
            thing = pick(rng, free)
            holds[name].append(thing)
            story.append(words(f"{name} took the {thing}"))
    name = pick(rng, sorted(holds))
    numbers = ("none", "one", "two", "three")
    return Question(story, words(f"how many objects does {name} hold"), numbers[len(holds[name])])


def distractors(rng: np.random.Generator, world: World) -> Question:
    """Two facts (`carried`) among as many sentences of the same people that decide nothing."""
    question = carried(rng, world)
    story = list(question.story)
    for _ in range(len(question.story)):
        place = int(rng.integers(len(story) + 1))
        name = pick(rng, world.names)
        story.insert(place, words(f"{name} likes {pick(rng, DRINKS)}"))
    return Question(story, question.words, question.answer)


FAMILIES: dict[str, Callable[[np.random.Generator, World], Question]] = {
    "newest": newest,
    "carried": carried,
    "containers": containers,
    "earlier": earlier,
    "induction": induction,
    "deduction": deduction,
    "combination": combination,
    "negation": negation,
    "counting": counting,
    "distractors": distractors,
}


def draw_world(rng: np.random.Generator) -> World:
    """The words of a task: some of each kind."""
    n_colours = int(rng.integers(3, 5))
    shortest = int(rng.integers(3, 7))
    # a Latin square: every colour alone, and every piece of clothing alone, leaves all roles open
    order = rng.permutation(n_colours)
    role_of = {}
    for i in range(n_colours):
        for j in range(n_colours):
            role_of[COLOURS[i], CLOTHES[j]] = ROLES[order[(i + j) % n_colours]]
    return World(
        names=tuple(several(rng, NAMES, int(rng.integers(3, 6)))),
        places=tuple(several(rng, PLACES, int(rng.integers(4, 7)))),
        objects=tuple(several(rng, OBJECTS, int(rng.integers(4, 7)))),
        classes=tuple(several(rng, CLASSES, int(rng.integers(4, 6)))),
        colours=COLOURS[:n_colours],
        shortest=shortest,
        longest=shortest + int(rng.integers(2, 8)),
        role_of=role_of,
    )


def invented_words(rng: np.random.Generator, vocabulary: list[str]) -> dict[str, str]:
    """An invented word for each word."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    invented: dict[str, str] = {}
    for word in vocabulary:
        candidate = ""
        while not candidate or candidate in invented.values():
            candidate = "".join(several(rng, syllables, int(rng.integers(2, 4))))
        invented[word] = candidate
    return invented


def in_other_language(rng: np.random.Generator, questions: list[Question]) -> list[Question]:
    """The same questions in invented words, the second word of a sentence at its end."""
    vocabulary = vocabulary_of(questions)
    invented = invented_words(rng, vocabulary)

    def translate(sentence: Sentence) -> Sentence:
        reordered = (sentence[0], *sentence[2:], sentence[1])
        return tuple(invented[word] for word in reordered)

    return [
        Question([translate(s) for s in q.story], translate(q.words), q.answer) for q in questions
    ]


def vocabulary_of(questions: list[Question]) -> list[str]:
    """The words of all stories and questions, sorted."""
    sentences = {sentence for q in questions for sentence in (*q.story, q.words)}
    return sorted({word for sentence in sentences for word in sentence})


@dataclass(frozen=True)
class StoryTask:
    """One task: its family, questions, and their tokens; the first ``n_train`` are to train on."""

    number: int
    family: str
    language: str
    questions: list[Question]
    data: Dataset
    answers: np.ndarray
    n_train: int

    @property
    def name(self) -> str:
        """Number, family and language."""
        return f"{self.number:02d} {self.family} ({self.language})"

    def train(self) -> tuple[kh.SetBatch, np.ndarray]:
        """Sets and answers to train on."""
        rows = np.arange(self.n_train)
        return self.data.sets[rows], self.answers[rows]

    def test(self) -> tuple[kh.SetBatch, np.ndarray]:
        """Sets and answers to test on."""
        rows = np.arange(self.n_train, len(self.answers))
        return self.data.sets[rows], self.answers[rows]


def draw_task(number: int, n_train: int = N_TRAIN, n_test: int = N_TEST) -> StoryTask:
    """Task ``number`` of 50: family number mod 10, everything else drawn from the number."""
    rng = np.random.default_rng([2811, number])
    family = list(FAMILIES)[number % len(FAMILIES)]
    world = draw_world(rng)
    questions = [FAMILIES[family](rng, world) for _ in range(n_train + n_test)]

    # every second round of families speaks the invented language
    language = "English" if (number // len(FAMILIES)) % 2 == 0 else "invented"
    if language == "invented":
        questions = in_other_language(rng, questions)
    return StoryTask(
        number=number,
        family=family,
        language=language,
        questions=questions,
        data=tokens_of(questions),
        answers=np.array([q.answer for q in questions]),
        n_train=n_train,
    )


def tokens_of(questions: list[Question]) -> Dataset:
    """Number sentences and words, and make tokens of them (`kh.datasets.babi_tokens`)."""
    vocabulary = vocabulary_of(questions)
    number_of_word = {word: i + 1 for i, word in enumerate(vocabulary)}
    sentences = sorted({sentence for q in questions for sentence in (*q.story, q.words)})
    number_of_sentence = {sentence: i for i, sentence in enumerate(sentences)}
    table = np.zeros((len(sentences), max(map(len, sentences))), int)
    for i, sentence in enumerate(sentences):
        table[i, : len(sentence)] = [number_of_word[word] for word in sentence]
    stories = [np.array([number_of_sentence[s] for s in q.story]) for q in questions]
    asked = np.array([number_of_sentence[q.words] for q in questions])
    return babi_tokens(table, stories, asked, vocabulary)


# ---- what is measured ----------------------------------------------------------------------------

PAPER_LAYER = {"activation": "softmax", "pooling": "mean", "scaling": "none", "query": "given"}


LEARNED_LAYER = {**PAPER_LAYER, "n_heads": 256, "dtype": "float32"}


TRANSFORMER_SECONDS = 180.0
"""The limit of a transformer encoder: on a busy core 60 s were over before it stopped by itself."""


def attention(seed: int, heads: Any, **options: Any) -> Any:
    """An attention classifier with a head distribution."""
    return kh.AttentionClassifier(heads=heads, random_state=seed, **options)


def methods(seed: int = 0) -> dict[str, Callable[[], Any]]:
    """What is compared; the networks are those of benchmarks/baselines.py."""
    from baselines import MemoryNetwork, Network

    return {
        "default settings": lambda: attention(seed, None),
        "LearnedHeads()": lambda: attention(seed, kh.LearnedHeads(), **LEARNED_LAYER),
        "zero-mean heads": lambda: attention(seed, kh.GaussianHeads(), **LEARNED_LAYER),
        "memory network": lambda: MemoryNetwork(seed),
        "transformer encoder": lambda: Network(
            "transformer", False, seed, seconds=TRANSFORMER_SECONDS
        ),
    }


RUNS = {"tuning": TUNING, "held-back": HELD_BACK}
"""The tasks of each run, by number."""

FIELDS = ("task", "method", "seed", "accuracy", "seconds", "heads")


def measure(task: StoryTask, method: str, seed: int) -> dict[str, str]:
    """Fit one method to one task; seconds are process time, of all threads."""
    model = methods(seed)[method]()
    sets, answers = task.train()
    began = time.process_time()
    # networks take numbers instead of answers
    labels, numbers = np.unique(answers, return_inverse=True)
    if isinstance(model, kh.AttentionClassifier):
        numbers = answers
        labels = None
    model.fit(sets, numbers)
    seconds = time.process_time() - began
    test_sets, test_answers = task.test()
    predicted = model.predict(test_sets)
    if labels is not None:
        predicted = labels[predicted]
    return {
        "task": task.name,
        "method": method,
        "seed": str(seed),
        "accuracy": f"{100 * np.mean(predicted == test_answers):.1f}",
        "seconds": f"{seconds:.1f}",
        "heads": getattr(getattr(model, "heads_", None), "reason", ""),
    }


def run(
    numbers: list[int],
    chosen_methods: list[str],
    seeds: list[int],
    out: Path,
) -> None:
    """Measure every method on every task; rows that ``out`` already has are not measured again."""
    rows: list[dict[str, str]] = []
    if out.exists():
        with out.open(newline="") as file:
            rows = list(csv.DictReader(file))
    done = {(row["task"], row["method"], row["seed"]) for row in rows}
    for number, seed in itertools.product(numbers, seeds):
        task = draw_task(number)
        for method in chosen_methods:
            if (task.name, method, str(seed)) in done:
                continue
            rows.append(measure(task, method, seed))
            print(rows[-1], flush=True)
            with out.open("w", newline="") as file:
                writer = csv.DictWriter(file, FIELDS)
                writer.writeheader()
                writer.writerows(rows)


def time_descents(numbers: list[int], device: str | None) -> None:
    """Wall seconds of `kh.LearnedHeads().fit`, with descents of all numbers of hops, by task.

    The first task is fitted twice: its first fit also compiles, and loads libraries.
    """
    for number in (numbers[0], *numbers):
        task = draw_task(number)
        sets, answers = task.train()
        columns = np.where(answers[:, None] == np.unique(answers), 1.0, -1.0)
        began = time.perf_counter()
        heads = kh.LearnedHeads().fit(
            sets, columns, activation="softmax", n_heads=256, device=device
        )
        seconds = time.perf_counter() - began
        error = min(step.held_out_error for step in heads.history)
        print(
            f"{task.name:28}{seconds:6.1f} s   {heads.hops} hops, held-out error {error:.3f}",
            flush=True,
        )


def picture(path: Path) -> None:
    """Draw what every hop looks at, for one question of task 1: two facts."""
    from matplotlib.figure import Figure

    task = draw_task(1)
    model = attention(0, kh.LearnedHeads(hops=2), **LEARNED_LAYER)
    model.fit(*task.train())

    # a question that is answered rightly, whose two facts stand in different sentences
    test_sets, answers = task.test()
    right = np.flatnonzero(model.predict(test_sets) == answers)
    position = int(right[0])
    question = task.questions[task.n_train + position]
    weights = [hop[0].mean(axis=0) for hop in model.hop_weights(test_sets[[position]])]

    # one column for each hop, one row for each sentence, the newest last
    sentences = [" ".join(sentence) for sentence in question.story] + ["(empty token)"]
    figure = Figure(figsize=(7.0, 0.45 * len(sentences) + 1.2), layout="constrained")
    axes = figure.subplots(1, len(weights), sharey=True)
    for hop, (ax, weight) in enumerate(zip(axes, weights, strict=True), start=1):
        ax.barh(np.arange(len(sentences)), weight, color="#4477aa")
        ax.set(title=f"hop {hop}", xlim=(0, 1), xlabel="weight")
    axes[0].set_yticks(np.arange(len(sentences)), sentences)
    axes[0].invert_yaxis()
    figure.suptitle(f"{' '.join(question.words)}? {question.answer}")
    figure.savefig(path, metadata={"Date": None})


def show_one_of_each() -> None:
    """Print one question of every family."""
    for number in range(len(FAMILIES)):
        task = draw_task(number, n_train=1, n_test=1)
        question = task.questions[0]
        print(task.name)
        for sentence in question.story:
            print("   ", " ".join(sentence))
        print("   ", f"{' '.join(question.words)}?  {question.answer}")


def main(arguments: list[str]) -> None:
    """Print examples, measure, or draw, as the arguments say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", choices=tuple(RUNS), help="tasks to measure")
    parser.add_argument("--tasks", type=int, nargs="*", help="only these tasks, by number")
    parser.add_argument("--methods", nargs="*", help="only these methods")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="random states")
    parser.add_argument("--out", type=Path, default=Path("out/stories.csv"))
    parser.add_argument("--descents", action="store_true", help="time descents alone")
    parser.add_argument("--device", help="where descents are computed: cuda, or the host")
    parser.add_argument("--picture", type=Path, help="draw what hops look at into this file")
    options = parser.parse_args(arguments)
    if options.picture is not None:
        picture(options.picture)
    elif options.descents:
        time_descents(options.tasks or list(TUNING), options.device)
    elif options.run is not None:
        numbers = list(RUNS[options.run])
        if options.tasks:
            numbers = [number for number in numbers if number in options.tasks]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        run(numbers, options.methods or list(methods()), options.seeds, options.out)
    else:
        show_one_of_each()


if __name__ == "__main__":
    main(sys.argv[1:])
