"""Interactions of users with items for the recommenders here: files of them, negatives, recall."""

import numpy as np
import torch


class Interactions:
    """Pairs (user, item) to train on and pairs to find, as rows of two tables from 0.

    Attributes:
        train: `(n, 2)`, ascending.
        test: `(m, 2)`, ascending, no pair of `train`.
        user_keys: what the data calls each user.
        item_keys: what it calls each item.
    """

    def __init__(self, train, test=None):
        """Take pairs of any labels, `(n, 2)`; where `test` is None a tenth of `train` is."""
        both = train if test is None else np.concatenate([train, test])
        self.user_keys, users = np.unique(both[:, 0], return_inverse=True)
        self.item_keys, items = np.unique(both[:, 1], return_inverse=True)
        self.users, self.items = len(self.user_keys), len(self.item_keys)
        if test is None:
            tested = np.random.default_rng(0).random(len(both)) < 0.1
        else:
            tested = np.arange(len(both)) >= len(train)
        pairs = torch.from_numpy(users * self.items + items)  # one number a pair
        self._known = pairs[~tested].unique()
        wanted = pairs[tested].unique()
        self._wanted = wanted[~_among(self._known, wanted)]
        self.train, self.test = (
            torch.stack([each // self.items, each % self.items], 1)
            for each in (self._known, self._wanted)
        )

    def to(self, device):
        """Move to a device what negatives and recall are computed from."""
        for name in ("_known", "_wanted", "train", "test"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def shuffled(self):
        """Return the training pairs in a random order."""
        return self.train[torch.randperm(len(self.train), device=self.train.device)]

    def of_users(self):
        """Draw as many pairs as there are to train on: users uniformly, then an item of each."""
        counts = torch.bincount(self.train[:, 0], minlength=self.users)
        known = counts.nonzero()[:, 0]
        users = known[torch.randint_like(self.train[:, 0], len(known))]
        nth = (torch.rand(len(users), device=users.device) * counts[users]).long()
        first = counts.cumsum(0) - counts
        return self.train[first[users] + nth.minimum(counts[users] - 1)]

    def negatives(self, users):
        """Draw an item for each user, uniformly among those that are not in its training pairs."""
        drawn = torch.randint_like(users, self.items)
        for _ in range(20):  # not for ever: a user may know every item
            known = _among(self._known, users * self.items + drawn)
            if not known.any():
                break
            drawn = torch.where(known, torch.randint_like(users, self.items), drawn)
        return drawn

    @torch.no_grad()
    def recall(self, score, k=20, users_at_once=2048):
        """Return the share of a user's test items among its best k, as a mean over the users.

        `score(users)` gives the scores `(n, items)` of some users. Items that a user is known to
        like are left out, and so are users without a test item.
        """
        found = []
        every = torch.arange(self.users, device=self.train.device)
        for users in every.split(users_at_once):
            bounds = torch.stack([users[0], users[-1] + 1]) * self.items
            begin, end = torch.searchsorted(self._known, bounds).tolist()
            known = self.train[begin:end]
            scores = score(users).clone()
            scores[known[:, 0] - users[0], known[:, 1]] = -torch.inf
            best = users[:, None] * self.items + scores.topk(min(k, self.items)).indices
            found.append(_among(self._wanted, best).sum(1))
        wanted = torch.bincount(self.test[:, 0], minlength=self.users)
        return (torch.cat(found)[wanted > 0] / wanted[wanted > 0]).mean().item()


def _among(ascending, numbers):
    """Return which numbers are among some that ascend."""
    at = torch.searchsorted(ascending, numbers).clamp_(max=len(ascending) - 1)
    return ascending[at] == numbers


def read(path):
    """Read pairs from a file or folder; without one make some up.

    A folder has `train.txt` and `test.txt` of lines `user item item …`, as the repository of
    LightGCN has them. An `.npz` has arrays `user` and `item`, and `test_user` and `test_item`
    where the test is given. Any other file has lines `user,item`.
    """
    test = None
    if path is None:
        train = made_up()
    elif path.is_dir():
        train, test = (_adjacency(path / f"{name}.txt") for name in ("train", "test"))
    elif path.suffix == ".npz":
        with np.load(path) as found:
            train = np.stack([found["user"], found["item"]], 1)
            if "test_user" in found:
                test = np.stack([found["test_user"], found["test_item"]], 1)
    else:
        train = np.loadtxt(path, np.str_, delimiter=",", ndmin=2)
    return Interactions(train, test)


def _adjacency(path):
    """Read lines `user item item …`; a user may have no item."""
    lines = [np.array(line.split(), np.int64) for line in path.read_text().splitlines()]
    users = np.concatenate([np.repeat(line[:1], len(line) - 1) for line in lines if len(line)])
    return np.stack([users, np.concatenate([line[1:] for line in lines])], 1)


def made_up(users=3000, items=2000, tastes=20, clicks=40):
    """Make pairs of users with a few tastes and items of one taste each, some of them popular."""
    rng = np.random.default_rng(0)
    taste_of_item = rng.integers(0, tastes, items)
    popularity = rng.zipf(1.5, items).clip(max=100) ** 0.5
    tastes_of_user = rng.dirichlet(np.full(tastes, 0.1), users)
    pairs = []
    for user in range(users):
        liking = tastes_of_user[user, taste_of_item] * popularity + 1e-9
        liked = rng.choice(items, clicks, replace=False, p=liking / liking.sum())
        pairs.append(np.stack([np.full(clicks, user), liked], 1))
    return np.concatenate(pairs)
