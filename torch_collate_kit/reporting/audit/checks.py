"""The table of checks: what each finds, how bad that is, what is wrong, and the way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_collate_kit.reporting.audit import (
    cut_checks,
    label_checks,
    reading_checks,
    repeat_checks,
    rollout_checks,
    target_checks,
    template_checks,
    token_checks,
)
from torch_collate_kit.reporting.audit.columns import AuditColumns, Found
from torch_collate_kit.reporting.audit.findings import Severity

__all__ = ["CHECKS", "NEEDS", "Check"]


@dataclass(frozen=True)
class Check:
    """A check, and the finding that is made of what it found."""

    run: Callable[[AuditColumns], Found | None]
    severity: Severity
    message: str
    """With places for ``rows``, how many of how many, and for the values of the check."""
    needs: tuple[str, ...] = ()
    """Names that :data:`NEEDS` explains."""
    of_rows: bool = True
    """Whether there is nothing to check where no row was read."""

    @property
    def name(self) -> str:
        """The name of its finding."""
        return self.run.__name__


NEEDS: dict[str, tuple[str, Callable[[AuditColumns], bool]]] = {
    "max_tokens": ("max_tokens=", lambda c: c.max_tokens is not None),
    "tokenizer": ("a tokenizer", lambda c: c.vocabulary.tokenizer is not None),
    "size": ("a tokenizer with a size", lambda c: c.vocabulary.size is not None),
    "bos": ("a tokenizer with a BOS token", lambda c: c.vocabulary.bos_id is not None),
    "eos": ("a tokenizer with an EOS token", lambda c: c.vocabulary.eos_id is not None),
    "pad": ("a tokenizer with a pad token", lambda c: c.vocabulary.pad_id is not None),
    "header": (
        "a tokenizer whose chat template has a generation prompt",
        lambda c: bool(c.vocabulary.header_ids),
    ),
    "template": (
        "a tokenizer with a chat template",
        lambda c: c.vocabulary.template is not None,
    ),
}

CHECKS = (
    Check(
        reading_checks.placeholders_disagree_with_grids,
        "error",
        "in {rows} the images and the text do not belong together: {reason}",
        of_rows=False,
    ),
    Check(
        reading_checks.refused,
        "error",
        "{rows} are refused by every collator, and were not looked at further: {reason}",
        of_rows=False,
    ),
    Check(
        reading_checks.images_not_checked,
        "note",
        "there are images, and only a processor says how many tokens they take; pass the processor "
        "in place of the tokenizer",
        of_rows=False,
    ),
    Check(
        target_checks.masks_all_zero,
        "error",
        "none of the {things}, {rows}, has {what}",
        of_rows=False,
    ),
    Check(
        target_checks.no_trained_token,
        "warning",
        "{rows} have no trained token: they take time and teach nothing; drop them, or correct "
        "their loss target",
    ),
    Check(
        target_checks.masks_all_one,
        "warning",
        "{rows} train every token, though {why}; prompts are trained too: mark the answers alone, "
        "as tokenize_chat does",
    ),
    Check(
        target_checks.generation_prompt_trained,
        "warning",
        "{rows} train the header that the chat template writes before an answer, which the model "
        "is given at inference; begin the target after it",
        needs=("header",),
    ),
    Check(
        target_checks.empty_thinking_trained,
        "warning",
        "{rows} train an empty thinking block, which teaches the model not to think; leave it out "
        "of the target (with enable_thinking=False many templates put it into the prompt)",
        needs=("tokenizer",),
    ),
    Check(
        cut_checks.target_truncated,
        "warning",
        "in {rows} a part of the target is beyond max_tokens={max_tokens}, {lost} of {targets} "
        'trained tokens: overflow="truncate" loses them; raise max_tokens, split the rows, or drop '
        "them",
        needs=("max_tokens",),
    ),
    Check(
        cut_checks.prompt_longer_than_row,
        "warning",
        "in {rows} the prompt alone fills max_tokens={max_tokens}, so a row that is cut there has "
        "no target left; raise max_tokens, or drop them",
        needs=("max_tokens",),
    ),
    Check(
        cut_checks.eos_truncated,
        "warning",
        "{rows} lose the end of their answer, {where}, so they teach the model not to stop; drop "
        "them, or raise the limit that cuts them",
        needs=("eos",),
    ),
    Check(
        token_checks.eos_never_trained,
        "error",
        "no trained token is {ends}, in {rows} {which}, so the model never learns to stop; "
        "{way_out}",
        needs=("eos",),
    ),
    Check(
        token_checks.eos_not_trained,
        "warning",
        "{rows} have {ends} after an answer but do not train it, while other answers do; extend "
        "their target by one token",
        needs=("eos",),
    ),
    Check(
        token_checks.eos_masked_as_pad,
        "error",
        "{rows} do not train the EOS after their answer: the pad token is the EOS token, and a "
        "collator that hides pads hid it too; mask by position, or set another pad token",
        needs=("eos", "pad"),
    ),
    Check(
        token_checks.pad_trained,
        "error",
        "{rows} train pad tokens (id {pad}); pads are no target: tokenize without padding, "
        "collators pad",
        needs=("pad",),
    ),
    Check(
        token_checks.padded_rows,
        "warning",
        "{rows} are padded already (id {pad}), and collators take these pads for text; tokenize "
        "without padding",
        needs=("pad",),
    ),
    Check(
        token_checks.double_bos,
        "warning",
        "{rows} begin with two BOS tokens (id {bos}), which no model has seen: the chat template "
        "writes one, and the tokenizer another; pass add_special_tokens=False",
        needs=("bos",),
    ),
    Check(
        token_checks.bos_in_some_rows,
        "note",
        "{rows} do not begin with BOS (id {bos}), while the others do; tokenize all rows the same "
        "way",
        needs=("bos",),
    ),
    Check(
        token_checks.id_out_of_vocabulary,
        "error",
        "{rows} have ids that the tokenizer does not have, such as {id}: its vocabulary has {size} "
        "tokens; use the tokenizer that made the ids, or add the missing tokens to it",
        needs=("size",),
    ),
    Check(
        label_checks.labels_shifted,
        "error",
        "the labels of {rows} are input_ids shifted by one ({direction}), so every token is "
        "trained towards a wrong one: models and collators shift labels themselves; give labels "
        "that equal input_ids at the same place",
    ),
    Check(
        label_checks.labels_not_input_ids,
        "warning",
        "the labels of {rows} are other ids than input_ids at the same place; a model that "
        "predicts the next token is trained towards its own text: set them to input_ids, or -100",
    ),
    Check(
        label_checks.mask_shifted,
        "error",
        "the trained tokens of {rows} stand one token too {direction}: the answer is not trained "
        "from its first token to its EOS; move the mask back by one",
        needs=("header", "eos"),
    ),
    Check(
        repeat_checks.duplicates,
        "warning",
        "{rows} have the same tokens as another one; drop the copies ({copies}), unless the weight "
        "that they get is meant",
    ),
    Check(
        repeat_checks.contradictory_answers,
        "warning",
        "{rows} give {answers} different answers to {prompts} prompts; keep one answer for each, "
        "unless several are meant",
    ),
    Check(
        rollout_checks.reward_without_variance,
        "note",
        "in {groups} of {all_groups} groups ({share:.0%}), which are {rows}, all rollouts of a "
        "prompt have the same reward, so their advantages are 0 ({all_same}); choose prompts that "
        "are solved sometimes, or filter such groups",
    ),
    Check(
        rollout_checks.logprobs_shifted,
        "error",
        "the logprobs of {rows} are shifted by one column: {evidence}; give logprobs[i] of "
        "response_ids[i]",
    ),
    Check(
        rollout_checks.logprobs_positive,
        "error",
        "{rows} have logprobs over 0, such as {value:.3g}, which no log-probability is; the sign "
        "is turned, or they are probabilities",
    ),
    Check(
        template_checks.template_not_prefix_stable,
        "warning",
        "the chat template writes earlier messages differently once others follow ({case}; "
        "{rows}): an answer is trained in a context that the model never sees; train the last turn "
        'of each conversation (train_on="each" or "last"), or change the template',
        needs=("template",),
        of_rows=False,
    ),
    Check(
        template_checks.eos_does_not_end_turns,
        "note",
        "the chat template ends answers with {end}, and the EOS of the tokenizer is {eos}; "
        "generation stops only if generation_config.eos_token_id has both",
        needs=("template", "eos"),
        of_rows=False,
    ),
)
