"""The exceptions of this package."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["DataError", "IsolationError", "StateError"]


class DataError(ValueError):
    """The data of an example is wrong.

    The message names the index of the example, what was found, the limit, and how to fix it. Wrong
    settings (an unknown strategy, a width below the alignment) raise a plain ``ValueError`` or
    ``TypeError``.

    >>> raise DataError("example 3 is empty; drop it")
    Traceback (most recent call last):
    torch_collate_kit.errors.DataError: example 3 is empty; drop it
    """


class IsolationError(RuntimeError):
    """Packed examples can see each other, or it could not be shown that they cannot.

    Raised by :func:`torch_collate_kit.attention.check_isolation`.

    >>> raise IsolationError("segment 0 moves the logits of segment 1")
    Traceback (most recent call last):
    torch_collate_kit.errors.IsolationError: segment 0 moves the logits of segment 1
    """


class StateError(RuntimeError):
    """A step, an order or a saved state does not match the object it is passed to.

    Raised instead of returning a batch of another step or of an older order, and instead of
    resuming on other data. The object is left unchanged.

    >>> raise StateError("the state is for 300 examples, the dataset has 200")
    Traceback (most recent call last):
    torch_collate_kit.errors.StateError: the state is for 300 examples, the dataset has 200
    """


@contextmanager
def examples_named(name: Callable[[int], str] | None) -> Iterator[None]:
    """Let a DataError say ``name(i)`` in place of "example i"; None changes nothing."""
    try:
        yield
    except DataError as error:
        message = str(error)
        if name is not None:
            numbered = r"\bexample (\d+)\b(?! of the )"
            message = re.sub(numbered, lambda found: name(int(found[1])), message)
        if message == str(error):
            raise
        raise DataError(message).with_traceback(error.__traceback__) from error.__cause__
