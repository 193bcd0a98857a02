"""What each finding says: how bad it is, what is wrong, and the way out."""

from __future__ import annotations

from dataclasses import dataclass

from torch_collate_kit.reporting.audit.findings import Severity

__all__ = ["MESSAGES", "Message"]


@dataclass(frozen=True)
class Message:
    """``text`` has places for ``rows``, how many of how many, and for the values of the check."""

    severity: Severity
    text: str


MESSAGES = {
    "no_trained_token": Message(
        "warning",
        "{rows} have no trained token: they take time and teach nothing; drop them, or correct "
        "their loss target",
    ),
    "masks_all_zero": Message(
        "error",
        "none of the rows, {rows}, has a trained token, so the loss is 0: the loss target marks "
        "nothing; mark the answers, as tokenize_chat does",
    ),
    "masks_all_one": Message(
        "warning",
        "{rows} train every token, though {why}; prompts are trained too: mark the answers alone, "
        "as tokenize_chat does",
    ),
    "generation_prompt_trained": Message(
        "warning",
        "{rows} train the header that the chat template writes before an answer, which the model "
        "is given at inference; begin the target after it",
    ),
    "empty_thinking_trained": Message(
        "warning",
        "{rows} train an empty thinking block, which teaches the model not to think; leave it out "
        "of the target (with enable_thinking=False many templates put it into the prompt)",
    ),
    "target_truncated": Message(
        "warning",
        "in {rows} a part of the target is beyond max_tokens={max_tokens}, {lost} of {targets} "
        'trained tokens: overflow="truncate" loses them; raise max_tokens, split the rows, or drop '
        "them",
    ),
    "prompt_longer_than_row": Message(
        "warning",
        "in {rows} the prompt alone fills max_tokens={max_tokens}, so a row that is cut there has "
        "no target left; raise max_tokens, or drop them",
    ),
    "eos_truncated": Message(
        "warning",
        "{rows} lose the end of their answer, {where}, so they teach the model not to stop; drop "
        "them, or raise the limit that cuts them",
    ),
    "eos_never_trained": Message(
        "error",
        "no trained token is {ends}, in {rows} {which}, so the model never learns to stop; "
        "{way_out}",
    ),
    "eos_not_trained": Message(
        "warning",
        "{rows} have {ends} after an answer but do not train it, while other answers do; extend "
        "their target by one token",
    ),
    "eos_masked_as_pad": Message(
        "error",
        "{rows} do not train the EOS after their answer: the pad token is the EOS token, and a "
        "collator that hides pads hid it too; mask by position, or set another pad token",
    ),
    "pad_trained": Message(
        "error",
        "{rows} train pad tokens (id {pad}); pads are no target: tokenize without padding, "
        "collators pad",
    ),
    "padded_rows": Message(
        "warning",
        "{rows} are padded already (id {pad}), and collators take these pads for text; tokenize "
        "without padding",
    ),
    "double_bos": Message(
        "warning",
        "{rows} begin with two BOS tokens (id {bos}), which no model has seen: the chat template "
        "writes one, and the tokenizer another; pass add_special_tokens=False",
    ),
    "bos_in_some_rows": Message(
        "note",
        "{rows} do not begin with BOS (id {bos}), while the others do; tokenize all rows the same "
        "way",
    ),
    "id_out_of_vocabulary": Message(
        "error",
        "{rows} have ids that the tokenizer does not have, such as {id}: its vocabulary has {size} "
        "tokens; use the tokenizer that made the ids, or add the missing tokens to it",
    ),
    "labels_shifted": Message(
        "error",
        "the labels of {rows} are input_ids shifted by one ({direction}), so every token is "
        "trained towards a wrong one: models and collators shift labels themselves; give labels "
        "that equal input_ids at the same place",
    ),
    "labels_not_input_ids": Message(
        "warning",
        "the labels of {rows} are other ids than input_ids at the same place; a model that "
        "predicts the next token is trained towards its own text: set them to input_ids, or -100",
    ),
    "mask_shifted": Message(
        "error",
        "the trained tokens of {rows} stand one token too {direction}: the answer is not trained "
        "from its first token to its EOS; move the mask back by one",
    ),
    "duplicates": Message(
        "warning",
        "{rows} have the same tokens as another one; drop the copies ({copies}), unless the weight "
        "that they get is meant",
    ),
    "contradictory_answers": Message(
        "warning",
        "{rows} give {answers} different answers to {prompts} prompts; keep one answer for each, "
        "unless several are meant",
    ),
    "reward_without_variance": Message(
        "note",
        "in {groups} of {all_groups} groups ({share:.0%}), which are {rows}, all rollouts of a "
        "prompt have the same reward, so their advantages are 0 ({all_same}); choose prompts that "
        "are solved sometimes, or filter such groups",
    ),
    "logprobs_shifted": Message(
        "error",
        "the logprobs of {rows} are shifted by one column: {evidence}; give logprobs[i] of "
        "response_ids[i]",
    ),
    "logprobs_positive": Message(
        "error",
        "{rows} have logprobs over 0, such as {value:.3g}, which no log-probability is; the sign "
        "is turned, or they are probabilities",
    ),
    "template_not_prefix_stable": Message(
        "warning",
        "the chat template writes earlier messages differently once others follow ({case}; "
        "{rows}): an answer is trained in a context that the model never sees; train the last turn "
        'of each conversation (train_on="each" or "last"), or change the template',
    ),
    "eos_does_not_end_turns": Message(
        "note",
        "the chat template ends answers with {end}, and the EOS of the tokenizer is {eos}; "
        "generation stops only if generation_config.eos_token_id has both",
    ),
    "placeholders_disagree_with_grids": Message(
        "error",
        "in {rows} the images and the text do not belong together: {reason}",
    ),
    "refused": Message(
        "error",
        "{rows} are refused by every collator, and were not looked at further: {reason}",
    ),
    "images_not_checked": Message(
        "note",
        "there are images, and only a processor says how many tokens they take; pass the processor "
        "in place of the tokenizer",
    ),
}
