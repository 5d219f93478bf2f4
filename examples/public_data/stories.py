"""
Questions about stories
=======================

Somebody took the football, and then went somewhere: where is it? That takes two facts,
and so two hops of attention. It needs the bAbI archive ``tasks_1-20_v1-2.tar.gz``.
"""

# %%
# The data
# --------
# Sentences are keys, the question is the query, the answer is a label.
import matplotlib.pyplot as plt
import numpy as np
from loaders import data_path
from sklearn.linear_model import LogisticRegression

import keyhole as kh

TASK = 2
STEPS = 300
N_HEADS = 256

data = kh.datasets.load_babi(data_path("tasks_1-20_v1-2.tar.gz"), TASK)
train = np.flatnonzero(data.split == 0)
test = np.flatnonzero(data.split == 1)
print(data.sets)


# %%
# One sample: the words of each sentence.
def words_of(key):
    return [
        name
        for name, value in zip(data.names, key, strict=True)
        if value > 0 and name.isalpha()
    ]


for key in data.sets[[int(test[0])]].tokens:
    print(", ".join(words_of(key)))

# %%
# Fit and score
# -------------
# The number of hops is chosen on held-out stories.


def fitted(hops):
    heads = kh.LearnedHeads(hops=hops, max_iter=STEPS)
    model = kh.AttentionClassifier(
        N_HEADS,
        heads,
        activation="softmax",
        pooling="mean",
        scaling="none",
        query="given",
        dtype="float32",
        random_state=0,
    )
    return model.fit(data.sets[train], data.target[train])


models = {"one hop": fitted(1), "hops chosen": fitted("auto")}
for name, model in models.items():
    accuracy = model.score(data.sets[test], data.target[test])
    print(f"attention, {name}: accuracy {accuracy:.3f}")

# %%
# A baseline: logistic regression on the words of the story and of the question.


def bags(sets):
    story = np.add.reduceat(sets.tokens, sets.offsets[:-1])
    return np.hstack([story / np.linalg.norm(story, axis=1, keepdims=True), sets.query])


logistic = LogisticRegression(C=10, max_iter=500).fit(
    bags(data.sets[train]), data.target[train]
)
accuracy = logistic.score(bags(data.sets[test]), data.target[test])
print(f"bags of words: accuracy {accuracy:.3f}")

# %%
# Which sentences were read?
# --------------------------
# Each hop asks with what the earlier ones found.
question = int(test[0])
weights = models["hops chosen"].hop_weights(data.sets[[question]])
table = np.vstack([hop[0].max(axis=0) for hop in weights])
figure, ax = plt.subplots(figsize=(7, 1 + 0.5 * len(table)), layout="constrained")
image = ax.imshow(table, vmin=0, vmax=1, cmap="Blues", aspect="auto")
ax.set_yticks(range(len(table)), [f"hop {h + 1}" for h in range(len(table))])
ax.set_xlabel("sentence")
figure.colorbar(image, label="weight")
plt.show()

# %%
# What to change for your data
# ----------------------------
# ``kh.datasets.babi_tokens`` turns your own stories into sets. Pass ``groups=`` if
# several questions are about one story.
