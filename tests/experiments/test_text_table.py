"""Tables and charts."""

import io
import re

import pytest

from surrogap.experiments.charts import chart
from surrogap.experiments.text_table import Table, filled


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_borders_in_a_terminal_and_plain_columns_elsewhere() -> None:
    table = Table(("a", "b"), [("1", "[2]")], "Title")
    plain, terminal = io.StringIO(), Terminal()
    table.print(plain)
    table.print(terminal)
    assert plain.getvalue() == "Title\na  b\n1  [2]\n"
    assert "┃" in terminal.getvalue()
    assert "[2]" in terminal.getvalue()  # rich would interpret it as markup


def test_narrow_terminals_break_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(("", "SAM, norm layers, last third", "test %"), [("calibration", "a b", "83.78")])
    folded, plain = Terminal(), Terminal()
    monkeypatch.setenv("COLUMNS", "45")  # less than the lines, more than the longest words
    table.print(folded)
    lines = re.sub(r"\x1b\[\d*m", "", folded.getvalue()).splitlines()
    assert max(map(len, lines)) <= 45
    assert not any("SAM, norm layers, last third" in line for line in lines)
    assert set(" ".join(re.split("[┃│]", "".join(lines))).split()) >= set(table.text().split())
    monkeypatch.setenv("COLUMNS", "30")  # less than the longest words
    table.print(plain)
    assert plain.getvalue() == table.text() + "\n"


def test_text_is_wrapped_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "one two " * 20
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, filled(text).splitlines())) == 59
    monkeypatch.setenv("COLUMNS", "200")
    assert max(map(len, filled(text, indent="  ").splitlines())) == 99


def dots(text: str) -> list[tuple[int, int]]:
    """Return the dots of a chart, by row and column."""
    lines = [line[12:] for line in text.splitlines()[1:-1]]
    bits = {0x01: (0, 0), 0x02: (1, 0), 0x04: (2, 0), 0x40: (3, 0)}
    bits |= {0x08: (0, 1), 0x10: (1, 1), 0x20: (2, 1), 0x80: (3, 1)}
    return [
        (4 * row + i, 2 * column + j)
        for row, line in enumerate(lines)
        for column, character in enumerate(line)
        for bit, (i, j) in bits.items()
        if (ord(character) - 0x2800) & bit
    ]


def test_the_dots_lie_on_the_curve() -> None:
    points = [(float(x), (x - 10.0) ** 2) for x in range(21)]
    found = dots(chart("parabola", points, width=40, height=10))
    for row, column in found:
        x, y = 20 * column / 79, 100 * (39 - row) / 39
        assert min(abs((u - 10) ** 2 - y) for u in (x - 0.5, x, x + 0.5)) < 10
    assert {column for _, column in found} == set(range(80))  # without gaps


def test_a_chart_of_one_point() -> None:
    assert len(dots(chart("one", [(3.0, 2.0)], width=5, height=2))) == 1
