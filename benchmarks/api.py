"""Speed of the front door: what the router spends on each streamed token, adds to a first token, and keeps per request.

`python benchmarks/api.py` prints a table; `--json` one object. See README.md beside this file.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The directory of a script comes first in the search path, and there a package could hide behind a file like this.
    sys.path[0] = str(Path(__file__).parents[1])
    from benchmarks.front_door.main import main

    sys.exit(main())
