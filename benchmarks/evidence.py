"""What the looks of a model turn to: `python benchmarks/evidence.py --data DIR [--only qa02 …]
[--show 2]`.

For each task: test accuracy; in how many of the questions answered rightly the k heaviest sentences
over all looks are the k that the data mark as support, never having been told; and accuracy on the
same questions with 30 irrelevant sentences put in: of nobody who acts in the support, and without
what the question asks for.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from real import BABI, attention, babi, read, support_shown

import keyhole as kh
from keyhole.data.datasets import babi_tokens

MORE = 30


def stretched(file: Any, names: list[str], rows: np.ndarray, seed: int) -> list[np.ndarray]:
    """Stories with irrelevant sentences of other stories put in at random places."""
    rng = np.random.default_rng(seed)
    table, ptr = file["sentence_table"], file["ptr"]
    common = {
        k + 1
        for k, word in enumerate(names)
        if word in {"the", "to", "is", "where", "in", "a", "of"}
    }
    used = np.unique(file["X_sent"])
    words = {s: set(table[s].tolist()) - common - {0} for s in used}
    made = []
    for row in rows:
        story = file["X_sent"][ptr[row] : ptr[row + 1]]
        marked = story[file["support"][ptr[row] : ptr[row + 1]] > 0]
        first = {int(table[s][0]) for s in marked}  # who acts
        asked = set(table[file["query_sent"][row]].tolist()) - common
        fine = [s for s in used if int(table[s][0]) not in first and not words[s] & asked]
        extra = rng.choice(fine, MORE)
        places = np.sort(rng.integers(0, len(story) + 1, MORE))
        made.append(np.insert(story, places, extra))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=os.environ.get("KEYHOLE_DATA"))
    parser.add_argument(
        "--only", nargs="+", default=["qa01", "qa02", "qa03"], choices=BABI, metavar="NAME"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=1, help="questions to show with their evidence")
    args = parser.parse_args()
    for name in args.only:
        problem = babi(args.data, name)
        file = read(args.data, "babi", f"{name}.npz")
        meta = json.loads(str(file["meta"]))
        names, answers = meta["vocab"], meta["answers"]
        train, test = next(problem.splits(args.seed))
        stories = np.split(file["X_sent"], file["ptr"][1:-1])
        # the longer stories are made with the others, so that all have the same columns for ages
        longer = stretched(file, names, test, args.seed)
        questions = np.concatenate([file["query_sent"], file["query_sent"][test]])
        X = babi_tokens(file["sentence_table"], stories + longer, questions, names).sets
        model = attention(problem, args.seed, kh.LearnedHeads())
        model.fit(X[train], problem.y[train], groups=problem.groups[train])
        right = model.predict(X[test]) == problem.y[test]
        more = model.predict(X[len(stories) :]) == problem.y[test]
        weights = model.hop_weights(X[test])
        found = support_shown(weights, [problem.support[row] for row in test])
        print(
            f"{name}: {model.layer_.heads.hops} looks, test accuracy {100 * right.mean():.1f}, "
            f"support found in {100 * found[right].mean():.1f} % of the right answers, {MORE} "
            f"sentences more: {100 * more.mean():.1f}",
            flush=True,
        )
        table = file["sentence_table"]
        for i in np.flatnonzero(right)[: args.show]:
            story = stories[test[i]][-80:]
            text = [" ".join(names[w - 1] for w in table[s] if w) for s in story]
            print("  " + " ".join(names[w - 1] for w in table[questions[test[i]]] if w) + "?")
            for hop, look in enumerate(weights):
                best = look[i].max(axis=0)[: len(text)].argmax()
                print(f"    look {hop + 1}: {text[best]} ({look[i].max(axis=0)[best]:.2f})")
            print(f"    answer: {answers[problem.y[test[i]]]}")


if __name__ == "__main__":
    main()
