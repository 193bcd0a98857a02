"""Targets at a depth: pairs and deep shards are loops over raw examples; blocks on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import oracle
from tests.batch_samples import VISION, image_examples
from tests.devices import NoWaiting
from tests.docs.test_code import blocks_of
from tests.tiny_models import tiny_model
from tests.tree_samples import exact_model, random_tree
from torch_collate_kit import (
    Batch,
    PackedCollator,
    PaddedCollator,
    ParallelLayout,
    PerToken,
    RolloutCollator,
    global_num_loss_tokens,
    token_logps,
    token_loss,
    unpack,
)
from torch_collate_kit.attention import context_join
from torch_collate_kit.losses import trained_values

LAYOUTS = ("zigzag", "contiguous", "head_tail")
FIELDS = {"kind": PerToken(torch.int32, pad=-7)}
PAD = 99
ALL = "ALL_CASES" in os.environ


class Token(NamedTuple):
    cell: int
    id: int
    label: int
    weight: float
    kind: int


def random_examples(rng: np.random.Generator, form: str) -> list[dict[str, Any]]:
    """Examples of one form, of up to 24 tokens, every token with its own ``kind``."""
    found: list[dict[str, Any]] = []
    for _ in range(rng.integers(1, 7)):
        if form == "tree":
            segments = [segment[:24] for segment in random_tree(rng)]
            masks = [(rng.random(len(s)) * (rng.random(len(s)) < 0.7)).tolist() for s in segments]
            found.append({"input_ids": segments, "loss_mask": masks})
        else:
            ids = rng.integers(3, 90, rng.integers(1, 25))
            mask = rng.choice([0, 1, 0.5, 2], len(ids))
            target = {"weights": {"loss_mask": mask.tolist()}, "all": {}}
            target["labels"] = {"labels": np.where(mask > 0, ids + 100, -100).tolist()}
            found.append({"input_ids": ids.tolist(), **target[form]})
    for i, example in enumerate(found):
        ids, first = example["input_ids"], 1000 * (i + 1)
        starts = [[*range(first + 100 * j, first + 100 * j + len(s))] for j, s in enumerate(ids)] \
            if form == "tree" else [*range(first, first + len(ids))]  # fmt: skip
        example["kind"] = starts
    return found


def random_rollouts(rng: np.random.Generator) -> list[dict[str, Any]]:
    found = []
    for _ in range(rng.integers(1, 7)):
        prompt, response = (rng.integers(3, 90, n).tolist() for n in rng.integers(1, 13, 2))
        mask = rng.integers(0, 2, len(response)).tolist()
        found.append({"prompt_ids": prompt, "response_ids": response, "loss_mask": mask})
        found[-1]["rewards"] = 1.0
    return found


def random_batch(seed: int) -> tuple[Batch, list[dict[str, Any]], int]:
    """A batch, its raw examples, and what divides its segments and rows."""
    rng = np.random.default_rng((seed, 46))
    form = str(rng.choice(["weights", "all", "labels", "tree", "rollouts"]))
    aligned = bool(rng.random() < 0.5)
    align = 24 if aligned else 1  # zigzag cuts segments in 2, 4, 6 or 8
    parallel = ParallelLayout(cp=12 if aligned else 1)
    options: dict[str, Any] = {"normalize_loss": bool(rng.random() < 0.5)}
    packed = {"max_tokens": 24 * int(rng.choice([1, 2, 8])), "parallel": parallel, **options}
    if form == "rollouts":
        rollouts = random_rollouts(rng)
        padded = RolloutCollator(PAD, pad_to_multiple_of=align, **options)
        collate: Any = padded if rng.random() < 0.5 else PackedCollator(PAD, **packed)
        made = [oracle._as_example(rollout) for rollout in rollouts]
        return collate(rollouts), made, align
    examples = random_examples(rng, form)
    options |= {"fields": FIELDS, "train_all": form == "all"}
    packed |= options
    if form == "tree":
        packed |= {"max_tokens": 480, "parallel": ParallelLayout(tp=int(rng.choice([1, 4])))}
        return PackedCollator(PAD, share_prefixes=True, **packed)(examples), examples, 0
    if rng.random() < 0.4:
        side = str(rng.choice(["left", "right"]))
        collate = PaddedCollator(PAD, padding_side=side, pad_to_multiple_of=align, **options)
    elif rng.random() < 0.3 and not aligned:  # pieces predict nothing of one another
        collate = PackedCollator(PAD, **{**packed, "max_tokens": 10, "overflow": "split"})
    else:
        collate = PackedCollator(PAD, **packed)
    batch = collate(examples)
    return (batch.pad_rows(multiple_of=3) if rng.random() < 0.2 else batch), examples, align


def pieces_of(batch: Batch, examples: list[dict[str, Any]]) -> Iterator[list[Token]]:
    """The tokens of each segment or piece, in the order of the rows, from the raw examples."""
    rows, width = batch["input_ids"].shape
    cells = unpack(torch.arange(rows * width).view(rows, width), batch)
    first_segment = np.cumsum([0, *(len(e["input_ids"]) for e in examples)])
    lengths = batch.placement.segments["lengths"]
    for row in range(rows):
        entries = zip(
            batch.row_metadata["example_indices"][row],
            batch.row_metadata["example_starts"][row],
            lengths[row],
            strict=False,
        )
        for number, (i, start, length) in enumerate(entries):
            example, of = examples[i], i
            if isinstance(example["input_ids"][0], list):
                segment = int(batch.row_metadata["segment_numbers"][row][number])
                example = {name: values[segment] for name, values in example.items()}
                of = first_segment[i] + segment
            weights, labels = oracle.example_weights(example)
            kinds = example.get("kind", [0] * len(weights))
            values = zip(
                cells[of].tolist(), example["input_ids"], labels, weights, kinds, strict=True
            )
            yield [Token(*one) for one in values][start : start + length]


def check_pairs(batch: Batch, pieces: list[list[Token]], depth: int) -> None:
    expected = []
    for piece in pieces:
        for t in range(len(piece) - depth):
            target = piece[t + depth]
            if target.weight != 0:
                expected.append((piece[t].cell, target.label, np.float32(target.weight)))
    found = batch.targets(depth)
    assert list(zip(*(of.tolist() for of in found), strict=True)) == expected
    assert [of.dtype for of in found] == [torch.int64, torch.int64, torch.float32]


def check_shards(
    batch: Batch, pieces: list[list[Token]], depth: int, size: int, layout: Any
) -> None:
    """Every field of the shards of all ranks, cell by cell."""
    shards = [batch.context_shard(rank, size, layout=layout, depth=depth) for rank in range(size)]
    own = batch.num_cells - batch.metadata["num_dummy_rows"] * batch["input_ids"].shape[1]
    read = dict.fromkeys(range(own), PAD)
    targets, weights, kinds = {}, {}, {}
    for piece in pieces:
        for t, token in enumerate(piece):
            if t + depth <= len(piece):
                read[token.cell] = piece[t + depth - 1].id
            if t + depth < len(piece):
                target = piece[t + depth]
                targets[token.cell], weights[token.cell] = target.label, np.float32(target.weight)
                kinds[token.cell] = target.kind
    divisor = batch.metadata["loss_mask_divisor"]
    for shard in shards:
        cells = shard.cells.tolist()
        ids, found = shard["input_ids"].flatten(), shard["targets"].flatten()
        inner = sum(cell < own for cell in cells)  # an added row reads what row 0 does
        assert ids[:inner].tolist() == [read[cell] for cell in cells[:inner]]
        assert found.tolist() == [targets.get(cell, -100) for cell in cells]
        mask = torch.tensor([weights.get(cell, 0) for cell in cells])
        assert torch.equal(shard["loss_mask"].flatten(), mask / torch.tensor(float(divisor)))
        positions = batch["position_ids"].flatten()[shard.cells]
        assert torch.equal(shard["position_ids"].flatten(), positions)
        if "kind" in batch:
            found = shard["kind"].flatten()[:inner]
            assert found.tolist() == [kinds.get(cell, -7) for cell in cells[:inner]]
        assert ("num_loss_tokens" in shard.metadata) == (depth == 1)
    number = sum(int(global_num_loss_tokens(shard)) for shard in shards)
    assert number == len(batch.targets(depth).ids)


def test_random_batches_are_loops_over_raw_examples() -> None:
    """A twentieth of a thousand; all of them with ALL_CASES=1."""
    seen = set()
    for seed in range(1000 if ALL else 50):
        batch, examples, align = random_batch(seed)
        rng = np.random.default_rng((seed, 1))
        pieces = list(pieces_of(batch, examples))
        for depth in {int(rng.integers(1, 4)), int(rng.integers(1, 21))}:
            check_pairs(batch, pieces, depth)
            if not align:  # a tree
                continue
            size = int(rng.integers(1, 5)) if align > 1 else 1
            is_packed = "cu_seq_lens" in batch
            layout = str(rng.choice(LAYOUTS if is_packed or size == 1 else LAYOUTS[1:]))
            check_shards(batch, pieces, depth, size, layout)
            seen.add((layout, size, is_packed))
    assert len(seen) >= 18


# --- by hand, changed by hand, without waiting ----------------------------------------------------


def two(**options: Any) -> Batch:
    examples = [
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
        {"input_ids": [3, 4, 9], "loss_mask": [0, 1, 1]},
    ]
    return PackedCollator(0, max_tokens=8, **options)(examples)


def pairs(batch: Batch, depth: int) -> list[tuple[int, int]]:
    return list(zip(*(of.tolist() for of in batch.targets(depth)[:2]), strict=True))


def test_written_by_hand() -> None:
    found = [pairs(two(), depth) for depth in (1, 2, 3, 4)]
    assert found == [[(1, 7), (2, 8), (4, 4), (5, 9)], [(0, 7), (1, 8), (4, 9)], [(0, 8)], []]
    answers = {"input_ids": [[5, 6, 7], [5, 6, 8, 9]], "loss_mask": [[0, 0, 1], [0, 0, 1, 1]]}
    tree = PackedCollator(0, max_tokens=8, share_prefixes=True)([answers])
    found = [pairs(tree, depth) for depth in (1, 2, 3, 4)]
    assert found == [[(1, 7), (1, 8), (3, 9)], [(0, 7), (0, 8), (1, 9)], [(0, 9)], []]
    shard = two().context_shard(0, 1, depth=9)
    loss = token_loss(torch.randn(1, 7, 12), shard, num_loss_tokens=global_num_loss_tokens(shard))
    assert loss.item() == 0, "no pairs, no NaN"


def test_depth_one_is_the_loss_of_the_batch() -> None:
    for batch in (two(), PaddedCollator(0)([{"input_ids": [4, 5, 6], "labels": [4, 7, -100]}])):
        cells, ids, weights = batch.targets()
        logits = torch.randn(*batch["input_ids"].shape, 12)
        logps = logits.flatten(0, 1)[cells].log_softmax(-1).gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(logps, token_logps(logits, batch))
        divisor = batch.metadata["loss_mask_divisor"]
        mask = trained_values(batch["loss_mask"], batch)
        torch.testing.assert_close(weights / divisor, mask)


def test_fields_changed_before_are_those_of_the_targets() -> None:
    batch = two()
    batch["labels"][0, 2] = 55
    batch["loss_mask"][0, 0], batch["loss_mask"][0, 3] = 0.5, 0.5  # of token 1, and across a border
    batch["input_ids"][0, 1] = 44
    assert pairs(batch, 1) == [(1, 55), (2, 8), (4, 4), (5, 9)], "token 1 has no label"
    assert batch.targets(1).weights.tolist() == [1, 1, 1, 1]  # as token_loss weighs them
    shard = batch.context_shard(0, 1, depth=2)
    assert shard["input_ids"].tolist() == [[44, 7, 8, 0, 4, 9, 0]]
    assert shard["targets"].tolist() == [[55, 8, -100, -100, 9, -100, -100]]
    assert pairs(batch, 2) == [(0, 55), (1, 8), (4, 9)]
    embeds = torch.arange(1.0, 8).view(1, 7, 1)
    shard = batch.with_fields(inputs_embeds=embeds).context_shard(0, 1, depth=3)
    assert shard["inputs_embeds"].flatten().tolist() == [3, 4, 0, 0, 7, 0, 0]


CHANGES: dict[str, Callable[[Batch], Batch]] = {
    "input_ids": lambda batch: batch.with_fields(input_ids=batch["input_ids"] % 2 + 50),
    "input_ids and weights": lambda batch: batch.with_fields(
        input_ids=batch["input_ids"] % 2 + 50, loss_mask=torch.ones_like(batch["loss_mask"])
    ),
    "no labels": lambda batch: batch.with_fields(labels=torch.full_like(batch["labels"], -100)),
    "some labels": lambda batch: batch.with_fields(
        labels=torch.where(batch["labels"] % 2 == 1, batch["labels"], -100)
    ),
    "every label and weight": lambda batch: batch.with_fields(
        labels=torch.full_like(batch["labels"], 7), loss_mask=torch.ones_like(batch["loss_mask"])
    ),
    "every weight": lambda batch: batch.with_fields(loss_mask=torch.ones_like(batch["loss_mask"])),
    "some weights": lambda batch: batch.with_fields(loss_mask=batch["loss_mask"] * 0 + 0.5),
    "weights of an added row": lambda batch: with_ones(batch.pad_rows(multiple_of=4)),
    "weights in float64": lambda batch: batch.with_fields(loss_mask=batch["loss_mask"].double()),
}


def with_ones(batch: Any) -> Any:
    return batch.with_fields(loss_mask=torch.ones_like(batch["loss_mask"]))


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("kind", ["packed", "padded", "labels", "rollouts", "tree"])
def test_one_rule_says_what_is_trained_and_by_which_id(kind: str, name: str) -> None:
    """A weight that is not 0 and a label that is not -100: for losses, counts, pairs and shards."""
    examples: Any = [{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}]
    examples += [{"input_ids": [3, 4, 9], "loss_mask": [0, 1, 1]}]
    collate: Any = PaddedCollator(0) if kind == "padded" else PackedCollator(0, max_tokens=8)
    if kind == "labels":
        for of in examples:
            of["labels"] = [-100, 4, -100, 2][: len(of.pop("loss_mask"))]
    if kind == "rollouts":
        collate = RolloutCollator(0)
        examples = [{"prompt_ids": [5, 6], "response_ids": [7, 8, 9], "rewards": [0.0, 0, 1]}]
        examples[0]["loss_mask"] = [1, 0, 1]
    if kind == "tree":
        collate = PackedCollator(0, max_tokens=8, share_prefixes=True)
        examples = [{k: [of[k], of[k][:2] + of[k][:1]] for k in of} for of in examples]
    if kind == "rollouts" and "label" in name:
        return
    batch = collate(examples)
    collated = batch.get("labels")
    batch = CHANGES[name](batch)
    logits = torch.randn(*batch["input_ids"].shape, 64).double()
    pairs_of = batch.targets(1)
    nll = -logits.flatten(0, 1)[pairs_of.cells].log_softmax(-1).gather(1, pairs_of.ids[:, None])
    logps = token_logps(logits, batch)
    torch.testing.assert_close(-logps, nll[:, 0])
    assert len(logps) == global_num_loss_tokens(batch)
    assert (pairs_of.ids.dtype, pairs_of.weights.dtype) == (torch.int64, torch.float32)
    is_every = name in ("every label and weight", "weights of an added row")
    if is_every and kind not in ("padded", "rollouts"):  # whose masks have fewer columns
        num_predicted = sum(len(ids) - 1 for ids in unpack(batch["input_ids"], batch))
        assert len(logps) == num_predicted, "never a first token, a pad or an added row"
    loss = (nll[:, 0] * pairs_of.weights).sum()
    torch.testing.assert_close(token_loss(logits, batch, num_loss_tokens=1), loss)
    if collated is not None:
        assert not (pairs_of.ids >= 50).any(), "labels are of the ids that were collated"
    if kind != "tree":
        shard = batch.context_shard(0, 1)
        torch.testing.assert_close(token_logps(logits, shard), logps)
        torch.testing.assert_close(token_loss(logits, shard, num_loss_tokens=1), loss)
        assert global_num_loss_tokens(shard) == len(logps)


def test_shards_wait_for_nothing_and_pairs_for_their_number_alone() -> None:
    parallel = ParallelLayout(cp=2)
    batch = PackedCollator(0, max_tokens=24, parallel=parallel)([{"input_ids": [5, 6, 7]}] * 3)
    moved = batch.to("meta")
    with NoWaiting():
        shard = moved.context_shard(1, 2, depth=2)
        logits = torch.empty(*shard["input_ids"].shape, 9, device="meta")
        token_loss(logits, shard, num_loss_tokens=3)
    with pytest.raises(AssertionError, match="nonzero"), NoWaiting():
        moved.targets(2)
    shards = [batch.context_shard(rank, 2, depth=2) for rank in range(2)]
    number = sum(int(global_num_loss_tokens(shard)) for shard in shards)
    assert (number, batch.metadata["num_loss_tokens"]) == (3, 6)
    assert context_join([of["targets"] for of in shards], shards)[0, ::4].tolist() == [7, 7, 7]


# --- one rank has the inputs of the whole batch ---------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_oss", "lfm2"])
def test_one_rank_has_the_inputs_of_the_whole_batch(kind: str) -> None:
    examples = [
        {"input_ids": [*range(10 * i + 3, 10 * i + 3 + n)]} for i, n in enumerate((5, 3, 9))
    ]
    packed = PackedCollator(0, max_tokens=12)(examples)
    padded = PaddedCollator(0, padding_side="right")(examples)
    attentions = ("eager", "sdpa" if kind == "lfm2" else "torch_varlen")
    for batch, layout in [(packed, "zigzag"), (padded, "zigzag"), (packed, "head_tail")]:
        shard = batch.context_shard(0, 1, layout=layout, depth=2)
        for attention in attentions:
            model = tiny_model(kind, attention)
            whole, inputs = batch.model_inputs(model, labels=False), shard.model_inputs(model)
            assert inputs.keys() == whole.keys()
            for name, value in whole.items():
                if name == "input_ids":
                    assert torch.equal(inputs[name].view_as(shard[name]), shard[name])
                elif isinstance(value, Tensor):
                    assert torch.equal(inputs[name], value), name
                else:
                    assert str(inputs[name]) == str(value), name


# --- blocks on packed rows and trees, as the guide has them ---------------------------------------


@pytest.fixture(scope="module")
def guide() -> dict[str, Any]:
    """The functions of the page; that its losses agree is a test of all pages."""
    names: dict[str, Any] = {}
    page = Path(__file__).parents[1] / "docs" / "guide" / "draft_heads.md"
    for _, block in blocks_of(page):
        exec(compile(block, str(page), "exec"), names)
    return names


def test_blocks_on_random_trees_are_those_of_single_texts(guide: dict[str, Any]) -> None:
    """A twentieth of two hundred; all of them with ALL_CASES=1."""
    model = exact_model("qwen3", "sdpa", num_hidden_layers=1)
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(guide["Block"](model.config) for _ in range(3)).double()
    for block in blocks:
        block.layer = exact_model("qwen3", "sdpa", num_hidden_layers=1).model
    largest = 0.0
    for seed in range(200 if ALL else 10):
        trees = random_examples(np.random.default_rng((seed, 2)), "tree")[:2]
        texts = [
            {"input_ids": ids, "loss_mask": mask}
            for tree in trees
            for ids, mask in zip(tree["input_ids"], tree["loss_mask"], strict=True)
        ]
        batch = PackedCollator(0, max_tokens=320, share_prefixes=True)(trees)
        plain = PackedCollator(0, max_tokens=320, normalize_loss=False)(trees)
        alone = guide["losses_alone"](model, blocks, texts)
        for found in (
            guide["tree_losses"](model, blocks, batch),
            guide["mtp_losses"](model, blocks, plain),
        ):
            for ours, expected in zip(found, alone, strict=True):
                largest = max(largest, abs(float((ours - expected).detach())))
    assert largest < 1e-12


# --- refused --------------------------------------------------------------------------------------


def of_same_token() -> Batch:
    return PackedCollator(0, max_tokens=8, targets="same_token")(
        [{"input_ids": [5], "labels": [5]}]
    )


IMAGES = PackedCollator(0, max_tokens=32, vision=VISION)
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: two().targets(0), ValueError, "depth must be at least 1, got 0; 1 is the next token"),
    (lambda: two().targets(True), TypeError, "depth must be an int, got True of type bool"),
    (lambda: two().targets(1.0), TypeError, "depth must be an int, got 1.0 of type float"),
    (lambda: two().context_shard(0, 1, depth=-1), ValueError, "depth must be at least 1, got -1"),
    (lambda: two().context_shard(0, 1, depth="2"), TypeError, "depth must be an int, got '2'"),
    (lambda: two().context_shard(0, 1).targets(1), ValueError, "shard of context rank 0 of 1, an"),
    (lambda: Batch({"input_ids": torch.ones(1, 2)}).targets(), ValueError, "built from tensors, "),
    (lambda: of_same_token().targets(1), ValueError, "targets='same_token'.* targets=.next_token"),
    (lambda: of_same_token().context_shard(0, 1, depth=2), ValueError, "has targets='same_token'"),
    (lambda: IMAGES(image_examples()).context_shard(0, 1, depth=2), ValueError, "depth=2 moves id"),
    (lambda: two().context_shard(0, 1, depth=2).metadata["num_loss_tokens"], KeyError, "num_loss"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_has_no_targets_is_refused(call: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_shards_of_different_depths_do_not_join() -> None:
    batch = PackedCollator(0, max_tokens=8, parallel=ParallelLayout(cp=2))([{"input_ids": [5, 6]}])
    shards = [batch.context_shard(rank, 2, depth=rank + 1) for rank in range(2)]
    with pytest.raises(ValueError, match="different batches or layouts"):
        context_join([of["targets"] for of in shards], shards)
