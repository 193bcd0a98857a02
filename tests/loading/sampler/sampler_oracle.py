"""The slow obvious versions: Python lists and loops over an endless stream of epochs."""

from __future__ import annotations

from itertools import chain

import numpy as np


def generator(*entropy):
    return np.random.default_rng(np.random.SeedSequence(entropy))


def epoch_order(n, epoch, *, seed, shuffle, order=None):
    rng = generator(seed, epoch)
    if order is not None:
        return [int(i) for i in order(epoch, rng)]
    return rng.permutation(n).tolist() if shuffle else list(range(n))


def dealt(batch, dp_size):
    return [part.tolist() for part in np.array_split(np.array(batch, dtype=np.int64), dp_size)]


def epochs_of(n, size, num_epochs, *, tail, seed=0, shuffle=True, order=None, reshuffles=()):
    """All batches of the first epochs, a list of lists of lists of one rank.

    ``reshuffles``: (epoch, step) in the order in which they happen.
    """
    pending, epochs = [], []
    for epoch in range(num_epochs):
        rest = epoch_order(n, epoch, seed=seed, shuffle=shuffle, order=order)
        batches, count = [], 0
        steps = [step for e, step in reshuffles if e == epoch]
        while True:
            while steps and steps[0] == len(batches):
                steps.pop(0)
                count += 1
                rest = generator(seed, epoch, count).permutation(np.array(rest)).tolist()
            if len(pending) + len(rest) < size:
                break
            take = size - len(pending)
            batches.append(pending + rest[:take])
            pending, rest = [], rest[take:]
        if tail == "wrap":
            pending = pending + rest
        elif tail == "keep" and rest:
            batches.append(rest)
        epochs.append(batches)
    return epochs


def flat(lists):
    return list(chain.from_iterable(lists))


def read(sampler, num_epochs=3):
    return [list(sampler) for _ in range(num_epochs)]


def curriculum(epoch, rng):
    """An order that repeats, leaves out, and has another length each epoch."""
    return rng.integers(0, 13, size=[11, 4, 9, 6, 13][epoch % 5])
