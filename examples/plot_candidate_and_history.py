"""
Will this user like that offer?
===============================

The purchases of a user are a set, the offer is its query, and the age of the user is a
sample-level feature. The data is generated: users like offers in styles that they
bought before.
"""

# %%
# The data
# --------
# Two tables: one row per purchase, and one row per user with the offer and its rating.
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.linear_model import RidgeCV

import keyhole as kh

STYLES = ["plain", "bright", "retro"]
N_USERS = 500
rng = np.random.default_rng(0)

owner = np.repeat(np.arange(N_USERS), rng.integers(3, 9, N_USERS))
bought = pd.DataFrame({"user": owner, "style": rng.choice(STYLES, len(owner))})
bought["price"] = rng.uniform(5, 50, len(owner)).round(2)

users = pd.DataFrame({"user": np.arange(N_USERS), "style": rng.choice(STYLES, N_USERS)})
users["age"] = rng.integers(18, 80, N_USERS)
offered = users.set_index("user")["style"].loc[owner].to_numpy()
share = (bought["style"] == offered).groupby(owner).mean().to_numpy()
users["rating"] = 3 * share + 0.01 * users["age"] + 0.1 * rng.normal(size=N_USERS)

# %%
# One sample: the purchases of user 0 …
bought[bought["user"] == 0]

# %%
# … and the offer.
users[users["user"] == 0].round(2)

# %%
# Read, fit, score
# ----------------
# Columns of one name in query and keys are paired: the style of the offer meets the
# style of each purchase.
data = kh.read_table(
    users,
    tokens=bought,
    set_id="user",
    keys="style,price",
    query="style",
    extras="age",
    target="rating",
)
train, test = data[:400], data[400:]
model = kh.AttentionRegressor(random_state=0).fit(train.sets, train.target)
print(f"R² on new users: {model.score(test.sets, test.target):.3f}")

# %%
# A baseline that does not see which purchase matches: the mean purchase beside offer
# and age.


def flat(sets):
    means = np.add.reduceat(sets.tokens, sets.offsets[:-1]) / sets.lengths[:, None]
    return np.hstack([means, sets.query, sets.extras])


ridge = RidgeCV(np.geomspace(1e-3, 1e3, 13)).fit(flat(train.sets), train.target)
print(f"R² of ridge on means: {ridge.score(flat(test.sets), test.target):.3f}")

# %%
# What each purchase adds
# -----------------------
# Purchases in the style of the offer raise the prediction, the others lower it.
row = 0
[parts] = model.contributions(test.sets[[row]])
user = test.ids[row]
history = bought[bought["user"] == user]
offer = users.loc[users["user"] == user, "style"].item()
colours = ["tab:blue" if style == offer else "0.7" for style in history["style"]]

figure, ax = plt.subplots(figsize=(6, 2.6), layout="constrained")
labels = [
    f"{style}, {price}"
    for style, price in zip(history["style"], history["price"], strict=True)
]
ax.barh(range(len(parts)), parts - parts.mean(), color=colours)
ax.set_yticks(range(len(parts)), labels)
ax.set_xlabel("contribution less the mean contribution")
ax.set_title(f"user {user} is offered: {offer}")
plt.show()

# %%
# What to change for your data
# ----------------------------
# Name your own columns in ``read_table``. Where ratings have dates, pass ``time=`` to
# hold out the newest ones, and ``reference_date=`` to have purchases carry their age.
