"""The table of bad inputs: what is given and what comes back, as in docs/contract.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.building import packed_collator
from torch_collate_kit.batch import Batch, PerExample, PerToken
from torch_collate_kit.collators import PackedCollator, PaddedCollator, RolloutCollator
from torch_collate_kit.packing import PackingOptions, ParallelLayout, pack
from torch_collate_kit.ragged import Ragged

IDS = [5, 6, 7]
GOOD = {"input_ids": IDS}
PAIR = {"input_ids": [IDS, [5, 6, 8]], "loss_mask": [[0, 0, 1], [0, 0, 1]]}
LABELLED = {**GOOD, "labels": IDS}
ROLLOUT = {"prompt_ids": [5, 6], "response_ids": [7, 8, 9], "rewards": 1.0, "loss_mask": [1, 1, 1]}
BRANCHED = {
    "prompt_ids": [[5, 6], [5]],
    "response_ids": [[7], [8, 9]],
    "loss_mask": [[1], [1, 1]],
    "rewards": 1.0,
}
COLUMNS = {
    "prompt_ids": [[5, 6], [5]],
    "response_ids": [[7], [8]],
    "rewards": [1.0, 0.0],
    "loss_mask": [[1], [1]],
}
ROUTES = np.arange(20).reshape(5, 2, 2)  # 5 tokens, 2 layers, 2 experts
IMAGE = {"pixel_values": np.ones((4, 3)), "image_grid_thw": [[1, 2, 2]]}
NO_IMAGE = {"pixel_values": None, "image_grid_thw": None}
NAN = float("nan")
TOP = {"top": PerToken(torch.int8, shape=(2,))}
NESTED = torch.nested.nested_tensor([torch.tensor([5, 6]), torch.tensor([7])], layout=torch.jagged)
META = torch.ones(2, dtype=torch.int64, device="meta")


class _NoPad:
    pad_token_id = None


class BadInput(NamedTuple):
    given: str
    call: Callable[[], Any]


def _collated(*examples: Any, **settings: Any) -> Callable[[], Any]:
    """Both collators must say the same, so the packed one is tried where the padded one passes."""

    def call() -> Any:
        packed_collator(0, max_tokens=8, **settings)(list(examples))

    return call


def _example(**keys: Any) -> Callable[[], Any]:
    return _collated({**GOOD, **keys})


def _pair(**keys: Any) -> Callable[[], Any]:
    return _collated(PAIR, {**PAIR, **keys})


def _padded(*examples: Any, **settings: Any) -> Callable[[], Any]:
    return lambda: PaddedCollator(0, **settings)(list(examples))


def _rollouts(*examples: Any, **settings: Any) -> Callable[[], Any]:
    return lambda: RolloutCollator(0, **settings)(list(examples))


def _rollout(**keys: Any) -> Callable[[], Any]:
    """A good rollout, then one of which these entries are wrong."""
    good = {"logprobs": [-1, -1, -1], "advantages": 1.0, "uid": "a", "is_last_step": True}
    good |= {"rollout_expert_indices": ROUTES, "trajectory_id": "t", **IMAGE}
    first = {**ROLLOUT, **{key: good[key] for key in keys if key in good}}
    return _rollouts(first, {**ROLLOUT, **keys})


def _branched(**keys: Any) -> Callable[[], Any]:
    """A good rollout of two segments, then one of which these entries are wrong."""
    return _rollouts(BRANCHED, {**BRANCHED, **keys})


def _without(*keys: str) -> Callable[[], Any]:
    return _rollouts({key: value for key, value in ROLLOUT.items() if key not in keys})


def _packed_rollouts(*examples: Any, **settings: Any) -> Callable[[], Any]:
    return lambda: packed_collator(0, **{"max_tokens": 8, **settings})(list(examples))


def _for_trainer(*examples: Any) -> Callable[[], Any]:
    return lambda: PackedCollator(0, max_tokens=8).for_trainer()(list(examples))


SEGMENTED_INPUTS = [
    BadInput("segments that differ in number", _pair(loss_mask=[[0, 0, 1]])),
    BadInput("a flat mask of several segments", _pair(loss_mask=[0, 0, 1])),
    BadInput("an example without segments", _pair(input_ids=[], loss_mask=[])),
    BadInput("an empty segment", _pair(input_ids=[IDS, []], loss_mask=[[0, 0, 1], []])),
    BadInput("a short mask of a segment", _pair(loss_mask=[[0, 0, 1], [0, 1]])),
    BadInput("segments beside a flat example", _collated(PAIR, GOOD | {"loss_mask": [0, 0, 1]})),
    BadInput("a flat example beside segments", _collated(GOOD | {"loss_mask": [0, 0, 1]}, PAIR)),
    BadInput("segments in a 2-D array", _pair(input_ids=np.ones((2, 3), dtype=int))),
    BadInput("segments over a row", _collated(PAIR, PAIR | {"input_ids": [IDS, [5] * 9],
     "loss_mask": [[0, 0, 1], [1] * 9]})),
    BadInput("segments over `max_length`", _padded(PAIR, max_length=5)),
    BadInput("segments to truncate", lambda: PackedCollator(0, max_tokens=8,
     overflow="truncate")([PAIR])),
    BadInput("segments to split", lambda: PackedCollator(0, max_tokens=8,
     overflow="split")([PAIR])),
    BadInput("segments to split where prefixes are shared", lambda: PackedCollator(0, max_tokens=8,
     share_prefixes=True, overflow="split")),
    BadInput("more segments than a row may have", lambda: PackedCollator(0,
     packing=PackingOptions(8, max_sequences_per_row=1))([PAIR])),
    BadInput("segments without a list among lengths", lambda: pack([[3, 4], 2], 8)),
    BadInput("padded rows cut within an example", lambda: PaddedCollator(0)([PAIR])[:1]),
]  # fmt: skip

ROLLOUT_INPUTS = [
    BadInput("no `rewards`", _without("rewards")),
    BadInput("no `prompt_ids` and no `loss_mask`", _without("prompt_ids", "loss_mask")),
    BadInput("no `response_ids`", _without("response_ids")),
    BadInput("an empty response", _rollout(response_ids=[], loss_mask=[])),
    BadInput("an empty prompt", _rollout(prompt_ids=[])),
    BadInput("a negative id in a response", _rollout(response_ids=[7, -1, 9])),
    BadInput("a prompt that is None", _rollout(prompt_ids=None)),
    BadInput("rewards of some tokens", _rollout(rewards=[0.5, 1.0])),
    BadInput("a list of one reward", _rollout(rewards=[1.0])),
    BadInput("advantages of some tokens", _rollout(advantages=[0.5, 1.0])),
    BadInput("a response mask of all tokens", _rollout(loss_mask=[0, 0, 1, 1, 1])),
    BadInput("a `loss_mask` that is one number", _rollout(loss_mask=1)),
    BadInput("log-probs of some tokens", _rollout(logprobs=[-0.5, -1.0])),
    BadInput("log-probs that are one number", _rollout(logprobs=-0.5)),
    BadInput("a reward that is NaN", _rollout(rewards=NAN)),
    BadInput("a reward of a token that is NaN", _rollout(rewards=torch.tensor([0, NAN, 1]))),
    BadInput("a reward over float32", _rollout(rewards=1e39)),
    BadInput("a log-prob of -inf", _rollout(logprobs=[-1.0, -np.inf, -1.0])),
    BadInput("probabilities as log-probs", _rollout(logprobs=[-1.0, 0.001, 0.5])),
    BadInput("an advantage that is NaN", _rollout(advantages=NAN)),
    BadInput("a response weight that is NaN", _rollout(loss_mask=[1, NAN, 1])),
    BadInput("a negative response weight", _rollout(loss_mask=[1, -1, 1])),
    BadInput("a reward that is None", _rollout(rewards=None)),
    BadInput("a reward that is a string", _rollout(rewards="1.0")),
    BadInput("a complex reward", _rollout(rewards=torch.tensor(1j))),
    BadInput("rewards of strings", _rollout(rewards=["a", "b", "c"])),
    BadInput("rewards in an object array", _rollout(rewards=np.array([1, None, 1]))),
    BadInput("nested rewards", _rollout(rewards=[[1.0], [0.0], [0.0]])),
    BadInput("2-D rewards", _rollout(rewards=np.ones((1, 3)))),
    BadInput("rewards on the meta device", _rollout(rewards=torch.ones(3, device="meta"))),
    BadInput("`log_probs` for `logprobs`", _rollouts({**ROLLOUT, "log_probs": [-1, -1, -1]})),
    BadInput("`advantage` for `advantages`", _rollouts({**ROLLOUT, "advantage": 1.0})),
    BadInput("a rollout's weight under another name", _rollouts({**ROLLOUT, "sample_weight": 2})),
    BadInput("a `uid` of some rollouts", _rollouts({**ROLLOUT, "uid": "a"}, ROLLOUT)),
    BadInput("a `uid` that is None", _rollout(uid=None)),
    BadInput("a `uid` that pandas found missing", _rollout(uid=NAN)),
    BadInput("a `uid` that is an array", _rollout(uid=np.array([1, 2]))),
    BadInput("a `trajectory_id` that is None", _rollout(trajectory_id=None)),
    BadInput("`is_last_step` that is a string", _rollout(is_last_step="True")),
    BadInput("routes of more tokens", _rollout(rollout_expert_indices=np.tile(ROUTES, (2, 1, 1)))),
    BadInput("routes of another `top_k`", _rollout(rollout_expert_indices=ROUTES[..., :1])),
    BadInput("2-D routes", _rollout(rollout_expert_indices=ROUTES[0])),
    BadInput("routes that are None", _rollout(rollout_expert_indices=None)),
    BadInput("float routes", _rollout(rollout_expert_indices=ROUTES / 2)),
    BadInput("an uneven list of routes", _rollout(rollout_expert_indices=[[[1, 2], [3]]])),
    BadInput(
        "routes without experts", _rollouts({**ROLLOUT, "rollout_expert_indices": ROUTES[:, :, :0]})
    ),
    BadInput("an expert over int16", _rollout(rollout_expert_indices=ROUTES + 40_000)),
    BadInput("a route of some layers", _rollout(rollout_expert_indices=ROUTES - 1)),
    BadInput("pixels without a grid", _rollouts({**ROLLOUT, "pixel_values": np.ones((4, 3))})),
    BadInput("a grid that is None", _rollout(**{**IMAGE, "image_grid_thw": None})),
    BadInput("3-D pixels", _rollout(**{**IMAGE, "pixel_values": np.ones((1, 4, 3))})),
    BadInput("integer pixels", _rollout(**{**IMAGE, "pixel_values": np.ones((4, 3), dtype=int)})),
    BadInput("patches of another size", _rollout(**{**IMAGE, "pixel_values": np.ones((4, 5))})),
    BadInput("a grid of other patches", _rollout(**{**IMAGE, "image_grid_thw": [[1, 2, 3]]})),
    BadInput("a grid with a 0", _rollout(**{**IMAGE, "image_grid_thw": [[1, 2, 2], [1, 1, 0]]})),
    BadInput(
        "a rollout column of another length", lambda: RolloutCollator(0)({**COLUMNS, "uid": ["a"]})
    ),
    BadInput("a number as a column", lambda: RolloutCollator(0)({**COLUMNS, "rewards": 1.0})),
    BadInput("one rollout without its list", lambda: RolloutCollator(0)(ROLLOUT)),
    BadInput("a rollout that is not a mapping", _rollouts([5, 6, 7])),
    BadInput("no rollouts", _rollouts()),
    BadInput("examples with `input_ids` in RolloutCollator", _rollouts(GOOD)),
    BadInput("rollouts in PaddedCollator", _padded(ROLLOUT)),
    BadInput("a rollout over `max_length`", _rollouts(ROLLOUT, max_length=4)),
    BadInput("a rollout collator's `max_length` of 0", lambda: RolloutCollator(0, max_length=0)),
    BadInput("packed rollouts with images", _packed_rollouts({**ROLLOUT, **IMAGE})),
    BadInput("packed rollouts with `train_all`", _packed_rollouts(ROLLOUT, train_all=True)),
    BadInput("packed rollouts as model inputs", _for_trainer(ROLLOUT)),
    BadInput(
        "packed rollouts to truncate",
        _packed_rollouts({**ROLLOUT, "prompt_ids": [5] * 9}, overflow="truncate"),
    ),
    BadInput("packed rollouts over a row", _packed_rollouts({**ROLLOUT, "prompt_ids": [5] * 9})),
    BadInput("packed rollouts without `prompt_ids`", _packed_rollouts({"response_ids": [5]})),
    BadInput("a prompt of two responses", _branched(prompt_ids=[5, 6])),
    BadInput("a response too many", _branched(response_ids=[[7], [8, 9], [4]])),
    BadInput("a flat mask of two responses", _branched(loss_mask=[1, 1, 1])),
    BadInput("a short mask of a response", _branched(loss_mask=[[1], [1]])),
    BadInput("rewards of three segments", _branched(rewards=[0.0, 0.0, 1.0])),
    BadInput("a reward of a segment that is None", _branched(rewards=[None, 1.0])),
    BadInput("a reward of segments that is None", _branched(rewards=None)),
    BadInput("a rollout without segments", _branched(response_ids=[])),
    BadInput("a segment without response", _branched(response_ids=[[7], []])),
    BadInput("segments beside a flat rollout", _rollouts(BRANCHED, ROLLOUT)),
    BadInput("a flat rollout beside segments", _rollouts(ROLLOUT, BRANCHED)),
    BadInput("a rollout of segments over `max_length`", _rollouts(BRANCHED, max_length=5)),
    BadInput("a rollout of segments over a row", _packed_rollouts(BRANCHED, max_tokens=5)),
    BadInput("a rollout of segments to truncate", _packed_rollouts(BRANCHED, overflow="truncate")),
    BadInput("rows cut within a rollout", lambda: RolloutCollator(0)([BRANCHED])[:1]),
]

BAD_INPUTS = [
    BadInput("an empty list of examples", _collated()),
    BadInput("an example without tokens", _collated(GOOD, {"input_ids": []})),
    BadInput("no `input_ids`", _collated({"text": "hello"})),
    BadInput("an example that is not a mapping", _collated([5, 6, 7])),
    BadInput("one example without its list", lambda: PaddedCollator(0)(GOOD)),
    BadInput("a generator", lambda: PaddedCollator(0)(GOOD for _ in range(2))),
    BadInput("`input_ids` that is None", _collated(GOOD, {"input_ids": None})),
    BadInput("a string as ids", _collated({"input_ids": "hello"})),
    BadInput("a float in a list of ids", _collated(GOOD, {"input_ids": [5, 6.5]})),
    BadInput("a float array of ids", _collated({"input_ids": np.array([5.0, 6.0])})),
    BadInput("a bool tensor of ids", _collated({"input_ids": torch.tensor([True, False])})),
    BadInput("a bool in a list of ids", _collated({"input_ids": [5, True]})),
    BadInput("a string in a list of ids", _collated({"input_ids": [5, "6"]})),
    BadInput("an id over 64 bits", _collated({"input_ids": [2**64]})),
    BadInput("a negative id", _collated(GOOD, {"input_ids": [5, -100, 7]})),
    BadInput("lists of lists of ids", _collated({"input_ids": [[[5, 6, 7]]]})),
    BadInput("a 2-D array", _collated(GOOD, {"input_ids": np.ones((1, 3), dtype=int)})),
    BadInput("a 2-D tensor", _collated({"input_ids": torch.ones(2, 3, dtype=torch.long)})),
    BadInput("a masked array", _collated(GOOD, {"input_ids": np.ma.array([5, 6], mask=[0, 1])})),
    BadInput("a nested tensor", _collated(GOOD, {"input_ids": NESTED})),
    BadInput("a sparse tensor", _collated(GOOD, {"input_ids": torch.tensor([5, 6]).to_sparse()})),
    BadInput("a tensor on the meta device", _collated(GOOD, {"input_ids": META})),
    BadInput("a conjugate tensor", _collated(GOOD, {"input_ids": torch.tensor([5j]).conj()})),
    BadInput("a short `loss_mask`", _example(loss_mask=[1, 1])),
    BadInput("a long `labels`", _example(labels=[5, 6, 7, 8])),
    BadInput("a short `assistant_masks`", _example(assistant_masks=[1])),
    BadInput("a long `completion_mask`", _example(completion_mask=[1, 1, 1, 1])),
    BadInput("a `loss_mask` unlike `num_actions`", _example(loss_mask=[1, 1, 1], num_actions=2)),
    BadInput("`num_actions` over the length", _example(loss_mask=[1] * 4, num_actions=4)),
    BadInput("`num_actions` that is a float", _example(loss_mask=[1], num_actions=1.0)),
    BadInput("`num_actions` without `loss_mask`", _example(num_actions=2)),
    BadInput("two targets", _example(labels=[-100, 6, 7], loss_mask=[0, 1, 1])),
    BadInput("a key that may be a target", _example(mask=[0, 1, 1])),
    BadInput("`loss_maks` for `loss_mask`", _example(loss_maks=[0, 1, 1])),
    BadInput("a misspelled key next to a target", _example(loss_mask=[0, 1, 1], lables=IDS)),
    BadInput("a target and `train_all`", lambda: PaddedCollator(0, train_all=True)([LABELLED])),
    BadInput("no target in model inputs", _for_trainer(GOOD)),
    BadInput("a label of -1", _example(labels=[-100, -1, 7])),
    BadInput("labels stored unsigned", _example(labels=np.array([-100, 6,
     -100]).astype(np.uint16))),
    BadInput("a mask in `labels`", _example(labels=[False, True, True])),
    BadInput("a mask in `labels`, an array", _example(labels=np.array([False, True, True]))),
    BadInput("a weight that float32 loses", _example(loss_mask=[0, 1, 1e-40])),
    BadInput("a weight that is NaN", _example(loss_mask=[0, 1, float("nan")])),
    BadInput("a negative weight", _example(loss_mask=np.array([0, -1, 1]))),
    BadInput("a negative `weight`", _example(weight=-1)),
    BadInput("a `weight` that is NaN", _collated({**GOOD, "weight": 1}, {**GOOD, "weight": NAN})),
    BadInput("a `weight` per token", _example(weight=[0, 1, 1])),
    BadInput("a `weight` that is None", _example(weight=None)),
    BadInput("a product that float32 loses", _example(loss_mask=[0, 1, 1e-20], weight=1e-20)),
    BadInput("`sample_weight` for `weight`", _example(sample_weight=0.5)),
    BadInput("a vector per token of another size", _collated({**GOOD, "top": [[1, 2], [3], [4, 5]]},
     fields=TOP)),
    BadInput("vectors per token in an array of another shape", _collated({**GOOD, "top":
     np.ones((3, 4))}, fields=TOP)),
    BadInput("a number as a name", _collated({**GOOD, "name": 3}, fields={"name":
     PerExample(str)})),
    BadInput("a mask of strings", _example(loss_mask=["a", "b", "c"])),
    BadInput("a mask that is None", _example(loss_mask=None)),
    BadInput("mixed keys", _collated({**GOOD, "labels": [5, 6, 7]}, GOOD)),
    BadInput("padded examples", _example(attention_mask=[0, 1, 1])),
    BadInput("a row that another tool packed", _example(attention_mask=[1, 2, 2])),
    BadInput("the same by positions", _example(position_ids=[0, 1, 0])),
    BadInput("the same by boundaries", _example(seq_lengths=[1, 2])),
    BadInput("a short `attention_mask`", _example(attention_mask=[1, 1])),
    *SEGMENTED_INPUTS,
    BadInput("an example over a row", _collated(GOOD, {"input_ids": list(range(9))})),
    BadInput("an `overflow` without `max_length`", _padded(GOOD, overflow="drop")),
    BadInput("no example within `max_length`", _padded(GOOD, max_length=2, overflow="drop")),
    BadInput("an example over `max_length`", _padded(GOOD, {"input_ids": [5] * 9}, max_length=8)),
    BadInput("rows over int32", lambda: PackedCollator(0, max_tokens=2**31,
     fixed_width=True)([GOOD])),
    BadInput("a column of another length",
     lambda: PaddedCollator(0)({"input_ids": Ragged.from_rows([[5, 6], [7]]),
     "labels": Ragged.from_rows([[5, 6]])})),
    BadInput("a column of 2-D values", lambda: PaddedCollator(0)({"input_ids": Ragged(np.ones((2,
     2), dtype=int), [0, 2])})),
    BadInput("a tokenizer without a pad token", lambda: PaddedCollator(_NoPad())),
    BadInput("a model instead of a tokenizer", lambda: PaddedCollator(torch.nn.Linear(1, 1))),
    BadInput("a negative pad id", lambda: PaddedCollator(-100)),
    BadInput("`max_tokens` under the alignment", lambda: PackedCollator(0, max_tokens=8,
     parallel=ParallelLayout(tp=4, cp=2))),
    BadInput("`max_tokens` of 0", lambda: PackedCollator(0, max_tokens=0)),
    BadInput("an unknown strategy", lambda: PackedCollator(0, max_tokens=8, strategy="bfd")),
    BadInput("an unknown overflow", lambda: PackedCollator(0, max_tokens=8, overflow="cut")),
    BadInput("an unknown balance", lambda: PackingOptions(8, balance="flops")),
    BadInput("a setting that is no bool", lambda: PaddedCollator(0, normalize_loss="no")),
    BadInput("an unknown side", lambda: PaddedCollator(0, padding_side="middle")),
    BadInput("a multiple of 0", lambda: PaddedCollator(0, pad_to_multiple_of=0)),
    BadInput("`fp8=True`", lambda: ParallelLayout(fp8=True)),
    BadInput("`max_tokens` under the multiple of fp8", lambda: PackedCollator(0, max_tokens=63,
             parallel=ParallelLayout(fp8="nvfp4"))),
    BadInput("a data-parallel size of 0", lambda: ParallelLayout(dp=0)),
    BadInput("float lengths", lambda: pack([3.0, 4.0], 8)),
    BadInput("a length of 0", lambda: pack([3, 0], 8)),
    BadInput("a masked array of lengths", lambda: pack(np.ma.array([3, 4], mask=[0, 1]), 8)),
    BadInput("lengths in an array of rows", lambda: pack(np.array([[3], [4]]), 8)),
    BadInput("an attention that is not known", lambda: _batch().model_inputs("flash")),
    BadInput("rows that do not divide", lambda: _batch().chunk(2)),
    BadInput("a row by its number", lambda: _batch()[0]),
    *ROLLOUT_INPUTS,
]  # fmt: skip


def _batch() -> Batch:
    batch = PackedCollator(0, max_tokens=8)([GOOD])
    assert isinstance(batch, Batch)
    return batch


def table() -> str:
    """The Markdown table of docs/contract.md: ``python -m tests.collators.bad_inputs``."""
    rows = ["| you give | you get |", "| --- | --- |"]
    for case in BAD_INPUTS:
        try:
            case.call()
        except (TypeError, ValueError) as error:
            message = str(error).replace("|", "\\|")
            rows.append(f"| {case.given} | `{type(error).__name__}`: {message} |")
        else:
            raise AssertionError(f"{case.given}: nothing was raised")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
