"""Random chains of runs on 1 to 64 ranks, held to an unbroken run and to plain Python.

    python -m tests.loading.chains --chains 1000 --seed 0

All ranks live in this process. Compared of every chain W1 -> W2 -> W3, stopped anywhere and resumed
from JSON: the examples and the number of loss tokens of every step, with ``rows_multiple_of`` and
``batch_rows`` all cells of every row, and what ``examples`` and ``when`` return for every step.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter

import numpy as np

from tests.loading import chain_truth as truth
from tests.loading.chain_runs import BY_ROWS, KINDS, MIXED, Chain, Runner, Step, random_chain
from tests.loading.chain_streams import stream_chain
from tests.loading.sampler.sampler_oracle import epochs_of


def check_chain(chain: Chain) -> Counter[str]:
    """What was compared, and what was wrong: "wrong: ..." by kind of fault."""
    alone = Runner(chain.on_one_rank(), unbroken=True)
    broken = Runner(chain, unbroken=False)
    alone.run()
    broken.run()
    found: Counter[str] = Counter({"steps": len(broken.steps), "chains": 1})
    found["runs"], found["ranks"] = len(chain.legs), sum(leg.dp_size for leg in chain.legs)
    found["by a PrefetchLoader"] = int(chain.behind_loader)
    expected = _expected(chain, alone)
    found["wrong: number of steps"] += len(broken.steps) != len(expected)
    for step, by_one, (position, examples) in zip(broken.steps, alone.steps, expected, strict=True):
        for name, is_wrong in _step_faults(chain, step, by_one, position, examples):
            found["wrong: " + name] += is_wrong
        found["rows"] += len(step.rows) if chain.kind == "rows" or chain.kind in BY_ROWS else 0
    _check_epochs(chain, expected, found)
    _check_lineage(broken, expected, found)
    for name, count in (alone.wrong + broken.wrong).items():
        found["wrong: " + name] += count
    return found


def _expected(chain: Chain, alone: Runner) -> list[tuple[tuple[int, int], list[int]]]:
    """Position and examples of every step: by plain Python, or by the unbroken run."""
    order = chain.order
    if chain.kind in (*MIXED, *BY_ROWS) or order["shuffle"] == "keyed":
        return [
            (step.position, alone.last.examples(*step.position).tolist()) for step in alone.steps
        ]
    names = ("tail", "seed", "shuffle", "order")
    epochs = epochs_of(
        len(chain.examples),
        order["batch_size"],
        alone.steps[-1].position[0] + 1 if alone.steps else 0,
        **{name: order[name] for name in names if name in order},
        reshuffles=alone.reshuffles,
    )
    steps = [((e, s), batch) for e, batches in enumerate(epochs) for s, batch in enumerate(batches)]
    return steps[: len(alone.steps)]


def _check_epochs(
    chain: Chain,
    expected: list[tuple[tuple[int, int], list[int]]],
    found: Counter[str],
) -> None:
    """By rows an epoch that was served whole has each example once."""
    if chain.kind != "full rows" or chain.order["tail"] != "keep":
        return
    last = expected[-1][0][0] if expected else 0
    for epoch in range(last):
        served = sorted(i for (of, _), examples in expected for i in examples if of == epoch)
        found["wrong: an epoch"] += served != list(range(len(chain.examples)))
        found["epochs"] += 1


def _step_faults(
    chain: Chain, step: Step, by_one: Step, position: tuple[int, int], examples: list[int]
) -> list[tuple[str, bool]]:
    read, read_by_one = (sorted(i for part in of.parts for i in part) for of in (step, by_one))
    trained = sum(truth.num_trained(chain.examples[i]) for i in examples)
    same_packing = all(leg.packing == chain.legs[0].packing for leg in chain.legs)
    parts = step.parts
    if not chain.is_packed:
        parts = [truth.part_of(examples, r, len(step.parts)) for r in range(len(step.parts))]
    return [
        ("position", step.position != position),
        ("examples", read != sorted(examples)),
        ("examples of the unbroken run", read_by_one != sorted(examples)),
        ("num_loss_tokens", step.num_loss_tokens != trained),
        ("the parts of the ranks", step.parts != parts),
        ("metadata", step.named != {position}),
        ("rows", chain.kind == "rows" and same_packing and step.rows != by_one.rows),
        ("full rows", chain.kind in BY_ROWS and sorted(step.rows) != sorted(by_one.rows)),
    ]


def _check_lineage(
    broken: Runner,
    expected: list[tuple[tuple[int, int], list[int]]],
    found: Counter[str],
) -> None:
    """Check ``examples`` and ``when`` of the last run's sampler for every step served."""
    sampler = broken.last
    for position, examples in expected:
        said = sampler.examples(*position).tolist()
        found["wrong: examples()"] += said != examples
        for example in set(examples[:2] + examples[-1:]):
            found["wrong: when()"] += position not in sampler.when(example, position[0])
        found["lineages"] += 1


def run(num_chains: int, seed: int, *, num_with_workers: int = 0) -> tuple[Counter[str], list[str]]:
    """Counts over all chains, by kind, and what to tell of the chains that were wrong."""
    total: Counter[str] = Counter()
    told: list[str] = []
    for number in range(num_chains):
        rng = np.random.default_rng([seed, number])
        kind = [*KINDS, "stream"][number % (len(KINDS) + 1)]
        try:
            if kind == "stream":
                found = stream_chain(rng, with_workers=number < num_with_workers)
            else:
                chain = random_chain(rng, kind, with_workers=number < num_with_workers)
                found = check_chain(chain)
        except Exception as error:
            last = traceback.format_exc().strip().splitlines()[-4:]
            found = Counter({f"wrong: {type(error).__name__}": 1})
            told.append(f"chain {number} ({kind}): {error!r:.300}\n    " + "\n    ".join(last))
        wrong = {k: n for k, n in found.items() if k.startswith("wrong") and n}
        if wrong and not (told and told[-1].startswith(f"chain {number} ")):
            told.append(f"chain {number} ({kind}): {wrong}")
        total.update({f"{kind}: {k}": n for k, n in found.items() if n})
    return total, told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chains", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--with-workers", type=int, default=20, help="chains with workers")
    given = parser.parse_args()
    logging.getLogger("torch_collate_kit").setLevel(logging.ERROR)
    begin = time.perf_counter()
    total, told = run(given.chains, given.seed, num_with_workers=given.with_workers)
    print("\n".join(told[:20]))
    for name, count in sorted(total.items()):
        print(f"{name:45} {count:9,}")
    num_wrong = sum(count for name, count in total.items() if "wrong" in name)
    print(f"{given.chains} chains, {num_wrong} mismatches, {time.perf_counter() - begin:.0f} s")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
