"""An attribute that is computed when it is first read, without a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["computed_once"]
T = TypeVar("T")


class computed_once(Generic[T]):
    """A property that keeps its value. Two threads at once compute it twice, and keep either.

    That of ``functools`` holds one lock for all objects of a class before Python 3.12: a process
    that is forked while another thread computes would wait for it without end.

    >>> class Row:
    ...     @computed_once
    ...     def tokens(self):
    ...         return print("computed") or 3
    >>> row = Row()
    >>> row.tokens, row.tokens
    computed
    (3, 3)
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __get__(self, owner: Any, kind: type) -> T:
        value = vars(owner)[self._compute.__name__] = self._compute(owner)
        return value
