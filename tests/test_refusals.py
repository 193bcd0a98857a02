"""What is refused, a row each: the call, the error, and the words that its message must have.

The other packages have such tables in their folders. `python -m tests.raises` lists each `raise` of
the package that no test reaches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from operator import delitem, setitem
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, RandomSampler

from tests.batch_samples import KINDS, VISION, image_examples, rollouts
from tests.command import run_command
from tests.hybrid_models import hybrid_model
from tests.rl.rollouts import rollout_batch
from tests.tree_samples import both, random_examples
from tests.vision.families import FAMILIES
from tests.vision.images import draw
from torch_collate_kit import (
    Batch,
    Mixture,
    PackedBatchSampler,
    PackedCollator,
    PackedIterableDataset,
    PackedRows,
    PackingOptions,
    PaddedCollator,
    ParallelLayout,
    PrefetchingSampler,
    PrefetchLoader,
    RolloutCollator,
    TokenizedDataset,
    VisionLanguageCollator,
    audit,
    check_isolation,
    pack,
    packing_report,
    token_loss,
    tokenize_chat,
)
from torch_collate_kit.errors import DataError, IsolationError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.rl import stage_mini_batches, unstage
from torch_collate_kit.vision import VisionLayout, image_grid

IDS = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}, {"input_ids": [5, 6, 7]}]


def moved_boundary(batch: Batch) -> Batch:
    batch["cu_seq_lens"].values[1] += 1  # in place
    return batch


def staged(kept: slice) -> Any:
    """Put back some of two mini-batches, of two rows and one, that are staged for one rank."""
    parts = stage_mini_batches(rollout_batch([(1, 1)] * 3, list("aab")), [0, 2, 3], 1)
    parts = [*parts, *parts][kept]
    return unstage(parts, [[part["input_ids"] for part in ranks] for ranks in parts])


def rows_kept_apart() -> None:
    """Pass boundaries of one row beside cells in two."""
    model = hybrid_model("qwen3_5", "sdpa")
    batch = PackedCollator(0, max_tokens=5, fixed_width=True)(IDS)
    inputs = batch.model_inputs(model, labels=False)
    cells = ("input_ids", "position_ids", "seq_idx")
    model.config._attn_implementation = "sdpa"
    check_isolation(model, inputs | {k: inputs[k].reshape(2, -1) for k in cells if k in inputs})


def processor(name: str = "qwen2_5_vl") -> Any:
    return copy.deepcopy(FAMILIES[name].processor())


def picture_in_a_chat(used: Any) -> Any:
    picture = {"type": "image", "image": draw(np.random.default_rng(0), 56, 84)}
    asked = {"role": "user", "content": [picture, {"type": "text", "text": "?"}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]}
    return tokenize_chat({"messages": [asked, answer]}, used)


def with_slow_tokenizer() -> Any:
    used = processor()
    used.tokenizer.__class__ = type("Slow", (type(used.tokenizer),), {"is_fast": False})
    return used


def that_shouts() -> Any:
    """A processor that changes the text that it is given."""
    used = processor()
    kind = type(used)

    def call(self: Any, images: Any = None, text: Any = None, **options: Any) -> Any:
        return kind.__call__(self, images=images, text=[f"{of}!" for of in text], **options)

    used.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    return used


def that_writes_more() -> Any:
    """A processor that writes as many placeholders as patches that it does not merge."""
    used = processor()
    kind = type(used)

    def call(self: Any, *given: Any, **options: Any) -> Any:
        size, self.image_processor.merge_size = self.image_processor.merge_size, 1
        try:
            return kind.__call__(self, *given, **options)
        finally:
            self.image_processor.merge_size = size

    used.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    return used


class Resizes:
    """An image processor of another package."""

    patch_size, merge_size, do_resize = 14, 2, True


def without_smart_resize() -> Any:
    used = processor()
    used.image_processor = Resizes()
    return used


def images_in_another_order() -> None:
    """Pass images in another order than their placeholders have."""
    family, rng = FAMILIES["qwen2_5_vl"], np.random.default_rng(0)
    rows = [family.example(rng, [size, "text"]) for size in ((56, 84), (28, 28))]
    layout = VisionLayout.of(family.processor(), family.model().config)
    batch = PackedCollator(family.processor(), max_tokens=64, vision=layout)(rows)
    inputs = batch.model_inputs("sdpa", labels=False)
    counts = inputs["image_grid_thw"].prod(dim=1).tolist()
    inputs["image_grid_thw"] = inputs["image_grid_thw"].flip(0)
    inputs["pixel_values"] = torch.cat(inputs["pixel_values"].split(counts)[::-1])
    check_isolation(family.model(), inputs, vision=layout)


def loader() -> PrefetchLoader:
    sampler = PrefetchingSampler(len(IDS), batch_size=1)
    return PrefetchLoader(DataLoader(IDS, batch_sampler=sampler, collate_fn=PaddedCollator(0)))


class Reading(RandomSampler):
    """A sampler that reads what it draws from, as those that group by length do."""

    def __init__(self, rows: PackedRows) -> None:
        self.rows = rows

    def read(self) -> Any:
        return self.rows[0]


def asked(text: str) -> dict[str, Any]:
    turns = [("user", text), ("assistant", "a cat")]
    return {"messages": [{"role": role, "content": said} for role, said in turns]}


def planned() -> Any:
    """The examples of a sampler's first step, with its plan."""
    data = TokenizedDataset(IDS)
    return data.__getitems__(next(iter(PackedBatchSampler(data, PACK, batch_size=2))))


PLAIN = Batch({"input_ids": torch.ones(2, 3, dtype=torch.int64)})
TURNS = [{"input_ids": [[5, 6], [7]]}] * 4096  # as many examples as are read at a time
PICTURE = {"input_ids": [7] * 4 + [5], "labels": [-100] * 4 + [5], "image_grid_thw": [[1, 4, 4]]}
PICTURE["pixel_values"] = np.zeros((16, 6))
CUT = {"max_length": 2, "overflow": "truncate"}
PACK, DP2 = PackedCollator(0, max_tokens=8), ParallelLayout(dp=2)
ROLLOUT = {"prompt_ids": [5], "response_ids": [6], "loss_mask": [1], "rewards": 1.0}
WRAPPED = {"max_tokens": 8, "strategy": "wrapped"}


class Padding:
    pad_token_id = "0"


class Ending:
    pad_token_id, eos_token_id = 0, 4


def lists_in(rows: list[Any]) -> Any:
    """Read the images of rows, whose pixels are nested lists."""
    ids = [{"input_ids": [7], "image_grid_thw": [[1, 2, 2]], "pixel_values": row} for row in rows]
    return TokenizedDataset(datasets.Dataset.from_list(ids), vision=VISION)[0]


def order_beyond(epoch: int, rng: Any) -> list[int]:
    return [0, 3]


REFUSED: list[tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = [
    (lambda: check_isolation("a model", {}), TypeError,
     ("needs a model and a Batch", "got str and dict")),
    (images_in_another_order, ValueError,
     ("image 1 has 6 placeholders", "which lie in", "in the order of their placeholders")),
    (lambda: picture_in_a_chat(with_slow_tokenizer()), ValueError,
     ("is Slow", "no character offsets", "load its fast version")),
    (lambda: picture_in_a_chat(that_shouts()), ValueError,
     ("changes the text around images", "pass its output to a collator")),
    (lambda: picture_in_a_chat(that_writes_more()), ValueError,
     ("placeholders for the images", "are expected of", "check its settings")),
    (lambda: image_grid(draw(np.random.default_rng(0), 56, 84), without_smart_resize()), ValueError,
     ("the module of Resizes has no smart_resize", "pass pixels=True")),
    (rows_kept_apart, IsolationError,
     ("qwen3_5 models take one row", "have 2", "batch.model_inputs(model)")),
    (lambda: moved_boundary(KINDS["packed"]()).context_shard(0, 2), ValueError,
     ("cu_seq_lens were replaced", "cut the batch first")),
    (lambda: KINDS["rollouts"]().model_inputs("sdpa"), ValueError,
     ("pixel_values", "model is not known", "the processor in place of the tok")),
    (lambda: unstage([[PLAIN]], [[torch.ones(2)]]), ValueError,
     ("staged[0][0] has no row_indices", "what stage_mini_batches returned")),
    (lambda: unstage([], []), ValueError, ("staged is empty", "what stage_mini_batches returned")),
    (lambda: staged(slice(1, 2)), ValueError, ("row 0", "missing or there twice", "every mini-b")),
    (lambda: staged(slice(3)), ValueError, ("row 1", "missing or there twice", "and no other")),
    (lambda: packing_report([3, 4], max_tokens=[]), ValueError, ("max_tokens is empty", "one")),
    (lambda: packing_report([3], strategies=[]), ValueError, ("strategies is empty", "give at l")),
    (lambda: packing_report(KINDS["packed"]()), TypeError,
     ("data is a Batch", "pass the examples that the batch was made of")),
    (lambda: packing_report([*TURNS, *IDS]), DataError,
     ("lists of segments", "give every example a list")),
    (lambda: PaddedCollator(Padding()), TypeError, ("pad_token_id must be an int", "got '0'")),
    (lambda: PackedCollator(0, max_tokens=8, share_prefixes=True, vision=VISION), ValueError,
     ("share_prefixes is for text", "placeholders of images", "leave it out")),
    (lambda: PaddedCollator(0)([{"input_ids": [5, 6], "loss_mask": [0, 1e-25], "weight": 1e-25}]),
     DataError, ("example 0: loss_mask is 1e-25 at token 1", "example's weight, 1e-25")),
    *(
        (
            lambda name=name: RolloutCollator(0)([ROLLOUT | {name: [-1.0]}]),
            *(DataError, (f"has no logprobs, but '{name}' looks like it", "rename it to logprobs")),
        )
        for name in ("old_logp", "old_logprobs", "ref_logprobs")
    ),
    (lambda: PackedCollator(Ending(), **WRAPPED)(rollouts()), DataError,
     ('strategy="wrapped" joins documents with input_ids', "not rollouts")),
    (lambda: PackedCollator(Ending(), **WRAPPED)([{"input_ids": [5, 4], "pixel_values": [1]}]),
     DataError, ("example 0 has pixel_values", "give it the processor in place of")),
    (lambda: VisionLanguageCollator(processor(), max_tokens=64, padding_side="left"), ValueError,
     ("padding_side='left' is for padded rows", "leave one of them out")),
    (lambda: lists_in([[[1.0, 2.0], [3.0]]]), DataError,
     ("row 0: pixel_values", "different lengths, [1, 2]", "store it as one")),
    (lambda: list(PrefetchingSampler(3, batch_size=1, order=order_beyond)), ValueError,
     ("order(epoch=0, rng)[1] is 3", "3 examples have indices 0 to 2")),
    (lambda: pack(datasets.Dataset.from_list(IDS), 8), TypeError,
     ("lengths is a Dataset", "pass TokenizedDataset(data), or its .lengths")),
    (lambda: pack(TokenizedDataset(IDS), 8), TypeError, ("TokenizedDataset", "pass its .lengths")),
    (lambda: loader().plot_timeline(), ValueError,
     ("timeline is empty (0 steps)", "read batches from")),
    (lambda: Ragged.cat([]), ValueError, ("Ragged.cat needs at least one part", "got none")),
    (lambda: PaddedCollator(0, vision=VISION, **CUT)([PICTURE]), DataError,
     ("begins with an image of more than max_length=2", 'overflow="drop"')),
    (lambda: VisionLanguageCollator(processor(), require_images="all")([asked("?"), asked("!")]),
     DataError, ("example 0 has no image", "2 of 2 conversations", "require_images=None")),
    (lambda: VisionLanguageCollator(processor())(planned()), TypeError,
     ("come with a plan of packed rows", "pass max_tokens= or packing=")),
    (lambda: TokenizedDataset(image_examples()).num_loss_tokens, ValueError,
     ("the source has images, whose tokens are not trained", "vision=processor")),
    (lambda: TokenizedDataset(IDS).patches, ValueError, ("model's processor", "vision=processor")),
    (lambda: list(PrefetchingSampler(3, batch_size=1, order=lambda epoch, rng: [[0, 1]])),
     ValueError, ("order(epoch=0, rng) must return a 1-D sequence", "got shape (1, 2)")),
    (lambda: Mixture([3, 4], weights=1.0), TypeError,
     ("weights must be a sequence with a number for each source", "got 1.0")),
    (lambda: PrefetchingSampler(3, batch_size=1).examples(0, 3), ValueError,
     ("step must be below 3", "epoch 0", "got 3")),
    (lambda: Reading(PackedRows(TokenizedDataset(IDS), PACK)).read(), TypeError,
     ("rows are not grouped by length", "leave group_by_length")),
    (lambda: PackingOptions(8, share_prefixes=True, parallel=ParallelLayout(cp=2)), ValueError,
     ("share_prefixes=True makes trees", "(cp=2) cuts segments", "leave one out")),
    (lambda: pack([3, 2], packing=PackingOptions(8, parallel=DP2, rows_multiple_of=1)), ValueError,
     ("rows_multiple_of=1 must be a multiple of dp=2", "plan with batch_rows=")),
    (lambda: pack([3, 2], 8, strategy="wrapped", patches=[[4], []]), DataError,
     ("example 0 has images", 'strategy="wrapped" would cut', "another strategy")),
    (lambda: Ragged([1, 2], [0, 2]), TypeError, ("ndarray or a tensor, got list", "from_rows")),
    (lambda: Ragged(torch.eye(2).to_sparse(), [0, 2]), TypeError,
     ("dense and flat, got a tensor of layout torch.sparse_coo", ".to_dense()")),
    (lambda: PaddedCollator(0)({"input_ids": []}), DataError, ("batch is empty (0 examples)",)),
    (lambda: packing_report({"input_ids": [5, 6]}), DataError,
     ("taken as columns", "input_ids are the tokens of one example", "[example]")),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_it_is_refused(
    call: Callable[[], Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message


def test_more_cells_than_boundaries_can_count_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """int32 boundaries count 2^31 cells, here 8."""
    monkeypatch.setattr("torch_collate_kit.batch.paths.MAX_WIDTH", 8)
    message = r"more than int32 boundaries can count, 8; .*batch\.split\(rows\)"
    with pytest.raises(ValueError, match=message):
        both(random_examples(0))[0].model_inputs("torch_varlen")
    shard = PackedCollator(0, max_tokens=16)([{"input_ids": [5] * 16}]).context_shard(0, 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=message):
            shard.model_inputs("torch_varlen", context_group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def test_data_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_list(IDS)})
    saved.save_to_disk("splits")
    Path("empty").mkdir()
    Path("ids.jsonl").write_text('{"input_ids": [5]}\n')

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "/cache/datasets")

    for arguments, words in (
        ("splits --split test", "splits: there is no split 'test'; it has train"),
        ("empty", "empty: no saved dataset here, and not found on the hub: "),
        ("ids.jsonl", "set HF_HOME to a folder to write to"),
    ):
        if arguments == "ids.jsonl":
            monkeypatch.setattr(datasets.Dataset, "from_json", full)
            monkeypatch.setattr(datasets, "load_dataset", full)
        assert run_command("report", *arguments.split()) == 2
        assert words in capsys.readouterr().err


ROWS = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}] * 4
DATASET, COLLATE = TokenizedDataset(ROWS), PackedCollator(0, max_tokens=8)
BATCH, LOGITS = COLLATE(ROWS[:2]), torch.zeros(1, 6, 8)
SAMPLERS = [PackedBatchSampler(DATASET, COLLATE, batch_size=2), PrefetchingSampler(4, batch_size=2)]
PADDED = PaddedCollator(0)
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
READERS: list[Callable[[Any], Any]] = [
    PADDED, COLLATE, TokenizedDataset, partial(audit, tokenizer=None), packing_report
]  # fmt: skip
STREAMS = [
    PackedIterableDataset(ROWS, of, buffer_size=4) for of in (COLLATE, COLLATE.for_trainer())
]


def batch_of(dataset: Any, **options: Any) -> Any:
    return next(iter(DataLoader(dataset, **options)))


def refused(call: Callable[[], Any], words: str, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("collate", [PADDED, COLLATE.for_trainer()])
def test_trainer_over_a_tokenized_dataset(collate):
    """Its RemoveColumnsCollator iterates over what a dataset returns."""
    call = partial(batch_of, DATASET, batch_size=2, collate_fn=lambda of: collate([*of]))
    words = "give transformers.Trainer PackedRows(dataset, collate), or for a padded collator"
    refused(call, words, ValueError)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("dataset", [DATASET, ROWS, Mixture([DATASET, DATASET])])
def test_batch_samplers_as_samplers(sampler, dataset):
    call = partial(batch_of, dataset, sampler=sampler, collate_fn=PADDED)
    refused(call, "DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)", TypeError)


def test_streams_with_a_batch_size():
    for stream in STREAMS:
        for options in ({"batch_size": 8}, {}, {"batch_size": 8, "collate_fn": COLLATE}):
            words = "DataLoader(dataset, batch_size=None, collate_fn=dataset.as_is)"
            refused(partial(batch_of, stream, **options), words, TypeError)
    refused(lambda: PADDED([BATCH]), "example 0 is a Batch; it is collated already", ValueError)


RECORDS: list[dict[str, Any]] = [
    {"messages": MESSAGES}, {"prompt": "a", "completion": "b"}, MESSAGES[0], {"text": "a"},
    {"prompt": "a", "chosen": "b", "rejected": "c"},
]  # fmt: skip


@pytest.mark.parametrize("record", RECORDS)
def test_records_that_are_not_tokenized(record):
    words = (
        "tokenize the text first (chats by tokenize_chat_dataset or tokenize_chat, pairs by pref"
    )
    for read in (PADDED, COLLATE, TokenizedDataset):
        refused(lambda of=read: of([record]), words, ValueError)


LOSS = "pass the loss tokens of the step, as global_num_loss_tokens(micro_batches) returns them"
LABEL = "or if it is one number declare fields={'label': PerExample(torch.int64)}"
LABELLED = [{"input_ids": [5, 6], "label": 1}]
CALLS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: token_loss(LOGITS, BATCH), TypeError, LOSS),
    (lambda: token_loss(LOGITS, BATCH["labels"]), TypeError, LOSS),
    (lambda: BATCH.cuda(), AttributeError, 'batch.to("cuda") moves it'),
    (lambda: BATCH.cpu(), AttributeError, 'batch.to("cuda") moves it'),
    (lambda: BATCH.copy(), AttributeError, "dict(batch) reads"),
    (lambda: BATCH.pop("labels"), AttributeError, "with_fields() replaces"),
    (lambda: BATCH.update(x=1), AttributeError, "with_fields() replaces"),
    (lambda: BATCH.labels, AttributeError, 'a field is an item, batch["labels"]'),
    (lambda: setitem(BATCH, "labels", LOGITS), TypeError, "batch.with_fields(labels=tensor)"),
    (lambda: delitem(BATCH, "labels"), TypeError, "fields of a Batch stay"),
    (lambda: PADDED(LABELLED), ValueError, LABEL),
    (lambda: TokenizedDataset(LABELLED), ValueError, LABEL),
    (lambda: RolloutCollator(0)([{"messages": MESSAGES}]), ValueError, "a rollout has prompt_ids"),
]


@pytest.mark.parametrize(("call", "error", "words"), CALLS)
def test_one_line_says_what_to_write(call, error, words):
    refused(call, words, error)
