"""``step``: what it prints is what the run served, of every sampler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tests.building import mixed_sampler, packed_sampler
from tests.chat.chats import byte_tokenizer
from tests.test_command_line import CHATS, TEMPLATE, Run, folder, run
from torch_collate_kit import (
    Mixture,
    PrefetchingSampler,
    PrefetchLoader,
    TokenizedDataset,
    tokenize_chat_dataset,
)
from torch_collate_kit.packing import ParallelLayout

__all__ = ["folder", "run"]  # fixtures

ROWS = [
    {"input_ids": [i + 1] * (2 + i % 4), "labels": [-100, *[i + 1] * (1 + i % 4)]}
    for i in range(15)
]
DATA = TokenizedDataset(ROWS)


def samplers() -> dict[str, Any]:
    packed = {"max_tokens": 16, "parallel": ParallelLayout(dp=2, tp=2), "strategy": "balanced"}
    by_rows = {"max_tokens": 8, "parallel": ParallelLayout(dp=2)}
    counts = {"num_loss_tokens": DATA.num_loss_tokens}
    lengths = [DATA.lengths[:9], DATA.lengths[9:]]
    return {
        "prefetching": PrefetchingSampler(
            DATA, batch_size=4, seed=5, tail="wrap", dp_rank=0, dp_size=2
        ),
        "keyed": PrefetchingSampler(DATA, batch_size=4, shuffle="keyed", dp_rank=0, dp_size=2),
        "packed": packed_sampler(DATA.lengths, batch_size=4, seed=5, **packed, **counts),
        "packed, without counts": packed_sampler(DATA.lengths, batch_size=4, **packed),
        "mixed": mixed_sampler(
            [9, 6], batch_size=4, weights=[0.3, 0.7], seed=5, dp_rank=0, dp_size=2
        ),
        "by tokens": mixed_sampler(
            lengths, batch_size=4, by="tokens", stop="all_exhausted", dp_rank=0, dp_size=2
        ),
        "rows": packed_sampler(DATA.lengths, batch_rows=2, window=2, seed=5, **by_rows, **counts),
        "rows, cut": packed_sampler(
            DATA.lengths, batch_rows=2, **{**by_rows, "max_tokens": 4, "overflow": "split"}
        ),
        "mixed, by rows": packed_sampler(
            Mixture(
                lengths, weights=[1, 2], by="tokens", max_passes=[9, None], stop="all_exhausted"
            ),
            batch_rows=2,
            window=1,
            tail="wrap",
            **by_rows,
        ),
        "mixed, with stages": packed_sampler(
            Mixture(lengths, schedule=[(0, [1, 2]), (1, [2, 1])], stop="all_exhausted"),
            batch_rows=2,
            shuffle="keyed",
            **by_rows,
            **counts,
        ),
    }


@pytest.mark.parametrize("name", samplers())
def test_the_examples_of_a_step(name: str, run: Run) -> None:
    sampler = samplers()[name]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("state.json").write_text(json.dumps({"loader": {"sampler": sampler.state_at(1, 2)}}))
    for epoch, step in ((0, 1), (1, 1), (7, 0)):
        where = ["--epoch", epoch, "--step", step]
        code, out, err = run("step", "state.json", "rows.jsonl", *where, "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert (found["epoch"], found["step"]) == (epoch, step)
        indices = sampler.examples(epoch, step).tolist()
        assert [one["index"] for one in found["examples"]] == indices
        assert [one["num_tokens"] for one in found["examples"]] == DATA.lengths[indices].tolist()
        trained = DATA.num_loss_tokens[indices].tolist()
        assert [one["num_trained"] for one in found["examples"]] == trained


def test_a_checkpoint_of_chats_is_decoded(run: Run) -> None:
    tokenized, _ = tokenize_chat_dataset(Dataset.from_list(CHATS), byte_tokenizer(TEMPLATE))
    data = TokenizedDataset(tokenized)
    sampler = packed_sampler(data.lengths, batch_size=2, max_tokens=200, seed=1)
    folder = Path("checkpoint-7")
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"step": 7, "sampler": sampler.state_dict()}))
    code, out, _ = run(
        "step", folder, "chats.jsonl", "--tokenizer", "tokenizer", "--step", 1, "--show", 30
    )
    (index,) = sampler.examples(0, 1)
    text = byte_tokenizer(TEMPLATE).decode(data[int(index)]["input_ids"].tolist())
    assert code == 0
    assert out.startswith("epoch 0, step 1: 1 example\n\nexample ")
    shown = "\n".join(line[4:] for line in out.splitlines()[3:])
    assert shown == text[:30] + "..."


def refusals() -> dict[str, tuple[list[Any], str]]:
    return {
        "no state": (["tokens.jsonl", "rows.jsonl"], "error: tokens.jsonl: is not JSON: Extra dat"),
        "other JSON": (["other.json", "rows.jsonl"], "other.json: there is no state of a sampler"),
        "no file": (["nowhere.json", "rows.jsonl"], "error: nowhere.json: there is no such file o"),
        "no run.json": (["tokenizer", "rows.jsonl"], "tokenizer: there is no run.json in it; name"),
        "other data": (["state.json", "tokens.jsonl"], "state is of 15 examples, the data has 2;"),
        "rollouts": (["state.json", "rollouts.jsonl"], "rollouts.jsonl holds rollouts, which no"),
        "order": (["order.json", "rows.jsonl"], "the order of this run is a function of its own"),
        "no step": (["state.json", "rows.jsonl", "--step", "99"], "step must be below 4, the step"),
    }


@pytest.mark.parametrize("name", refusals())
def test_what_is_refused(name: str, run: Run) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("state.json").write_text(json.dumps(samplers()["packed"].state_dict()))
    Path("other.json").write_text(json.dumps({"epoch": 3, "more": [{"step": 1}]}))
    ordered = PrefetchingSampler(15, batch_size=4, order=lambda epoch, rng: range(15))
    Path("order.json").write_text(json.dumps(ordered.state_dict()))
    arguments, message = refusals()[name]
    code, out, err = run("step", *arguments, *([] if "--step" in arguments else ["--step", "0"]))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_state_of_a_loader_in_the_middle_of_an_epoch(run: Run) -> None:
    from torch.utils.data import DataLoader

    sampler = samplers()["packed"]
    collate = sampler._collate
    with PrefetchLoader(DataLoader(DATA, batch_sampler=sampler, collate_fn=collate)) as loader:
        batch = next(loader.steps(3))
        batch = [batch, *loader.steps(2)][-1]
        Path("state.json").write_text(json.dumps(loader.state_dict()))
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    where = ["--epoch", batch.metadata["epoch"], "--step", batch.metadata["step"]]
    code, out, _ = run("step", "state.json", "rows.jsonl", *where, "--json")
    found = [one["num_tokens"] for one in json.loads(out)["examples"]]
    assert code == 0
    assert sum(found) == batch.step.num_tokens
