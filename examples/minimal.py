"""Train a small chat model on packed rows, from conversations to a saved model.

python examples/minimal.py: seconds on a CPU, and the same on a GPU. The conversations, the
tokenizer and the model are made up here; load_dataset and from_pretrained return your own.
"""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

import torch_collate_kit as kit

TEMPLATE = """{% for m in messages %}{{ m.role + ' ' + m.content + '<end>' }}{% endfor %}
{%- if add_generation_prompt %}assistant {% endif %}"""
COLORS = ["red", "blue", "green", "white", "black", "brown", "grey", "pink"]
ANIMALS = ["cat", "dog", "owl", "fox", "bear", "mouse", "horse", "snail"]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
torch.set_num_threads(1)  # so small a model is no work for more


def conversation(color: str, animal: str) -> list[dict]:
    said = [f"My {animal} is {color}.", f"A {color} {animal}!", "Which color?", f"It is {color}."]
    roles = ["user", "assistant"] * 2
    return [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]


# Model: a tokenizer of words with a chat template, and a Qwen3 of two layers.
words = ["<pad>", "<end>", "user", "assistant", "My", "A", "is", "It", "Which", "color", *".!?"]
vocabulary = {word: i for i, word in enumerate(words + COLORS + ANIMALS)}
of_words = Tokenizer(models.WordLevel(vocabulary))
of_words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
names = {"pad_token": "<pad>", "eos_token": "<end>", "chat_template": TEMPLATE}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=of_words, **names)
sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
sizes |= {"intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": len(tokenizer)}
model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes), attn_implementation="sdpa")

# Dataset: 64 conversations, one of them held out; tokenized, with a mask of what is trained.
asked, *chats = [conversation(color, animal) for color in COLORS for animal in ANIMALS]
tokenized, _ = kit.tokenize_chat_dataset(Dataset.from_dict({"messages": chats}), tokenizer)
examples = kit.TokenizedDataset(tokenized)

# Batches: 32 conversations a step in rows of at most 256 tokens, in a new order every epoch.
collate = kit.PackedCollator(tokenizer, max_tokens=256)
sampler = kit.PackedBatchSampler(examples, collate, batch_size=32)
loader = DataLoader(examples, batch_sampler=sampler, collate_fn=collate)
optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=3e-3)
with kit.PrefetchLoader(loader, device=device) as batches:  # the next one is made meanwhile
    for step, batch in enumerate(batches.steps(100), 1):
        if step == 1:  # raises if one packed conversation can see another
            kit.check_isolation(model, batch)
        total = 0.0
        for part in batch.split(2):  # on several ranks: synchronize in the last (is_last_part)
            logits = model(**part.model_inputs(model, labels=False)).logits
            loss = kit.token_loss(logits, part, num_loss_tokens=part.metadata["num_loss_tokens"])
            loss.backward()  # divided by the tokens of the whole step, so that parts add up
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {total:.4f}")

options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
prompt = tokenizer.apply_chat_template(asked[:3], **options).to(device)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=5)[0]))
model.save_pretrained("outputs/minimal")
tokenizer.save_pretrained("outputs/minimal")
