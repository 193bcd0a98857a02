"""Which columns the examples of a batch have: missing keys, misspelled ones, rows packed before."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.ma import MaskedArray
from torch import Tensor

from torch_collate_kit._checks import bare_key, respelt, type_name
from torch_collate_kit.batch import Batch
from torch_collate_kit.batch.fields import PerToken
from torch_collate_kit.batch.placement import TargetKind
from torch_collate_kit.errors import DataError
from torch_collate_kit.packing.rank_plan import SourceName
from torch_collate_kit.ragged import Nested, Ragged
from torch_collate_kit.reading.source import (
    Examples,
    Source,
    are_nested,
    check_even,
    num_rows,
    with_vectors,
)
from torch_collate_kit.vision import VisionLayout
from torch_collate_kit.vision.families import IMAGE_FIELDS

CHECKED = ("attention_mask", "position_ids")  # not read, but checked by ``check_one_text``
TARGETS = ("loss_mask", "labels", "assistant_masks", "completion_mask")
PER_TOKEN = ("input_ids", *TARGETS, "num_actions", *CHECKED, "token_type_ids")
KNOWN = (*PER_TOKEN, "weight")
PER_EXAMPLE = {"num_actions", "weight"}  # a number of each example, not lists
_REQUIRED = ("prompt_ids", "response_ids", "rewards", "loss_mask")
_OPTIONAL = ("logprobs", "advantages", "uid", "trajectory_id", "is_last_step", "weight")
ROLLOUT_KEYS = (*_REQUIRED, *_OPTIONAL, "rollout_expert_indices", *CHECKED)
ROLLOUT_PER_TOKEN = (*_REQUIRED, "logprobs", "advantages", "rollout_expert_indices", *CHECKED)
IMAGES = ("pixel_values", "image_grid_thw")
VIDEOS = ("pixel_values_videos", "video_grid_thw")
MEDIA = (*IMAGE_FIELDS, *VIDEOS)
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")  # follow from the ids
TOKENIZE = (
    "tokenize the text first (chats by tokenize_chat_dataset or tokenize_chat, pairs by "
    "preference.tokenize_preferences)"
)
_NO_EXAMPLES: dict[type, str] = {
    str: "tokenize texts first (chat.tokenize_documents), open a path as TokenizedDataset(path), "
    "take one split of a DatasetDict; give transformers.Trainer PackedRows(dataset, collate), or "
    "for a padded collator TrainingArguments(remove_unused_columns=False)",
    Batch: "it is collated already: pass DataLoader(dataset, batch_size=None, "
    "collate_fn=dataset.as_is) of a dataset that yields batches",
}
# What others call the weight of an example; one slip away from it is also "height".
_OTHER_WEIGHTS = ("weight", "sampleweight", "exampleweight")


def raw_columns(
    examples: Examples,
    *,
    rollouts: bool | None,
    train_all: bool,
    fields: Mapping[str, Any],
    vision: VisionLayout | None,
    targets: TargetKind = "next_token",
) -> tuple[dict[str, Any], bool, dict[str, PerToken]]:
    """Return the known columns as given, whether they are rollouts, and fields per token."""
    given: Any = examples
    if not isinstance(given, Mapping | list | tuple):
        source = Source(given)
        given = source.part(0, len(source))
    first = given
    if not isinstance(given, Mapping):
        first = first_example(given, "response_ids" if rollouts else "input_ids")
    if rollouts is None:
        rollouts = _are_rollouts(first)
    of_model = () if vision is None else (*vision.fields, *TOKEN_TYPES, *vision.token_fields)
    media = () if vision is None else (*MEDIA, *of_model)
    if rollouts:
        known, ids, media = (*ROLLOUT_KEYS, *fields), "response_ids", media or IMAGES
        if vision is not None and vision.family.positions != "model":
            media = (*MEDIA, *vision.fields)
    else:
        own = KNOWN if vision is None else [key for key in KNOWN if key not in TOKEN_TYPES]
        known, ids = (*own, *fields), "input_ids"
    owners = first_with(given)
    refuse_boundaries(owners, column_of(given), (*fields, *media))
    if isinstance(given, Mapping):
        vectors = [key for key, spec in fields.items() if getattr(spec, "shape", ())]
        if vectors and not are_nested(given.get(ids, ())):  # then lists of lists are vectors
            given = with_vectors(given, vectors)
        raw = _columns(given, (*known, *media), ids)
    else:
        raw = _transposed(given, known, media and [key for key in media if key in owners], owners)
    if ids not in raw:
        raise _without_ids(sorted(map(str, first)), ids)
    if rollouts:
        needed = (*_REQUIRED, *fields)
        raw = {k: column for k, column in raw.items() if k in needed or not _is_all_none(column)}
        _check_rollout_keys(raw, [key for key in map(str, first) if key not in fields])
    else:
        if vision is None and "pixel_values" in owners and "pixel_values" not in fields:
            raise unknown_images(f"example {owners['pixel_values']}")
        names = {key: f"example {i}" for key, i in owners.items()}
        declared = (*fields, *of_model, *added_keys(given, owners))
        if targets != "next_token":
            _check_targets(names, targets)
        check_keys(names, train_all=train_all, declared=declared, targets=targets)
    if vision is None or vision.family.positions != "model":
        return raw, rollouts, {}
    read = {*KNOWN, *ROLLOUT_KEYS, *media, *fields}
    others = {key: i for key, i in owners.items() if key not in read}
    return raw, rollouts, _token_types(given, raw, others, vision)


def unknown_images(owner: str) -> DataError:
    """Return the error for images of an unknown model."""
    return DataError(
        f"{owner} has pixel_values, and the collator does not know the images of the model; give "
        "it the processor in place of the tokenizer"
    )


def first_with(examples: Any) -> dict[str, int]:
    """Return all keys, and the first example that has each."""
    if isinstance(examples, Mapping):
        return dict.fromkeys(examples, 0)
    found = dict.fromkeys(examples[0], 0)
    if len(set(found).union(*examples)) > len(found):
        for i, example in enumerate(examples):
            found |= dict.fromkeys(example.keys() - found.keys(), i)
    return found


def added_keys(examples: Any, owners: Mapping[str, int]) -> list[str]:
    """Return the keys that a Mixture has added to examples, which do not concern the loss."""
    is_list = not isinstance(examples, Mapping)
    return [k for k, i in owners.items() if is_list and isinstance(examples[i][k], SourceName)]


def column_of(examples: Any) -> Callable[[str], Any]:
    """Return a function that returns a column of examples, a list of mappings or columns."""
    if isinstance(examples, Mapping):
        return examples.__getitem__
    return lambda key: [example.get(key) for example in examples]


def first_example(examples: Sequence[Any], ids: str) -> Mapping[str, Any]:
    """Return the first example, checked as all others: a mapping."""
    if not len(examples):
        raise DataError("the batch is empty (0 examples); give at least one")
    if set(map(type, examples)) != {dict}:
        for i, example in enumerate(examples):
            if not isinstance(example, Mapping) or isinstance(example, Batch):
                hint = f"an example is a mapping with {ids} (of a pandas row pass row.to_dict())"
                hint = _NO_EXAMPLES.get(type(example), hint)
                raise DataError(f"example {i} is {type_name(example)}; {hint}")
    first: Mapping[str, Any] = examples[0]
    return first


def _are_rollouts(keys: Mapping[str, Any]) -> bool:
    """Return whether examples are rollouts; beside ``input_ids`` all of their keys are needed."""
    if "input_ids" in keys:
        return keys.keys() >= {*_REQUIRED}
    return "prompt_ids" in keys or "response_ids" in keys


def _columns(given: Mapping[str, Any], names: Sequence[str], ids: str) -> dict[str, Any]:
    raw = {key: given[key] for key in names if key in given}
    if _is_one_example(raw.get(ids, ())):
        raise DataError(
            f"a mapping is taken as columns, but its {ids} are the tokens of one example; "
            "collate one example as a list: [example]; if a tool replaced the batch sampler, such "
            "as Ray's prepare_data_loader, leave it out"
        )
    for key, column in raw.items():
        if isinstance(column, MaskedArray):
            raise DataError(
                f"column {key} is a masked array, whose mask would be lost; give .filled(value)"
            )
        if isinstance(column, Tensor) and column.is_nested:  # it has no len()
            raw[key] = column = column.unbind()
        if num_rows(column) is None:
            raise DataError(
                f"column {key} is {type(column).__name__}, which has no rows; a mapping is taken "
                "as columns, with one entry per example"
            )
    if ids in raw:
        if not len(raw[ids]):
            raise DataError("the batch is empty (0 examples); give at least one")
        check_even(raw, ids)
    return raw


def _is_one_example(column: Any) -> bool:
    """Return whether ids are tokens, rather than rows of tokens."""
    if isinstance(column, Ragged | Nested):
        return False
    if isinstance(column, np.ndarray | Tensor):
        return column.ndim < 2 and not (isinstance(column, np.ndarray) and column.dtype.hasobject)
    return not hasattr(column, "__iter__") or isinstance(
        next(iter(column), None), int | float | np.number
    )


def _transposed(
    examples: Sequence[Mapping[str, Any]],
    known: Sequence[str],
    media: Sequence[str],
    owners: Mapping[str, int],
) -> dict[str, Any]:
    """Return lists of entries: every example has all columns but those of media."""
    first = examples[0].keys()
    have_all = {*map(len, examples)} == {len(owners)}
    for i, example in enumerate(() if have_all else examples):
        if odd := {k for k in known if (k in first) != (k in example)}:
            raise DataError(
                f"example {i} and example 0 differ in {', '.join(sorted(odd))}; every example of a "
                "batch needs the same keys"
            )
    raw: dict[str, Any] = {}
    for key in known:
        if key in first:
            raw[key] = list(map(itemgetter(key), examples))
    for key in media:
        column = [example.get(key) for example in examples]
        if any(entry is not None for entry in column):
            raw[key] = column
    return raw


def _without_ids(given: list[str], ids: str) -> DataError:
    hint = TOKENIZE
    if ids == "response_ids":
        hint = f"a rollout has {', '.join(_REQUIRED)}"
        if "input_ids" in given:
            hint += "; examples with input_ids go into PaddedCollator"
    elif {"prompt_ids", "response_ids"} & set(given):
        hint = "rollouts go into RolloutCollator, or into PackedCollator without a sampler"
    return DataError(f"no {ids} in example 0, got keys {given}; {hint}")


def _is_all_none(column: Any) -> bool:
    if isinstance(column, Ragged | Nested | Tensor):
        return False
    if isinstance(column, np.ndarray) and not column.dtype.hasobject:
        return False
    return all(entry is None for entry in column)


def _check_targets(owners: Mapping[str, str], targets: TargetKind) -> None:
    """Check that examples have labels where a token's own are read, and no target elsewhere."""
    read = ("labels", "weight") if targets == "same_token" else ()
    if read and "labels" not in owners:
        raise DataError(
            'example 0 has no labels, which targets="same_token" reads: give every example one '
            "label per token, -100 where there is none"
        )
    way_out = f"remove it, as labels of -100 say what is not trained ({targets=})"
    if not read:
        way_out = (
            "nothing per token is trained with targets=None: remove it, or declare a number "
            "per example under another name, fields={'label': PerExample(torch.int64)}"
        )
    for key in (*TARGETS, "num_actions", "weight"):
        if key in owners and key not in read:
            raise DataError(f"{owners[key]} has {key}; {way_out}")


def check_keys(
    owners: Mapping[str, str],
    *,
    train_all: bool,
    declared: tuple[str, ...] = (),
    targets: TargetKind = "next_token",
) -> None:
    """Check the keys of examples; ``owners`` names the first with each, such as "example 0"."""
    others = [key for key in owners if key not in KNOWN and key not in declared]
    check_no_other_weight(owners, others)
    names = [name for name in TARGETS if name in owners]
    for key in others:
        name = respelt(str(key), (*PER_TOKEN, *declared))
        is_class = key == "label" and names  # of an example, as KTO has it
        if name is not None and name not in owners and not is_class:
            raise _looks_like(owners[key], name, key)
    if train_all and names:
        raise DataError(
            f"{owners[names[0]]} has {names[0]}, and train_all=True trains every token; keep "
            "one of the two"
        )
    if others and not names and not train_all and targets == "next_token":
        raise DataError(
            f"{owners[others[0]]} has {', '.join(map(repr, others[:5]))}"
            f"{', ...' if len(others) > 5 else ''} and no loss target, so it is not clear whether "
            f"every token is trained; known keys are {', '.join(KNOWN)}; give one target, "
            "remove the other keys, or pass train_all=True to train every token"
        )


def check_no_other_weight(owners: Mapping[str, str], others: Iterable[str]) -> None:
    """Refuse the weight of an example under another name."""
    for key in others:
        if is_other_weight(key) and "weight" not in owners:
            raise DataError(
                f"{owners[key]} has {key!r}, which is not read; name it weight if it is one number "
                "per example that multiplies its loss weights, put a weight per token into "
                "loss_mask, or remove it"
            )


def is_other_weight(key: Any) -> bool:
    """Return whether a key looks like the weight of an example under another name."""
    return bare_key(str(key)) in _OTHER_WEIGHTS


def _check_rollout_keys(raw: Mapping[str, Any], given: list[str]) -> None:
    if missing := [key for key in _REQUIRED if key not in raw]:
        raise DataError(
            f"no {' and no '.join(missing)} in example 0, got keys {sorted(given)}; a "
            f"rollout has {', '.join(_REQUIRED)}"
        )
    check_no_other_weight(dict.fromkeys(given, "example 0"), given)
    known = (*ROLLOUT_KEYS, *IMAGES)
    others = {key: bare_key(key) for key in given if key not in known}
    for name in (name for name in known if name not in raw and others):
        for key, bare in others.items():
            is_logprobs = "logprob" in bare or bare.endswith("logp")
            if bare == bare_key(name) or (name == "logprobs" and is_logprobs):
                raise _looks_like("example 0", name, key)


def _looks_like(owner: str, name: str, key: str) -> DataError:
    way_out = f"rename it to {name}, or remove it"
    if key.lower() == "label":  # perhaps of the example
        way_out += (
            f", or if it is one number declare fields={{{key!r}: PerExample(torch.int64)}} in a "
            f"collator with targets=None (TokenizedDataset: columns=['input_ids', {key!r}])"
        )
    return DataError(f"{owner} has no {name}, but {key!r} looks like it; {way_out}")


def _token_types(
    examples: Any, raw: Mapping[str, Any], others: Mapping[str, int], layout: VisionLayout
) -> dict[str, PerToken]:
    """Return the fields per token that the model reads; ``others`` are unknown keys."""
    has_images = any(name in raw for name in layout.other_fields)
    needed = layout.token_fields if has_images else (layout.family.token_types,)
    missing = [name for name in needed if name and name not in raw]
    if missing:
        raise DataError(
            f"example 0 has no {' and no '.join(missing)}, which the model reads for every token; "
            "give all that the processor returned"
        )
    if layout.family_name == "other":
        for key, owner in others.items():
            _refuse_per_token(key, owner, examples, raw)
    passed_on = dict.fromkeys((*TOKEN_TYPES, *layout.token_fields))
    return {name: PerToken(torch.int64) for name in passed_on if name in raw}


def _refuse_per_token(key: str, owner: int, examples: Any, raw: Mapping[str, Any]) -> None:
    """Refuse a key with one entry per token: dropped, it would change what is computed."""
    is_mapping = isinstance(examples, Mapping)
    column = examples[key] if is_mapping else [example.get(key) for example in examples]
    names = ("input_ids", "prompt_ids", "response_ids")
    rows_of_ids = zip(*(raw[name] for name in names if name in raw), strict=True)
    for entry, parts in zip(column, rows_of_ids, strict=True):
        num_tokens = sum(num_rows(part) or 0 for part in parts)
        if isinstance(entry, Mapping) or not num_tokens or num_rows(entry) != num_tokens:
            return
        if isinstance(entry[0], str | bytes | Mapping):
            return
    raise DataError(
        f"example {owner} has {key!r} with one entry per token, and it is not known whether the "
        "model reads it, since it is in no row of the table of families (docs/vision.md); remove "
        "it, or declare it in fields and add it to the dict that model_inputs() returns"
    )


# seq_lengths (TRL), cu_seq_lens_q (transformers), packing_params (LLaMA-Factory), seq_lens_padded
# (Automodel), input_pos (torchtune), seq_start_id (NeMo), sequence_id (llm-foundry), segment_ids
# (Levanter), inputs_segmentation (maxtext), cumulative_len (XTuner), doc_lens (OLMo-core), ...
_PACKED = "(packed|packing|inputs?|targets?|encoder|decoder|cu|cumulative|max|sub)"
_DOCUMENT = "(seq|sequence|segment|doc|document|sample|example)s?"
_WHERE = "(len|length|id|idx|index|indice|number|start|end|offset|boundarie|position|param)s?"
_KEYS = re.compile(
    f"{_PACKED}*{_DOCUMENT}({_WHERE})+(q|k|kv|padded|unpadded)*|{_PACKED}*(segmentation|position)s?"
    f"|({_PACKED}|eod)+(pos|position|len|length|param)s?|posids|lengths?|boundaries|cuseqlens"
    "|attentionmaskin(len|length)s?"
)
_AS_ONE_TEXT = (
    "another tool has packed documents into the row, which would be read as one text; give each "
    "document as an example of its own (loading.unpack_dataset)"
)


def refuse_boundaries(
    keys: Iterable[Any],
    column: Callable[[Any], Any],
    declared: Collection[str] = (),
    owner: Callable[[int], str] = "example {}".format,
) -> None:
    """Refuse keys with lists of numbers that are boundaries of documents; ``owner`` names a row.

    A single number or a string under such a name, as an id of the source, is left alone.
    """
    for key in keys:
        name = "".join(filter(str.isalnum, str(key).lower()))
        if not _KEYS.fullmatch(name) or name == "positionids" or key in declared:
            continue
        entries = column(key)
        for i, entry in enumerate(entries if hasattr(entries, "__iter__") else ()):
            if _are_numbers(entry):
                raise DataError(
                    f"{owner(i)} has {key!r}: {_AS_ONE_TEXT}, or remove the key if it means "
                    "something else (fields= of a collator carries it along)"
                )


def _are_numbers(entry: Any) -> bool:
    """Return whether an entry is a list of numbers, at any depth, or a mapping of them."""
    if isinstance(entry, Mapping):
        return any(map(_are_numbers, entry.values()))
    if isinstance(entry, np.ndarray | Tensor | Ragged | Nested):
        return isinstance(entry, Ragged | Nested) or entry.ndim > 0
    if not isinstance(entry, list | tuple) or not entry:
        return False
    return isinstance(entry[0], int | float | np.number) or _are_numbers(entry[0])


def check_one_text(key: str, column: Ragged) -> None:
    """Check that a mask is 1 at all tokens, or that positions are 0, 1, 2, ... in each example."""
    values: Any = column.values
    expected, wanted = np.ones(1, dtype=np.int64), "a token of one text has 1"
    if key == "position_ids":
        expected = np.arange(len(values)) - column.offsets[:-1].repeat(column.lengths)
        wanted = "those of one text are 0, 1, 2, ..."
    wrong = np.flatnonzero(values != expected)
    if not len(wrong):
        return
    others = wrong if key == "position_ids" else wrong[values[wrong] != 0]
    entry = int((others if len(others) else wrong)[0])
    i = int(np.searchsorted(column.offsets, entry, side="right")) - 1
    if not len(others):
        raise DataError(
            f"example {i}: attention_mask contains a 0, so the example is padded already; "
            "tokenize without padding, collators pad"
        )
    raise DataError(
        f"example {i}: {key} is {values[entry]:g} at token {entry - column.offsets[i]}, and "
        f"{wanted}: {_AS_ONE_TEXT}, or remove {key} if it means something else"
    )
