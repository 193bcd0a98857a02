"""Bad input is refused with a message that ends the search, as docs/contract.md prints it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests.collators.bad_inputs import (
    BAD_INPUTS,
    COLUMNS,
    IDS,
    IMAGE,
    NESTED,
    NO_IMAGE,
    ROLLOUT,
    ROUTES,
    BadInput,
)
from torch_collate_kit.batch import PerToken
from torch_collate_kit.collators import PackedCollator, PaddedCollator, RolloutCollator
from torch_collate_kit.errors import DataError
from torch_collate_kit.loading import TokenizedDataset
from torch_collate_kit.packing import pack
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.rl import merge_steps

CONTRACT = Path(__file__).parents[2] / "docs" / "contract.md"


@pytest.mark.parametrize("case", BAD_INPUTS, ids=lambda case: case.given)
def test_bad_input_raises_what_the_contract_says(case: BadInput):
    shown = CONTRACT.read_text(encoding="utf-8")
    with pytest.raises((TypeError, ValueError)) as caught:
        case.call()
    message = str(caught.value).replace("|", "\\|")
    assert f"| {case.given} | `{caught.type.__name__}`: {message} |" in shown


PADDED = PaddedCollator(0)
SPLIT = PackedCollator(0, max_tokens=4, overflow="split")
FOR_TRAINER = PackedCollator(0, max_tokens=8).for_trainer()
LONG_ROW = {"input_ids": [1, 2, 3, 4, 5, 6, -9]}
ACTIONS = {"input_ids": [5, 6, 7, 8], "loss_mask": [1, -2], "num_actions": 2}
SEVERAL = r"example 0: num_actions is .* it must be an integer"
MASKED = np.ma.array([5, 6, 7], mask=[False, True, False])
ACTION_COLUMNS = {"input_ids": [[5, 6], [7, 8]], "loss_mask": [[1], [1]]}
LOST = "is a masked array, whose mask would be lost"
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: SPLIT([{"input_ids": [1]}, LONG_ROW]), "example 1: input_ids is -9 at token 6"),
    (lambda: PADDED([ACTIONS]), r"example 0: loss_mask is -2\.0 at response token 1"),
    (lambda: PADDED([ACTIONS | {"num_actions": np.array([1, 2])}]), SEVERAL),
    (lambda: PADDED([ACTIONS | {"num_actions": torch.tensor([1, 2])}]), SEVERAL),
    (lambda: PADDED([ACTIONS | {"num_actions": np.array([])}]), SEVERAL),
    (lambda: FOR_TRAINER([{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0.25]}]),
     r"no loss_mask, but a token has weight 0\.25; give masks"),
    (lambda: PADDED({"input_ids": 5}), "collate one example as a list"),
    (lambda: PADDED({"input_ids": torch.tensor([5, 6])}), "collate one example as a list"),
    (lambda: PADDED(iter([])), "is a list_iterator; pass a list of examples, a mapping of columns"),
    (lambda: PADDED([{"input_ids": [5], "attention_mask": 1}]), "attention_mask is int; give a"),
    (lambda: PADDED([{"input_ids": np.array([5, 6]), "attention_mask": torch.tensor([0, 1])}]),
     "attention_mask contains a 0"),
    (lambda: PADDED({**ACTION_COLUMNS, "num_actions": MASKED[:2]}), f"column num_actions {LOST}"),
    (lambda: PADDED({**ACTION_COLUMNS, "loss_mask": MASKED[:2, None]}), f"column loss_mask {LOST}"),
    (lambda: Ragged(MASKED, [0, 3]), r"values are a masked array.*pass \.filled"),
    (lambda: Ragged.from_rows([[1], MASKED]), r"row 1 is a masked array.*pass \.compressed"),
    (lambda: TokenizedDataset([{"input_ids": [1]}, {"input_ids": MASKED}]),
     r"example 1: input_ids is a masked array.*\.compressed"),
    (lambda: pack(MASKED, 8), r"lengths is a masked array.*pass \.compressed"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_else_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((DataError, TypeError), match=words):
        call()


def test_weights_of_0_and_1_are_passed_on_as_labels() -> None:
    assert "loss_mask" not in FOR_TRAINER([{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]}])


# --- rows of more cells than int32 counts --------------------------------------------------------

LONG = np.broadcast_to(np.int64(5), 2**31 + 5)  # takes no memory
LONG_ROLLOUT = {"rewards": 1.0, "loss_mask": np.broadcast_to(True, 2**31 + 5)}
WIDE = {
    "padded": (PaddedCollator(0), {"input_ids": LONG}, "2147483653.*shorten example 1 when"),
    "rounded up": (PaddedCollator(0, pad_to_multiple_of=2**31), {"input_ids": [5, 6, 7]},
     "2147483648 cells, more than the 2147483647 that"),
    "packed": (PackedCollator(0, max_tokens=2**32), {"input_ids": LONG},
     "example 1 has 2147483653 tokens, more than the 2147483647 that fit.*int32 counts.*shorten"),
    "fixed width": (PackedCollator(0, max_tokens=2**32, fixed_width=True), {"input_ids": [5, 6, 7]},
     "row would have 4294967296 cells.*lower max_tokens=4294967296"),
    "rollouts": (RolloutCollator(0), {**LONG_ROLLOUT, "prompt_ids": [5, 6, 7],
     "response_ids": LONG}, "2147483656 cells.*filter out example 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WIDE)
def test_rows_of_more_cells_than_int32_counts_are_refused(name):
    collate, long, message = WIDE[name]
    good = {key: np.array(value[:3]) if np.ndim(value) else value for key, value in long.items()}
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    try:  # an allocation of such a row fails, rather than fill the memory of the machine
        most = pages * resource.getpagesize() + 2**30
        resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
        with pytest.raises(DataError, match=message):
            collate([good, long])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


# --- Values that used to pass, or to crash inside NumPy: bools as ids, odd tensors, lost masks


COLLATORS = {"padded": PADDED, "packed": PackedCollator(0, max_tokens=8)}
collators = pytest.mark.parametrize("collate", COLLATORS.values(), ids=COLLATORS)


def message_of(collate: Any, examples: Any) -> str:
    with pytest.raises(DataError) as caught:
        collate(examples)
    return str(caught.value)


ODD = {
    "nested tensor; give each example its own, as of .unbind()": NESTED,
    "layout torch.sparse_coo on device cpu; give a dense one": torch.tensor([5, 6, 7]).to_sparse(),
    "layout torch.sparse_csr on device cpu": torch.tensor([[5.0, 6.0, 7.0]]).to_sparse_csr(),
    "layout torch.strided on device meta": torch.ones(3, dtype=torch.int64, device="meta"),
    "dtype complex64": torch.tensor([5j, 6j, 7j]).conj(),
    "masked array, whose mask would be lost; give .compressed() or .filled(value)": MASKED,
}


@pytest.mark.parametrize("words", ODD)
@collators
def test_odd_values_name_the_example(collate, words):
    for name in ("input_ids", "labels", "loss_mask", "attention_mask"):
        if (name, words) != ("attention_mask", "dtype complex64"):
            good = {"input_ids": IDS, name: [1, 1, 1]}
            message = message_of(collate, [good, {**good, name: ODD[words]}])
            assert message.startswith(f"example 1: {name} ")
            assert words in message


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_column_may_be_a_nested_tensor_of_examples(layout):
    rows = [torch.tensor([5, 6]), torch.tensor([7])]
    column = torch.nested.nested_tensor(rows, layout=layout)
    assert PaddedCollator(0)({"input_ids": column}) == PaddedCollator(0)({"input_ids": rows})


MASKS = {"rollout_expert_indices": ROUTES, **IMAGE}


@pytest.mark.parametrize("name", sorted(MASKS))
@pytest.mark.parametrize("is_list", [False, True])
def test_masked_routes_and_images_are_refused(name, is_list):
    good = {**ROLLOUT, **({name: MASKS[name]} if name not in IMAGE else IMAGE)}
    masked = np.ma.masked_array(MASKS[name], mask=np.arange(np.size(MASKS[name])) == 1)
    bad = {**good, name: list(masked) if is_list else masked}
    message = message_of(RolloutCollator(0), [good, bad])
    assert message == (
        f"example 1: {name} is a masked array, whose mask would be lost; give .filled(value)"
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize(
    "form",
    {
        "array": lambda labels: [[5, 6, 7], labels],
        "mixed dtypes": lambda labels: [np.array([5, 6, 7]), labels],
        "tensor": lambda labels: [torch.tensor([5, 6, 7]), torch.from_numpy(labels)],
        "column": lambda labels: Ragged.from_rows([[5, 6, 7], labels], dtype=labels.dtype),
    }.items(),
    ids=lambda form: form[0],
)
@collators
def test_an_ignored_label_stored_unsigned_is_no_token_id(collate, form, dtype):
    ids = [[5, 6, 7]] * 2
    labels = np.array([5, -100, 7]).astype(dtype)
    message = message_of(collate, {"input_ids": ids, "labels": form[1](labels)})
    assert message == (
        f"example 1: labels is {labels[1]} at token 1 in dtype {labels.dtype}, which is what -100 "
        "becomes there, so the token would be trained; store labels in a signed dtype such as int32"
    )
    labels[1] = 155
    trained = collate({"input_ids": ids, "labels": form[1](labels)})
    assert trained["labels"].flatten().tolist().count(155) == 1


@collators
@pytest.mark.parametrize("dtypes", [("i8", "u8"), ("u8", "i8"), ("i4", "u8"), ("u4", "u8", "i8")])
def test_ids_of_mixed_dtypes_do_not_become_floats(collate, dtypes):
    """NumPy joins int64 and uint64 to float64, which has 53 bits."""
    large = 2**60 + 1
    rows = [np.array([1, 2], dtype=dtype) for dtype in dtypes]
    rows[dtypes.index("u8")][1] = large
    examples = [{"input_ids": row, "labels": row, "own": row} for row in rows]
    collate = type(collate)(
        0,
        fields={"own": PerToken(torch.int64)},
        **({"max_tokens": 8} if isinstance(collate, PackedCollator) else {}),
    )
    batch = collate(examples)
    for name in ("input_ids", "labels", "own"):
        assert batch[name].max() == large, name
    rollouts = [
        {"prompt_ids": row, "response_ids": row, "rewards": 0, "loss_mask": [1, 1]} for row in rows
    ]
    assert RolloutCollator(0)(rollouts)["input_ids"][dtypes.index("u8")].tolist() == [1, large] * 2


@collators
@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", ">i4", ">i8", "u1", "u4", "u8"])
@pytest.mark.parametrize("num_tokens", [3, 300])
def test_ids_of_every_integer_dtype(dtype, num_tokens, collate):
    """In an order of rows that is not that of the examples; the largest of int32 at either end."""
    largest = min(np.iinfo(dtype).max, 2**31 - 1)
    rows = [np.full(n, largest, dtype=dtype) for n in (num_tokens, num_tokens + 5)]
    rows[0][1], rows[1][-1] = 1, 0
    collate = PackedCollator(0, max_tokens=700) if isinstance(collate, PackedCollator) else collate
    column = Ragged(np.concatenate(rows, dtype=dtype), [0, num_tokens, 2 * num_tokens + 5])
    for given in ({"input_ids": column}, [{"input_ids": row} for row in rows]):
        batch = collate(given)
        order = batch.row_metadata["example_indices"].values
        assert batch.column("input_ids").dtype == torch.int32
        expected = np.concatenate([rows[i].astype(np.int64) for i in order])
        assert batch.column("input_ids").tolist() == expected.tolist()
    if dtype[-2] == "i":
        negative = np.array([5, 6, -7], dtype=dtype)
        for given in ({"input_ids": Ragged(negative, [0, 3])}, [{"input_ids": negative}]):
            assert message_of(collate, given).startswith("example 0: input_ids is -7 at token 2;")


# --- Hostile rollouts: each is refused by name, and never with an error of NumPy or torch


META = torch.ones(3, device="meta")
GOOD = {
    "logprobs": [-1.0] * 3,
    "advantages": 1.0,
    "uid": "a",
    "is_last_step": True,
    "trajectory_id": "t",
    "rollout_expert_indices": ROUTES,
    **IMAGE,
}
HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"prompt_ids": META.long()}, "prompt_ids is a tensor of layout .* on device meta"),
    ({"response_ids": "abc"}, "response_ids is str"),
    ({"rewards": np.array("a")}, r"rewards is 'a' \(str\); give one number"),
    ({"rewards": 10**400}, r"rewards is 1000.*\(int\); give one number"),
    ({"rewards": [10**400, 0, 0]}, r"rewards\[0\] is 1000.*\(int\); it must be a number"),
    ({"rewards": -np.inf}, "rewards is -inf at response token 2; .*filter such rollouts out"),
    ({"rewards": META[0]}, r"rewards is tensor\(.*meta.* give one number"),
    ({"loss_mask": np.array(1)}, r"loss_mask is 0-D .* \(loss_mask\[0\]\)"),
    ({"loss_mask": np.array([1, 1, 1], dtype=object)}, "loss_mask has dtype object; give numbers"),
    ({"uid": META[0]}, r"uid is tensor\(.*\(Tensor\); rollouts are grouped by it"),
    ({"is_last_step": 2}, "is_last_step is 2"),
    ({"rollout_expert_indices": []}, r"has shape \(0,\) .* an array \[0, layers, top_k\] where"),
    ({"rollout_expert_indices": [torch.ones(2, 2, requires_grad=True)]}, "dtype float32; give int"),
    ({"rollout_expert_indices": [[[2**70, 1], [1, 2]]]}, "dtype object; give integers"),
    ({"rollout_expert_indices": ROUTES - 2}, "has the expert -2; experts are 0 to 32767"),
    ({"rollout_expert_indices": np.where(ROUTES > 17, -1, ROUTES)}, "-1 in some .* of token 4; "),
    ({**IMAGE, "pixel_values": [[1.0, 2.0], [3.0]]}, "pixel_values is a list whose parts differ"),
    ({**IMAGE, "image_grid_thw": [1, 2, 2]}, r"shape \(3,\) .* give integers \[images, 3\]"),
    ({**IMAGE, "image_grid_thw": [[1.0, 2.0, 2.0]]}, "image_grid_thw has .* dtype float64"),
]


@pytest.mark.parametrize("wrong", HOSTILE, ids=[message for _, message in HOSTILE])
@pytest.mark.parametrize("collator", ["block", "packed"])
def test_a_hostile_entry_is_refused_by_name(
    wrong: tuple[dict[str, Any], str], collator: str
) -> None:
    entries, message = wrong
    collate: Any = RolloutCollator(0)
    if collator == "packed":
        collate = PackedCollator(0, max_tokens=64)
    good = {**ROLLOUT, **{key: GOOD[key] for key in entries if key in GOOD}}
    with pytest.raises(DataError, match=rf"^example 1\b.*{message}"):
        collate([good, {**ROLLOUT, **entries}])


@pytest.mark.parametrize(
    "entries",
    [
        {**IMAGE, "pixel_values": np.ones((1, 4, 3))},
        {**IMAGE, "image_grid_thw": [[1, 2]]},
    ],
)
def test_an_image_behind_a_rollout_without_one_is_refused_by_name(entries: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"^example 1: (pixel_values|image_grid_thw)"):
        RolloutCollator(0)([{**ROLLOUT, **NO_IMAGE}, {**ROLLOUT, **entries}])
    other = {**IMAGE, "pixel_values": np.ones((4, 5))}
    with pytest.raises(DataError, match=r"^example 2: .* example 1 has \(4, 3\)"):
        RolloutCollator(0)([{**ROLLOUT, **e} for e in (NO_IMAGE, IMAGE, other)])
    with pytest.raises(DataError, match=r"^example 1 has pixel_values, and the collator does not"):
        PackedCollator(0, max_tokens=8)([{**ROLLOUT, **e} for e in (NO_IMAGE, IMAGE)])


@pytest.mark.parametrize("largest", [255, 256, 257])
@pytest.mark.parametrize("collate", [RolloutCollator(0), PackedCollator(0, max_tokens=8)])
def test_experts_around_the_largest_of_a_byte(collate: Any, largest: int) -> None:
    routes = ROUTES + largest - ROUTES.max()
    batch = collate([{**ROLLOUT, "rollout_expert_indices": routes}])
    assert batch["rollout_expert_indices"].tolist() == [routes.tolist()]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"uid": "ab"}, "column uid is str, which has no rows"),
        ({"response_ids": [7, 8]}, r"collate one example as a list: \[example\]"),
        ({"prompt_ids": [5, 6]}, "example 0: prompt_ids is int"),
        ({"rewards": [1.0]}, "column rewards has 1 rows, response_ids has 2"),
        ({"rewards": np.array([1j, 0])}, "example 0: rewards is complex"),
        ({"rewards": np.ones((2, 1, 1))}, "example 0: rewards is 2-D"),
        ({"rewards": Ragged(META, [0, 1, 2])}, "column rewards is a tensor of layout"),
        ({"rewards": Ragged(np.ones((2, 2)), [0, 1, 2])}, "column rewards has 2-D values"),
        ({"uid": np.ones((2, 2))}, "example 0: uid is array"),
        ({"uid": pd.Series(["a", None], dtype="string")}, "example 1: uid is <NA>"),
    ],
)
def test_a_hostile_column_is_refused_by_name(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        RolloutCollator(0)({**COLUMNS, **entries})


@pytest.mark.parametrize("key", ["prompt_ids", "response_ids"])
def test_an_id_over_64_bits_does_not_wrap(key: str) -> None:
    """A column of uint64 alone stays one."""
    wide = {**ROLLOUT, key: np.array([5, 2**63, 7], dtype=np.uint64)}
    for collate in (RolloutCollator(0), PackedCollator(0, max_tokens=8)):
        with pytest.raises(DataError, match=f"example 0: {key} is -9223372036854775808 at token 1"):
            collate([wide])


@pytest.mark.parametrize("as_array", [list, np.array, np.float16, torch.tensor])
@pytest.mark.parametrize("collate", [RolloutCollator(0), PackedCollator(0, max_tokens=8)])
def test_log_probs_over_0_are_refused_but_for_rounding(collate: Any, as_array: Any) -> None:
    step = {**ROLLOUT, "uid": "a", "is_last_step": True}
    good = {**step, "logprobs": as_array([-0.5, 0.0, 0.0009])}
    assert collate([good])["rollout_logprobs"].max() == pytest.approx(0.0009, rel=1e-3)
    for wrong in (0.0011, 0.5, 1.0):
        bad = {**step, "logprobs": as_array([-0.5, wrong, 0.0])}
        for read in (collate, merge_steps):
            with pytest.raises(
                DataError, match=r"example 1: logprobs is \S+ at response token 1; a"
            ):
                read([good, bad])
