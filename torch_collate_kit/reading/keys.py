"""Which keys of an example are read, and whether they say what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from torch_collate_kit.errors import DataError

__all__ = ["KNOWN", "TARGETS", "check_keys"]

TARGETS = ("loss_mask", "labels", "assistant_masks", "completion_mask")
KNOWN = ("input_ids", *TARGETS, "num_actions", "attention_mask")


def check_keys(
    owners: Mapping[str, str], *, train_all: bool, declared: tuple[str, ...] = ()
) -> None:
    """``owners``: of every key whose it is, such as "example 0".

    Without a target every token is trained, so beside any key that is not read it must be said.
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
        name = _respelt(str(key), declared)
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


@lru_cache(maxsize=4096)
def _respelt(key: str, declared: tuple[str, ...]) -> str | None:
    """The known key that this one is, but for case, "_", a plural, or one slip of the hand."""
    known = (*KNOWN, *declared)
    return next((name for name in known if _is_one_slip(_bare(key), _bare(name))), None)


def _bare(key: str) -> str:
    return "".join(filter(str.isalnum, key.lower())).rstrip("s")


def _is_one_slip(a: str, b: str) -> bool:
    """Whether they differ in a letter, one too many or too few, or two that changed places."""
    while a and b and a[0] == b[0]:
        a, b = a[1:], b[1:]
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    return (len(a) < 2 and len(b) < 2) or (len(a) == 2 and a == b[::-1])
