"""The methods of a batch that show its rows."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Literal

from torch_collate_kit._checks import checked_int
from torch_collate_kit.batch.showing.context_plot import draw_context
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

    def plot(
        self,
        *,
        max_rows: int = 40,
        cp_size: int | None = None,
        layout: Literal["zigzag", "contiguous", "head_tail"] = "zigzag",
        ax: Axes | None = None,
    ) -> Axes:
        """Draw the first ``max_rows`` rows with matplotlib, on ``ax`` or a new figure.

        Examples are blocks, paths of shared prefixes lines; trained is dark. With ``cp_size`` the
        colours are those of the context ranks that compute the cells, in this ``layout`` of
        ``context_shard``; the title has the attention of the busiest rank of each row over the
        mean. Call ``plt.show()``.

        Raises:
            ValueError: no rows, or no ``input_ids`` ``[R, W]`` in host memory; rows that
                ``context_shard`` does not cut.
            ImportError: matplotlib is not installed.

        >>> from torch_collate_kit import PackedCollator, ParallelLayout
        >>> PackedCollator(0, max_tokens=8)([{"input_ids": [5, 6, 7]}]).plot().get_title()
        '1 row of 3 cells: 3 tokens, 0.0% padding, 2 trained'
        >>> two = PackedCollator(0, max_tokens=8, parallel=ParallelLayout(cp=2))
        >>> two([{"input_ids": [5, 6, 7]}]).plot(cp_size=2).get_title()
        '1 row of 4 cells, zigzag over 2 context ranks: attention, busiest / mean 1.000'
        """
        most = checked_int("max_rows", max_rows)
        stored = self.stored()
        drawn = stored.change(lambda of: of[:most])
        if cp_size is None:
            return draw_rows(drawn, stored.num_rows, ax)
        return draw_context(drawn, stored.num_rows, cp_size, layout, ax)

    def __repr__(self) -> str:
        return described(self.stored())

    def _repr_html_(self) -> str:
        return html_of(self.stored())
