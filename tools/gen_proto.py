"""Generate the gRPC stubs from proto/ into pdserve/rpc/v1/, or check that the committed ones are current.

python tools/gen_proto.py           # write
python tools/gen_proto.py --check   # exit 1 and name the files that differ
"""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO_DIR = ROOT / "proto"
PACKAGE = Path("pdserve/rpc/v1")


def generate(out: Path) -> None:
    """Run protoc on every file under proto/ and write the stubs below `out`."""
    sources = sorted(str(p) for p in (PROTO_DIR / PACKAGE).glob("*.proto"))
    command = [
        sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO_DIR}",
        f"--python_out={out}", f"--grpc_python_out={out}", f"--mypy_out={out}", f"--mypy_grpc_out={out}",
        *sources,
    ]  # fmt: skip
    # protoc looks for its mypy plugins on PATH, where an environment that is not activated is not.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    done = subprocess.run(command, env=os.environ | {"PATH": path}, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr)


def differing(out: Path) -> list[str]:
    """Names of generated files that differ between the tree and `out`, in either direction."""

    def names(base: Path) -> set[str]:
        return {p.name for p in (base / PACKAGE).glob("*_pb2*")}

    all_names = names(out) | names(ROOT)
    return sorted(
        n
        for n in all_names
        if not (out / PACKAGE / n).exists()
        or not (ROOT / PACKAGE / n).exists()
        or not filecmp.cmp(out / PACKAGE / n, ROOT / PACKAGE / n, shallow=False)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed stubs instead of writing")
    args = parser.parse_args()
    if not args.check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as tmp:
        generate(Path(tmp))
        stale = differing(Path(tmp))
    if stale:
        print("stubs differ from proto/, run `make proto`: " + ", ".join(stale), file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
