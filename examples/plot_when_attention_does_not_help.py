"""
When attention does not help
============================

If the mean of the keys tells everything, a linear model on the mean is as good and
simpler. The lens finds out before you build anything. The data is generated.
"""

# %%
# Two targets on the same sets
# ----------------------------
# The first is the mean of a coordinate, which pooling keeps. The second is the value of
# the key that is most like the query, which pooling loses.
import textwrap

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import keyhole as kh

rng = np.random.default_rng(0)
keys = rng.normal(size=(240, 6, 3))
query = rng.normal(size=(240, 3))
sets = kh.SetBatch(keys, query)
nearest = np.einsum("nd,nkd->nk", query, keys).argmax(axis=1)
noise = 0.1 * rng.normal(size=240)
targets = {
    "the mean of a coordinate": keys[:, :, 0].mean(axis=1) + noise,
    "the key most like the query": keys[np.arange(240), nearest, 0] + noise,
}

# %%
# One sample:
pd.DataFrame(keys[0], columns=["x", "y", "z"]).round(2)

# %%
# Ask the lens
# ------------
# It fits baselines on statistics of the keys and attention layers on the same folds.
# ``keyhole lens DATA`` does the same for a file, and writes a report.
reports = {name: kh.lens(sets, y) for name, y in targets.items()}
for name, findings in reports.items():
    answer = findings.answers["attention"]
    print(f"Target: {name}. Does attention pay?")
    print(textwrap.fill(answer.sentence, width=84), end="\n\n")

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3), layout="constrained", sharex=True)
for ax, (name, findings) in zip(axes, reports.items(), strict=True):
    table = pd.DataFrame(findings.table)
    table = table[table["learner"] != "a constant guess"]
    is_attention = ~table["learner"].str.contains("pooled|statistics|without attention")
    colours = np.where(is_attention, "tab:red", "0.5")
    for place, (_, row) in enumerate(table[::-1].iterrows()):
        ax.errorbar(
            row["error"],
            place,
            xerr=row["±"],
            fmt="o",
            color=colours[::-1][place],
            capsize=3,
        )
    ax.set_yticks(range(len(table)), table["learner"][::-1], fontsize=8)
    ax.set_xlabel("held-out error, share of the variance")
    ax.set_title(name)
plt.show()

# %%
# Red is attention. On the left ridge on statistics of the keys is as good as any layer:
# use that. On the right pooled learners leave most of the variance, and attention pays.
#
# What to change for your data
# ----------------------------
# Run ``keyhole lens DATA --target COLUMN`` first. If it answers no, use LightGBM or
# ridge on aggregates.
