"""What techniques are worth that make decoding cheaper or contexts longer.

`python benchmarks/techniques.py` prints a table; `--json` one object. See README.md beside this file.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # The directory of a script comes first in the search path, and there this file hides the package it measures.
    sys.path[0] = str(Path(__file__).parents[1])
    from benchmarks.technique.main import main

    sys.exit(main())
