"""What users can catch."""

from __future__ import annotations

__all__ = ["DataError", "IsolationError", "StateError"]


class DataError(ValueError):
    """The data of an example is wrong.

    The message names the example's index, what was found, the limit, and the way out. Wrong
    configuration (an unknown strategy, a width below the alignment) is a plain ``ValueError`` or
    ``TypeError``.

    >>> raise DataError("example 3 is empty; drop it")
    Traceback (most recent call last):
    torch_collate_kit.errors.DataError: example 3 is empty; drop it
    """


class IsolationError(RuntimeError):
    """Packed examples can see each other, or nothing shows that they cannot.

    Raised by :func:`torch_collate_kit.attention.check_isolation`.

    >>> raise IsolationError("segment 0 moves the logits of segment 1")
    Traceback (most recent call last):
    torch_collate_kit.errors.IsolationError: segment 0 moves the logits of segment 1
    """


class StateError(RuntimeError):
    """A step, an order or a saved state that does not fit what it is given to.

    Raised instead of serving a batch of another step or of an older order, and instead of resuming
    on other data. Nothing has been changed when it is raised.

    >>> raise StateError("state is of 300 examples, the dataset has 200")
    Traceback (most recent call last):
    torch_collate_kit.errors.StateError: state is of 300 examples, the dataset has 200
    """
