"""benchmarks/gpu on the CPU: its checks find what is wrong, and its runs compare like with like."""

from __future__ import annotations

import doctest
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from gpu.cells import CELLS
from gpu.errors import compared
from gpu.lengths import Layout, loader_of, mix_of
from gpu.saved import Results
from gpu.tables import write_page
from gpu.training import parts_of
from gpu.where import Where

from torch_collate_kit.attention import kernels

WHERE = Where(torch.device("cpu"), is_tiny=True)


# --- checks that can fail ------------------------------------------------------------------------


def test_an_error_is_judged_by_the_usual_one() -> None:
    exact = {"out": torch.tensor([3.0, 4.0])}

    def of(error: float) -> dict[str, torch.Tensor]:
        return {"out": torch.tensor([3.0, 4.0 + 5 * error])}

    usual = of(0.02)
    for error, is_ok in ((0.01, True), (0.039, True), (0.041, False), (float("nan"), False)):
        check = compared("x", of(error), usual, exact, torch.bfloat16)
        assert check["is_ok"] is is_ok, (error, check)
    assert compared("x", of(0.0039), exact, exact, torch.bfloat16)["is_ok"]  # one rounding
    assert not compared("x", of(0.0040), exact, exact, torch.bfloat16)["is_ok"]
    with pytest.raises(AssertionError, match="x: out is all zero"):
        compared("x", usual, usual, {"out": torch.zeros(2)}, torch.bfloat16)


def test_the_worst_tensor_counts() -> None:
    exact = {name: torch.ones(100) for name in ("a", "b", "c")}
    ours = exact | {"b": torch.full((100,), 1.5)}
    check = compared("x", ours, exact, exact, torch.bfloat16)
    assert (check["tensor"], check["is_ok"]) == ("b", False)


def test_attention_that_leaks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = importlib.import_module("gpu.attention")
    assert all(check["is_ok"] for check in attention.kernel(WHERE)["checks"])
    by_segment = kernels._sdpa_by_segment

    def leaking(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, rows: int, *rest: Any) -> Any:
        whole = torch.arange(0, len(q) + 1, len(q) // rows).int()
        return by_segment(q, k, v, whole, whole, rows, *rest)

    monkeypatch.setattr(kernels, "_sdpa_by_segment", leaking)
    assert not any(check["is_ok"] for check in attention.kernel(WHERE)["checks"])


def test_on_a_gpu_the_kernel_itself_must_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = importlib.import_module("gpu.attention")
    monkeypatch.setattr(Where, "is_cuda", True)  # the CPU has no kernel, so SDPA runs
    monkeypatch.setattr(Where, "low", torch.float32)
    monkeypatch.setattr(Where, "exact", torch.float64)
    checks = attention.kernel(WHERE)["checks"]
    assert {check.get("reason") for check in checks} == {"torch's varlen kernel was not used"}
    assert not any(check["is_ok"] for check in checks)


def test_a_family_is_compared_one_example_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = importlib.import_module("gpu.attention")
    checks = attention._family(WHERE, "gemma3")
    assert len(checks) == 6
    assert all(check["is_ok"] for check in checks), checks
    attend = kernels.attend
    varlen = importlib.import_module("torch_collate_kit.attention.varlen")
    monkeypatch.setattr(
        varlen, "attend", lambda *a, **o: attend(*a, **{**o, "window": None})
    )  # the window of Gemma is lost
    assert not any(check["is_ok"] for check in attention._family(WHERE, "gemma3"))


def test_other_fields_on_the_device_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = importlib.import_module("gpu.batches")
    from torch_collate_kit.batch import Batch

    to = Batch.to

    def changed(self: Batch, *args: Any, **options: Any) -> Batch:
        moved = to(self, *args, **options)
        return moved.with_fields(input_ids=moved["input_ids"] + 1)

    monkeypatch.setattr(Batch, "to", changed)
    checks = [c for c in batches.dense_fields(WHERE)["checks"] if "packed images" in c["name"]]
    assert [check["is_ok"] for check in checks] == [False]
    assert "input_ids" in checks[0]["different"]


# --- training ------------------------------------------------------------------------------------


def test_every_layout_has_the_same_examples() -> None:
    mix = mix_of(WHERE, 512)
    tokens = []
    for kind in ("packed", "padded", "sorted"):
        with loader_of(mix, Layout(kind), WHERE) as loader:
            steps = [parts_of(batch) for batch in loader.steps(3)]
        for parts, num_loss_tokens, num_tokens in steps:
            assert all(part["input_ids"].numel() <= mix.max_tokens for part in parts)
            real = sum(int(part["attention_mask"].sum()) for part in parts)
            trained = sum(int((part["labels"] != -100).sum()) for part in parts)
            assert (real, trained) == (num_tokens, num_loss_tokens)
        tokens.append(
            [
                sorted(
                    int(i) for part in parts for i in part["input_ids"][part["attention_mask"] > 0]
                )
                for parts, *_ in steps
            ]
        )
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.fixture
def no_accelerator_stays() -> Iterator[None]:
    """What transformers.Trainer sets up is one per process, and other tests set up another."""
    yield
    importlib.import_module("accelerate.state").AcceleratorState._reset_state(True)


@pytest.mark.usefixtures("no_accelerator_stays")
def test_trainer_has_our_losses() -> None:
    peers = importlib.import_module("gpu.peers")
    trainers = ["ours: packed, torch_varlen", "Trainer, flattened, torch_varlen"]
    found = peers.against_peers(WHERE, size="0.6B", trainers=trainers, steps=4, rounds=1)
    ours, trainer = found["variants"]
    assert "error" not in trainer, trainer
    assert len(ours["losses"][0]) == 4
    assert trainer["losses"][0] == pytest.approx(ours["losses"][0], rel=1e-4)
    assert len({round(loss, 6) for loss in ours["losses"][0]}) == 4
    ratio = ours["tokens_per_second"] * ours["seconds"][0]
    assert ratio == pytest.approx(trainer["tokens_per_second"] * trainer["seconds"][0])


class _Event:
    """An event on a device whose clock is a list: the time is when it was recorded."""

    clock = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object = None) -> None:
        self.time = _Event.clock

    def elapsed_time(self, end: _Event) -> float:
        return end.time - self.time


def test_a_copy_is_hidden_if_it_ended_before_the_step_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = importlib.import_module("gpu.training")
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    batches = [object() for _ in range(4)]
    copy = SimpleNamespace(send=lambda batch: SimpleNamespace(batch=batch), _stream="copies")
    where = Where(torch.device("cuda"), is_tiny=True)
    copies = training._Copies(SimpleNamespace(_copy=copy), where)
    # when each copy ends, and each step: copies 1 and 3 end within the step before, copy 2 after it
    times = [(0, 5), (4, 10), (11, 20), (12, 30)]
    for batch, (copied, _) in zip(batches, times, strict=True):
        _Event.clock = copied
        assert copy.send(batch).batch is batch
    for batch, (_, trained) in zip(batches, times, strict=True):
        _Event.clock = trained
        copies.step_ended(batch)
    assert copies.block_ended() == [True, False, True]
    assert copies.block_ended() == []


def test_a_profile_has_the_longest_operations() -> None:
    profiling = importlib.import_module("gpu.profiling")
    found = profiling.profiled(WHERE, size="0.6B", variant="packed, torch_varlen", steps=1)
    shares = [entry["share"] for entry in found["top"]]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 1
    assert 0 <= found["idle_share"] < 1
    assert any("attention" in entry["name"].lower() for entry in found["top"])
    assert not any(entry["name"].startswith("Optimizer.") for entry in found["top"])


def test_a_compiled_variant_is_compiled_and_the_others_are_not() -> None:
    """One model for all of them: its layers are switched, and their losses stay the same."""
    speed, training = importlib.import_module("gpu.speed"), importlib.import_module("gpu.training")
    fixed = "packed, torch_varlen, fixed width"
    names = [fixed, "packed, torch_varlen, compiled"]
    found = speed.compare(WHERE, size="0.6B", variants=names)
    eager, compiled = found["variants"]
    assert compiled["error"] is None, compiled
    assert compiled["first_loss"] == pytest.approx(eager["first_loss"], rel=1e-3)
    assert compiled["graphs_after_warm_up"] == eager["graphs_after_warm_up"] == 0
    assert training._num_graphs() > 0


def test_a_variant_that_runs_out_of_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    speed, training = importlib.import_module("gpu.speed"), importlib.import_module("gpu.training")
    loss_of = training.loss_of

    def hungry(model: Any, part: Any, variant: Any, *rest: Any) -> Any:
        if variant.whole_logits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss_of(model, part, variant, *rest)

    monkeypatch.setattr(training, "loss_of", hungry)
    names = ["packed, torch_varlen, whole logits", "packed, torch_varlen"]
    whole, ours = speed.compare(WHERE, size="0.6B", variants=names)["variants"]
    assert (whole["error"], ours["error"]) == ("out of memory", None)
    assert "tokens_per_second" not in whole
    assert ours["tokens_per_second"] > 0


def test_the_first_setting_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    models = importlib.import_module("gpu.models")
    tried = []

    def one_step(model: Any, optimizer: Any, setting: Any) -> None:
        is_again = model.model.layers[0].gradient_checkpointing
        tried.append((next(model.parameters()).dtype, is_again))
        if setting != models.SETTINGS[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    _, optimizer, setting, too_large = models.fitting("0.6B", WHERE, one_step)
    low = torch.bfloat16
    assert tried == [(torch.float32, False), (low, False), (low, True), (low, True)]
    assert str(setting) == "bf16 weights, gradient checkpointing"
    assert too_large == ["float32 weights, bf16 autocast", "bf16 weights"]
    assert isinstance(optimizer, torch.optim.AdamW)


def test_a_setting_must_fit_rows_of_full_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """As wide as any later row, or memory runs out in the middle of a comparison."""
    speed, layouts = importlib.import_module("gpu.speed"), []

    def watched(mix: Any, layout: Any, where: Where) -> Any:
        layouts.append(layout)
        return loader_of(mix, layout, where)

    monkeypatch.setattr(speed, "loader_of", watched)
    speed.prepared(WHERE, "0.6B", 8192)
    assert layouts == [Layout("packed", fixed_width=True)] * 2


@pytest.mark.parametrize("size", ["0.6B", "1.7B", "4B", "8B"])
def test_models_have_their_sizes(size: str) -> None:
    """The published numbers of parameters."""
    models = importlib.import_module("gpu.models")
    where = Where(torch.device("meta"), is_tiny=False)
    model = models.built(size, where, models.SETTINGS[0])
    published = {"0.6B": 0.596, "1.7B": 1.721, "4B": 4.022, "8B": 8.191}
    num_parameters = sum(p.numel() for p in model.parameters())
    assert num_parameters / 1e9 == pytest.approx(published[size], abs=5e-4)


def test_flex_attention_gets_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers
    from transformers.integrations import flex_attention

    importlib.import_module("gpu.models").cast_for_flex()
    monkeypatch.setattr(flex_attention, "flex_attention_forward", lambda _, *heads: heads)
    forward = transformers.AttentionInterface()["flex_attention"]
    query, key, value = (torch.ones(1, heads, 4, 8) for heads in (4, 2, 2))
    with torch.autocast("cpu", torch.bfloat16):  # as Qwen3 hands them over
        heads = forward(None, query, key, value.bfloat16())
    assert {head.dtype for head in heads} == {torch.bfloat16}
    assert forward(None, query, key, value)[0] is query


@pytest.mark.filterwarnings("error::FutureWarning")
def test_checkpointing_warns_of_no_old_name() -> None:
    models = importlib.import_module("gpu.models")
    for setting in models.SETTINGS:
        model = models.built("0.6B", WHERE, setting)
        assert model.model.layers[0].gradient_checkpointing is setting.checkpointing


# --- the page of a GPU ---------------------------------------------------------------------------


def variant(name: str, rate: float, **changes: Any) -> dict[str, Any]:
    return {
        "variant": name,
        "error": None,
        "first_loss": 11.9,
        "tokens_per_second": rate,
        "efficiency": 0.99,
        "mfu": 0.41,
        "peak_bytes": 40e9,
        "wait_share": 0.001,
        "copies_hidden": 1.0,
        "graphs_after_warm_up": 0,
        **changes,
    }


def test_a_page_of_an_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, answers = importlib.import_module("gpu.tables"), importlib.import_module("answers")
    machine = {"device": "NVIDIA H200", "memory": "140 GiB", "versions": {"torch": "2.13"}}
    monkeypatch.setattr(tables, "described", lambda where: machine)
    monkeypatch.setattr(tables, "machine_name", lambda where: "nvidia-h200")
    where = Where(torch.device("cpu"), is_tiny=False)
    about = {"model": "1.7B", "setting": "float32 weights", "too_large": [], "lengths": "real"}
    about |= {"max_tokens": 8192, "examples_per_step": 76, "parameters": 1.7e9}
    out_of_memory = {"variant": "packed, flex", "error": "out of memory", "first_loss": None}
    results = Results(tmp_path, where)
    packed = [variant("packed, torch_varlen", 35_000), variant("padded, sdpa", 10_000)]
    results.save("padding-1.7B", {**about, "variants": [*packed, out_of_memory]})
    compiled = variant("packed, torch_varlen, compiled", 40_000, graphs_after_warm_up=2)
    results.save("compiled-1.7B", {**about, "variants": [compiled]})
    results.save("padding-8B", {"error": "stopped after 270 s"})
    trainers = [
        {"variant": name, "tokens_per_second": rate, "mfu": 0.4, "peak_bytes": 1e9}
        | {"first_loss": 11.9, "last_loss": last}
        for name, rate, last in (
            ("ours: packed, torch_varlen", 36_000, 11.0),
            ("Trainer, flattened, torch_varlen", 30_000, 11.01),
            ("Trainer, flattened, sdpa", 20_000, 11.4),
        )
    ]
    del about["parameters"]
    results.save("trainers-1.7B", {**about, "variants": trainers})
    page, failed = write_page(tmp_path, results, where)
    text = page.read_text(encoding="utf-8")
    assert (page.name, failed) == ("gpu-nvidia-h200.md", 0)
    for line in (
        "| packed, torch_varlen | 35,000 | 1.00x | 41.0% | 40.0 | 99.0% | 0.10% | 100% | 0 |",
        "| packed, flex | out of memory | - | - | - | - | - | - | - | - |",
        "| 1.7B: real tokens per second, packed over padded | 3.5x | at least 2.5x | met |",
        "(packed, torch_varlen, compiled) | 4e+04 | at least 36000 | met |",
        "| 1.7B: MFU (packed, torch_varlen, compiled) | 41% | at least 38% | met |",
        "| compiled-1.7B: graphs compiled after the warm-up | 2 | at most 0 | MISSED |",
        "| padding-8B | stopped after 270 s |",
        "| Trainer, flattened, sdpa | 20,000 | 1.80x | 40.0% | 1.0 | 11.9000 | 11.4000 |",
        "over the best of transformers.Trainer | 1.2x | at least 1x, aim 1.15x | aim reached |",
        "| 1.7B: last loss, Trainer, flattened, torch_varlen, apart from ours | 0.0909% |",
        "| 1.7B: last loss, Trainer, flattened, sdpa, apart from ours | 3.64% | at most 1% | MIS",
        "| 35,000 real tokens per second packed, 3.50x as many as padded |",
    ):
        assert line in text, line
    assert text.index("MISSED") < text.index("| met |")
    whole = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    question = "How fast is a Qwen3-1.7B fine-tuned on NVIDIA H200?"
    assert answers.ANSWERS["gpu"](whole)[0][0] == question


def test_cells_have_distinct_names_and_run_what_there_is() -> None:
    names = [cell.name for cell in CELLS]
    assert len(set(names)) == len(names)
    assert {cell.part for cell in CELLS} == {"correctness", "speed", "launch"}
    speed, peers = importlib.import_module("gpu.speed"), importlib.import_module("gpu.peers")
    for cell in CELLS:
        module, _, name = cell.function.partition(":")
        assert callable(getattr(importlib.import_module(f"gpu.{module}"), name))
        assert cell.limit >= cell.seconds
        assert set(cell.options.get("variants", [])) <= set(speed.VARIANTS)
        assert set(cell.options.get("trainers", [])) <= set(peers.TRAINERS)
        assert cell.options.get("variant", "packed, torch_varlen") in speed.VARIANTS


@pytest.mark.parametrize("name", ["cells", "errors", "launches", "profiling", "saved"])
def test_examples_of_docstrings(name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"gpu.{name}"))
    assert found.attempted > 0
    assert found.failed == 0
