"""A slow way to right examples: one rendering for each turn, no more than the rules ask for."""

from __future__ import annotations

from typing import Any

from tests.chat.truth import Case

__all__ = ["reference", "reference_examples"]


def reference(case: Case, turn: int) -> dict[str, Any] | None:
    """The example that ends with this turn and trains it, or None where the template has none."""
    settings = [case.record.get("chat_template_kwargs") or {}]
    settings += [] if settings[0] else [{"enable_thinking": False}]
    for messages in case.forms(turn + 1):
        for setting in settings:
            whole = case.render(messages, False, setting)
            prompt = case.render(messages[:turn], True, setting) if turn else b""
            if whole is None or prompt is None or not whole.startswith(prompt):
                continue
            if turn == 0:
                before, header, _ = whole.partition(case.family.header.encode())
                prompt = before + header
            if case.name == "glm4moe":  # it writes the end of a turn with the next turn
                whole += b"<|user|>"
            end = max(whole.rfind(token.encode()) + len(token) for token in case.family.ends)
            example = _example(case, whole.decode(), len(prompt), end)
            if case.verdict_of_turn(turn, example).kind == "right":
                return example
    return None


def reference_examples(case: Case) -> list[dict[str, Any]] | None:
    """One example per turn to train, or None if one of them cannot be had."""
    examples = [reference(case, turn) for turn in case.turns("each")]
    return None if None in examples else [example for example in examples if example is not None]


def _example(case: Case, whole: str, start: int, end: int) -> dict[str, Any]:
    ids = case.tokenizer(whole, add_special_tokens=False)["input_ids"]
    position, mask = 0, []
    for piece in case.pieces(ids):
        mask.append(int(start <= position < end))
        position += len(piece)
    return {"input_ids": ids, "loss_mask": mask, "skip_reason": "", "num_cut_tokens": 0}
