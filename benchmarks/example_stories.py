"""Questions about stories: where is the football?

    python benchmarks/example_stories.py tasks_1-20_v1-2.tar.gz 2

The archive has the bAbI tasks, 1000 questions to learn from in each. Somebody took the
football, and then went somewhere: two facts, two hops. One layer has one hop. With several,
each asks with what the earlier ones found, and the weights of every hop show the sentences
behind an answer. The baseline without attention reads question and story as two bags of words.
"""

import sys

import numpy as np
from sklearn.linear_model import LogisticRegressionCV

import keyhole as kh


def bags(sets):
    story = np.add.reduceat(sets.tokens, sets.offsets[:-1])
    return np.concatenate(
        [story / np.linalg.norm(story, axis=1, keepdims=True), sets.query], axis=1
    )


def show(data, i, model):
    """Print the sentences that each hop attends to, as bags of the words they hold."""
    keys = data.sets[i : i + 1].tokens
    for hop, (weights,) in enumerate(model.hop_weights(data.sets[i : i + 1])):
        best = int(weights.max(axis=0).argmax())
        said = [
            name
            for name, value in zip(data.names, keys[best], strict=True)
            if value > 0 and name.isalpha()
        ]
        print(
            f"  hop {hop + 1}: sentence {best + 1} of {len(keys)} ({', '.join(said)}), "
            f"weight {weights.max():.2f}"
        )
    print(f"  answer: {model.predict(data.sets[i : i + 1])[0]} (right: {data.target[i]})")


def main(path, task=2, max_iter=300, n_heads=256):
    data = kh.datasets.load_babi(path, int(task))
    train, test = (np.flatnonzero(data.split == part) for part in (0, 1))
    right = {}
    model = LogisticRegressionCV(
        Cs=5, l1_ratios=(0,), use_legacy_attributes=False, scoring="neg_log_loss", max_iter=500
    )
    model.fit(bags(data.sets[train]), data.target[train])
    right["bags of words, logistic"] = model.predict(bags(data.sets[test])) == data.target[test]
    for name, hops in {"attention, one hop": 1, "attention, hops it chose": "auto"}.items():
        heads = kh.LearnedHeads(hops=hops, max_iter=max_iter)
        model = kh.AttentionClassifier(
            n_heads,
            heads,
            activation="softmax",
            pooling="mean",
            scaling="none",
            query="given",
            dtype="float32",
            random_state=0,
        ).fit(data.sets[train], data.target[train])
        right[name] = model.predict(data.sets[test]) == data.target[test]
    for name, hits in right.items():
        print(f"{name:28}{100 * hits.mean():6.1f} % ± {100 * hits.std() / len(hits) ** 0.5:.1f}")
    print(f"the first question of the test, with {len(model.hop_weights(data.sets[:1]))} hops:")
    show(data, int(test[0]), model)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
