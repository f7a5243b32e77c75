"""Tables for people: with lines in a terminal, and as plain columns elsewhere."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO, final


@final
@dataclass(frozen=True)
class Table:
    """A heading and rows of words, as many in each.

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
        """Plain columns, which other programs can read too."""
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
        return "\n".join([self.title] * bool(self.title) + list(padded))

    def markdown(self) -> str:
        r"""The table in Markdown, without its title.

        >>> print(Table(("a", "b"), [("1", "x | y")]).markdown())
        | a | b |
        | --- | --- |
        | 1 | x \| y |
        """
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
        return "\n".join(f"| {' | '.join(line)} |" for line in cells)

    def print(self, file: TextIO | None = None) -> None:
        """Prints it, with lines if that is to a terminal."""
        file = sys.stdout if file is None else file
        if not file.isatty():
            print(self.text(), file=file)
            return
        from rich.console import Console
        from rich.table import Table as Lines
        from rich.text import Text

        lines = Lines(title=self.title or None, title_justify="left")
        for index, column in enumerate(self.columns):
            # The first column holds names, which people copy: the others wrap before it is cut.
            lines.add_column(column, no_wrap=index == 0)
        for row in self.rows:
            lines.add_row(*map(Text, row))  # as they are: rich would read brackets as its own
        Console(file=file).print(lines)
