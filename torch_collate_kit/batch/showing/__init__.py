"""A batch as people see it: rows drawn as text and in HTML, and a row token by token."""

from __future__ import annotations
