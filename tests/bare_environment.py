"""What works with torch and NumPy alone, and what says which package it needs.

``make test-bare`` runs it in an environment that has nothing else installed, and
``tests/test_packaging.py`` where all other packages are hidden.
"""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

EXAMPLES = [{"input_ids": list(range(1, n + 1)), "labels": list(range(n))} for n in (7, 3, 5, 2)]
ROLLOUTS = [
    {"prompt_ids": [5, 6], "response_ids": [7] * n, "rewards": float(n), "loss_mask": [1] * n}
    | {"logprobs": [-0.5] * n, "uid": uid}
    for uid, n in (("a", 2), ("a", 1), ("b", 3), ("b", 2))
]


def batches() -> list[Any]:
    """Every collator, from every form of its input."""
    from torch_collate_kit import PackedCollator, PaddedCollator, ParallelLayout, RolloutCollator
    from torch_collate_kit.ragged import Ragged

    forms = [EXAMPLES]
    for kind in (np.array, torch.tensor):
        forms.append([{key: kind(ids) for key, ids in example.items()} for example in EXAMPLES])
    columns = {key: Ragged.from_rows([e[key] for e in EXAMPLES]) for key in EXAMPLES[0]}
    layout = ParallelLayout(dp=2, tp=2, cp=2)
    found = []
    for make in (
        PaddedCollator(0),
        PaddedCollator(0, padding_side="right", pad_to_multiple_of=8),
        PackedCollator(0, max_tokens=8),
        PackedCollator(0, max_tokens=16, parallel=layout, overflow="split", strategy="balanced"),
    ):
        same = [make(form) for form in (*forms, columns)]
        assert all(batch == same[0] for batch in same)
        found.append(same[0])
    assert PackedCollator(0, max_tokens=8).for_trainer()(EXAMPLES)["use_cache"] is False
    return [*found, RolloutCollator(0)(ROLLOUTS), PackedCollator(0, max_tokens=8)(ROLLOUTS)]


def check_batch(batch: Any) -> None:
    from torch_collate_kit import Batch, global_num_loss_tokens, token_loss
    from torch_collate_kit.testing import batch_digest

    assert len(Batch.cat([batch[:1], batch[1:]])) == len(batch)
    assert batch.select([0, 0])[1:] == batch[:1]
    assert len(batch.pad_rows(multiple_of=2)) % 2 == 0
    assert pickle.loads(pickle.dumps(batch)) == batch.to("cpu") == batch
    assert batch_digest(batch.with_fields(x=torch.zeros(len(batch)))) != batch_digest(batch)
    assert repr(batch)
    assert batch.model_inputs("sdpa", mask="block", labels=False)["use_cache"] is False
    assert "input_ids" in batch.model_inputs(labels=False)
    logits = torch.zeros(*batch["input_ids"].shape, 32, requires_grad=True)
    token_loss(logits, batch, num_loss_tokens=global_num_loss_tokens(batch)).backward()
    assert logits.grad.abs().sum() > 0


def check_packing() -> None:
    from torch_collate_kit import ParallelLayout, pack

    for strategy in ("best_fit_decreasing", "first_fit_decreasing", "balanced", "sequential"):
        layout = ParallelLayout(dp=2)
        plan = pack([7, 3, 5, 2, 9], 8, strategy=strategy, parallel=layout, overflow="truncate")
        assert sorted(plan.example_indices.tolist()) == [0, 1, 2, 3, 4]


def check_rl() -> None:
    from torch_collate_kit import RolloutCollator, rl

    batch = RolloutCollator(0)(ROLLOUTS)
    uids, mask = batch.row_metadata["uids"], batch["response_mask"]
    for estimator in ("grpo", "grpo_no_std", "rloo", "maxrl"):
        found = rl.compute_advantages(batch["rewards"], mask, uids, estimator=estimator)
    boundaries = rl.mini_batch_boundaries(uids, prompts_per_mini_batch=1)
    found = rl.normalize_advantages(found, batch["loss_mask"], boundaries, reduction="token_mean")
    batch = batch.with_fields(advantages=found)
    staged = rl.stage_mini_batches(batch, boundaries, dp_size=2)
    outputs = [[part["advantages"] for part in ranks] for ranks in staged]
    assert torch.equal(rl.unstage(staged, outputs), found)
    assert [len(row) for row in rl.response_values(found, mask)] == [2, 1, 3, 2]
    steps = [{**ROLLOUTS[0], "is_last_step": False}, {**ROLLOUTS[0], "is_last_step": True}]
    steps[1]["prompt_ids"] = [5, 6, 7, 7, 8]
    assert len(rl.merge_steps(steps)) == 1


def check_loading() -> None:
    from torch_collate_kit import (
        Mixture,
        PackedBatchSampler,
        PackedCollator,
        PackedIterableDataset,
        PrefetchingSampler,
        PrefetchLoader,
        TokenizedDataset,
    )
    from torch_collate_kit.testing import assert_exact_resume

    dataset = TokenizedDataset(EXAMPLES)
    collate = PackedCollator(0, max_tokens=8)

    def loader(sampler: Any, **options: Any) -> Any:
        return PrefetchLoader(
            DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, **options)
        )

    def packed() -> Any:
        return PackedBatchSampler(dataset, PackedCollator(0, max_tokens=8), batch_size=2)

    assert_exact_resume(
        lambda: loader(PrefetchingSampler(dataset, batch_size=2, seed=1)), num_steps=3
    )
    assert_exact_resume(lambda: loader(packed(), num_workers=1), num_steps=2)
    mixed = PrefetchingSampler(
        Mixture([dataset, dataset], weights=[1, 2], by="tokens"), batch_size=2
    )
    assert len(next(iter(mixed))) == 2

    def stream() -> Any:
        return PackedIterableDataset(EXAMPLES, PackedCollator(0, max_tokens=8), buffer_size=2)

    assert_exact_resume(stream, num_steps=3)
    dataset_of_batches = stream()
    workers = DataLoader(
        dataset_of_batches, batch_size=None, collate_fn=dataset_of_batches.as_is, num_workers=1
    )
    assert sum(batch.metadata["num_examples"] for batch in workers) == len(EXAMPLES)


def needs() -> dict[str, Any]:
    """What needs a package, by the message that must come without it."""
    from torch_collate_kit import (
        TokenizedDataset,
        packing_report,
        register_torch_varlen,
        tokenize_chat,
        tokenize_chat_dataset,
    )

    def read(content: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "file"
            path.write_bytes(content)
            TokenizedDataset(path)

    report = packing_report([5, 3, 9], 16, show=False)
    assert "recommended: max_tokens=16" in repr(report)
    tokenizer = SimpleNamespace(chat_template="{{ messages }}", get_chat_template=None)
    turn = [{"role": "assistant", "content": "yes"}]
    return {
        "register_torch_varlen needs the package transformers: pip install transformers": (
            register_torch_varlen
        ),
        "tokenize_chat needs the package transformers: pip install transformers": (
            lambda: tokenize_chat({"messages": turn}, tokenizer)
        ),
        "tokenize_chat_dataset needs the package datasets: pip install datasets": (
            lambda: tokenize_chat_dataset([], tokenizer)
        ),
        "a plot needs the package matplotlib: pip install -e '.[plots]'": (report.plot),
        "reading Arrow files needs the package pyarrow: pip install pyarrow": lambda: read(b"ARR"),
        "reading Parquet files needs the package pyarrow: pip install pyarrow": (
            lambda: read(b"PAR1")
        ),
    }


def check_needs() -> None:
    for message, call in needs().items():
        try:
            call()
            found = "no error"
        except ImportError as error:
            found = str(error)
        assert found == message, f"{found}, in place of: {message}"


def main() -> None:
    for name in ("transformers", "datasets", "accelerate", "pyarrow"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        raise AssertionError(f"{name} is installed, so this environment is not bare")
    import torch_collate_kit

    for module in pkgutil.walk_packages(torch_collate_kit.__path__, "torch_collate_kit."):
        importlib.import_module(module.name)
    for batch in batches():
        check_batch(batch)
    check_packing()
    check_rl()
    check_loading()
    check_needs()
    print("torch and NumPy are enough")


if __name__ == "__main__":
    main()
