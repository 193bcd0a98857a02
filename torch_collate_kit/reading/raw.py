"""Examples in, raw columns out: the known keys, one entry per example, nothing converted.

Keys are checked here: those that are missing, say two things, or look like a known one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.ma import MaskedArray
from torch import Tensor

from torch_collate_kit._checks import bare_key, respelt
from torch_collate_kit.errors import DataError
from torch_collate_kit.ragged import Ragged
from torch_collate_kit.vision import VisionLayout
from torch_collate_kit.vision.families import IMAGE_FIELDS

__all__ = [
    "IMAGES",
    "KNOWN",
    "MEDIA",
    "ROLLOUT_KEYS",
    "TARGETS",
    "TOKEN_TYPES",
    "VIDEOS",
    "Examples",
    "are_rollouts",
    "check_even",
    "check_keys",
    "first_with",
    "is_sequence",
    "raw_examples",
    "raw_rollouts",
    "unknown_images",
]

TARGETS = ("loss_mask", "labels", "assistant_masks", "completion_mask")
KNOWN = ("input_ids", *TARGETS, "num_actions", "attention_mask")
_REQUIRED = ("prompt_ids", "response_ids", "rewards", "loss_mask")
ROLLOUT_KEYS = (
    *_REQUIRED,
    "logprobs",
    "advantages",
    "uid",
    "trajectory_id",
    "is_last_step",
    "rollout_expert_indices",
)
IMAGES = ("pixel_values", "image_grid_thw")
VIDEOS = ("pixel_values_videos", "video_grid_thw")
MEDIA = (*IMAGE_FIELDS, *VIDEOS)
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")  # follow from the ids
Examples = Sequence[Mapping[str, Any]] | Mapping[str, Any]


def raw_examples(
    examples: Examples, fields: Iterable[str], vision: VisionLayout | None, *, train_all: bool
) -> dict[str, Any]:
    """The columns of SFT examples, also of ``fields`` and of what the model of ``vision`` reads."""
    of_images = () if vision is None else (*vision.fields, *TOKEN_TYPES, *vision.token_fields)
    media = () if vision is None else (*MEDIA, *of_images)
    known, hint = (*KNOWN, *fields), "tokenize the text first"
    raw = _raw_columns(examples, known, "input_ids", hint, sometimes=media)
    owners = {key: f"example {i}" for key, i in first_with(examples).items()}
    if vision is None and "pixel_values" in owners and "pixel_values" not in fields:
        raise unknown_images(owners["pixel_values"])
    check_keys(owners, train_all=train_all, declared=(*fields, *of_images))
    return raw


def raw_rollouts(
    examples: Examples, fields: Iterable[str], vision: VisionLayout | None
) -> dict[str, Any]:
    """The columns of rollouts; an optional one that is None in all of them is not there."""
    of_images = IMAGES if vision is None else (*MEDIA, *vision.fields)
    if vision is not None and vision.family.positions == "model":
        of_images = (*of_images, *TOKEN_TYPES, *vision.token_fields)
    known, hint = (*ROLLOUT_KEYS, *fields), f"a rollout has {', '.join(_REQUIRED)}"
    raw = _raw_columns(examples, known, "response_ids", hint, sometimes=of_images)
    needed = (*_REQUIRED, *fields)
    raw = {k: column for k, column in raw.items() if k in needed or not _is_all_none(column)}
    _check_rollout_keys(raw, [key for key in map(str, _first_keys(examples)) if key not in fields])
    return raw


def unknown_images(owner: str) -> DataError:
    """Images, and no processor that says what they are."""
    return DataError(
        f"{owner} has pixel_values, and the collator does not know the images of the model; give "
        "it the processor in place of the tokenizer"
    )


def are_rollouts(examples: Examples) -> bool:
    """Whether the examples come as prompt and response; with ``input_ids`` too, as a whole."""
    if not isinstance(examples, Mapping) and (not is_sequence(examples) or not len(examples)):
        return False
    keys = _first_keys(examples)
    if not isinstance(keys, Mapping):
        return False
    if "input_ids" in keys:
        return all(key in keys for key in _REQUIRED)
    return "prompt_ids" in keys or "response_ids" in keys


def _raw_columns(
    examples: Examples, known: Sequence[str], ids: str, hint: str, sometimes: Sequence[str]
) -> dict[str, Any]:
    """The known columns: a Ragged or a list each. ``ids`` is the one that counts the examples.

    ``sometimes``: further columns, None in the examples that do not have them.
    """
    if isinstance(examples, Mapping):
        if _is_one_example(examples.get(ids, ())):
            raise DataError(
                f"a mapping is taken as columns, but its {ids} are the tokens of one example; "
                "collate one example as a list: [example]"
            )
        names = (*known, *sometimes)
        raw = {key: _rows(key, examples[key]) for key in names if key in examples}
    elif is_sequence(examples):
        raw = _transpose(examples, known, ids)
        for key in sometimes:
            column = [example.get(key) for example in examples]
            if any(entry is not None for entry in column):
                raw[key] = column
    else:
        raise TypeError(
            "examples must be a list of mappings or a mapping of columns, got "
            f"{type(examples).__name__}; of a dataset pass dataset[i:j], of a DataFrame "
            'df.to_dict("records")'
        )
    if ids not in raw:
        raise _without_ids(sorted(map(str, _first_keys(examples))), ids, hint)
    _check_rows(raw, ids)
    return raw


def _without_ids(given: list[str], ids: str, hint: str) -> DataError:
    if ids == "input_ids" and {"prompt_ids", "response_ids"} & set(given):
        hint = "rollouts go into RolloutCollator, or into PackedCollator without a sampler"
    if ids == "response_ids" and "input_ids" in given:
        hint += "; examples with input_ids go into PaddedCollator"
    return DataError(f"no {ids} in example 0, got keys {given}; {hint}")


def _check_rows(raw: Mapping[str, Any], ids: str) -> None:
    for key, column in raw.items():
        is_text = isinstance(column, str | bytes)
        if is_text or not hasattr(column, "__len__") or getattr(column, "ndim", 1) == 0:
            raise DataError(
                f"column {key} is {type(column).__name__}, which has no rows; a mapping is taken "
                "as columns, with one entry per example"
            )
    num_examples = len(raw[ids])
    if not num_examples:
        raise DataError("the batch is empty (0 examples); give at least one")
    for key, column in raw.items():
        if len(column) != num_examples:
            raise DataError(f"column {key} has {len(column)} rows, {ids} has {num_examples}")


def check_even(columns: Mapping[str, Any], first: str) -> None:
    """Compare every column with ``first``; text, and what has no length, is no column.

    Raises:
        DataError: a column has more rows or fewer.

    >>> check_even({"input_ids": [[5], [6]], "labels": [[5]]}, "input_ids")
    Traceback (most recent call last):
    torch_collate_kit.errors.DataError: column labels has 1 rows, input_ids has 2; give every column
    one entry per row
    """
    num_rows = _num_rows(columns[first])
    for key, column in columns.items():
        found = _num_rows(column)
        if None not in (found, num_rows) and found != num_rows:
            raise DataError(
                f"column {key} has {found} rows, {first} has {num_rows}; give every column one "
                "entry per row"
            )


def _num_rows(column: Any) -> int | None:
    if not hasattr(column, "__len__") or isinstance(column, str | bytes):
        return None
    return None if getattr(column, "ndim", 1) == 0 else len(column)


def _first_keys(examples: Examples) -> Mapping[str, Any]:
    """A mapping with the keys of example 0."""
    return examples if isinstance(examples, Mapping) else examples[0]


def first_with(examples: Examples) -> dict[str, int]:
    """All keys, and the first example that has each."""
    if isinstance(examples, Mapping):
        return dict.fromkeys(examples, 0)
    first = examples[0].keys()
    found = dict.fromkeys(first, 0)
    for i, example in enumerate(examples):
        if example.keys() != first:
            found |= dict.fromkeys(example.keys() - found.keys(), i)
    return found


def _is_all_none(column: Any) -> bool:
    """Whether an optional column stands for one that is not there."""
    if isinstance(column, Ragged | Tensor):
        return False
    if isinstance(column, np.ndarray) and not column.dtype.hasobject:
        return False
    return all(entry is None for entry in column)


def _is_one_example(column: Any) -> bool:
    """Whether the ids are tokens, not rows of tokens."""
    if isinstance(column, Ragged):
        return False
    if isinstance(column, np.ndarray | Tensor):
        return column.ndim < 2 and not (isinstance(column, np.ndarray) and column.dtype.hasobject)
    return not hasattr(column, "__iter__") or isinstance(
        next(iter(column), None), int | float | np.number
    )


def _rows(name: str, column: Any) -> Any:
    """A column as it is, but of a nested tensor its rows, which have no len() otherwise."""
    if isinstance(column, MaskedArray):
        raise DataError(
            f"column {name} is a masked array, whose mask would be lost; give .filled(value)"
        )
    return column.unbind() if isinstance(column, Tensor) and column.is_nested else column


def _transpose(
    examples: Sequence[Mapping[str, Any]], names: Sequence[str], ids: str
) -> dict[str, list[Any]]:
    if not len(examples):
        raise DataError("the batch is empty (0 examples); give at least one")
    if set(map(type, examples)) != {dict}:
        for i, example in enumerate(examples):
            if not isinstance(example, Mapping):
                raise DataError(
                    f"example {i} is a {type(example).__name__}; an example is a mapping with "
                    f"{ids} (of a pandas row pass row.to_dict())"
                )
    first = examples[0].keys()
    known = [key for key in names if key in first]
    for i, example in enumerate(examples):
        if example.keys() != first and {k for k in names if k in example} != set(known):
            odd = sorted(set(known) ^ {k for k in names if k in example})
            raise DataError(
                f"example {i} and example 0 differ in {', '.join(odd)}; every example of a batch "
                "needs the same keys"
            )
    return {key: [example[key] for example in examples] for key in known}


def is_sequence(value: Any) -> bool:
    """Whether a value is a sequence, and no string."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def check_keys(
    owners: Mapping[str, str], *, train_all: bool, declared: tuple[str, ...] = ()
) -> None:
    """``owners``: of every key whose it is, such as "example 0".

    Without a target every token is trained. With other keys, which are not read, this must be
    requested: one of them may have been meant as the target.
    ``declared`` keys are read as fields.

    Raises:
        DataError: a key in another spelling; keys that leave open, or say twice, what is trained.

    >>> check_keys({"input_ids": "example 0", "loss_maks": "example 0"}, train_all=False)
    Traceback (most recent call last):
    torch_collate_kit.errors.DataError: example 0 has no loss_mask, but 'loss_maks' looks like it;
    rename it to loss_mask, or remove it
    """
    others = [key for key in owners if key not in KNOWN and key not in declared]
    for key in others:
        name = respelt(str(key), (*KNOWN, *declared))
        if name is not None and name not in owners:
            raise DataError(
                f"{owners[key]} has no {name}, but {key!r} looks like it; rename it to {name}, or "
                "remove it"
            )
    target = next((name for name in TARGETS if name in owners), None)
    if train_all and target is not None:
        raise DataError(
            f"{owners[target]} has {target}, and train_all=True trains every token; keep one of "
            "the two"
        )
    if others and target is None and not train_all:
        raise DataError(
            f"{owners[others[0]]} has {', '.join(map(repr, others[:5]))}"
            f"{', ...' if len(others) > 5 else ''} and no loss target, so it is not clear whether "
            f"every token is trained; understood are {', '.join(KNOWN)}: give a target among these "
            "(or remove the rest), or pass train_all=True to train every token"
        )


def _check_rollout_keys(raw: Mapping[str, Any], given: list[str]) -> None:
    missing = [key for key in _REQUIRED if key not in raw]
    if missing:
        raise DataError(
            f"no {' and no '.join(missing)} in example 0, got keys {sorted(given)}; a "
            f"rollout has {', '.join(_REQUIRED)}"
        )
    for name in (name for name in (*ROLLOUT_KEYS, *IMAGES) if name not in raw):
        for key in (key for key in given if key not in (*ROLLOUT_KEYS, *IMAGES)):
            if bare_key(key) == bare_key(name) or (name == "logprobs" and _is_logprobs(key)):
                raise DataError(
                    f"example 0 has no {name}, but {key!r} looks like it; rename it to {name}, or "
                    "remove it"
                )


def _is_logprobs(key: str) -> bool:
    return "logprob" in bare_key(key) or bare_key(key).endswith("logp")
