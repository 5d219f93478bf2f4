"""Learned heads on questions about stories: accuracy and seconds on bAbI's first ten tasks.

    python benchmarks/stories.py --data DIR
    python benchmarks/stories.py --data DIR --only qa02 qa03 --seeds 0 1 2

DIR has one file for each task, qa01.npz to qa10.npz, with 1000 questions to train on and 1000 to
test on. Tokens are those of `kh.datasets.babi_tokens`, and the questions of one story are a group.
All tasks have the same options: `kh.LearnedHeads()`, 256 heads, softmax. The head distribution is
learned first, and its seconds of process time are those of one core. Then values are fitted.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import keyhole as kh
from keyhole.data.datasets import babi_tokens

TASKS = tuple(f"qa{number:02d}" for number in range(1, 11))

LAYER = {
    "n_heads": 256,
    "activation": "softmax",
    "pooling": "mean",
    "scaling": "none",
    "query": "given",
    "mlp": "none",
    "dtype": "float32",
}


@dataclass(frozen=True)
class Stories:
    """Stories with a question each, the answers, and which story a question is about."""

    sets: kh.SetBatch
    answers: np.ndarray
    story: np.ndarray
    is_test: np.ndarray

    @classmethod
    def read(cls, path: Path) -> Stories:
        """The stories of one file."""
        file = np.load(path, allow_pickle=False)
        vocabulary = json.loads(str(file["meta"]))["vocab"]
        sentences = np.split(file["X_sent"], file["ptr"][1:-1])
        data = babi_tokens(file["sentence_table"], sentences, file["query_sent"], vocabulary)
        # lines of a story are numbered: a question with a lower one begins another
        last_line = file["line"][file["ptr"][1:] - 1]
        return cls(
            sets=data.sets,
            answers=file["y"],
            story=np.cumsum(np.diff(last_line, prepend=0) <= 0),
            is_test=file["split"] == 1,
        )


def measure(stories: Stories, seed: int) -> tuple[float, float, str]:
    """Test accuracy in %, seconds to learn the heads, and what was learned."""
    train = np.flatnonzero(~stories.is_test)
    test = np.flatnonzero(stories.is_test)
    answers = stories.answers[train]
    outputs = np.where(answers[:, None] == np.unique(answers), 1.0, -1.0)

    began = time.process_time()
    heads = kh.LearnedHeads().fit(
        stories.sets[train],
        outputs,
        activation="softmax",
        groups=stories.story[train],
        seed=seed,
    )
    seconds = time.process_time() - began

    model = kh.AttentionClassifier(heads=heads, random_state=seed, **LAYER)
    model.fit(stories.sets[train], answers, groups=stories.story[train])
    accuracy = 100.0 * model.score(stories.sets[test], stories.answers[test])
    return accuracy, seconds, heads.reason


def main() -> None:
    """Print a row for each task and seed, and the mean accuracy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    options = parser.parse_args()
    accuracies = []
    for name in options.only:
        stories = Stories.read(options.data / f"{name}.npz")
        for seed in options.seeds:
            accuracy, seconds, reason = measure(stories, seed)
            accuracies.append(accuracy)
            print(f"| {name} | {seed} | {accuracy:.1f} | {seconds:.0f} | {reason} |", flush=True)
    print(f"| mean | | {np.mean(accuracies):.1f} | | |")


if __name__ == "__main__":
    main()
