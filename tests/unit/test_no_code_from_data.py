"""Nothing in the product turns data into code or objects: no pickle, no eval, no object collectives (O-SEC)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("pdserve", "kv_transfer", "router", "prefill_worker", "decode_worker")

MODULES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle", "runpy", "code",
    "multiprocessing.managers", "multiprocessing.connection", "multiprocessing.queues", "xmlrpc",
}  # fmt: skip
NAMES = {"eval", "exec", "compile", "__import__"}
"""Built-ins. Methods of the same name are something else."""
METHODS = {
    "torch.load", "torch.save", "torch.hub.load", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load",
    "numpy.load", "np.load", "numpy.save", "np.save", "builtins.eval", "builtins.exec", "os.system", "os.popen",
}  # fmt: skip
ENDINGS = {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list", "_object_to_tensor", "_tensor_to_object", "init_rpc", "rpc_sync", "rpc_async",
}  # fmt: skip
"""Collectives of torch.distributed that pickle, whatever they are called on."""
KEYWORDS = {"shell": True, "allow_pickle": True, "trust_remote_code": True, "weights_only": False}


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "rpc/v1" not in path.as_posix() and "testing" not in path.parts:
                yield path


def dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ".".join(reversed(parts))


def problems(source: str) -> list[str]:
    """What of the above is in a module, with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [f"{node.lineno}: import {a.name}" for a in node.names if a.name in MODULES]
        elif isinstance(node, ast.ImportFrom):
            names = {node.module or "", *(f"{node.module}.{a.name}" for a in node.names)}
            found += [f"{node.lineno}: from {name}" for name in names & (MODULES | METHODS)]
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in METHODS or (isinstance(node.func, ast.Name) and name in NAMES) or name.split(".")[-1] in ENDINGS:
                found.append(f"{node.lineno}: {name}()")
            found += [
                f"{node.lineno}: {k.arg}="
                for k in node.keywords
                if k.arg in KEYWORDS and isinstance(k.value, ast.Constant) and k.value.value is KEYWORDS[k.arg]
            ]
    return found


def test_the_product_turns_no_data_into_code() -> None:
    """The one exception is numba's own cache, in a directory that only its owner can write (SECURITY.md)."""
    paths = list(sources())
    assert len(paths) > 200
    found = {str(path.relative_to(ROOT)): bad for path in paths if (bad := problems(path.read_text(encoding="utf-8")))}
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "torch.load(f)",
        "eval('1')",
        "exec(code)",
        "dist.broadcast_object_list(x)",
        "torch.distributed.all_gather_object(a, b)",
        "np.load(path)",
        "np.frombuffer(x, allow_pickle=True)",
        "subprocess.run('ls', shell=True)",
        "yaml.load(text)",
        "AutoTokenizer.from_pretrained(p, trust_remote_code=True)",
    ],
)
def test_the_search_finds_what_it_is_for(source: str) -> None:
    assert problems(source) != []


def test_the_search_leaves_what_only_looks_alike() -> None:
    assert problems("model.eval()\nre.compile('x')\nyaml.safe_load(t)\nstore.load(x)\nself.exec(y)") == []
