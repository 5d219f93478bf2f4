"""
Large bags: slides with few keys that matter
============================================

A pathology slide is a bag of thousands of patch embeddings, and has one label. A few of
its patches explain the label. Here are synthetic slides of which we know these patches.

    python examples/plot_large_bags.py [n_bags] [n_keys] [dim]
"""

# %%
# The slides
# ----------
# Every slide mixes tissue types in its own proportions. In half of them, two keys in a
# hundred are drawn around another centre: the signal. We write one file for each slide,
# as feature extractors do.

import sys
import tempfile
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import keyhole as kh
from keyhole.lab.displays import KeyMapDisplay

sizes = [int(word) for word in sys.argv[1:] if word.isdigit()]
n_bags, n_keys, dim = sizes if len(sizes) == 3 else (120, 200, 16)
slides = kh.datasets.make_bags(
    n_bags, (n_keys // 2, 2 * n_keys), dim, share=0.02, random_state=0
)
folder = Path(tempfile.mkdtemp(prefix="slides-"))
for i, name in enumerate(slides.names):
    np.savez(
        folder / f"{name}.npz",
        features=slides.sets.keys_of(i),
        coords=slides.coordinates[i],
    )
labels = dict(zip(slides.names, slides.target.tolist(), strict=True))

# %%
# Reading
# -------
# ``read_bags`` reads the headers of the files. Their keys stay on the disk. A fit reads
# some megabytes of them at a time.

bags = kh.read_bags(folder, labels)
print(bags.sets)
rng = np.random.default_rng(0)
order = rng.permutation(len(bags))
train, test = np.sort(order[: len(order) // 2]), np.sort(order[len(order) // 2 :])

# %%
# Fitting
# -------
# Learned heads find the few keys that an average over hundreds of keys hides. The
# baseline is a logistic regression on the mean of all keys.

model = kh.AttentionClassifier(heads=kh.LearnedHeads(), random_state=0)
model.fit(bags.sets[train], bags.target[train])
auc = roc_auc_score(bags.target[test], model.decision_function(bags.sets[test]))
print(f"area under the curve on new slides: {auc:.2f}")
means = np.array([bags.sets.keys_of(i).mean(axis=0) for i in range(len(bags))])
baseline = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
baseline.fit(means[train], bags.target[train])
auc = roc_auc_score(bags.target[test], baseline.decision_function(means[test]))
print(f"of mean pooling: {auc:.2f}")

# %%
# Which patches?
# --------------
# Contributions add up to the score of a slide. On a positive slide we compare them with
# the keys that we drew as signal.

positive = test[bags.target[test] == 1]
scores = model.decision_function(bags.sets[positive])
row = int(positive[np.argmax(scores)])
contributions = model.contributions(bags.sets[row : row + 1])[0]
is_signal = slides.is_signal[slides.names.index(bags.names[row])]
ranking = roc_auc_score(is_signal, contributions)
print(f"{bags.names[row]}: contributions rank signal keys with AUC {ranking:.2f}")

# %%
# A map shows where they lie. The ten keys that add most are circled.

display = KeyMapDisplay.from_contributions(
    bags.coordinates[row], contributions, n_top=10
)
display.ax_.set_title(bags.names[row])
print(display.listing())
if "--save" in sys.argv:
    display.figure_.savefig("large_bags.png", dpi=120)

# %%
# What to change for your data
# ----------------------------
# Give ``read_bags`` the folder of your feature extractor and the table of your labels,
# and name its columns with ``bag=``, ``label=`` and ``group=``, the patient of a slide.
# Pass ``groups=bags.groups`` to ``fit``, so that all slides of a patient are left out
# together. Leave ``heads`` out if the label depends on most keys of a slide.
