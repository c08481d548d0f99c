"""Hugging Face model directories: `config.json`, `generation_config.json`, and safetensors in one file or in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

from pdserve.errors import ModelLoadError
from pdserve.model.config import ModelConfig
from pdserve.model.fields import Fields
from pdserve.model.hf_config import read_hf_config
from pdserve.model.safetensors_file import read_safetensors
from pdserve.model.tensors import StoredTensor

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def read_hf_dir_config(directory: Path) -> ModelConfig:
    """The configuration of a model directory. Raises ModelLoadError that names the file and key at fault."""
    if not (directory / "config.json").is_file():
        ggufs = sorted(p.name for p in directory.glob("*.gguf"))
        hint = f"; to serve a GGUF file, name the file itself: {', '.join(ggufs[:5])}" if ggufs else ""
        _fail(directory, "config.json", f"is missing: not a Hugging Face model directory{hint}")
    generation = directory / "generation_config.json"
    return read_hf_config(
        directory / "config.json",
        _read_json_object(directory / "config.json"),
        Fields(generation, _read_json_object(generation)) if generation.is_file() else None,
    )


def read_hf_dir_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of a model directory by name, mapped and not read.

    With an index, exactly the tensors it lists are there, each from the shard it names. Raises ModelLoadError that
    names the file at fault: no weights at all, a missing or damaged shard, a tensor that its shard does not have.
    """
    index = directory / _INDEX
    if (directory / _SINGLE).is_file():
        return read_safetensors(directory / _SINGLE)
    if not index.is_file():
        _fail(directory, "weights", f"are missing: neither {_SINGLE} nor {_INDEX} is there{_hint(directory)}")
    weight_map = _read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _fail(index, "weight_map", "must be a non-empty object of tensor names and file names")
    present = {p.name for p in directory.iterdir()}
    shards: dict[str, dict[str, StoredTensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, file_name in weight_map.items():
        where = f"weight_map[{name!r:.100}]"
        # Shards lie beside their index; anything else in a file name would lead out of the directory.
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            _fail(index, where, f"is {file_name!r:.80}, which is not the name of a file in this directory")
        if file_name not in present:
            _fail(index, where, f"names {file_name!r:.80}, which is missing: the download is incomplete")
        if file_name not in shards:
            shards[file_name] = read_safetensors(directory / file_name)
        tensor = shards[file_name].get(name)
        if tensor is None:
            _fail(directory / file_name, f"tensor {name!r:.100}", f"is missing, though {_INDEX} says that it is here")
        tensors[name] = tensor
    return tensors


def _read_json_object(path: Path) -> dict[str, object]:
    try:
        decoded = json.loads(path.read_text("utf-8"))
    except OSError as e:
        raise ModelLoadError(f"{path}: cannot be read: {e.strerror}", file=str(path)) from e
    except (ValueError, RecursionError) as e:
        raise ModelLoadError(f"{path}: not valid JSON: {e}", file=str(path)) from e
    if not isinstance(decoded, dict):
        raise ModelLoadError(f"{path}: must be a JSON object", file=str(path))
    return decoded


def _hint(directory: Path) -> str:
    if any(directory.glob("*.bin")) or any(directory.glob("*.pth")):
        return "; weights in pickle files (*.bin, *.pth) are not read, convert them to safetensors"
    return ""


def _fail(path: Path, where: str, problem: str) -> NoReturn:
    raise ModelLoadError(f"{path}: {where} {problem}", field=where, file=str(path))
