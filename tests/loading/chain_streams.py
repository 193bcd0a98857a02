"""One random chain of runs of a stream that is divided into a fixed number of shards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from itertools import islice, pairwise
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from tests.building import packed_stream
from tests.loading import chain_truth as truth
from torch_collate_kit import Mixture, PrefetchLoader
from torch_collate_kit.loading import merge_states

# of a batch: its pass, its round and its shard
Place = tuple[int, int, int]


def stream_chain(rng: np.random.Generator, *, with_workers: bool) -> Counter[str]:
    """What was compared, and what was wrong.

    All ranks are stopped after the same round, in which each still has a batch, and go on to the
    end of the pass in the last run. A batch is told by its pass, round and shard, so none may be
    missing or come twice.
    """
    num_shards = int(rng.choice([2, 4, 6, 12, 24]))
    examples = truth.examples_of(rng, int(rng.integers(4, 30)) * num_shards, 20)
    settings = _settings(rng, num_shards)
    mixture = _mixture(rng, examples, num_shards) if rng.random() < 0.5 else None
    sizes = [w for w in truth.divisors_up_to(num_shards, 64) if not with_workers or w <= 2]
    num_workers = int(rng.integers(1, 3)) if with_workers else 0
    found: Counter[str] = Counter(chains=1)
    expected = Run(examples, settings, 0, found, mixture)
    expected.leg(1, None)
    batches_of = Counter(shard for _, _, shard in expected.served)
    mine = Run(examples, settings, num_workers, found, mixture)
    done = 0
    for dp_size in [int(rng.choice(sizes)) for _ in range(2)]:
        parts = np.split(np.array([batches_of[s] for s in range(num_shards)]), dp_size)
        most = min(max(part) for part in parts) - 1
        stop = int(rng.integers(done, max(done, most) + 1))
        take = [sum(np.minimum(part, stop) - np.minimum(part, done)) for part in parts]
        mine.leg(dp_size, take)
        done = stop
    mine.leg(int(rng.choice(sizes)), None)
    found["steps"] = len({place[:2] for place in mine.served})
    found["batches"] = len(mine.served)
    found["wrong: missing or new"] += mine.served.keys() != expected.served.keys()
    for place in mine.served.keys() & expected.served.keys():
        found["wrong: batches"] += mine.served[place] != expected.served[place]
    examples_read = sorted(i for batch in mine.served.values() for i in batch[0])
    if mixture is None:
        found["wrong: partition"] += examples_read != list(range(len(examples)))
    else:
        found["mixtures"] += 1
        found["wrong: partition"] += len(set(examples_read)) != len(examples_read)
    return found


def _mixture(rng: np.random.Generator, examples: truth.Examples, num_shards: int) -> dict[str, Any]:
    """Sources of which each shard has examples."""
    cuts = rng.integers(num_shards, len(examples) - num_shards + 1, size=int(rng.integers(0, 3)))
    cuts = [0, *sorted({cut - cut % num_shards for cut in cuts.tolist()}), len(examples)]
    weights = rng.integers(0, 4, size=len(cuts) - 1)
    weights[rng.integers(len(weights))] += 1
    return {
        "sources": [examples[start:end] for start, end in pairwise(cuts)],
        "weights": weights.tolist(),
        "by": str(rng.choice(["examples", "tokens"])),
    }


def _settings(rng: np.random.Generator, num_shards: int) -> dict[str, Any]:
    return {
        "tokenizer": 0,
        "max_tokens": int(rng.choice([24, 32, 64])),
        "buffer_size": int(rng.integers(4, 9)),
        "rows": int(rng.integers(1, 3)),
        "strategy": str(rng.choice(["best_fit_decreasing", "sequential"])),
        "num_shards": num_shards,
        "shuffle": bool(rng.random() < 0.5),
        "seed": int(rng.integers(100)),
    }


class Run:
    """Runs of a pass, one after the other, each on other ranks."""

    def __init__(
        self,
        examples: truth.Examples,
        settings: dict[str, Any],
        num_workers: int,
        found: Counter[str],
        mixture: dict[str, Any] | None,
    ) -> None:
        self.examples, self.settings, self.found = examples, settings, found
        self.num_workers, self.mixture = num_workers, mixture
        self.served: dict[Place, Any] = {}
        self.state: str | None = None

    def leg(self, dp_size: int, take: list[int] | None) -> None:
        """Each rank takes so many batches, or reads to the end of the pass."""
        states = []
        for rank in range(dp_size):
            stream = packed_stream(self._source(), **self.settings, dp_rank=rank, dp_size=dp_size)
            num_workers = min(self.num_workers, self.settings["num_shards"] // dp_size)
            options: dict[str, Any] = {"collate_fn": stream.as_is, "num_workers": num_workers}
            with PrefetchLoader(DataLoader(stream, batch_size=None, **options)) as loader:
                if self.state is not None:
                    loader.load_state_dict(json.loads(self.state))
                self._read(islice(loader, None if take is None else int(take[rank])))
                states.append(json.loads(json.dumps(loader.state_dict())))
        if take is not None:
            self.state = json.dumps(merge_states(states))
            shards = json.loads(self.state)["stream"]["shards"]
            most = 80 if self.mixture is None else 80 + 64 * len(self.mixture["sources"])
            self.found["wrong: size of a state"] += len(json.dumps(shards)) > most * len(shards)

    def _source(self) -> Any:
        """The examples, or a mixture of streams."""
        if self.mixture is None:
            return self.examples
        streams = [lambda part=part: iter(part) for part in self.mixture["sources"]]
        return Mixture(streams, weights=self.mixture["weights"], by=self.mixture["by"])

    def _read(self, batches: Iterable[Any]) -> None:
        before = None
        for batch in batches:
            at = batch.metadata
            place = at["epoch"], at["step"], at["shard"]
            self.found["wrong: twice"] += place in self.served
            self.found["wrong: order of a rank"] += before is not None and before > place
            self.served[place] = truth.decoded(batch), truth.rows_of(batch), at["num_loss_tokens"]
            before = place
