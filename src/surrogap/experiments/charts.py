"""Curves in a terminal, drawn with Braille characters of 2 x 4 dots."""

import math
from collections.abc import Sequence
from itertools import pairwise, zip_longest

# The bit of each dot in a Braille character, by row and column.
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800
# In characters. Two charts fit into 80 columns.
CHART_WIDTH = 39

Point = tuple[float, float]


def chart(title: str, points: Sequence[Point], *, width: int = 60, height: int = 8) -> str:
    """Return a curve of `width` characters and `height` lines, with both axes labelled.

    The points are finite and ordered by x, and there is at least one.

    >>> print(chart("a line", [(0, 0.0), (1, 1.0)], width=6, height=3))
    a line
             1 ┤⠀⠀⠀⠀⡠⠊
               │⠀⠀⡠⠎⠀⠀
             0 ┤⡠⠊⠀⠀⠀⠀
                0    1
    """
    low, high = min(y for _, y in points), max(y for _, y in points)
    dots = _dots(points, low, high, 2 * width, 4 * height)
    lines = [_line(dots, row, width) for row in range(height)]
    labels = [f"{high:10.4g} ┤"] + ["           │"] * (height - 2) + [f"{low:10.4g} ┤"]
    first, last = f"{points[0][0]:g}", f"{points[-1][0]:g}"
    foot = " " * 12 + first + last.rjust(width - len(first))
    return "\n".join([title, *map(str.__add__, labels, lines), foot])


def side_by_side(charts: Sequence[str], *, width: int = CHART_WIDTH) -> list[str]:
    r"""Return the lines of charts of equal height, two in a row.

    >>> print(*side_by_side(["a\nb", "c\nd", "e\nf"], width=3), sep="\n")
    a  c
    b  d
    e
    f
    """
    lines = []
    for left, right in zip_longest(charts[::2], charts[1::2], fillvalue=""):
        pairs = zip_longest(left.splitlines(), right.splitlines(), fillvalue="")
        lines += [f"{one:<{width}}{other}".rstrip() for one, other in pairs]
    return lines


def _dots(
    points: Sequence[Point], low: float, high: float, columns: int, rows: int
) -> set[tuple[int, int]]:
    """Return the dots, by row and column, of the lines between neighbouring points."""
    left, right = points[0][0], points[-1][0]
    scaled = [
        (
            (high - y) / (high - low or 1.0) * (rows - 1),
            (x - left) / (right - left or 1.0) * (columns - 1),
        )
        for x, y in points
    ]
    dots = set()
    for (row0, column0), (row1, column1) in pairwise([scaled[0], *scaled]):  # one point: a dot
        num = 1 + math.ceil(max(abs(row1 - row0), abs(column1 - column0)))
        for i in range(num + 1):
            t = i / num
            dots.add((round(row0 + t * (row1 - row0)), round(column0 + t * (column1 - column0))))
    return dots


def _line(dots: set[tuple[int, int]], row: int, width: int) -> str:
    characters = []
    for column in range(width):
        bits = sum(
            bit
            for i, pair in enumerate(_BITS)
            for j, bit in enumerate(pair)
            if (4 * row + i, 2 * column + j) in dots
        )
        characters.append(chr(_BLANK + bits))
    return "".join(characters)
