"""What encoders are trained on, packed on two ranks with accumulation, against texts one by one.

The two ranks are run one after the other. "Alone" is the model's own forward pass of one text,
with its own positions, mask and, where it has one, its own head: losses and gradients in fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.encoder_models import (
    BERT,
    DECODER,
    ROBERTA,
    VOCAB,
    difference,
    encoder_model,
    gradients_of,
)
from torch_collate_kit import (
    Batch,
    IsolationError,
    PackedBatchSampler,
    PackedCollator,
    PaddedCollator,
    ParallelLayout,
    PerExample,
    TokenizedDataset,
    token_loss,
)
from torch_collate_kit.losses import (
    global_num_examples,
    global_num_loss_tokens,
    segment_pool,
)

transformers = pytest.importorskip("transformers")
LABEL = {"label": PerExample(torch.int64)}
LENGTHS = (9, 20, 1, 5, 17, 8, 3, 12)


def examples(kind: str) -> list[dict[str, Any]]:
    """Texts with the labels of a task: ``tokens``, ``mlm``, ``classes``, ``pairs`` or ``lists``."""
    generator = torch.Generator().manual_seed(3)

    def ids(n: int, most: int = VOCAB) -> list[int]:
        return torch.randint(4, most, (n,), generator=generator).tolist()

    found: list[dict[str, Any]] = []
    for i, n in enumerate(LENGTHS):
        text: dict[str, Any] = {"input_ids": ids(n)}
        if kind == "tokens":
            text["labels"] = [-100 if k > 5 else k % 3 for k in ids(n, 9)]
            text["labels"][0] = i % 3  # also at the first token
        elif kind == "mlm":
            text["labels"] = [k if k % 3 == 0 else -100 for k in text["input_ids"]]
        elif kind == "lists":  # a query, a positive, and 0 to 2 negatives
            text = {"input_ids": [ids(3), ids(n), *(ids(4) for _ in range(i % 3))]}
        else:
            text["label"] = i % (2 if kind == "pairs" else 3)
        if kind == "pairs":
            text["token_type_ids"] = [0] * (n // 2) + [1] * (n - n // 2)
        found.append(text)
    return found


def of_two_ranks(rows: list[dict[str, Any]], padding: str | None, **options: Any) -> list[Batch]:
    """The micro-batches of a step over two ranks: one row each, or two padded ones."""
    if padding is not None:
        collate = PaddedCollator(0, padding_side=padding, **options)
        return [collate(rows[i : i + 2]) for i in range(0, len(rows), 2)]
    data = TokenizedDataset(rows, columns=list(rows[0]))
    packed = PackedCollator(0, max_tokens=32, parallel=ParallelLayout(dp=2), **options)
    found: list[Batch] = []
    for rank in (0, 1):
        sampler = PackedBatchSampler(
            data, packed, batch_size=len(rows), dp_rank=rank, shuffle=False
        )
        (batch,) = [packed(data.__getitems__(part)) for part in sampler]
        found += batch.split(1)
    assert len(found) > 2, "there is no accumulation"
    return found


def alone(model: Any, text: dict[str, Any]) -> Any:
    keys = [key for key in ("input_ids", "token_type_ids") if key in text]
    return model(**{key: torch.tensor([text[key]]) for key in keys})


def of_labels(model: Any, rows: list[dict[str, Any]], padding: str | None) -> tuple[Tensor, Tensor]:
    """The summed loss of all micro-batches, and that of the texts one by one."""
    batches = of_two_ranks(rows, padding, targets="same_token", normalize_loss=False)  # in fp32
    count = int(global_num_loss_tokens(batches))
    assert count == sum(label != -100 for text in rows for label in text["labels"])
    assert padding or {batch.metadata["num_loss_tokens"] for batch in batches} == {count}
    found = [
        token_loss(
            model(**batch.model_inputs(model, labels=False)).logits, batch, num_loss_tokens=count
        )
        for batch in batches
    ]
    expected = [
        F.cross_entropy(alone(model, text).logits[0], torch.tensor(text["labels"]), reduction="sum")
        for text in rows
        if set(text["labels"]) != {-100}
    ]
    return torch.stack(found).sum(), torch.stack(expected).sum() / count


def bert_head(model: Any, pooled: Tensor) -> Tensor:
    return model.classifier(model.dropout(model.base_model.pooler(pooled[:, None])))


def roberta_head(model: Any, pooled: Tensor) -> Tensor:
    return model.classifier(pooled[:, None])


def score_head(model: Any, pooled: Tensor) -> Tensor:
    return model.score(pooled)


def of_classes(
    model: Any, rows: list[dict[str, Any]], padding: str | None, how: Any, head: Any
) -> tuple[Tensor, Tensor]:
    """As ``of_labels``, of a head that reads one vector per text."""
    batches = of_two_ranks(rows, padding, targets=None, fields=LABEL)
    count = int(global_num_examples(batches))
    assert count == len(rows)
    found = []
    for batch in batches:
        inputs = batch.model_inputs(model.base_model)
        hidden = model.base_model(**inputs).last_hidden_state
        logits = head(model, segment_pool(hidden, batch, how=how))
        found.append(_loss(logits, batch["label"].values) / count)
    expected = [_loss(alone(model, text).logits, torch.tensor([text["label"]])) for text in rows]
    return torch.stack(found).sum(), torch.stack(expected).sum() / len(rows)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.shape[-1] > 1:
        return F.cross_entropy(logits, labels, reduction="sum")
    targets = labels.to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits[:, 0], targets, reduction="sum")


def of_lists(model: Any, rows: list[dict[str, Any]], padding: str | None) -> tuple[Tensor, Tensor]:
    """As ``of_labels``, of queries against the answers of all micro-batches and ranks."""
    batches = of_two_ranks(rows, padding, targets=None)
    parts, numbers, owners = [], [], []
    for batch in batches:
        hidden = model(**batch.model_inputs(model)).last_hidden_state
        parts.append(segment_pool(hidden, batch, how="mean"))
        numbers += batch.row_metadata["segment_numbers"].values.tolist()
        owners += batch.row_metadata["example_indices"].values.tolist()
    order = [(i, k) for i, of in enumerate(rows) for k in range(len(of["input_ids"]))]
    if padding is None:
        assert sorted(zip(owners, numbers, strict=True)) == order
    single = [
        alone(model, {"input_ids": ids}).last_hidden_state[0].mean(dim=0)
        for text in rows
        for ids in text["input_ids"]
    ]
    return (
        contrastive(torch.cat(parts), torch.tensor(numbers)),
        contrastive(torch.stack(single), torch.tensor([number for _, number in order])),
    )


def contrastive(vectors: Tensor, number: Tensor) -> Tensor:
    """InfoNCE with all positives and negatives, as docs/guide/encoders.md has it."""
    vectors = F.normalize(vectors, dim=-1)
    queries, others = vectors[number == 0], vectors[number > 0]
    gold = torch.nonzero(number[number > 0] == 1)[:, 0]
    return F.cross_entropy(queries @ others.T / 0.05, gold, reduction="sum") / len(queries)


Task = Callable[[Any, list[dict[str, Any]], str | None], tuple[Tensor, Tensor]]


def classes(how: str, head: Any) -> Task:
    def run(model: Any, rows: Any, padding: str | None) -> tuple[Tensor, Tensor]:
        return of_classes(model, rows, padding, how, head)

    return run


TASKS: dict[str, tuple[str, dict[str, Any], str, Task]] = {
    "token classification": ("BertForTokenClassification", {**BERT, "num_labels": 3}, "tokens", of_labels),
    "of a causal model": ("LlamaForTokenClassification", {**DECODER, "is_causal": True, "num_labels": 3}, "tokens", of_labels),
    "MLM": ("BertForMaskedLM", BERT, "mlm", of_labels),
    "MLM, positions from 2": ("RobertaForMaskedLM", ROBERTA, "mlm", of_labels),
    "classification": ("BertForSequenceClassification", {**BERT, "num_labels": 3}, "classes", classes("first", bert_head)),
    "by RoBERTa": ("RobertaForSequenceClassification", {**ROBERTA, "num_labels": 3}, "classes", classes("first", roberta_head)),
    "by a causal model": ("LlamaForSequenceClassification", {**DECODER, "is_causal": True, "num_labels": 3}, "classes", classes("last", score_head)),
    "reranking": ("BertForSequenceClassification", {**BERT, "num_labels": 1}, "pairs", classes("first", bert_head)),
    "contrastive": ("BertModel", BERT, "lists", of_lists),
}  # fmt: skip


@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("task", TASKS)
def test_losses_and_gradients_are_those_of_single_texts(task: str, padding: str | None) -> None:
    name, options, kind, run = TASKS[task]
    causal = options.get("is_causal", False)
    changes = {k: v for k, v in options.items() if k != "is_causal"} if causal else options
    model = encoder_model(name, **changes)
    if causal:
        model.config.is_causal = True
    if padding == "left" and name in ("BertForSequenceClassification", "BertModel"):  # a pooler
        with pytest.raises(IsolationError, match="reads the first cell of a row, which is a pad"):
            run(model, examples(kind), padding)
        return
    found, expected = run(model, examples(kind), padding)
    assert difference(found.detach(), expected.detach()) < 1e-10
    bound = 1e-6 if causal else 1e-10  # its softmax is in fp32
    gradients = [gradients_of(model, loss) for loss in (found, expected)]
    assert difference(*gradients) < bound


# --- transformers.Trainer ------------------------------------------------------------------------


def compute_loss_func(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The one of docs/guide/encoders.md."""
    total = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / num_items_in_batch


def trained_by_trainer(folder: Path, model: Any, rows: Any, **options: Any) -> dict[str, Tensor]:
    """The gradients of one optimizer step of plain descent, with accumulation."""
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=1, gradient_accumulation_steps=4, report_to=[],
        per_device_train_batch_size=2, use_cpu=True, save_strategy="no", disable_tqdm=True,
        max_grad_norm=0.0,
    )  # fmt: skip
    collate = PackedCollator(0, max_tokens=32, targets="same_token").for_trainer(model)
    descent = torch.optim.SGD(model.parameters(), lr=1.0)
    transformers.Trainer(
        model, arguments, train_dataset=rows, data_collator=collate,
        optimizers=(descent, torch.optim.lr_scheduler.LambdaLR(descent, lambda _: 1.0)), **options,
    ).train()  # fmt: skip
    return {name: before[name] - weight.detach() for name, weight in model.named_parameters()}


def test_the_gradient_of_trainer_is_exact_with_the_loss_of_the_guide(tmp_path: Path) -> None:
    rows = examples("tokens")
    model = encoder_model("BertForTokenClassification", **BERT, num_labels=3)
    _, expected = of_labels(model, rows, None)
    wanted = gradients_of(model, expected)
    found = trained_by_trainer(tmp_path, model, rows, compute_loss_func=compute_loss_func)
    assert difference({name: found[name] for name in wanted}, wanted) < 1e-10
    # the model's own loss divides each micro-batch by its own labels: why the guide says this
    model = encoder_model("BertForTokenClassification", **BERT, num_labels=3)
    found = trained_by_trainer(tmp_path, model, rows)
    ratio = found["classifier.bias"].norm() / wanted["classifier.bias"].norm()
    assert ratio > 2


HEADS = ("SequenceClassification", "MultipleChoice", "QuestionAnswering", "NextSentencePrediction")


@pytest.mark.parametrize("head", HEADS)
def test_heads_of_whole_rows_are_refused_by_trainer(head: str) -> None:
    model = encoder_model(f"BertFor{head}", **BERT)
    for targets in ("same_token", "next_token", None):
        collate = PackedCollator(0, max_tokens=32, targets=targets)
        with pytest.raises(IsolationError, match=f"BertFor{head} reads one cell of .*segment_pool"):
            collate.for_trainer(model)


def test_the_loss_of_a_head_is_that_of_its_collator() -> None:
    bert = encoder_model("BertForMaskedLM", **BERT)
    llama = encoder_model("LlamaForCausalLM", **DECODER)
    same, after = ({"targets": of} for of in ("same_token", "next_token"))
    for collate, model, message in (
        (PackedCollator(0, max_tokens=32, **after), bert, 'pass targets="same_token" to the coll'),
        (PaddedCollator(0, **after), bert, 'a two-way model sees the next ones.*"same_token"'),
        (PackedCollator(0, max_tokens=32, **after), llama, 'targets="same_token" to the collator'),
        (PackedCollator(0, max_tokens=32, **same), llama, "shifts labels by a token"),
        (PackedCollator(0, max_tokens=32, **same), None, r"pass for_trainer\(model\)"),
        (PackedCollator(0, max_tokens=32, targets=None), bert, "targets=None a batch has none"),
    ):
        with pytest.raises(ValueError, match=message):
            collate.for_trainer(model)
    assert "labels" in PaddedCollator(0, **same).for_trainer(bert)(examples("mlm"))
