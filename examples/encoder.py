"""Train a small encoder on packed pairs: does this docstring belong to this function, or that?

python examples/encoder.py: a minute on a CPU. The pairs are functions of the installed packages
named by --packages, without their names and docstrings. Files are held out as a whole.
"""

import argparse
import ast
import hashlib
import importlib.util
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertConfig, BertModel

import torch_collate_kit as kit
from torch_collate_kit.loading import map_segments
from torch_collate_kit.losses import segment_pool

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch-size", type=int, default=32, help="pairs of a step")
parser.add_argument("--most-pairs", type=int, default=3000)
parser.add_argument("--packages", nargs="+", default=["numpy", "torch", "transformers"])
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
options = parser.parse_args()
torch.manual_seed(0)
torch.set_num_threads(1)  # so small a model is no work for more


def pairs_of(path: Path) -> list[tuple[str, str]]:
    """The first line of each docstring of a file, and the lines of its function below it."""
    text = path.read_text(encoding="utf-8", errors="ignore")
    try:
        functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines, found = text.splitlines(), []
    for function in functions:
        said = (ast.get_docstring(function) or "").split("\n\n")[0]
        if len(said.split()) > 5 and len(function.body) > 1:
            body = lines[function.body[1].lineno - 1 : function.end_lineno]
            found.append((said, "\n".join(body)))
    return found


def number_of(path: Path) -> int:
    """A number that follows from the path, to put files in an order and hold some out."""
    return int(hashlib.sha256(path.name.encode()).hexdigest()[:8], 16)


# Dataset: an example is a list of two segments, a docstring and the code of its function.
folders = [Path(importlib.util.find_spec(name).origin).parent for name in options.packages]
files = sorted((f for folder in folders for f in folder.rglob("*.py")), key=number_of)
texts: dict[str, list[tuple[str, str]]] = {"train": [], "held out": []}
for file in files:
    texts["held out" if number_of(file) % 5 == 0 else "train"] += pairs_of(file)
    if len(texts["train"]) > options.most_pairs:
        break
tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
special = trainers.BpeTrainer(
    vocab_size=4000, special_tokens=["<pad>", "<unk>", "<cls>"], show_progress=False
)
tokenizer.train_from_iterator((text for pair in texts["train"] for text in pair), special)


def dataset(pairs: list[tuple[str, str]]) -> kit.TokenizedDataset:
    ids = [[[2, *tokenizer.encode(text).ids[:63]] for text in pair] for pair in pairs]
    return kit.TokenizedDataset([{"input_ids": pair} for pair in ids])


train, held_out = dataset(texts["train"]), dataset(texts["held out"])
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
sizes |= {"num_attention_heads": 2, "max_position_embeddings": 64, "vocab_size": 4000}
no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
config = BertConfig(**sizes, **no_dropout, pad_token_id=0, attn_implementation="sdpa")
model = BertModel(config, add_pooling_layer=False).to(options.device)

# Batches: targets=None, since no token has a label: what is trained is one vector per segment.
collate = kit.PackedCollator(0, max_tokens=256, targets=None)
sampler = kit.PackedBatchSampler(train, collate, batch_size=options.batch_size)


def vectors_of(batch: kit.Batch) -> torch.Tensor:
    hidden = model(**batch.model_inputs(model)).last_hidden_state
    return F.normalize(segment_pool(hidden, batch, how="mean"), dim=-1)


def accuracy() -> tuple[float, int]:
    """How often a held-out docstring is closer to its own function than to that of another."""
    found = torch.from_numpy(map_segments(vectors_of, held_out, collate, device=options.device))
    said, code = found[:, 0], found[:, 1]
    others = code.roll(len(code) // 2, 0)
    belongs = (said * code).sum(dim=1) > (said * others).sum(dim=1)
    return float(belongs.float().mean()), len(code)


def trained() -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = torch.utils.data.DataLoader(train, batch_sampler=sampler, collate_fn=collate)
    with kit.PrefetchLoader(loader, device=options.device) as batches:
        for step, batch in enumerate(batches.steps(options.steps), 1):
            if step == 1:  # raises if one packed text can see another
                kit.check_isolation(model, batch)
            vectors = vectors_of(batch)
            number = torch.from_numpy(batch.row_metadata["segment_numbers"].values)
            said, code = vectors[number == 0], vectors[number == 1]  # in one order
            loss = F.cross_entropy(
                said @ code.T / 0.05, torch.arange(len(said), device=said.device)
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 20 == 0 or step == options.steps:
                print(f"step {step}: loss {loss:.3f}, padding {batch.padding:.3f}", flush=True)


before, count = accuracy()
trained()
after, _ = accuracy()
print(f"{len(train):,} pairs in training; {count:,} held-out docstrings, two functions each:")
print(f"accuracy {after:.3f}; by chance 0.500, before training {before:.3f}")
