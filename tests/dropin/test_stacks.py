"""What examples/dropin/README.md says of the stacks: where they are not exact, with the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader

import torch_collate_kit as kit
from tests.dropin.launching import FOLDER, load_script, skip_without

tiny = load_script("tiny")


def test_lightning_resumes_a_stream_without_a_length_one_batch_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without("lightning", "torchdata")
    monkeypatch.syspath_prepend(FOLDER)
    script = load_script("lightning_stream")
    monkeypatch.setattr(script, "Steps", lambda loader, num_steps: loader)
    whole = script.train(str(tmp_path))
    rest = script.train(str(tmp_path), str(tmp_path / f"step={script.SAVE_AFTER}.ckpt"))
    assert rest.numbers[:5] == whole.numbers[script.SAVE_AFTER + 1 :][:5]


def prepare_in_ray(config: dict[str, Any]) -> dict[str, str]:
    """What comes out of prepare_data_loader, with and without its sampler."""
    import ray.train.torch

    collate = kit.PackedCollator(tiny.PAD, max_tokens=tiny.MAX_TOKENS)
    examples = tiny.make_examples(16)
    loader = DataLoader(
        examples,
        batch_sampler=BatchSampler(range(16), batch_size=8, drop_last=False),
        collate_fn=collate,
    )
    found = {}
    for name, settings in (("defaults", {}), ("no sampler", {"add_dist_sampler": False})):
        prepared = ray.train.torch.prepare_data_loader(loader, **settings)
        try:
            batch = next(iter(prepared))
            found[name] = f"{type(batch).__name__} with {', '.join(sorted(batch))}"
        except kit.DataError as error:
            found[name] = f"DataError: {error}"
    return found


def test_ray_rebuilds_a_batch_and_loses_its_sampler(tmp_path: Path) -> None:
    skip_without("ray")
    import ray
    import ray.train.torch

    ray.init(num_cpus=3, log_to_driver=False)
    try:
        result = ray.train.torch.TorchTrainer(
            prepare_in_ray,
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=str(tmp_path)),
        ).fit()
    finally:
        ray.shutdown()
    found = result.return_value
    assert found["no sampler"].startswith("dict with attention_mask,")
    assert "its input_ids are the tokens of one example" in found["defaults"]


def trl_trainer(folder: Path, examples: Any, collate: Any, **settings: Any) -> Any:
    import trl

    options = {"max_steps": 1, "max_length": None, "use_cpu": True, "bf16": False, "report_to": []}
    return trl.SFTTrainer(
        tiny.make_model(),
        trl.SFTConfig(output_dir=str(folder), **options, **settings),
        train_dataset=examples,
        data_collator=collate,
        processing_class=tiny.make_tokenizer(),
    )


def test_trl_takes_no_loss_mask_and_counts_the_width_of_a_batch(tmp_path: Path) -> None:
    skip_without("trl", "peft")
    import datasets

    tokenizer = tiny.make_tokenizer()
    chats = datasets.Dataset.from_list(tiny.make_chats(8))
    collate = kit.PackedCollator(tokenizer, max_tokens=tiny.MAX_TOKENS).for_trainer()
    examples, _ = kit.tokenize_chat_dataset(chats, tokenizer)
    assert "loss_mask" in examples.column_names
    inputs = next(iter(trl_trainer(tmp_path, examples, collate).get_train_dataloader()))
    num_tokens = sum(len(ids) for ids in examples["input_ids"])
    assert int((inputs["labels"] != -100).sum()) == num_tokens - 8, "all but the first tokens"
    assert sum(sum(mask) for mask in examples["loss_mask"]) < num_tokens / 2, "of which half should"

    examples, _ = kit.tokenize_chat_dataset(chats, tokenizer, kit.ChatOptions(labels=True))
    counting = {"logging_steps": 1, "include_num_input_tokens_seen": "non_padding"}
    batch = {"per_device_train_batch_size": 8}
    trainer = trl_trainer(tmp_path, examples, collate, **counting, **batch)
    trainer.train()
    logged = trainer.state.log_history[0]
    rows, width = collate(list(examples))["input_ids"].shape
    assert rows > 1
    assert logged["num_tokens"] == width
    assert logged["num_input_tokens_seen"] == sum(map(len, examples["input_ids"])) > width
