"""The methods of a batch that show its rows."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from torch_collate_kit._checks import checked_int
from torch_collate_kit.batch.showing.drawing import described, html_of
from torch_collate_kit.batch.showing.explanation import Explanation, explained
from torch_collate_kit.batch.showing.plot import draw_rows
from torch_collate_kit.batch.storage import Storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Displayed:
    """Rows in words, as a table and as a drawing."""

    @abstractmethod
    def stored(self) -> Storage:
        """Return all that is stored."""

    def explain(
        self,
        row: int | None = None,
        tokenizer: Any = None,
        *,
        example: int | None = None,
        start: int | None = None,
        stop: int | None = None,
        max_tokens: int | None = 60,
    ) -> Explanation:
        """Show a row token by token: ids, text, positions, labels, weights and the other fields.

        ``tokenizer`` (or a processor) adds the text. ``example`` shows that example alone (without
        ``row``, in the first row with a piece of it), ``start`` and ``stop`` these cells. A table
        shows the first and last of more than ``max_tokens``.

        Raises:
            IndexError, ValueError: no such row; an example that is not there; no ``input_ids``.
        """
        batch: Any = self
        return explained(batch, row, tokenizer, example, slice(start, stop), max_tokens)

    def plot(self, *, max_rows: int = 40, ax: Axes | None = None) -> Axes:
        """Draw the first ``max_rows`` rows with matplotlib, on ``ax`` or a new figure.

        Examples are blocks, paths of shared prefixes lines; trained is dark. Call ``plt.show()``.

        Raises:
            ValueError: no rows, or no ``input_ids`` ``[R, W]`` in host memory.
            ImportError: matplotlib is not installed.

        >>> from torch_collate_kit import PackedCollator
        >>> PackedCollator(0, max_tokens=8)([{"input_ids": [5, 6, 7]}]).plot().get_title()
        '1 row of 3 cells: 3 tokens, 0.0% padding, 2 trained'
        """
        most = checked_int("max_rows", max_rows)
        stored = self.stored()
        return draw_rows(stored.change(lambda of: of[:most]), stored.num_rows, ax)

    def __repr__(self) -> str:
        return described(self.stored())

    def _repr_html_(self) -> str:
        return html_of(self.stored())
