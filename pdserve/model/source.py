"""The one way to a model: its configuration, weights under one set of names, and what its tokenizer is made from.

Opening is cheap: files are mapped, headers are read, and names, shapes and types of all tensors are checked, but no
weight is touched until it is asked for. So the router, which needs only the tokenizer and a few numbers, opens models
the same way.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from pdserve.errors import ModelLoadError
from pdserve.model.config import ModelConfig
from pdserve.model.fingerprint import fingerprint
from pdserve.model.gguf import read_gguf
from pdserve.model.gguf_config import gguf_architecture, read_gguf_config
from pdserve.model.gguf_rope import FREQUENCY_FACTORS
from pdserve.model.hf_dir import read_hf_dir_config, read_hf_dir_tensors
from pdserve.model.known import PACKAGED_MODELS, locate
from pdserve.model.names import LM_HEAD, expected_tensors, fused_parts, half_split_rows, hf_name, rotary_heads
from pdserve.model.quants import check_supported, dequantize
from pdserve.model.tensors import Float32Array, StoredTensor

_ROTARY_BUFFER = ".rotary_emb.inv_freq"  # Old checkpoints store this constant with every layer.


class ModelSource:
    """An opened model. Immutable and safe to use from several threads."""

    def __init__(
        self,
        *,
        name: str,
        path: Path,
        config: ModelConfig,
        tensors: Mapping[str, StoredTensor],
        gguf_metadata: Mapping[str, Any] | None,
        hf_dir: Path | None,
        interleaved_rotary: bool,
    ) -> None:
        """Use `open_model`. `tensors` are by Hugging Face name and exactly those that `config` calls for.

        `interleaved_rotary`: query and key rows are stored in the order that `half_split_rows` undoes.
        """
        self.name = name
        """Name under which the model is served unless the operator chooses another."""
        self.path = path
        """The GGUF file or Hugging Face directory."""
        self.config = config
        self._stored_config = config
        self.gguf_metadata = gguf_metadata
        """All keys of a GGUF file, None for a directory."""
        self.hf_dir = hf_dir
        """The Hugging Face directory, None for a GGUF file."""
        self._tensors = tensors
        self._interleaved_rotary = interleaved_rotary

    @cached_property
    def fingerprint(self) -> str:
        """Digest of configuration, weights and vocabulary: equal for the same files, different for other weights or
        other tokens. Raises ModelLoadError if the vocabulary cannot be read."""
        try:
            return fingerprint(self._stored_config, self._tensors.values(), self._vocabulary())
        finally:
            self.drop_pages()

    def with_config(self, config: ModelConfig) -> ModelSource:
        """The same weights and vocabulary, with the same fingerprint, to be computed as `config` says."""
        other = copy.copy(self)
        other.config = config
        return other

    def _vocabulary(self) -> bytes:
        """What says which token each row of the embedding is; empty for a model without a tokenizer."""
        if self.gguf_metadata is not None:
            tokens = self.gguf_metadata.get("tokenizer.ggml.tokens", ())
            return "\0".join(map(str, tokens)).encode("utf-8", "surrogatepass")
        assert self.hf_dir is not None, "a file or a directory"
        path = self.hf_dir / "tokenizer.json"
        try:
            return path.read_bytes() if path.is_file() else b""
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be read: {error}") from error

    def tensor_names(self) -> list[str]:
        """Hugging Face names of all tensors, in the order of use. `lm_head.weight` is absent if it is tied."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of `tensor(name)`, without touching its data."""
        return self._tensors[name].shape

    def packed(self, name: str) -> StoredTensor:
        """One tensor as it is stored, rows in the order of `tensor`: for engines that compute on packed rows.

        A view of the file, but for query and key rows that had to be put into half-split rotary order: those are a
        copy. A fused matrix of the file is seen as its parts, like everywhere here. `name` must be one of
        `tensor_names`.
        """
        stored = self._tensors[name]
        num_heads = rotary_heads(name, self.config) if self._interleaved_rotary else None
        if num_heads is None:
            return stored
        rows = stored.data.reshape(stored.shape[0], -1)[half_split_rows(num_heads, self.config.head_dim)]
        return dataclasses.replace(stored, data=rows.reshape(-1), mapped=None)

    def tensor(self, name: str) -> Float32Array:
        """One tensor as float32, matrices as [outputs, inputs], query and key rows in half-split rotary order.

        The array is C-contiguous, writable and the caller's own. `name` must be one of `tensor_names`.
        """
        return dequantize(self.packed(name))

    def drop_pages(self) -> None:
        """Give back the memory of what has been read of the files so far; all tensors stay valid."""
        for mapped in {tensor.mapped for tensor in self._tensors.values() if tensor.mapped is not None}:
            mapped.drop_pages()


def open_model(path_or_name: str) -> ModelSource:
    """Open a packaged model by name, a GGUF file, or a Hugging Face directory with safetensors.

    A packaged name wins over a file or directory of the same name (write ./NAME for that). Raises ModelLoadError that
    names the file and field or tensor if there is no such model, or it is damaged, incomplete or not supported.
    """
    if path_or_name in PACKAGED_MODELS:
        return _open_gguf(locate(path_or_name), name=path_or_name)
    try:
        path = Path(path_or_name).expanduser()
        # Path("") is the working directory, which an empty setting hardly means.
        is_dir, is_file = path_or_name != "" and path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as e:  # no permission, a name too long, an unknown ~user
        raise ModelLoadError(f"model {path_or_name!r} cannot be opened: {e}", field="model") from e
    if is_dir:
        return _open_hf_dir(path)
    if is_file:
        return _open_gguf(path, name=path.stem)
    raise ModelLoadError(
        f"model {path_or_name!r} not found; give a GGUF file, a Hugging Face directory (config.json and safetensors), "
        f"or one of the packaged models: {', '.join(PACKAGED_MODELS)}",
        field="model",
    )


def _open_gguf(path: Path, name: str) -> ModelSource:
    file = read_gguf(path)
    architecture = gguf_architecture(file)
    config = read_gguf_config(file)
    tensors: dict[str, StoredTensor] = {}
    for gguf_name, tensor in file.tensors.items():
        if architecture == "llama" and gguf_name == FREQUENCY_FACTORS:
            continue  # No weight, but part of the configuration.
        name_in_model = hf_name(gguf_name, architecture)
        if name_in_model is None:
            _refuse(tensor)
        tensors[name_in_model] = tensor
    return ModelSource(
        name=name,
        path=path,
        config=config,
        tensors=_checked(path, config, tensors),
        gguf_metadata=file.metadata,
        hf_dir=None,
        interleaved_rotary=architecture == "llama",
    )


def _open_hf_dir(directory: Path) -> ModelSource:
    config = read_hf_dir_config(directory)
    tensors = {k: t for k, t in read_hf_dir_tensors(directory).items() if not k.endswith(_ROTARY_BUFFER)}
    if LM_HEAD in tensors and config.tie_word_embeddings:
        # What is stored is what was trained; transformers 5 does the same if the two differ.
        config = dataclasses.replace(config, tie_word_embeddings=False)
    return ModelSource(
        name=directory.resolve().name,
        path=directory,
        config=config,
        tensors=_checked(directory, config, tensors),
        gguf_metadata=None,
        hf_dir=directory,
        interleaved_rotary=False,
    )


def _checked(path: Path, config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors in the order of use, if they are exactly those of `config`, in shape as well, and of known types.

    Fused matrices are replaced by their parts.
    """
    tensors = _split_fused(config, tensors)
    checked: dict[str, StoredTensor] = {}
    for name, shape in expected_tensors(config):
        tensor = tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"{path}: tensor {name!r} is missing", field=name, file=str(path))
        if tensor.shape != shape:
            raise ModelLoadError(
                f"{tensor.file}: tensor {tensor.name!r} has shape {list(tensor.shape)}, "
                f"but the configuration calls for {list(shape)}",
                field=tensor.name,
                file=str(tensor.file),
            )
        if len(shape) == 1 and tensor.type.block_elems != 1:
            _fail(tensor, f"is a vector of quantised type {tensor.type.name}, which is not supported")
        check_supported(tensor)
        checked[name] = tensor
    for name, tensor in tensors.items():
        if name not in checked:
            _refuse(tensor)
    return checked


def _split_fused(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Each fused matrix as one view of the file for each of its parts; everything else as it is."""
    split: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        parts = fused_parts(name, config)
        if not parts:
            split[name] = tensor
            continue
        num_rows = sum(rows for _, rows in parts)
        if tensor.shape != (num_rows, config.hidden_size):
            _fail(
                tensor,
                f"has shape {list(tensor.shape)}, "
                f"but the configuration calls for {[num_rows, config.hidden_size]}, {len(parts)} matrices in one",
            )
        row_nbytes = tensor.type.row_nbytes(config.hidden_size)
        begin = 0
        for part, rows in parts:
            split[part] = dataclasses.replace(
                tensor,
                name=f"{tensor.name}[{begin}:{begin + rows}]",
                shape=(rows, config.hidden_size),
                data=tensor.data[begin * row_nbytes : (begin + rows) * row_nbytes],
            )
            begin += rows
    return split


def _refuse(tensor: StoredTensor) -> NoReturn:
    # Biases, norms of queries and keys, rotary factors: leaving one out would give wrong tokens without a word.
    _fail(tensor, "is not part of this architecture as the configuration describes it; it is not supported")


def _fail(tensor: StoredTensor, problem: str) -> NoReturn:
    where = f"tensor {tensor.name!r:.100}"
    raise ModelLoadError(f"{tensor.file}: {where} {problem}", field=where, file=str(tensor.file))
