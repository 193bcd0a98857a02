"""Train a small chat model on packed rows, from conversations to a saved model.

python examples/minimal.py: a minute on a CPU, the same on a GPU. Everything that is made up here,
the conversations, the tokenizer and the model, is what from_pretrained and load_dataset give you.
"""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import torch_collate_kit as kit

STEPS, SAVED = 120, "outputs/minimal"
TEMPLATE = """{% for m in messages %}{{ '<start>' + m.role + '\n' + m.content + '<end>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"""
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# Conversations: dicts with "messages".
colors = ["red", "blue", "green", "white", "black", "brown", "grey", "pink"]
animals = ["cat", "dog", "owl", "fox", "bear", "mouse", "horse", "snail"]
chats = [
    [
        {"role": "user", "content": f"My {animal} is {color}."},
        {"role": "assistant", "content": f"A {color} {animal}!"},
        {"role": "user", "content": "Which color?"},
        {"role": "assistant", "content": color},
    ]
    for color in colors
    for animal in animals
]

# A tokenizer of bytes with a chat template, and a small model.
characters = ["<pad>", "<start>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
bytes_only = Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, merges=[]))
bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bytes_only.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=bytes_only, pad_token="<pad>", eos_token="<end>", chat_template=TEMPLATE
)
tokenizer.add_special_tokens({"additional_special_tokens": ["<start>"]})
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
config = Qwen3Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **sizes)
kit.register_torch_varlen()  # attention that keeps packed examples apart
model = Qwen3ForCausalLM._from_config(config, attn_implementation="torch_varlen").to(device)

# Tokens with their loss masks, packed rows, batches collated one ahead.
tokenized, _ = kit.tokenize_chat_dataset(Dataset.from_dict({"messages": chats}), tokenizer)
examples = kit.TokenizedDataset(tokenized)
collate = kit.PackedCollator(tokenizer, max_tokens=1024)
sampler = kit.PackedBatchSampler(examples, collate, batch_size=32)
loader = DataLoader(examples, batch_sampler=sampler, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

with kit.PrefetchLoader(loader, device=device) as batches:
    kit.check_isolation(model, collate([examples[0], examples[1]]).to(device))
    for step, batch in enumerate(batches.steps(STEPS), 1):  # each epoch in an order of its own
        total = 0.0
        for part in batch.split(2):  # two rows at a time
            logits = model(**part.model_inputs(labels=False)).logits
            number = part.metadata["num_loss_tokens"]  # of the whole step
            loss = kit.token_loss(logits, part, num_loss_tokens=number)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {total:.4f}")

model.save_pretrained(SAVED)
tokenizer.save_pretrained(SAVED)
