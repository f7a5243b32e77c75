"""Tables of text: with borders in a terminal, as plain columns elsewhere, and in Markdown."""

import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO, final

_TEXT_WIDTH = 100


def filled(text: str, *, indent: str = "") -> str:
    """Wrap text to 100 columns, or to the terminal if it is narrower.

    Args:
        text: The text, without line breaks.
        indent: The indentation of all lines but the first.
    """
    width = min(shutil.get_terminal_size(fallback=(_TEXT_WIDTH, 24)).columns, _TEXT_WIDTH)
    return textwrap.fill(text, width, subsequent_indent=indent, break_on_hyphens=False)


@final
@dataclass(frozen=True)
class Table:
    """A table with a header, and rows of the same length.

    >>> table = Table(("model", "test accuracy"), [("vit_s32", "73.8"), ("vit_b32", "76.8")])
    >>> print(table.text())
    model    test accuracy
    vit_s32  73.8
    vit_b32  76.8
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def text(self) -> str:
        """Return the table as plain columns."""
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
        return "\n".join([self.title] * bool(self.title) + list(padded))

    def markdown(self) -> str:
        r"""Return the table in Markdown, without its title.

        >>> print(Table(("a", "b"), [("1", "x | y")]).markdown())
        | a | b |
        | --- | --- |
        | 1 | x \| y |
        """
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
        return "\n".join(f"| {' | '.join(line)} |" for line in cells)

    def print(self, file: TextIO | None = None) -> None:
        """Print the table, with borders if the file is a terminal."""
        file = sys.stdout if file is None else file
        if not file.isatty():
            print(self.text(), file=file)
            return
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        console = Console(file=file)
        widths = self._widths(console.width - 3 * len(self.columns) - 1)  # without borders
        if widths is None:
            print(self.text(), file=file)
            return
        table = RichTable(title=self.title or None, title_justify="left")
        for column, width in zip(self.columns, widths, strict=True):
            table.add_column(column, width=width)
        for row in self.rows:
            table.add_row(*map(Text, row))  # plain text: rich would interpret brackets as markup
        console.print(table)

    def _widths(self, total: int) -> list[int] | None:
        """Return the widths of the columns that break no word; None if they exceed `total`.

        The first column has names that users copy, so it is not wrapped.
        """
        columns = list(zip(self.columns, *self.rows, strict=True))
        widths = [max(map(len, column)) for column in columns]
        words = [max(map(len, " ".join(column).split()), default=0) for column in columns]
        least = [widths[0], *words[1:]]
        while sum(widths) > total:
            wide = [index for index, width in enumerate(widths) if width > least[index]]
            if not wide:
                return None
            widths[max(wide, key=widths.__getitem__)] -= 1
        return widths
