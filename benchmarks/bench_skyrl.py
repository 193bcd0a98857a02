"""How long SkyRL's collators take, release and main branch, against ours with the same fields made.

Claimed, for 1,024 examples, medians of alternating runs in one process, one thread, with the fields
made on the CPU that SkyRL makes (ids, attention mask, loss mask; of rollouts also response mask,
rewards and log-probs): SkyRL's main branch takes at least 1.2 times as long for packed arrays, 1.0
for padded arrays, and 1.5 for lists, columns and rollouts.

    SKYRL_MAIN=path/of/a/checkout python benchmarks/bench_skyrl.py  # measured: a9564572

Both get the same examples, each in its own form: SkyRL reads ``num_actions`` and the
mask of these, and no columns, so ours are compared with its arrays. Seconds are CPU seconds
of the process, which other work on the machine moves less. Three things of ours are timed:

- **all fields**: the call, and the fields that SkyRL makes, on the CPU;
- **step**: the call, and the fields that a step reads, on the device (the CPU where there is no
  GPU), as ``model_inputs`` and the loss do: labels and positions too, no attention mask of packed
  rows;
- **call**: what the host does where fields are made on the device. SkyRL has no other than all.

SkyRL's padded collator divides the loss mask in a further pass, which is in its time, as it is in
ours; without it, its function ``collate_sft_batch`` alone is in the table, too.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
from harness import Report, Times, alternate, arguments, timed
from runs import columns_of, lists_of, ready
from samples import Examples, examples_of, real_mix, rollouts_of

from torch_collate_kit import Batch, PackedCollator, PaddedCollator, RolloutCollator

FIELDS = ("input_ids", "attention_mask", "loss_mask")
OF_ROLLOUTS = (*FIELDS, "response_mask", "rewards", "rollout_logprobs")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADER = ["from", "SkyRL", "its median", "ours, all fields", "times ours", "step", "call"]


def with_actions(examples: Examples) -> Examples:
    """Examples in the form that SkyRL reads; lists without the mask of ones that we do not need."""
    given = []
    for example in examples:
        ids, count = example["input_ids"], int(example["loss_mask"].sum())
        masks = {"attention_mask": np.ones_like(ids), "loss_mask": np.ones(count, np.int64)}
        given.append({"input_ids": ids, "num_actions": np.int64(count), **masks})
    return given


def all_fields(batch: Batch, names: tuple[str, ...]) -> Batch:
    for name in names:
        batch[name]
    return batch


def step(batch: Batch) -> Batch:
    batch = ready(batch.to(DEVICE))
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return batch


def compare(
    report: Report,
    heading: str,
    collate: Callable[[Any], Batch],
    inputs: Mapping[str, Any],
    theirs: Mapping[str, tuple[Callable[[Any], Any] | None, tuple[str, ...]]],
    names: tuple[str, ...],
    rounds: int,
    about: str,
) -> None:
    """The table of one layout; ``theirs`` are SkyRL's collators with the forms that they take."""
    runs: dict[str, Callable[[], Any]] = {}
    for form, given in inputs.items():
        runs[f"all fields, {form}"] = lambda given=given: all_fields(collate(given), names)
        runs[f"step, {form}"] = lambda given=given: step(collate(given))
        runs[f"call, {form}"] = partial(collate, given)
    for name, (other, forms) in theirs.items():
        for form in forms if other is not None else ():
            runs[f"{name}, {form}"] = partial(other, inputs[form])
            same_tokens(runs[f"{name}, {form}"](), collate(inputs[form]), names)
    gc.collect()
    gc.freeze()  # or every collection walks through all lists, and the caches are cold after it
    clocked = {name: timed(run, time.process_time) for name, run in runs.items()}
    times = alternate(clocked, rounds=rounds, warm_up=2)
    gc.unfreeze()
    report.times(heading, times)
    rows = []
    for form in inputs:
        for name, (other, _) in theirs.items():
            key = f"{name}, {form if f'{name}, {form}' in times else 'arrays'}"
            if other is None or key not in times:
                continue
            rows.append([form, key, *cells(times, key, form)])
    note = f"ms of CPU; {about}; steps on {DEVICE.type}; medians of {rounds} rounds."
    report.table(heading, HEADER, rows, note)
    least = {"packed, arrays": 1.2, "padded, arrays": 1.0}
    name = peers.skyrl_main_name()
    for form in inputs:
        if f"{name}, {form}" in times or form == "columns":
            other = f"{name}, {form if f'{name}, {form}' in times else 'arrays'}"
            factor = times[other].median / times[f"all fields, {form}"].median
            wanted = least.get(f"{heading}, {form}", 1.5)
            report.target(f"{heading}: {name} over ours, {form}", factor, "x", wanted)


def cells(times: Mapping[str, Times], key: str, form: str) -> list[str]:
    ours = times[f"all fields, {form}"].median
    ms = [1e3 * times[f"{of}, {form}"].median for of in ("step", "call")]
    factor = f"{times[key].median / ours:.2f}x"
    return [
        f"{1e3 * times[key].median:.3g}",
        f"{1e3 * ours:.3g}",
        factor,
        *(f"{m:.3g}" for m in ms),
    ]


def same_tokens(other: Any, batch: Batch, names: tuple[str, ...]) -> None:
    """Raises unless the other one has our tokens."""
    ids = other[0] if isinstance(other, tuple) else other["sequences"]
    if int(ids.sum()) != int(batch["input_ids"].sum()):
        raise AssertionError("not the tokens of the examples")


def layouts(report: Report, folder: Path, rounds: int) -> None:
    count, max_tokens = 1024, 8192
    lengths, what = real_mix(folder, count, longest=max_tokens)
    name = peers.skyrl_main_name()
    collators: dict[str, tuple[int, Any, dict[str, Any]]] = {
        "packed": (
            max_tokens,
            PackedCollator(0, max_tokens=max_tokens),
            {
                "SkyRL 0.3.0": (peers.skyrl_packed(max_tokens), ("lists",)),
                name: (peers.skyrl_packed(max_tokens, main=True), ("lists", "arrays")),
            },
        ),
        "padded": (
            2048,
            PaddedCollator(0),
            {
                "SkyRL 0.3.0": (peers.skyrl_padded(), ("lists",)),
                name: (peers.skyrl_padded(main=True), ("lists", "arrays")),
                f"{name}, undivided": (
                    peers.skyrl_padded(main=True, normalized=False),
                    ("lists", "arrays"),
                ),
            },
        ),
    }
    for layout, (longest, collate, theirs) in collators.items():
        examples = examples_of(np.minimum(lengths, longest))
        arrays = with_actions(examples)
        inputs = {"columns": columns_of(examples), "arrays": arrays, "lists": lists_of(arrays)}
        tokens = sum(len(example["input_ids"]) for example in examples)
        about = f"{count} examples, {tokens:,} tokens, {what}, cut at {longest}"
        compare(report, layout, collate, inputs, theirs, FIELDS, rounds, about)


def rollouts(report: Report, folder: Path, rounds: int) -> None:
    lengths, what = real_mix(folder, 1024, longest=2048)
    examples = rollouts_of(lengths)
    lists = lists_of(examples)
    for example in lists:
        example["loss_mask"] = list(map(int, example["loss_mask"]))  # as SkyRL declares it
    inputs = {"columns": columns_of(examples), "arrays": examples, "lists": lists}
    theirs: dict[str, Any] = {
        "SkyRL 0.3.0": (peers.skyrl_rollouts(), ("lists",)),
        peers.skyrl_main_name(): (peers.skyrl_rollouts(main=True), ("lists", "arrays")),
    }
    about = f"1024 rollouts, {int(lengths.sum()):,} tokens, {what}, cut at 2048"
    compare(report, "rollouts", RolloutCollator(0), inputs, theirs, OF_ROLLOUTS, rounds, about)


def main() -> None:
    parser = arguments(__doc__, rounds=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    claim = (
        "1,024 examples, the fields that SkyRL makes, on the CPU: its main branch takes at least "
        "1.0x as long for padded arrays, 1.2x for packed arrays, 1.5x for lists, columns and "
        "rollouts."
    )
    report = Report("skyrl", claim)
    layouts(report, options.data, options.rounds)
    rollouts(report, options.data, options.rounds)
    report.write(options.out)


if __name__ == "__main__":
    main()
