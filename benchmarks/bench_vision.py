"""What images add to collation: patches joined, sent to another process, and given to a model.

Claimed: collating processed examples takes no longer than ``torch.cat`` of the same pixels into the
dtype that is asked for, and the text of an example takes less than 0.2 ms.

    python benchmarks/bench_vision.py

Half of the examples are text only; images are drawn, of different sizes, and processed as
Qwen3-VL's are, with up to 1024 x 1024 pixels. "Plain" is the code that people write:
``tokenizer.pad``, ``pad_sequence`` and ``torch.cat``. TRL's collator is called as its SFTTrainer
does. Times are CPU seconds of the process, so other work on the machine moves them less; only what
goes through a DataLoader worker is measured by the clock. The GPU has a script of its own,
``gpu/bench_vision_gpu.py``.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import peers
import torch
from harness import Report, Times, alternate, arguments, timed
from image_samples import image_mix, processed, qwen3_layout, qwen3_processor, records
from runs import delivery, ready
from samples import real_mix
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3VLConfig
from vision_step import compare_steps

from torch_collate_kit import (
    ModelCost,
    PackedCollator,
    PaddedCollator,
    ParallelLayout,
    VisionLanguageCollator,
    pack,
    tokenize_chat,
)
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.vision import VisionLayout

MAX_TOKENS = 8192
PLANNED_TOKENS, PLANNED_PATCHES = 16384, 16384
Examples = list[dict[str, Any]]


def plain(examples: Examples, processor: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Padded on the right; labels, token types and pixels joined by hand."""
    ids = [{"input_ids": example["input_ids"]} for example in examples]
    batch = dict(processor.tokenizer.pad(ids, padding=True, return_tensors="pt"))
    labels = [torch.from_numpy(example["labels"]) for example in examples]
    batch["labels"] = pad_sequence(labels, batch_first=True, padding_value=-100)
    batch["mm_token_type_ids"] = (batch["input_ids"] == processor.image_token_id).long()
    with_images = [example for example in examples if "pixel_values" in example]
    batch["pixel_values"] = joined([e["pixel_values"] for e in with_images], dtype)
    grids = [torch.from_numpy(example["image_grid_thw"]) for example in with_images]
    batch["image_grid_thw"] = torch.cat(grids)
    return batch


def joined(pixels: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    """``torch.cat`` of the arrays, each converted before where that is needed."""
    return torch.cat([torch.from_numpy(array).to(dtype) for array in pixels])


def measured(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Times]:
    """CPU seconds of the second of two batches in a row, as in a training loop.

    The first one gets its memory from the system, which may have lent it to others meanwhile.
    """

    def second(run: Callable[[], float]) -> Callable[[], float]:
        return lambda: (run(), run())[1]

    clocked = {name: second(timed(run, time.process_time)) for name, run in runs.items()}
    return alternate(clocked, rounds=rounds, warm_up=1)


def check_pixels(batch: Any, expected: Mapping[str, Tensor]) -> None:
    """Raises unless the batch, whose rows are the examples, has the images and ids of the other."""
    inputs = batch.model_inputs("sdpa")
    for name in ("pixel_values", "image_grid_thw"):
        if not torch.equal(inputs[name], expected[name]):
            raise AssertionError(f"{name} differ")
    kept, theirs = inputs["attention_mask"].bool(), expected["attention_mask"].bool()
    if not torch.equal(inputs["input_ids"][kept], expected["input_ids"][theirs]):
        raise AssertionError("input_ids differ")


def collation(report: Report, examples: Examples, processor: Any, rounds: int) -> None:
    """Processed examples: ours, the plain code, and the pixels alone."""
    pixels = [example["pixel_values"] for example in examples if "pixel_values" in example]
    for name in ("float32", "bfloat16"):
        dtype, vision = getattr(torch, name), qwen3_layout(processor, name)
        padded = PaddedCollator(processor, vision=vision)
        packed = PackedCollator(processor, max_tokens=MAX_TOKENS, vision=vision)
        by_hand = partial(plain, examples, processor, dtype)
        check_pixels(padded(examples), by_hand())
        runs: dict[str, Callable[[], Any]] = {
            "padded, collate": partial(padded, examples),
            "padded, ready": lambda padded=padded: ready(padded(examples)),
            "packed, collate": partial(packed, examples),
            "packed, ready": lambda packed=packed: ready(packed(examples)),
            "plain": by_hand,
            "torch.cat of the pixels": partial(joined, pixels, dtype),
        }
        times = measured(runs, rounds)
        report.times(f"processed examples, {name}", times)
        base = times["torch.cat of the pixels"].median
        rows = [[key, *t.cells(), f"{t.median / base:.2f}x"] for key, t in times.items()]
        size = sum(array.nbytes for array in pixels) / 1e6
        note = f"CPU ms; {len(examples)} examples, {size:.0f} MB of float32 pixels. Ready: fields, "
        note += "positions and doubled frames made on the CPU; else the device makes them."
        header = ["", "median", "quartiles", "minimum", "times torch.cat"]
        report.table(f"Processed examples, {name}", header, rows, note)
        for stage in ("collate", "ready"):
            ratio = max(times[f"{kind}, {stage}"].median / base for kind in ("padded", "packed"))
            report.target(f"{stage}, {name}, against torch.cat", ratio, "<x", 1)


def text_alone(report: Report, examples: Examples, processor: Any, rounds: int) -> None:
    """The same ids and grids with one number per patch: what is left without pixels."""
    layout = VisionLayout("qwen3_vl", processor.image_token_id, merge_size=2, patch_shape=(1, 1, 1))
    thin = [
        {**e, "pixel_values": np.ascontiguousarray(e["pixel_values"][:, :1])}
        if "pixel_values" in e
        else e
        for e in examples
    ]
    packed = PackedCollator(processor, max_tokens=MAX_TOKENS, vision=layout)
    times = measured(
        {"collate": lambda: packed(thin), "ready": lambda: ready(packed(thin))}, rounds
    )
    report.times("text", times)
    for stage, of_stage in times.items():
        ms = 1e3 * of_stage.median / len(thin)
        report.target(f"text of an example, packed, {stage}", ms, "< ms", 0.2)


def joining(report: Report, examples: Examples, processor: Any, rounds: int) -> None:
    """Bytes of a batch at rest and pickled, and its way through a worker."""
    pixels = [example["pixel_values"] for example in examples if "pixel_values" in example]
    makers: dict[str, Callable[[], Any]] = {
        "torch.cat, float32": partial(joined, pixels, torch.float32),
        "torch.cat, then to bfloat16": lambda: joined(pixels, torch.float32).bfloat16(),
        "torch.cat of bfloat16": partial(joined, pixels, torch.bfloat16),
    }
    for name in ("float32", "bfloat16"):
        layout = qwen3_layout(processor, name)
        collate = PackedCollator(processor, max_tokens=MAX_TOKENS, vision=layout)
        makers[f"packed batch, {name}"] = partial(collate, examples)
    times = measured(makers, rounds)
    # each run has batches that are not timed
    crossing = {key: delivery(make) for key, make in makers.items()}
    delivered = alternate(crossing, rounds=2, warm_up=0)
    report.times("joining", times)
    report.times("joining, delivered", delivered)
    rows = []
    for key, make in makers.items():
        made = make()
        stored, sent = made.nbytes, len(pickle.dumps(made, protocol=5))
        report.data[f"bytes, {key}"] = {"stored": stored, "pickled": sent}
        megabytes = (f"{size / 1e6:.1f}" for size in (stored, sent))
        ms = (f"{1e3 * t[key].median:.3g}" for t in (times, delivered))
        rows.append([key, *megabytes, *ms])
    note = "The batch has the text, too. One of two equal frames is stored. Delivered: ms by the "
    note += "clock from batch to batch, through one worker."
    report.table("Pixels", ["", "MB stored", "MB pickled", "CPU ms", "delivered"], rows, note)


def from_records(report: Report, made: Examples, processor: Any, rounds: int) -> None:
    """Conversations with PIL images: processed in the collator, ours and TRL's."""
    padded = VisionLanguageCollator(processor)
    config = Qwen3VLConfig()
    packed = VisionLanguageCollator(processor, config=config, max_tokens=MAX_TOKENS)
    runs: dict[str, Callable[[], Any]] = {
        "process: tokenize_chat of each": lambda: [
            tokenize_chat(record, processor) for record in made
        ],
        "padded, collate": lambda: padded(made),
        "padded, ready": lambda: ready(padded(made)),
        "packed, collate": lambda: packed(made),
        "packed, ready": lambda: ready(packed(made)),
    }
    theirs = peers.trl_vision(processor)
    if theirs is None:
        report.text("TRL is not installed.")
    else:
        check_pixels(padded(made), theirs(made))
        runs["TRL vision"] = lambda: theirs(made)
    times = measured(runs, rounds)
    report.times("records", times)
    base = times["padded, ready"].median
    rows = [[key, *t.cells(), f"{t.median / base:.2f}x"] for key, t in times.items()]
    note = f"CPU ms; {len(made)} conversations, images decoded. TRL's are padded on the right; it "
    note += "makes no positions, and trains all tokens, those of images too."
    header = ["", "median", "quartiles", "minimum", "times padded, ready"]
    report.table("Conversations, images processed in the collator", header, rows, note)


def planning(report: Report, data: Any, count: int, rounds: int) -> None:
    """Two budgets against one, on the same examples and 8 ranks."""
    lengths, what = real_mix(data, count, longest=4096)
    tokens, (patches, offsets) = image_mix(lengths, longest=PLANNED_TOKENS)
    load, cost, ranks = Ragged(patches, offsets), ModelCost(), ParallelLayout(dp=8)
    runs = {
        "tokens alone": lambda: pack(tokens, PLANNED_TOKENS, parallel=ranks),
        "tokens and patches": lambda: pack(
            tokens, PLANNED_TOKENS, patches=load, max_patches=PLANNED_PATCHES, parallel=ranks
        ),
    }
    times = alternate(
        {name: timed(run, time.process_time) for name, run in runs.items()},
        rounds=rounds,
        warm_up=1,
    )
    report.times(f"planning, {count}", times)
    before = np.append(0, np.cumsum(patches)), np.append(0, np.cumsum(cost.vision(patches)))
    of_examples, vision_costs = (np.diff(sums[offsets]) for sums in before)
    rows = []
    for name, run in runs.items():
        plan = run()
        assert np.array_equal(np.sort(plan.example_indices), np.arange(count))
        per_row = np.add.reduceat(of_examples[plan.example_indices], plan.row_offsets[:-1])
        assert name == "tokens alone" or per_row.max() <= PLANNED_PATCHES
        in_rows = np.add.reduceat(vision_costs[plan.example_indices], plan.row_offsets[:-1])
        ranks = (plan.cost_per_rank, in_rows.reshape(8, -1).sum(axis=1))
        uneven = (f"{of.max() / of.mean():.4f}" for of in ranks)
        fill = f"{tokens.sum() / (plan.num_rows * PLANNED_TOKENS):.2%}"
        patched = f"{of_examples.sum() / (plan.num_rows * PLANNED_PATCHES):.2%}"
        ms = f"{1e3 * times[name].median:.4g}"
        cells = (f"{plan.num_rows:,}", fill, patched, f"{per_row.max():,}")
        rows.append([name, ms, *cells, *uneven])
    header = ["plan", "CPU ms", "rows", "tokens filled", "patches filled", "most patches of a row"]
    header += ["language, max / mean of 8 ranks", "vision"]
    note = f"Text: {what}. {len(patches):,} images; rows of {PLANNED_TOKENS} tokens and "
    note += f"{PLANNED_PATCHES} patches."
    report.table(f"Plans of {count:,} examples", header, rows, note)


def main() -> None:
    parser = arguments(__doc__, rounds=9)
    parser.add_argument("--examples", type=int, default=32, help="of a batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    claim = (
        "Collating examples whose images are processed takes no longer than torch.cat of their "
        "pixels into the dtype asked for; the text of an example takes less than 0.2 ms."
    )
    report = Report("vision", claim)
    processor = qwen3_processor(1024)
    made = records(options.examples, (160, 1100))
    examples = processed(made, processor)
    collation(report, examples, processor, options.rounds)
    text_alone(report, examples, processor, options.rounds)
    joining(report, examples, processor, options.rounds)
    from_records(report, made, processor, min(options.rounds, 3))
    compare_steps(report, min(options.rounds, 3))
    planning(report, options.data, 1_000_000, min(options.rounds, 3))
    planning(report, options.data, 1_024, 5 * options.rounds)
    report.write(options.out)


if __name__ == "__main__":
    main()
