"""The loss against a loop over tokens, whatever the layout, the slicing and the options.

`Model` gives a token its logits from its own id and its position, so that the same example has the
same logits in every layout, and a loop over examples knows what every batch must give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torch_collate_kit.batch import Batch
from torch_collate_kit.collators import PackedCollator, PaddedCollator
from torch_collate_kit.losses import token_loss
from torch_collate_kit.packing import ParallelLayout

VOCABULARY, POSITIONS = 11, 24
Example = Mapping[str, Any]
Collate = Callable[[Sequence[Example]], Batch]

EXAMPLES: list[dict[str, list[Any]]] = [
    {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 1, 1, 1]},
    {"input_ids": [6, 7, 8], "loss_mask": [1, 1, 0]},  # its first token predicts from nothing
    {"input_ids": [9, 1, 9, 2, 9, 3, 9], "loss_mask": [0, 0, 0, 2, 0, 0.5, 0]},
    {"input_ids": [4, 4], "loss_mask": [0, 0]},
    {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]},
    {"input_ids": [3], "loss_mask": [1]},
]
NUM_LOSS_TOKENS = 3 + 1 + 2 + 0 + 2 + 0

LAYOUTS: dict[str, Callable[[bool], Collate]] = {
    "left": lambda normalize: PaddedCollator(0, normalize_loss=normalize),
    "left, wide": lambda normalize: PaddedCollator(
        0, pad_to_multiple_of=12, normalize_loss=normalize
    ),
    "right": lambda normalize: PaddedCollator(0, padding_side="right", normalize_loss=normalize),
    "packed": lambda normalize: PackedCollator(0, max_tokens=9, normalize_loss=normalize),
    "one row": lambda normalize: PackedCollator(0, max_tokens=24, normalize_loss=normalize),
    "aligned, dp=2": lambda normalize: PackedCollator(
        0, max_tokens=16, parallel=ParallelLayout(dp=2, tp=4), normalize_loss=normalize
    ),
    "dummy rows": lambda normalize: PackedCollator(
        0, max_tokens=8, parallel=ParallelLayout(dp=8), normalize_loss=normalize
    ),
}


class Model:
    """Logits [R, W, V] from a table of ids and positions; `table.grad` is the gradient."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(VOCABULARY, POSITIONS, VOCABULARY, generator=generator)
        self.table = (3 * table).to(dtype).requires_grad_()

    def __call__(self, batch: Batch) -> Tensor:
        return self.table[batch["input_ids"], batch["position_ids"]]

    def gradient(self, loss: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, self.table, retain_graph=True)
        return gradient


def nll_of(logits_V: Tensor, target: int) -> float:
    """Minus the log-probability of one target, in float64."""
    logits = [float(value) for value in logits_V]
    top = max(logits)
    return top + math.log(sum(math.exp(value - top) for value in logits)) - logits[target]


def loop_loss(model: Model, examples: Sequence[Example], num_loss_tokens: float) -> float:
    """The loss of examples one by one, token by token; no batch is involved."""
    total = 0.0
    for example in examples:
        ids = example["input_ids"]
        for t in range(1, len(ids)):
            if example["loss_mask"][t]:
                logits = model.table[ids[t - 1], t - 1].detach()
                total += nll_of(logits, ids[t]) * example["loss_mask"][t]
    return total / num_loss_tokens


def loop_nll(
    model: Model, example: Example, start: int = 0, stop: int | None = None
) -> list[float]:
    """The nll of a piece's response: from its first trained token (not its first) to its end."""
    ids, mask = example["input_ids"][start:stop], example["loss_mask"][start:stop]
    trained = [t for t in range(1, len(ids)) if mask[t]]
    first = trained[0] if trained else len(ids)
    return [nll_of(model.table[ids[t - 1], t - 1].detach(), ids[t]) for t in range(first, len(ids))]


# --- by hand -------------------------------------------------------------------------------------

LOG_2, LOG_4 = math.log(2), math.log(4)
# Column t predicts token t + 1. Probabilities 1/2, 1/4, 1/4; 1/4, 1/2, 1/4; the last is unused.
HAND_LOGITS = torch.tensor([[[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.9, 0.05, 0.05]]]).log()


@pytest.mark.parametrize(
    ("labels", "num_loss_tokens", "expected"),
    [
        ([0, 0, 1], 1, LOG_2 + LOG_2),
        ([0, 0, 1], 2, LOG_2),
        ([0, 2, 0], 2, LOG_4),
        ([-100, -100, 0], 1, LOG_4),
        ([2, 0, -100], 4, LOG_2 / 4),  # the first label is predicted by nothing
        ([0, -100, -100], 1, 0.0),
        ([0, 0, 1], 0.5, 2 * (LOG_2 + LOG_2)),  # a sum of weights may be below 1
        ([-100, -100, -100], 0, 0.0),
    ],
)
def test_labels_by_hand(labels: list[int], num_loss_tokens: int, expected: float) -> None:
    loss = token_loss(HAND_LOGITS, torch.tensor([labels]), num_loss_tokens=num_loss_tokens)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected)
    one_row = token_loss(HAND_LOGITS[0], torch.tensor(labels), num_loss_tokens=num_loss_tokens)
    assert one_row == loss


# --- a loop over tokens --------------------------------------------------------------------------


examples_strategy = st.lists(
    st.lists(
        st.tuples(st.integers(0, VOCABULARY - 1), st.sampled_from([0, 0, 1, 1, 0.5])),
        min_size=1,
        max_size=9,
    ).map(lambda pairs: {"input_ids": [p[0] for p in pairs], "loss_mask": [p[1] for p in pairs]}),
    min_size=1,
    max_size=6,
)


@given(examples=examples_strategy, name=st.sampled_from(list(LAYOUTS)))
def test_loss_and_token_values_of_any_examples(examples: list[Example], name: str) -> None:
    if name in ("packed", "dummy rows"):
        examples = [{key: row[:8] for key, row in example.items()} for example in examples]
    model = Model()
    batch = LAYOUTS[name](True)(examples)
    loss, outputs = token_loss(
        model(batch), batch, num_loss_tokens=4, return_per_token_outputs=True
    )
    assert loss.item() == pytest.approx(loop_loss(model, examples, 4), rel=1e-6)
    assert outputs.example_indices.tolist() == list(range(len(examples)))
    for values, example in zip(outputs.nll, examples, strict=True):
        assert values.tolist() == pytest.approx(loop_nll(model, example), rel=1e-6)


# --- labels, logits_to_keep, infinities, dtypes --------------------------------------------------


@pytest.mark.parametrize("per_token", [False, True])
def test_an_infinite_loss_of_an_untrained_token_is_no_nan(per_token: bool) -> None:
    batch = PaddedCollator(0)([{"input_ids": [1, 2, 3, 1], "loss_mask": [0, 1, 0, 1]}])
    logits = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(0))
    logits[0, 1, 3] = -math.inf  # token 3 of the row cannot come here, and it is not trained
    logits.requires_grad_()
    result: Any = token_loss(logits, batch, num_loss_tokens=2, return_per_token_outputs=per_token)
    loss = result
    if per_token:
        loss, outputs = result
        assert outputs.nll[0][1] == math.inf
    loss.backward()
    expected = (nll_of(logits[0, 0].detach(), 2) + nll_of(logits[0, 2].detach(), 1)) / 2
    assert loss.item() == pytest.approx(expected)
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[0, [1, 3]] == 0).all()


# --- num_loss_tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_loss_tokens", [4, 4.0, np.int64(4), torch.tensor(4), torch.tensor([4.0])]
)
def test_the_denominator_may_be_a_number_or_a_tensor(num_loss_tokens: Any) -> None:
    labels = torch.tensor([[0, 0, 1]], dtype=torch.int32)
    loss = token_loss(HAND_LOGITS, labels, num_loss_tokens=num_loss_tokens)
    assert loss.item() == pytest.approx(2 * LOG_2 / 4)
    assert loss.shape == ()


@pytest.mark.parametrize("num_loss_tokens", [0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_nothing_to_train_divides_by_one(num_loss_tokens: Any) -> None:
    logits = torch.randn(1, 3, 4, requires_grad=True)
    batch = PackedCollator(0, max_tokens=3)([{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}])
    for target in (batch, batch["labels"]):
        loss = token_loss(logits, target, num_loss_tokens=num_loss_tokens)
        assert loss.item() == 0
        (gradient,) = torch.autograd.grad(loss, logits)  # every rank must take part in backward
        assert (gradient == 0).all()


# --- per-token outputs ---------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [True, False])
def test_the_pieces_of_a_split_example_are_joined_in_order(normalize: bool) -> None:
    long = {"input_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "loss_mask": [0, 0] + [1] * 8}
    short = {"input_ids": [5, 4, 3], "loss_mask": [0, 1, 1]}
    model = Model()
    collate = PackedCollator(0, max_tokens=4, overflow="split", normalize_loss=normalize)
    batch = collate([short, long])
    batch = batch.select(list(range(len(batch)))[::-1])  # the pieces come in any order
    loss, outputs = token_loss(
        model(batch), batch, num_loss_tokens=8, return_per_token_outputs=True
    )
    assert outputs.example_indices.tolist() == [0, 1]
    pieces = [loop_nll(model, long, a, a + 4) for a in (0, 4, 8)]
    assert [len(piece) for piece in pieces] == [2, 3, 1]  # a piece's first token has no value
    assert outputs.nll[0].tolist() == pytest.approx(loop_nll(model, short), rel=1e-6)
    assert outputs.nll[1].tolist() == pytest.approx([*pieces[0], *pieces[1], *pieces[2]], rel=1e-6)
    assert loss.item() * 8 == pytest.approx(sum(sum(outputs.nll[i].tolist()) for i in (0, 1)))


def test_labels_that_differ_from_the_ids_are_what_is_scored() -> None:
    example = {"input_ids": [1, 2, 3, 4], "labels": [-100, 7, -100, 8]}
    model = Model()
    batch = PaddedCollator(0)([example])
    _, outputs = token_loss(model(batch), batch, num_loss_tokens=1, return_per_token_outputs=True)
    # The token between them is not trained, so it has no label: its value is that of its id.
    expected = [nll_of(model.table[t, t - 1].detach(), i) for t, i in ((1, 7), (2, 3), (3, 8))]
    assert outputs.nll[0].tolist() == pytest.approx(expected, rel=1e-6)


# --- errors --------------------------------------------------------------------------------------


LABELS = torch.tensor([[-100, 1]])
LOGITS = torch.zeros(1, 2, 3)
SHAPE = r"pass logits of the same rows, not shifted: \[1, 2, 'V'\]$"


@pytest.mark.parametrize(
    ("logits", "labels", "options", "error", "message"),
    [
        (object(), LABELS, {}, TypeError, r"floats, got object; pass model\(\.\.\.\)"),
        (LOGITS.long(), LABELS, {}, TypeError, "tensor of floats, got torch.int64"),
        (LOGITS, {"labels": 1}, {}, TypeError, "got dict; pass what the collator returned"),
        (LOGITS, LABELS.float(), {}, TypeError, "got torch.float32; pass the Batch"),
        (LOGITS, LABELS.bool(), {}, TypeError, "labels must be token ids or -100, got torch.bool"),
        (LOGITS, LABELS.to(torch.uint8), {}, TypeError, "ids or -100, got torch.uint8"),
        (LOGITS, LABELS, {"num_loss_tokens": None}, TypeError, "a number, got NoneType; pass"),
        (LOGITS, LABELS, {"num_loss_tokens": True}, TypeError, "a number, got bool; pass the loss"),
        (LOGITS, LABELS, {"num_loss_tokens": torch.ones(2)}, ValueError, r"got shape \[2\]"),
        (LOGITS, LABELS, {"num_loss_tokens": -0.5}, ValueError, "finite and 0 or more, got -0.5"),
        (LOGITS, LABELS, {"num_loss_tokens": math.nan}, ValueError, "0 or more, got nan"),
        (LOGITS, LABELS, {"num_loss_tokens": np.float32("inf")}, ValueError, "0 or more, got inf"),
        (LOGITS, LABELS, {"return_per_token_outputs": True}, ValueError, "needs a Batch, got"),
        (LOGITS, LABELS, {"return_per_token_outputs": 0}, TypeError, "be True or False, got 0"),
        (torch.zeros(2, 2, 3), LABELS, {}, ValueError, r"shape \[2, 2, 3\], labels \[1, 2\]; "),
        (torch.zeros(1, 3, 3), LABELS, {}, ValueError, SHAPE),
        (torch.zeros(1, 1, 3), LABELS, {}, ValueError, SHAPE),
        (torch.zeros(2, 3), LABELS, {}, ValueError, SHAPE),
        (torch.zeros(1, 1, 2, 3), LABELS, {}, ValueError, SHAPE),
        (LOGITS.to("meta"), LABELS, {}, ValueError, r"on meta, labels on cpu; call batch\.to\("),
    ],
)  # fmt: skip
def test_refuses(
    logits: Any, labels: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        token_loss(logits, labels, **{"num_loss_tokens": 1, **options})


def test_logits_with_too_few_or_too_many_columns_of_a_batch() -> None:
    batch = PaddedCollator(0)(EXAMPLES)  # 7 columns, of which a response takes 4
    assert batch.metadata["response_length"] == 4
    for columns in (4, 8, 0):
        with pytest.raises(ValueError, match=r"\[6, 7, 'V'\], or at least its last 5 columns"):
            token_loss(torch.zeros(6, columns, 11), batch, num_loss_tokens=1)


@pytest.mark.parametrize("name", ["packed", "aligned, dp=2", "dummy rows"])
def test_all_rows_as_one_give_the_loss_of_the_rows(name: str) -> None:
    """As of models whose kernels take one row, to which ``model_inputs`` passes [1, R * W]."""
    batch, model = LAYOUTS[name](False)(EXAMPLES), Model()
    logits = model(batch)
    assert len(logits) > 1
    one_row = logits.flatten(0, 1)[None]
    head = torch.nn.Linear(VOCABULARY, VOCABULARY, dtype=torch.float64)
    for options in ({}, {"head": head}):
        options |= {"num_loss_tokens": NUM_LOSS_TOKENS, "return_per_token_outputs": True}
        loss, outputs = token_loss(logits, batch, **options)
        found, of_one = token_loss(one_row, batch, **options)
        assert found == loss
        assert torch.equal(model.gradient(found), model.gradient(loss))
        for expected, nll in zip(outputs.nll, of_one.nll, strict=True):
            np.testing.assert_array_equal(nll, expected)
    for wrong in (one_row[:, 1:], one_row[:, :0], one_row.repeat(2, 1, 1)):
        with pytest.raises(ValueError, match=r"logits have shape \[\d, \d+, 11\], labels \["):
            token_loss(wrong, batch, num_loss_tokens=1)
