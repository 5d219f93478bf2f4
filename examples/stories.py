"""Questions about stories: where is the milk, if Mary took it and went to the hallway?

    python examples/stories.py tasks_1-20_v1-2.tar.gz 2        (the bAbI tasks; 2 is the one with two facts)

Sentences are the keys, the question is the query. One look cannot answer: which sentence comes second follows from what
the first one says. Each answer comes with its evidence, the sentence that every look turned to.
"""

import sys

import numpy as np

import keyhole as kh

LAW = {"n_means": 2, "steps": 300, "learning_rate": 0.05, "max_samples": 1000}


def sentence(token, names):
    """The words of a token, in their order: names are the words, and "word@" for the place of each."""
    known = dict(zip(names, token, strict=True))
    words = [word for word in names if f"{word}@" in known and known[word] > 0]
    return " ".join(sorted(words, key=lambda word: known[f"{word}@"])) or "(nothing)"


def fitted(data, train, hops, law):
    model = kh.AttentionClassifier(
        256, kh.LearnedHeads(hops=hops, **law), activation="softmax", scaling="none", query="given", random_state=0
    )
    return model.fit(data.sets[train], data.target[train])


def main(archive, task=2, questions=3, law=LAW):
    data = kh.datasets.load_babi(archive, int(task))
    train, test = (np.flatnonzero(data.split == part) for part in (0, 1))
    for hops in (1, "auto"):
        model = fitted(data, train, hops, law)
        right = model.predict(data.sets[test]) == data.target[test]
        error = 100 * right.std() / np.sqrt(len(test))
        name = "one look" if hops == 1 else f"chosen: {model.law_.hops}"
        print(f"{name:20}  {100 * right.mean():.1f} % ± {error:.1f}")
    asked = data.sets[test[:questions]]
    for i, looks in enumerate(zip(*model.hop_weights(asked), strict=True)):
        print(f"{sentence(asked.query[i], data.names)}?")
        for number, weights in enumerate(looks):
            best = weights.max(axis=0).argmax()
            print(f"  look {number + 1}: {sentence(asked[i].tokens[best], data.names)} ({weights.max():.2f})")
        print(f"  {model.predict(asked[i])[0]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
