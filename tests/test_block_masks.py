"""BlockMask in closed form against ``create_block_mask``, and through models of transformers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from tests.tiny_models import TRANSFORMERS, WINDOW, packed_inputs, tiny_model, token_ids
from torch_collate_kit import PackedCollator
from torch_collate_kit.attention import check_isolation
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.block_masks import document_masks
from torch_collate_kit.collators import PaddedCollator
from torch_collate_kit.errors import IsolationError
from torch_collate_kit.packing import ParallelLayout

CASES = 600 if "ALL_CASES" in os.environ else 60
TABLES = [
    f"{full}{of}_{what}"
    for of in ("kv", "q")
    for full in ("", "full_")
    for what in ("num_blocks", "indices")
]
RNG = np.random.default_rng(0)
EXAMPLES = [{"input_ids": RNG.integers(1, 50, n).tolist()} for n in (150, 40, 3, 90, 200, 1, 20)]


def rows_of(rng: np.random.Generator, num_rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return boundaries over rows of documents, some empty, and the document of each cell."""
    longest, bounds = int(rng.choice([5, 60, 300, 2000])), [0]
    for row in range(num_rows):
        while bounds[-1] < (row + 1) * width:
            bounds.append(min((row + 1) * width, bounds[-1] + int(rng.integers(1, longest + 1))))
    bounds += [bounds[-1]] * int(rng.integers(3))
    flat = torch.tensor(bounds, dtype=torch.int32)
    return flat, torch.repeat_interleave(torch.diff(flat)).view(num_rows, width)


def visible(segments: Tensor, window: int | None, *, two_way: bool) -> Any:
    """What a cell sees, one pair at a time."""

    def is_seen(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = segments[row, query] == segments[row, key]
        if not two_way:
            seen = seen & (key <= query)
        return seen if window is None else seen & ((query - key).abs() < window)

    return is_seen


@pytest.mark.parametrize("window", [2**31 - 1, 2**32, 2**70])
def test_a_window_that_is_longer_than_the_row(window: int) -> None:
    batch = PackedCollator(0, max_tokens=400)([{"input_ids": [1] * n} for n in (300, 80)])
    for attention in ("flex_attention", "sdpa"):
        found, whole = (
            batch.model_inputs(attention, mask="block", sliding_window=size)["attention_mask"]
            for size in (window, 400)
        )
        found, whole = found["sliding_attention"], whole["sliding_attention"]
        if attention == "sdpa":
            assert torch.equal(found, whole)
            continue
        for table in TABLES:
            assert torch.equal(getattr(found, table), getattr(whole, table))


@pytest.mark.parametrize("case", range(CASES))
def test_all_tables_are_those_of_create_block_mask(case: int) -> None:
    rng = np.random.default_rng((7, case))
    num_rows, whole = int(rng.integers(1, 4)), 128 * int(rng.integers(1, 8))
    width = int(rng.choice([int(rng.integers(1, 900)), whole]))
    flat, segments = rows_of(rng, num_rows, width)
    two_way, window = bool(rng.integers(2)), int(rng.integers(1, width + 50))
    masks = document_masks(flat, segments, window=window, two_way=two_way)
    assert isinstance(masks, dict)
    for name, mask in masks.items():
        of = window if name == "sliding_attention" else None
        expected = visible(segments, of, two_way=two_way)
        other = create_block_mask(expected, num_rows, None, width, width, device="cpu")
        for table in TABLES:
            found = getattr(mask, table)
            assert found.dtype == torch.int32
            assert found.is_contiguous()
            assert torch.equal(found, getattr(other, table)), (table, name, width, two_way)
        assert (mask.shape, mask.BLOCK_SIZE) == (other.shape, other.BLOCK_SIZE)
        if case % 5 == 0:
            cells = [
                create_mask(mod, num_rows, 1, width, width, device="cpu")
                for mod in (mask.mask_mod, expected)
            ]
            assert torch.equal(*cells)


def test_written_out() -> None:
    """Blocks of 128: documents of 192 and 320 cells are the 3 and 5 of blocks of 2, FACTS 3."""
    flat = torch.tensor([0, 192, 512], dtype=torch.int32)
    mask: Any = document_masks(flat, torch.repeat_interleave(torch.diff(flat))[None])

    def listed(numbers: Tensor, indices: Tensor) -> list[list[int]]:
        pairs = zip(numbers[0, 0].tolist(), indices[0, 0].tolist(), strict=True)
        return [row[:number] for number, row in pairs]

    assert listed(mask.kv_num_blocks, mask.kv_indices) == [[0], [0, 1], [1, 2], [1, 3]]
    assert listed(mask.full_kv_num_blocks, mask.full_kv_indices) == [[], [], [], [2]]
    assert listed(mask.q_num_blocks, mask.q_indices) == [[0, 1], [1, 2, 3], [2], [3]]


def test_it_takes_a_five_hundredth_of_the_time() -> None:
    batch = PackedCollator(0, max_tokens=8192, fixed_width=True)([{"input_ids": [5] * 400}] * 20)
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        document_masks(batch_bounds(batch), segments_of(batch))
        seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    mod = visible(segments_of(batch), None, two_way=False)
    create_block_mask(mod, 1, None, 8192, 8192, device="cpu")
    assert 500 * min(seconds) < time.perf_counter() - began


def batch_bounds(batch: Any) -> Tensor:
    found: Tensor = batch.model_inputs()["cu_seq_lens_q"]
    return found


def segments_of(batch: Any) -> Tensor:
    shape = batch["input_ids"].shape
    return torch.repeat_interleave(torch.diff(batch_bounds(batch))).view(shape)


def tiny(kind: str, attention: str, **options: Any) -> Any:
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, pad_token_id=0,
        attn_implementation=attention, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


GEMMA = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3_text": GEMMA,
    "qwen3": {},
    "mistral": {"sliding_window": 40},
}


@pytest.fixture(params=["force_eager", pytest.param("default", marks=pytest.mark.release)])
def flex(request: pytest.FixtureRequest) -> Iterator[None]:
    """Without the compiler, which takes 10 to 40 s; kernels that it makes read the tables, too."""
    with torch.compiler.set_stance(request.param):
        yield


@pytest.mark.usefixtures("flex")
@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_sdpa(kind: str) -> None:
    batch = PackedCollator(0, max_tokens=256)(EXAMPLES)
    model = tiny(kind, "flex_attention", **MODELS[kind])
    found = batch.model_inputs(model, labels=False, mask="block")
    assert isinstance(found["attention_mask"], dict) == ("layer_types" in MODELS[kind])
    other = tiny(kind, "sdpa", **MODELS[kind])
    other.load_state_dict(model.state_dict())
    window = MODELS[kind].get("sliding_window")
    inputs = batch.model_inputs("sdpa", labels=False, mask="block", sliding_window=window)
    if kind == "mistral":
        inputs["attention_mask"] = inputs["attention_mask"]["sliding_attention"]
    with torch.no_grad():
        torch.testing.assert_close(
            model(**found).logits, other(**inputs).logits, atol=1e-5, rtol=1e-4
        )


TWO_WAY: dict[str, dict[str, Any]] = {
    "modernbert": {"local_attention": 40, "global_attn_every_n_layers": 2},
    "bert": {"max_position_embeddings": 300},
    "llama": {"is_causal": False},
}


@pytest.mark.usefixtures("flex")
@pytest.mark.parametrize("kind", TWO_WAY)
def test_two_way_models_get_it_from_the_model(kind: str) -> None:
    batch, found, state = PackedCollator(0, max_tokens=256, train_all=True)(EXAMPLES), [], None
    for attention in ("flex_attention", "sdpa"):
        config = transformers.AutoConfig.for_model(
            kind, vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=3,
            num_attention_heads=2, pad_token_id=0, attn_implementation=attention, **TWO_WAY[kind],
        )  # fmt: skip
        model = transformers.AutoModel.from_config(config).eval()
        state = state or model.state_dict()
        model.load_state_dict(state)
        inputs = batch.model_inputs(model, labels=False)
        assert isinstance(inputs["attention_mask"], dict) == (kind == "modernbert")
        with torch.no_grad():
            found.append(model(**inputs)[0])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_a_model_whose_mask_ignores_positions_gets_it_unasked() -> None:
    batch = PackedCollator(0, max_tokens=256)(EXAMPLES)
    model = tiny("gpt_oss", "flex_attention", **GEMMA, num_local_experts=2)
    masks = batch.model_inputs(model)["attention_mask"]
    assert list(masks) == ["full_attention", "sliding_attention"]


def test_the_name_of_the_attention_makes_the_same_masks() -> None:
    batch = PackedCollator(0, max_tokens=256)(EXAMPLES)
    one = batch.model_inputs("flex_attention", mask="block")["attention_mask"]
    assert one.shape == (len(batch), 1, *[batch["input_ids"].shape[1]] * 2)
    two = batch.model_inputs("flex_attention", mask="block", sliding_window=9)["attention_mask"]
    assert torch.equal(two["full_attention"].kv_indices, one.kv_indices)
    assert "attention_mask" not in batch.model_inputs("flex_attention")
    tree = PackedCollator(0, max_tokens=8, share_prefixes=True)
    shared = tree([{"input_ids": [[5, 6], [5, 7]], "labels": [[-100, 6], [-100, 7]]}])
    with pytest.raises(ValueError, match="flex_attention takes none of image blocks or shared pre"):
        shared.model_inputs("flex_attention", mask="block")


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


# --- the mask ------------------------------------------------------------------------------------


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
