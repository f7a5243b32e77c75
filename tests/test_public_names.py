"""A change to the public names or their arguments is a decision, and noted for users."""

import difflib
from pathlib import Path

from tests.public_names import lines


def test_public_names_are_those_of_the_list() -> None:
    listed = Path(__file__).with_name("public_names.txt").read_text().splitlines()
    changes = [line for line in difflib.ndiff(listed, lines()) if line[0] in "+-"]
    remedy = (
        "Public names or arguments changed. Add a line to CHANGELOG.md, then run "
        "python -m tests.public_names > tests/public_names.txt"
    )
    assert not changes, "\n".join([remedy, *changes])
