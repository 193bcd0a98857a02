"""Every drop-in script trains as one example at a time does: each loss within 1e-5, in float32.

The scripts write the loss of each step and the numbers of its examples. Here the reference is
computed again, from those numbers, with plain transformers and torch. `make dropin` runs them all.
"""

from __future__ import annotations

import math
import re
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

import torch_collate_kit as kit
from tests.dropin.launching import FOLDER, load_script, run_on_two_ranks, run_script, skip_without

tiny = load_script("tiny")

SCRIPTS = {  # ranks, and packages that the stack needs beside those of the tests
    "trainer": ((1, 2), ()),
    "ddp": ((2,), ()),
    "accelerate_loader": ((1, 2), ()),
    "controller": ((1,), ()),
    "sft_trainer": ((1, 2), ("trl", "peft")),
    "lightning_fit": ((1, 2), ("lightning",)),
    "ray_train": ((1,), ("ray",)),
    "stateful_loader": ((1,), ("torchdata",)),  # from here on streams
    "accelerate_stream": ((1, 2), ("torchdata",)),
    "lightning_stream": ((1,), ("lightning", "torchdata")),
    "ray_data": ((1,), ("ray",)),
}
OF_ROWS = (
    "trainer",
    "sft_trainer",
)  # 24 steps of four rows: two epochs, each in an order of its own
STOP_AFTER_20 = ("accelerate_stream", "lightning_stream")
CASES = [(name, num) for name, (ranks, _) in SCRIPTS.items() for num in ranks]
FORKED = [("accelerate_loader", 2), ("trainer", 2)]  # ranks without torchrun


@pytest.mark.parametrize(("script", "num_ranks"), CASES)
def test_losses_are_those_of_one_example_at_a_time(
    script: str, num_ranks: int, tmp_path: Path
) -> None:
    skip_without(*SCRIPTS[script][1])
    if (script, num_ranks) in FORKED:
        result = run_on_two_ranks(script, tmp_path)
    else:
        result = run_script(script, tmp_path, num_ranks=num_ranks)
    examples, numbers = tiny.make_examples(), result["numbers"]
    assert len(numbers) >= 20
    steps = [[examples[i] for i in step] for step in numbers]
    assert result["losses"] == pytest.approx(tiny.reference_losses(steps), abs=1e-5)
    first, last = np.mean(result["losses"][:5]), np.mean(result["losses"][-5:])
    assert last < first - 0.1, "nothing was learnt, so a step could be wrong unseen"
    seen = list(chain.from_iterable(numbers))
    if script in OF_ROWS:
        epochs = [list(chain(*numbers[:12])), list(chain(*numbers[12:]))]
        assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(160))
        assert epochs[0] != epochs[1]
        assert numbers[0] != sorted(numbers[0])
    else:
        assert len(set(seen)) == len(seen), "no example twice"
        assert len(seen) > 100 if script in STOP_AFTER_20 else sorted(seen) == list(range(160))
        if list(SCRIPTS).index(script) < list(SCRIPTS).index("stateful_loader"):
            assert [len(step) for step in numbers] == [8] * 20
    if script == "trainer":
        check_evaluation(result["printed"], {1: 3.106, 2: 3.103}[num_ranks])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_dpo_in_a_trainer_is_one_pair_at_a_time(num_ranks: int, tmp_path: Path) -> None:
    """The script has the reference, and ends with an error where a loss differs by 1e-5."""
    if num_ranks == 1:
        result = run_script("dpo_trainer", tmp_path)
    else:
        result = run_on_two_ranks("dpo_trainer", tmp_path)
    losses, numbers = result["losses"], result["numbers"]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6)
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.1
    assert set(chain.from_iterable(numbers)) == set(range(160))


def check_evaluation(printed: str, eval_loss: float) -> None:
    """The script compares each example with itself alone; the mean of Trainer is not exact."""
    assert "evaluation: 21 examples, the largest difference is" in printed
    for name, expected in (("eval_token_mean", 3.104), ("eval_loss", eval_loss)):
        found = re.search(rf"'{name}': '([\d.]+)'", printed)
        assert found is not None, printed
        assert float(found[1]) == pytest.approx(expected, abs=1e-3)


# --- The reference of the drop-ins is right, and a script with other losses ends with an error


def test_the_first_loss_by_hand_and_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over the tokens of two examples, from probabilities."""
    step = tiny.make_examples(count=2)
    model = tiny.make_model("eager")
    nll, count = 0.0, 0
    for example in step:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([example["input_ids"]])).logits[0].double()
        for at, label in enumerate(example["labels"]):
            if label != -100:
                probabilities = logits[at - 1].exp() / logits[at - 1].exp().sum()
                nll, count = nll - math.log(probabilities[label].item()), count + 1
    losses = tiny.reference_losses([step])
    assert losses == pytest.approx([nll / count], abs=1e-5)
    monkeypatch.setattr("sys.argv", ["script.py"])
    tiny.compare(losses, [[0, 1]])
    with pytest.raises(SystemExit, match=r"the losses differ by 2\.\de-05, more than 1e-05"):
        tiny.compare([losses[0] + 2e-5], [[0, 1]])


# --- What examples/dropin/README.md says of the stacks: where they are not exact, with the figures


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
