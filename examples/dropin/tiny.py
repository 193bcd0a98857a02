"""What the drop-in scripts share: made-up data, a tiny model, and the reference they must match.

The reference trains one example at a time. It pads nothing, packs nothing, and uses nothing of
torch_collate_kit: plain cross entropy, and the sum of a step divided by its number of targets.
"""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import torch_collate_kit as kit

NUM_STEPS = 20
BATCH_SIZE = 8  # examples per step, over all ranks and micro-batches
MAX_TOKENS = 64  # per row
ROWS_PER_STEP = 4  # of scripts whose dataset has packed rows, over all ranks and micro-batches
ACCURACY = 1e-5  # of every loss, in float32
PAD = 0
VOCABULARY = ["<pad>", "<user>", "<assistant>", "<end>", *"abcdefghijklmnopqrstuvwxyz"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }} <end> {% endgeneration %}"
    "{% else %}{{ m.content }} <end> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
# A field that the collators carry along: which example is where.
NUMBER = {"number": kit.PerExample(torch.int64)}

torch.set_num_threads(1)  # the model is too small for more, and the ranks share the machine


def make_chats(count: int = NUM_STEPS * BATCH_SIZE, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return a question of letters, and the letters backwards as the answer; most are short."""
    rng = np.random.default_rng(seed)
    chats = []
    for number in range(count):
        letters = rng.choice(VOCABULARY[4:], 1 + int(24 * rng.random() ** 3))
        messages = [
            {"role": "user", "content": " ".join(letters)},
            {"role": "assistant", "content": " ".join(letters[::-1])},
        ]
        chats.append({"messages": messages, "number": number})
    return chats


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token per word."""
    words = {word: i for i, word in enumerate(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_examples(count: int = NUM_STEPS * BATCH_SIZE, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return the chats as token ids, 6 to 52 each, and labels that train the answers alone.

    By transformers, not by the kit, which is what the reference compares.
    """
    tokenizer = make_tokenizer()
    examples = []
    for chat in make_chats(count, seed=seed):
        tokens = tokenizer.apply_chat_template(
            chat["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        pairs = zip(tokens["input_ids"], tokens["assistant_masks"], strict=True)
        labels = [token if trained else -100 for token, trained in pairs]
        examples.append(
            {"input_ids": tokens["input_ids"], "labels": labels, "number": chat["number"]}
        )
    return examples


def make_model(attention: str = "torch_varlen") -> transformers.Qwen3ForCausalLM:
    """Return a model with the same float32 weights in every process and for every attention."""
    kit.register_torch_varlen()
    config = transformers.Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=VOCABULARY.index("<end>"),
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config).train()


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    """SGD, because AdamW would hide gradients of a wrong scale: its steps do not depend on it."""
    return torch.optim.SGD(model.parameters(), lr=0.2)


def nll_of(model: Any, example: dict[str, Any]) -> torch.Tensor:
    """Sum of the losses of one example's targets, with nothing else in the batch."""
    logits = model(input_ids=torch.tensor([example["input_ids"]])).logits[0, :-1]
    targets = torch.tensor(example["labels"][1:])
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def num_targets(examples: list[dict[str, Any]]) -> int:
    """How many tokens are trained; nothing predicts a first one."""
    return sum(label != -100 for example in examples for label in example["labels"][1:])


def reference_losses(steps: list[list[dict[str, Any]]]) -> list[float]:
    """Return the loss of each step, from the examples of each step."""
    model = make_model("eager")
    optimizer = make_optimizer(model)
    losses = []
    for examples in steps:
        loss = 0.0
        for example in examples:
            nll = nll_of(model, example) / num_targets(examples)
            nll.backward()
            loss += nll.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


def numbers_in(*batches: kit.Batch) -> list[int]:
    """Which examples the batches hold, on all ranks."""
    mine = [number for batch in batches for number in batch["number"].values.tolist()]
    if not dist.is_initialized():
        return mine
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    return list(chain.from_iterable(of_ranks))


class Noting:
    """A data_collator for rows that notes which examples were in each of this rank's batches."""

    def __init__(self, collate: Any) -> None:
        self.collate, self.batches = collate, []

    def __call__(self, items: list[Any]) -> dict[str, Any]:
        rows = [item["input_ids"] if isinstance(item, dict) else item for item in items]
        self.batches.append([row.examples for row in rows])
        return self.collate(items)

    def steps(self, num_micro_batches: int) -> list[list[int]]:
        """Return the examples of each step on all ranks."""
        of_ranks: list[Any] = [self.batches]
        if dist.is_initialized():
            of_ranks *= dist.get_world_size()
            dist.all_gather_object(of_ranks, self.batches)
        batches = [list(chain.from_iterable(of)) for of in zip(*of_ranks, strict=True)]
        starts = range(0, len(batches), num_micro_batches)
        of_steps = [chain(*batches[i : i + num_micro_batches]) for i in starts]
        return [list(chain.from_iterable(rows)) for rows in of_steps]


def compare(
    losses: list[float], numbers: list[list[int]], expected: list[float] | None = None
) -> None:
    """Print the losses beside the reference's; stop with an error where they differ.

    The first argument of the script, if there is one, is a file for both, as JSON.
    """
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({"losses": losses, "numbers": numbers}))
    if expected is None:
        examples = make_examples()
        expected = reference_losses([[examples[i] for i in step] for step in numbers])
    pairs = list(zip(losses, expected, strict=True))
    for step, (loss, reference) in enumerate(pairs, start=1):
        print(f"step {step:2}: loss {loss:.6f}, one example at a time {reference:.6f}")
    difference = max(abs(loss - reference) for loss, reference in pairs)
    print(f"the largest difference is {difference:.1e}")
    if not difference <= ACCURACY:
        raise SystemExit(f"the losses differ by {difference:.1e}, more than {ACCURACY}")
