"""Batches for the tests of Batch, and their contents as Python values."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import torch

from torch_collate_kit.batch import Batch, PerExample, PerResponseToken, PerToken
from torch_collate_kit.collators import PackedCollator, PaddedCollator, RolloutCollator
from torch_collate_kit.packing import ParallelLayout
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.vision import VisionLayout

LENGTHS = (5, 3, 4, 2, 7)


def examples(lengths: Any = LENGTHS) -> list[dict[str, list[int]]]:
    """Token t of example i is 100 * i + t + 1."""
    return [{"input_ids": [100 * i + t + 1 for t in range(n)]} for i, n in enumerate(lengths)]


def loose() -> Batch:
    """Not from a collator: fields of many kinds, and metadata of all kinds."""
    return Batch(
        {
            "ids": torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]),
            "rewards": torch.tensor([0.5, 1.5, 2.5, 3.5]),
            "half": torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.bfloat16),
            "kept": torch.tensor([True, False, True, True]),
            "words": Ragged.from_rows([[1], [2, 3], [], [4, 5, 6]]),
        },
        row_metadata={
            "uids": ["a", "b", "c", "d"],
            "turns": np.array([1, 2, 3, 4]),
            "scores": torch.tensor([0.1, 0.2, 0.3, 0.4]),
            "parts": Ragged.from_rows([[0], [], [1, 2], [3]]),
        },
        metadata={
            "step": 7,
            "name": "run",
            "limits": (1, 2, 3),
            "options": {"x": [1]},
            "nothing": None,
        },
    )


def masked_examples(form: str = "loss_mask") -> list[dict[str, Any]]:
    """SFT examples with weights, a 0/1 mask, or labels that are not the ids."""
    weights = {"loss_mask": (0, 1, 0.5), "completion_mask": (0, 1, 1)}
    found: list[dict[str, Any]] = examples()
    for i, example in enumerate(found):
        ids = example["input_ids"]
        if form == "labels":
            example["labels"] = [t + 1 if (i + t) % 3 else -100 for t in ids]
        else:
            example[form] = [weights[form][(i + t) % 3] for t in ids]
    return found


def rollouts(*, images: bool = False) -> list[dict[str, Any]]:
    """Rollouts with everything that one may have."""
    found: list[dict[str, Any]] = []
    for i, (prompt, response) in enumerate([(2, 3), (4, 1), (1, 2), (3, 4)]):
        found.append(
            {
                "prompt_ids": [10 * i + t + 1 for t in range(prompt)],
                "response_ids": [100 * i + t + 1 for t in range(response)],
                "rewards": 0.5 * i,
                "loss_mask": [(i + t) % 2 for t in range(response)],
                "logprobs": [-0.25 * t for t in range(response)],
                "advantages": [0.125 * (t + i) for t in range(response)],
                "rollout_expert_indices": np.arange(prompt * 6).reshape(prompt, 2, 3) % 5,
                "uid": f"u{i // 2}",
            }
        )
        if images:
            grids = [[1, 2, 2]] * (i % 3)
            patches = np.arange(12.0 * len(grids)).reshape(-1, 3) + i
            found[-1] |= (
                {"pixel_values": patches, "image_grid_thw": grids}
                if grids
                else {"pixel_values": None, "image_grid_thw": None}
            )
    return found


def image_examples() -> list[dict[str, Any]]:
    """Of a model with M-RoPE: two, one and no images; 7 is the placeholder."""
    found: list[dict[str, Any]] = []
    for i, grids in enumerate([[[1, 4, 4], [1, 2, 4]], [], [[1, 6, 2]], []]):
        ids = [100 * i + 8, *[7] * sum(h * w // 4 for _, h, w in grids), 100 * i + 9, 100 * i + 10]
        images = {"pixel_values": None, "image_grid_thw": None}
        if grids:
            patches = np.arange(sum(h * w for _, h, w in grids)) + 0.5 * i
            images = {"pixel_values": np.repeat(patches[:, None], 6, 1), "image_grid_thw": grids}
        found.append({"input_ids": ids, "labels": ids, **images})
    return found


def weighted(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**example, "weight": i % 3 / 2} for i, example in enumerate(given)]


VISION = VisionLayout("qwen3_vl", image_token_id=7, merge_size=2, patch_shape=(3, 2, 1))
DECLARED = {
    "name": PerExample(str),
    "type": PerToken(torch.int8, pad=3),
    "top": PerToken(torch.int16, pad=-1, shape=(2,)),
    "reference": PerResponseToken(torch.bfloat16),
    "domain": PerExample(torch.int64),
}


def declared_examples() -> list[dict[str, Any]]:
    """The examples with a mask of their last tokens, and an entry of every declared kind."""
    found = []
    for i, example in enumerate(examples()):
        length = len(example["input_ids"])
        own = {
            "name": f"example {i}",
            "type": [i % 3] * length,
            "top": [[10 * i + t, t] for t in range(length)],
            "reference": [0.5 * i] * (length - 1),
            "domain": i,
        }
        mask = {"loss_mask": [1] * (length - 1), "num_actions": length - 1}
        found.append({**example, **mask, **own})
    return found


def trees() -> list[dict[str, Any]]:
    """Examples whose segments share prefixes; one has a segment that no other shares."""
    return [
        {
            "input_ids": [[i, 2, 3], [i, 2, 4, 5], [i, 2, 4, 6, 7], [i, 2], [8 + i]],
            "loss_mask": [[0, 1, 1], [0, 0, 1, 0.5], [0, 1, 1, 1, 1], [0, 0], [0]],
        }
        for i in (1, 11, 21)
    ]


KINDS: dict[str, Any] = {  # a batch of every kind that collators make
    "left": lambda: PaddedCollator(9)(masked_examples()),
    "right": lambda: PaddedCollator(9, padding_side="right")(masked_examples("completion_mask")),
    "labels": lambda: PaddedCollator(9, pad_to_multiple_of=4)(masked_examples("labels")),
    "weighted labels": lambda: PaddedCollator(9)(weighted(masked_examples("labels"))),
    "packed": lambda: PackedCollator(9, max_tokens=8, strategy="best_fit_decreasing")(
        masked_examples()
    ),
    "packed labels": lambda: PackedCollator(9, max_tokens=8, strategy="best_fit_decreasing")(
        masked_examples("labels")
    ),
    "packed weighted labels": lambda: PackedCollator(9, max_tokens=8)(
        weighted(masked_examples("labels"))
    ),
    "aligned": lambda: PackedCollator(9, max_tokens=16, parallel=ParallelLayout(dp=2, tp=4))(
        masked_examples()
    ),
    "rollouts": lambda: RolloutCollator(9)(rollouts(images=True)),
    "packed rollouts": lambda: PackedCollator(9, max_tokens=9, strategy="best_fit_decreasing")(
        rollouts()
    ),
    "images": lambda: PaddedCollator(9, vision=VISION)(image_examples()),
    "packed images": lambda: PackedCollator(
        9, max_tokens=16, vision=VISION, parallel=ParallelLayout(dp=2, tp=2)
    )(image_examples()),
    "declared": lambda: PaddedCollator(9, fields=DECLARED)(declared_examples()),
    "packed declared": lambda: PackedCollator(9, max_tokens=16, fields=DECLARED)(
        declared_examples()
    ),
    "trees": lambda: PackedCollator(
        9, max_tokens=16, share_prefixes=True, parallel=ParallelLayout(dp=2, tp=2)
    )(trees()),
}
# Those that have a cell for each token, for oracles that go cell by cell.
APART = {name: make for name, make in KINDS.items() if name != "trees"}


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def contents(batch: Batch) -> dict[str, Any]:
    """All of a batch as Python values, so that two can be compared."""
    dtypes = {k: (v.values if isinstance(v, Ragged) else v).dtype for k, v in batch.items()}
    return {
        "rows": len(batch),
        "fields": {name: plain(field) for name, field in batch.items()},
        "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()},
        "row_metadata": {key: plain(value) for key, value in batch.row_metadata.items()},
        "metadata": dict(batch.metadata),
    }


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """All that is stored."""
    stored = batch.stored().items().values()
    return [field.values if isinstance(field, Ragged) else field for field in stored]


def storages_of(batch: Batch) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_of(batch)}


def functions_of_a_batch() -> set[str]:
    """The names of public functions that take a Batch."""
    found = set()
    modules = ("", "rl", "losses", "attention", "preference", "reporting", "batch")
    for module in (*modules, "loading", "packing", "testing", "vision", "chat", "collators"):
        of = importlib.import_module(f"torch_collate_kit{'.' if module else ''}{module}")
        for name in of.__all__:
            function = getattr(of, name)
            if inspect.isfunction(function) and "atch" in str(inspect.signature(function)):
                found.add(f"{module}.{name}" if module not in ("", "batch") else name)
    return found


def members_of_a_batch() -> set[str]:
    """The names of its public methods and properties."""
    return {name for name in dir(Batch) if not name.startswith("_")} - {"metadata"}
