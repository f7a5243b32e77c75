"""The classes that docs/how-to/new-objective.md defines."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "new-objective.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)

namespace: dict[str, Any] = {"__name__": __name__}
exec(compile(BLOCKS[0], str(PAGE), "exec"), namespace)
FriendlySAM = namespace["FriendlySAM"]
