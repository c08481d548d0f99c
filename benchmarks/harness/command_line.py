"""The command line that benchmarks made of parts have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def parse(
    arguments: Sequence[str],
    parts: Sequence[str],
    *,
    prog: str,
    description: str | None,
    quick: str,
    llama_bin: Path | None = None,
) -> argparse.Namespace:
    """json, out, quick (`quick` says what that leaves out) and only, a list of `parts`. Exits for a part that there is
    none of. With `llama_bin`, its default, also that: the directory of llama.cpp's programs."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON object there")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--only", default=",".join(parts), help="comma list of parts; default: %(default)s")
    if llama_bin is not None:
        parser.add_argument(
            "--llama-bin", type=Path, default=llama_bin, help="directory of llama.cpp's programs; default: %(default)s"
        )
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    if unknown := [name for name in options.only if name not in parts]:
        parser.error(f"--only: no such part: {', '.join(unknown)}; there are {', '.join(parts)}")
    return options
