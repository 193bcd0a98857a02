"""torchdata's StatefulDataLoader around a packed stream: stop anywhere, go on at the next batch.

    python examples/dropin/stateful_loader.py

The workers hold the stream, so only the loader knows where they are: its state_dict has the state
of every worker. The run below saves a checkpoint in the middle and goes on; a second one, with
everything made anew, resumes from it. Both must agree to the last bit.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import tiny
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import torch_collate_kit as kit

SAVE_AFTER = 7  # steps


def make_loader() -> StatefulDataLoader:
    collate = kit.PackedCollator(tiny.PAD, max_tokens=tiny.MAX_TOKENS, fields=tiny.NUMBER)
    stream = kit.PackedIterableDataset(
        tiny.make_examples(),
        collate,
        batch_rows=2,
        buffer_size=20,
    )
    # batch_size=None: the stream yields whole batches. as_is: torch would rebuild them as dicts.
    return StatefulDataLoader(stream, batch_size=None, collate_fn=stream.as_is, num_workers=2)


def train(checkpoint: Path, *, resume: bool) -> tuple[list[float], list[list[int]]]:
    """Loss and example numbers of each step; a fresh run writes the checkpoint on its way."""
    model, loader = tiny.make_model(), make_loader()
    optimizer = tiny.make_optimizer(model)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    if resume:
        saved = torch.load(checkpoint, weights_only=False)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    losses, numbers = [], []
    for batch in loader:
        logits = model(**batch.model_inputs(model, labels=False)).logits
        loss = kit.token_loss(logits, batch, num_loss_tokens=batch.metadata["num_loss_tokens"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        numbers.append(tiny.numbers_in(batch))
        if not resume and len(losses) == SAVE_AFTER:
            torch.save({name: part.state_dict() for name, part in parts.items()}, checkpoint)
    return losses, numbers


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint.pt"
        losses, numbers = train(checkpoint, resume=False)
        rest = train(checkpoint, resume=True)
    if rest != (losses[SAVE_AFTER:], numbers[SAVE_AFTER:]):
        raise SystemExit("the resumed run differs from the one that was not stopped")
    print(f"resumed after step {SAVE_AFTER}: the other {len(rest[0])} steps are the same")
    tiny.compare(losses, numbers)
