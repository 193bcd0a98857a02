"""Models whose mask does not see position_ids: a block mask is exact, and errors say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_models import TRANSFORMERS, WINDOW, packed_inputs, tiny_model, token_ids
from torch_collate_kit.attention import check_isolation
from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.packing import ParallelLayout

BLIND = [
    ("gpt_oss", "eager"),
    ("opt", "eager"),
    ("opt", "sdpa"),
    ("falcon", "eager"),
    ("falcon", "sdpa"),
]
LEAKING = [pair for pair in BLIND if pair[0] != "falcon" or TRANSFORMERS < (5, 24)]
KINDS = pytest.mark.parametrize(("kind", "attention"), BLIND)
EXACT = pytest.mark.parametrize(
    ("kind", "attention"), [*BLIND, ("llama", "eager"), ("llama", "sdpa")]
)
LENGTHS = (7, 9, 1, 5, 3)


def examples() -> list[dict[str, Tensor]]:
    ids = token_ids(sum(LENGTHS)).split(LENGTHS)
    return [{"input_ids": row, "loss_mask": torch.ones(len(row))} for row in ids]


def packed() -> Batch:
    """Two rows of several segments with gaps and a pad tail."""
    layout = ParallelLayout(dp=2, tp=2)
    batch = PackedCollator(0, max_tokens=20, parallel=layout, normalize_loss=False)(examples())
    assert len(batch) == 2
    return batch


def block_inputs(model: Any, batch: Batch, attention: str) -> dict[str, Any]:
    window = model.config.sliding_window if "gpt_oss" in model.config.model_type else None
    return batch.model_inputs(attention, labels=False, mask="block", sliding_window=window)


def alone(kind: str, attention: str, *, training: bool = False) -> tuple[Any, list[Tensor]]:
    model = tiny_model(kind, attention, dtype=torch.float64).train(training)
    ids = (example["input_ids"][None] for example in examples())
    return model, [model(input_ids=row, use_cache=False).logits[0] for row in ids]


def by_example(values_RW: Tensor, batch: Batch) -> list[Tensor]:
    """The cells of every example, in the order of the examples."""
    found: dict[int, Tensor] = {}
    for row, numbers in enumerate(batch.row_metadata["example_indices"].tolist()):
        starts = batch["cu_seq_lens"].tolist()[row]
        for k, number in enumerate(numbers):
            found[number] = values_RW[row, starts[k] : starts[k] + LENGTHS[number]]
    return [found[i] for i in range(len(LENGTHS))]


# --- exact ---------------------------------------------------------------------------------------


@EXACT
def test_a_block_mask_equals_one_example_at_a_time(kind: str, attention: str) -> None:
    batch = packed()
    model, expected = alone(kind, attention)
    with torch.no_grad():
        logits = by_example(model(**block_inputs(model, batch, attention)).logits, batch)
        for found, value in zip(logits, expected, strict=True):
            # opt and llama take their softmax in float32
            torch.testing.assert_close(found, value, atol=2e-5, rtol=0)
        if (kind, attention) in BLIND:  # and without the mask they see each other
            leaking = by_example(model(**batch.model_inputs(attention)).logits, batch)
            moved = max((a - b).abs().max() for a, b in zip(leaking, expected, strict=True))
            assert moved > 0.1 if (kind, attention) in LEAKING else moved < 2e-5


@KINDS
@pytest.mark.parametrize("training", [False, True])
def test_check_isolation_proves_it(kind: str, attention: str, training: bool) -> None:
    model = tiny_model(kind, attention).train(training)
    check_isolation(model, block_inputs(model, packed(), attention))
    check_isolation(model, packed())  # the table of families knows that it needs the mask


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["gpt_oss", "opt"])
def test_the_mask_for_eager_fits_every_dtype(kind: str, dtype: torch.dtype) -> None:
    model = tiny_model(kind, "eager", dtype=dtype, initializer_range=0.05, init_std=0.05)
    logits = model(**block_inputs(model, packed(), "eager")).logits
    assert logits.dtype == dtype
    assert logits.isfinite().all()
    check_isolation(model, block_inputs(model, packed(), "eager"))


# --- the mask ------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_window_gives_a_mask_for_each_kind_of_layer(attention: str) -> None:
    batch = PackedCollator(0, max_tokens=4)([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
    masks = batch.model_inputs(attention, mask="block", sliding_window=2)["attention_mask"]
    assert list(masks) == ["full_attention", "sliding_attention"]
    seen = {name: mask if attention == "sdpa" else mask == 0 for name, mask in masks.items()}
    full = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]
    near = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    assert seen["full_attention"].int().tolist() == [[full]]
    assert seen["sliding_attention"].int().tolist() == [[near]]


def test_a_padded_batch_keeps_its_own_mask() -> None:
    batch = PaddedCollator(0)(examples())
    inputs = batch.model_inputs("sdpa", mask="block", sliding_window=4)
    assert inputs["attention_mask"] is batch["attention_mask"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": "blocks"}, ValueError, "mask='blocks' is unknown; use .block"),
        ({"mask": True}, ValueError, "mask=True is unknown"),
        ({"model": "torch_varlen"}, ValueError, 'and "flex_attention", got .torch_varlen.'),
        ({"mask": None, "sliding_window": 4}, ValueError, 'sliding_window=4 without mask="b'),
        ({"sliding_window": 0}, ValueError, "at least 1, got 0; it counts the token itself"),
        ({"sliding_window": 4.0}, TypeError, r"must be an int, got 4.0 .*model\.config\.sliding_w"),
    ],
)
def test_what_makes_no_mask_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    for batch in (packed(), PaddedCollator(0)(examples())):
        with pytest.raises(error, match=message):
            batch.model_inputs(**{"model": "sdpa", "mask": "block", **options})


# --- reasons -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "attention"), LEAKING)
def test_the_reason_is_the_mask_and_no_other_layer(kind: str, attention: str) -> None:
    window = f", sliding_window={WINDOW}" if kind == "gpt_oss" else ""
    message = (
        r"leaks into.*Likely reason: the model builds its mask without position_ids.*pass "
        rf'Batch\.model_inputs\("{attention}", mask="block"{window}\)$'
    )
    model = tiny_model(kind, attention)
    with pytest.raises(IsolationError, match=message):
        check_isolation(model, packed().model_inputs(attention))
    with pytest.raises(IsolationError, match=message):  # with boundaries, which change nothing
        check_isolation(model, packed().model_inputs("torch_varlen"))


@pytest.mark.parametrize(("longest", "is_lost"), [(WINDOW, False), (WINDOW + 1, True)])
@pytest.mark.parametrize(("kind", "attention"), [("gpt_oss", "eager"), ("mistral", "sdpa")])
def test_a_window_is_lost_from_one_token_more_on(
    kind: str, attention: str, longest: int, is_lost: bool
) -> None:
    """A token sees itself and WINDOW - 1 tokens before it, so WINDOW tokens see all the others."""
    examples = [{"input_ids": [5] + [7] * (length - 1)} for length in (3, longest)]
    batch = PackedCollator(0, max_tokens=16)(examples)
    assert len(batch) == 1
    inputs = batch.model_inputs(attention, mask="block")
    if not is_lost:
        check_isolation(tiny_model(kind, attention), inputs)
        return
    message = (
        rf"sliding window of {WINDOW} tokens is lost in segments of up to {longest}; .*"
        rf'mask="block", sliding_window={WINDOW}\)'
    )
    with pytest.raises(ValueError, match=message):
        check_isolation(tiny_model(kind, attention), inputs)


# --- torch_varlen --------------------------------------------------------------------------------


def test_torch_varlen_says_what_gpt_oss_needs() -> None:
    message = (
        r"attention sinks, but GptOssAttention passes s_aux; use attn_implementation=\"eager\".*"
        rf'check_isolation.*mask="block"\) and sliding_window={WINDOW}'
    )
    with pytest.raises(ValueError, match=message):
        tiny_model("gpt_oss")(**packed_inputs([4, 3]))


def test_bloom_with_torch_varlen_is_refused() -> None:
    message = r"reads its attention mask itself \(add\).*does not run with torch_varlen.*Padded"
    model = tiny_model("bloom")
    with pytest.raises(ValueError, match=message):
        model(**packed_inputs([4, 3]))
    with pytest.raises(IsolationError, match="bloom models: it takes a 2-D attention_mask only"):
        check_isolation(model, packed())
    # It added the booleans of a padded batch's mask to its scores, without a word.
    with pytest.raises(ValueError, match=message):
        model(**PaddedCollator(0)(examples()).model_inputs("torch_varlen"))


def test_rows_of_one_token_each_are_refused_as_longer_ones_are() -> None:
    """OPT's mask ignores positions, so in evaluation they would see each other."""
    for lengths in ([2, 3], [1, 1, 1, 1]):
        inputs = packed_inputs(lengths, varlen=False)
        del inputs["use_cache"]
        with pytest.raises(ValueError, match="position_ids restart inside a row"):
            tiny_model("opt").eval()(**inputs)
