"""examples/run_log.py: what is recorded of a step, by hand, and what is made of it at the end."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import run_log
import torch
import transformers
from run_log import RunLog, flops_per_step, peak_flops
from torch.utils.flop_counter import FlopCounterMode

import torch_collate_kit as kit

NAMES = [
    *("step", "loss", "learning_rate", "grad_norm", "tokens", "cells", "filled_cells"),
    *(
        "seconds",
        "wait_seconds",
        "tokens_per_second",
        "packing_efficiency",
        "padding",
        "cost_balance",
    ),
]


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def packed() -> kit.Batch:
    """Rows of 4 + 1 and of 3 + 2 tokens; n tokens cost n * (10 + n): 67 on rank 0, 63 on rank 1."""
    layout, cost = kit.ParallelLayout(dp=2), kit.ModelCost(10, 1)
    packing = kit.PackingOptions(max_tokens=8, parallel=layout, cost=cost)
    collate = kit.PackedCollator(0, packing=packing)
    return collate([{"input_ids": [n] * n} for n in (3, 1, 4, 2)])


def logging(device: str = "cpu") -> Namespace:
    """What a log needs of an Accelerator; `logged` keeps what is logged."""
    logged: dict[int, dict[str, float]] = {}
    options = {"is_main_process": True, "print": print, "device": torch.device(device)}
    return Namespace(
        **options, logged=logged, log=lambda values, step: logged.update({step: values})
    )


def model_of(config: Any = None) -> torch.nn.Linear:
    """What a log needs of a ModelWithLoss."""
    model = torch.nn.Linear(1, 1)
    model.through_head, model.model = True, Namespace(config=config or Namespace())
    return model


def log_of(folder: Path, accelerator: Any, model: Any = None, **changes: Any) -> RunLog:
    options = {
        "first_step": 0,
        "num_steps": 2,
        "layout": kit.ParallelLayout(dp=2),
        "log_with": None,
        "resume": None,
    }
    args = Namespace(output_dir=folder, **{**options, **changes})
    return RunLog(model or model_of(), Namespace(wait_seconds=0.0), accelerator, args)


def two_steps(
    folder: Path, accelerator: Any, monkeypatch: pytest.MonkeyPatch, model: Any = None
) -> RunLog:
    """One of 2 seconds, half of them spent waiting, and one of 4 with two micro-batches."""
    clock = iter([100.0, 102.0, 106.0])
    monkeypatch.setattr(run_log, "time", Namespace(perf_counter=lambda: next(clock)))
    batch = packed()
    with log_of(folder, accelerator, model) as log:
        log.loader.wait_seconds = 1.0
        log.step(1, [batch[:1]], 3.0, 0.1, 0.5)
        more = batch.pad_rows(multiple_of=4)
        log.step(2, [more[:1], more[1:2]], 2.0, 0.2, 0.25)
    return log


def test_a_step_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 tokens of two ranks; 5 cells on each, and in the second step 10: a row was added."""
    log = two_steps(tmp_path, accelerator := logging(), monkeypatch)
    rows = [  # in the order of NAMES
        (1, 3.0, 0.1, 0.5, 10, 10, 10, 2.0, 1.0, 5.0, 1.0, 0.0, pytest.approx(67 / 65)),
        (2, 2.0, 0.2, 0.25, 10, 20, 10, 4.0, 0.0, 2.5, 0.5, 0.5, pytest.approx(67 / 65)),
    ]
    expected = [dict(zip(NAMES, row, strict=True)) for row in rows]
    assert records_of(tmp_path) == expected
    assert accelerator.logged == {step.pop("step"): step for step in expected}
    sums = {"steps": 2, "train_seconds": 6.0, "tokens": 20, "cells": 30}
    sums |= {"filled_cells": 20, "wait_seconds": 1.0}
    rates = {"tokens_per_second": 20 / 6, "packing_efficiency": 2 / 3, "padding": 1 / 3}
    assert log.summary() == pytest.approx({**sums, **rates, "cost_balance": 67 / 65})


PEAK = 989.4e12  # of an H100
SIZES: dict[str, Any] = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 16}
SIZES |= {"num_hidden_layers": 1, "num_attention_heads": 2}


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str = "NVIDIA H100 80GB HBM3") -> Namespace:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**29)
    return logging("cuda")


@pytest.mark.parametrize("kind", ["whole", "all logits", "adapters"])
def test_mfu_and_memory_of_a_known_gpu(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the rows of this process: 4 and 1 tokens, of which 3 are trained and pass the head.

    Per token 6 * (4 * 8 * 8 + 3 * 8 * 16) = 3840 FLOPs, at the head 6 * 8 * 10, and attention
    6 * 8 * (4 * 4 + 1 * 1). Per token a frozen weight costs 4, one of 3 adapter parameters 6.
    """
    accelerator, model = on_a_gpu(monkeypatch), model_of(transformers.LlamaConfig(**SIZES))
    if kind == "adapters":
        for parameter in model.parameters():
            parameter.requires_grad = False
        model.lora_A = torch.nn.Parameter(torch.ones(3))
    model.through_head = kind != "all logits"
    log = two_steps(tmp_path, accelerator, monkeypatch, model)
    first = {
        "whole": 5 * 3840 + 3 * 480 + 48 * 17,
        "all logits": 5 * (3840 + 480) + 48 * 17,
        "adapters": (5 * 3840 + 3 * 480) * 4 / 6 + 6 * 3 * 5 + 48 * 17,
    }
    records = records_of(tmp_path)
    assert records[0]["mfu"] * PEAK == pytest.approx(first[kind] / 2)
    assert list(records[0]) == [*NAMES, "mfu", "peak_memory_gib"]
    if kind == "whole":
        more = 10 * 3840 + 6 * 480 + 48 * (17 + 9 + 4)
        assert records[1]["mfu"] * PEAK == pytest.approx(more / 4)
        assert log.summary()["mfu"] * PEAK == pytest.approx((first[kind] + more) / 6)
        assert log.summary()["peak_memory_gib"] == 1.5


def test_a_step_of_rows_that_share_prefixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 tokens of 3 contexts in two rows of 5 cells; 3 tokens pass the head.

    Own tokens cost 3840 FLOPs each, and attention 48 times what they add to the squares of paths.
    """
    trees = [[[1, 2, 3], [1, 2, 4, 5]], [[6, 2, 4, 6, 7]]]
    masks = [[[0] * (len(of) - 1) + [1] for of in tree] for tree in trees]
    turns = {"input_ids": trees, "loss_mask": masks}
    collate = kit.PackedCollator(0, max_tokens=5, share_prefixes=True)
    accelerator, model = on_a_gpu(monkeypatch), model_of(transformers.LlamaConfig(**SIZES))
    model.through_head = True
    clock = iter([100.0, 102.0])
    monkeypatch.setattr(run_log, "time", Namespace(perf_counter=lambda: next(clock)))
    with log_of(tmp_path, accelerator, model, layout=kit.ParallelLayout(dp=1)) as log:
        log.step(1, collate(turns).split(1), 3.0, 0.1, 0.5)
    [record] = records_of(tmp_path)
    found = {name: record[name] for name in ("tokens", "cells", "filled_cells", "padding")}
    assert found == {"tokens": 12, "cells": 10, "filled_cells": 10, "padding": 0.0}
    assert record["tokens_per_cell"] == 1.2
    assert "6.00 tok/s, 1.20 tok/cell, waited" in str(log.bar.postfix)
    flops = 10 * 3840 + 3 * 480 + 48 * (3 * 3 + (4 * 4 - 2 * 2) + 5 * 5)
    assert record["mfu"] * PEAK == pytest.approx(flops / 2)


WHY_NO_MFU = {
    "gpu": "the peak of Tesla T4 is not known",
    "frozen": "some weights are frozen, and not all that are trained are adapters",
    "images": "the FLOPs of a vision tower are not counted",
}


@pytest.mark.parametrize("unknown", WHY_NO_MFU)
def test_mfu_is_left_out_where_it_is_not_known(
    unknown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    accelerator = on_a_gpu(monkeypatch, "Tesla T4" if unknown == "gpu" else "NVIDIA H100 PCIe")
    model = model_of(transformers.LlamaConfig(**SIZES))
    model.bias.requires_grad = unknown != "frozen"
    if unknown == "images":
        model.model.config.vision_config = {}
    log = two_steps(tmp_path, accelerator, monkeypatch, model)
    assert list(records_of(tmp_path)[0]) == [*NAMES, "peak_memory_gib"]
    assert "mfu" not in log.summary()
    assert f"mfu is not recorded: {WHY_NO_MFU[unknown]}" in capsys.readouterr().out


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, mode: str = "r") -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    log = log_of(tmp_path, logging(), resume="always")
    message = (
        r"metrics.jsonl could not be written at step 1: \[Errno 28\] No space left on device; "
        "--resume goes on from the last checkpoint, if --checkpoint-every saved one$"
    )
    with log, pytest.raises(SystemExit, match=message):
        log.step(1, [packed()], 3.0, 0.1, 0.5)


# --- FLOPs of a step against torch's own counter, and against counts by hand


TINY_SIZES: dict[str, Any] = {
    **{"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0},
    "head_dim": 16,  # not hidden_size / num_attention_heads
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
# linear layers per token by hand: q and o 32 * 64, k and v 32 * 32, three of 32 * 48 in the MLP
LAYER, MLP = 2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 48, 3 * 32 * 48
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MOE = LAYER - MLP + 2 * 3 * 32 * 24 + 8 * 32  # two of the experts, and the router
# Weights that a token passes in a layer, and tokens squared that two layers see for 1, 2, 5 and 10.
FAMILIES: dict[str, tuple[dict[str, Any], int, int]] = {
    "Qwen3Config": ({}, LAYER, 2 * (1 + 4 + 25 + 100)),
    "MistralConfig": ({"sliding_window": 4}, LAYER, 2 * (1 + 4 + 24 + 64)),  # w * (2 * n - w)
    "Gemma3TextConfig": ({"sliding_window": 4, **MIXED}, LAYER, 130 + 93),
    "Qwen3MoeConfig": (EXPERTS, MOE, 2 * 130),
    "MixtralConfig": (
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        LAYER + MLP + 8 * 32,
        2 * 130,
    ),
}


def config_of(name: str) -> Any:
    return getattr(transformers, name)(**{**TINY_SIZES, **FAMILIES[name][0]})


@pytest.mark.parametrize("name", FAMILIES)
def test_by_hand(name: str) -> None:
    """Only trained tokens pass the head; adapters save a third of what is frozen."""
    _, layer, squares = FAMILIES[name]
    linear, attention = 6 * 18 * 2 * layer, 6 * 4 * 16 * squares
    config, lengths = config_of(name), [1, 2, 5, 10]
    found = [flops_per_step(config, lengths, num_head_tokens=n) for n in (None, 4)]
    heads = [6 * 32 * 50 * tokens for tokens in (18, 4)]
    assert found == pytest.approx([linear + head + attention for head in heads], rel=1e-3)
    if "num_experts_per_tok" in FAMILIES[name][0]:
        with pytest.raises(ValueError, match=r"tokens pass an adapter of an expert is not known"):
            flops_per_step(config, lengths, num_adapter_parameters=3)
    else:
        adapted = flops_per_step(config, lengths, num_adapter_parameters=3)
        expected = (linear + heads[0]) * 4 / 6 + attention + 6 * 3 * 18
        assert adapted == pytest.approx(expected, rel=1e-3)


def test_shared_tokens_are_computed_once() -> None:
    """Attention is what own tokens add to the squares of their paths."""
    config = config_of("Qwen3Config")
    found = flops_per_step(config, [7, 5], shared_lengths=[0, 4])
    prefix = flops_per_step(config, [4])
    assert found == pytest.approx(
        flops_per_step(config, [7]) + flops_per_step(config, [5]) - prefix
    )


def test_equal_to_the_counter_of_torch() -> None:
    """It counts whole squares of attention, of which a causal token sees the lower half."""
    length, config = 12, config_of("Qwen3Config")
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(3, 3 + length)[None]).logits.sum().backward()
    tables = counter.get_flop_counts()["Global"]
    causal = tables[torch.ops.aten.bmm] / 2
    expected = tables[torch.ops.aten.mm] + causal
    assert flops_per_step(config, [length]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        *[(name, None) for name in ("cpu", "NVIDIA H20", "NVIDIA GeForce RTX 4090 D")],
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_peaks(name: str, tera: float | None) -> None:
    assert peak_flops(name) == (tera and tera * 1e12)
