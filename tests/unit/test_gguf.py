"""The GGUF parser against the `gguf` package, and against files that are damaged or hostile."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.errors import ModelLoadError
from pdserve.model.gguf import GgufFile, read_gguf
from pdserve.model.known import locate
from pdserve.model.quants import dequantize

STRING, ARRAY, U32, U64, BOOL = 8, 9, 4, 10, 7


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw)) + raw


def pair(key: str | bytes, type_id: int, value: bytes) -> bytes:
    return string(key) + u32(type_id) + value


def info(name: str, dims: Sequence[int] = (4, 2), type_id: int = 0, offset: int = 0) -> bytes:
    return string(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(type_id) + u64(offset)


def file_bytes(
    pairs: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: bytes = u32(3),
    num_tensors: int | None = None,
    num_pairs: int | None = None,
) -> bytes:
    head = magic + version + u64(len(infos) if num_tensors is None else num_tensors)
    head += u64(len(pairs) if num_pairs is None else num_pairs) + b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % 32) + data if infos else head


@pytest.fixture
def parse(tmp_path: Path) -> Callable[[bytes], GgufFile]:
    def write_and_read(content: bytes) -> GgufFile:
        path = tmp_path / "m.gguf"
        path.write_bytes(content)
        return read_gguf(path)

    return write_and_read


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file written by the `gguf` package with every value type and two tensors."""
    path = tmp_path_factory.mktemp("gguf") / "sound.gguf"
    w = gguf.GGUFWriter(path, "llama")
    w.add_uint8("a.u8", 200)
    w.add_int8("a.i8", -3)
    w.add_uint16("a.u16", 60000)
    w.add_int16("a.i16", -30000)
    w.add_uint32("a.u32", 2**32 - 1)
    w.add_int32("a.i32", -(2**31))
    w.add_uint64("a.u64", 2**63 + 5)
    w.add_int64("a.i64", -(2**62))
    w.add_float32("a.f32", 0.1)
    w.add_float64("a.f64", 0.1)
    w.add_bool("a.bool", True)
    w.add_string("a.text", "grüße 🌶")
    w.add_array("b.ints", [1, -2, 3])
    w.add_array("b.floats", [0.5, 0.25])
    w.add_array("b.bools", [True, False])
    w.add_array("b.strings", ["", "x", "日本"])
    w.add_array("b.nested", [[1, 2], [3]])
    w.add_tensor("first", np.arange(24, dtype=np.float32).reshape(4, 6))
    w.add_tensor("second", np.arange(5, dtype=np.float16))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path.read_bytes()


def test_every_value_type_is_read(sound: bytes, parse: Callable[[bytes], GgufFile]) -> None:
    file = parse(sound)
    m = dict(file.metadata)
    arrays = {k: list(np.asarray(m.pop(k))) for k in ("b.ints", "b.floats", "b.bools")}
    assert arrays == {"b.ints": [1, -2, 3], "b.floats": [0.5, 0.25], "b.bools": [True, False]}
    nested = m.pop("b.nested")
    assert isinstance(nested, list)
    assert [x.tolist() for x in nested] == [[1, 2], [3]]
    assert m == {
        "general.architecture": "llama",
        "a.u8": 200,
        "a.i8": -3,
        "a.u16": 60000,
        "a.i16": -30000,
        "a.u32": 2**32 - 1,
        "a.i32": -(2**31),
        "a.u64": 2**63 + 5,
        "a.i64": -(2**62),
        "a.f32": float(np.float32(0.1)),
        "a.f64": 0.1,
        "a.bool": True,
        "a.text": "grüße 🌶",
        "b.strings": ["", "x", "日本"],
    }
    assert type(m["a.bool"]) is bool
    assert type(m["a.u8"]) is int
    assert {n: (t.shape, t.type.name) for n, t in file.tensors.items()} == {
        "first": ((4, 6), "F32"),
        "second": ((5,), "F16"),
    }
    assert np.array_equal(dequantize(file.tensors["first"]), np.arange(24).reshape(4, 6))
    assert np.array_equal(dequantize(file.tensors["second"]), np.arange(5))


def test_a_published_file_reads_as_with_the_gguf_package() -> None:
    path = locate("smollm2-135m-instruct")
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for key, expected in fields.items():
        got = ours.metadata[key]
        assert (got.tolist() if isinstance(got, np.ndarray) else got) == expected, key
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for t in theirs.tensors:
        got_tensor = ours.tensors[t.name]
        assert (got_tensor.type.name, got_tensor.shape) == (t.tensor_type.name, tuple(int(n) for n in t.shape[::-1]))
        assert np.array_equal(got_tensor.data, t.data.reshape(-1).view(np.uint8)), t.name
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.29.ffn_down.weight", "output_norm.weight"):
        t = next(t for t in theirs.tensors if t.name == name)
        expected_values = gguf.quants.dequantize(t.data, t.tensor_type)
        assert dequantize(ours.tensors[name]).tobytes() == expected_values.tobytes(), name


def test_a_file_cut_anywhere_is_refused(sound: bytes, parse: Callable[[bytes], GgufFile]) -> None:
    last = parse(sound).tensors["second"]
    end_of_data = sound.rindex(last.data.tobytes()) + last.data.nbytes
    for length in range(end_of_data):
        with pytest.raises(ModelLoadError, match=r"m\.gguf: "):
            parse(sound[:length])
    parse(sound[:end_of_data])


def test_no_flipped_bit_in_the_header_gives_anything_but_a_clear_error(
    sound: bytes, parse: Callable[[bytes], GgufFile]
) -> None:
    header_nbytes = sound.index(np.arange(24, dtype=np.float32).tobytes())
    refused = 0
    for position in range(header_nbytes):
        for bit in {7, position % 8}:  # All bits of every byte would take a minute on a busy machine.
            damaged = bytearray(sound)
            damaged[position] ^= 1 << bit
            try:
                parse(bytes(damaged))
            except ModelLoadError as e:
                refused += 1
                assert "m.gguf" in e.message
    assert refused > header_nbytes / 2  # Many flips hit a length, a type or a count.


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)
@given(where=st.floats(0, 1), new=st.binary(min_size=1, max_size=24), cut=st.integers(0, 24))
def test_spliced_files_give_at_most_a_clear_error(
    sound: bytes, parse: Callable[[bytes], GgufFile], where: float, new: bytes, cut: int
) -> None:
    position = int(where * len(sound))
    try:
        file = parse(sound[:position] + new + sound[position + cut :])
    except ModelLoadError as e:
        assert "m.gguf" in e.message
    else:
        assert all(t.data.nbytes > 0 for t in file.tensors.values())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)
@given(content=st.binary(max_size=200))
def test_arbitrary_bytes_after_a_sound_start_give_at_most_a_clear_error(
    parse: Callable[[bytes], GgufFile], content: bytes
) -> None:
    for head in (b"", b"GGUF" + u32(3), b"GGUF" + u32(2) + u64(1) + u64(1)):
        try:
            parse(head + content)
        except ModelLoadError as e:
            assert "m.gguf" in e.message


NESTED = pair("k", ARRAY, (u32(ARRAY) + u64(1)) * 5000 + u32(U32) + u64(0))
ALIGNED = pair("general.alignment", U32, u32(64))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (file_bytes(magic=b"GGML"), "magic is b'GGML'"),
        (file_bytes(version=u32(1)), "version is 1; supported are 2 and 3"),
        (file_bytes(version=u32(4)), "version is 4"),
        (file_bytes(version=struct.pack(">I", 3)), "version is in big-endian order"),
        (file_bytes(num_tensors=2**64 - 1), "tensor count announces 18446744073709551615 elements"),
        (file_bytes(num_pairs=2**62), "metadata count announces"),
        (file_bytes([pair("k", STRING, u64(2**64 - 1))]), "k reaches to byte"),
        (file_bytes([string(b"")[:7] + b"\xff" * 9]), "metadata key 0 "),
        (file_bytes([pair("k", ARRAY, u32(STRING) + u64(2**61))]), "k announces"),
        (file_bytes([pair("k", ARRAY, u32(U64) + u64(2**61))]), "k announces"),
        (file_bytes([pair("k", ARRAY, u32(BOOL) + u64(2**63))]), "k announces"),
        (file_bytes([pair("k", ARRAY, u32(13) + u64(0))]), "k is an array of the unknown value type 13"),
        (file_bytes([pair("k", 13, u32(0))]), "k has the unknown value type 13"),
        (file_bytes([NESTED]), "k nests arrays more than 4 deep"),
        (file_bytes([pair("k", STRING, string(b"\xff"))]), r"k is not valid UTF-8 \(string 1 of 1\)"),
        (file_bytes([pair(b"\xff\xfe", U32, u32(0))]), "metadata key 0 is not valid UTF-8"),
        (file_bytes([pair("k", BOOL, b"\x02")]), "k has a boolean that is neither 0 nor 1"),
        (file_bytes([pair("k", U32, u32(0))] * 2), "k appears twice"),
        (file_bytes(infos=[info("t"), info("t", offset=32)], data=bytes(64)), "tensor 't' appears twice"),
        (file_bytes(infos=[info("t"), info("s")], data=bytes(64)), "tensor 't' overlaps tensor 's'"),
        (file_bytes(infos=[info("t")], data=bytes(31)), "tensor 't' ends at byte .* truncated or damaged"),
        (file_bytes(infos=[info("t", offset=2**64 - 32)], data=bytes(32)), "tensor 't' ends at byte"),
        (file_bytes(infos=[info("t", offset=8)], data=bytes(64)), "tensor 't' starts at offset 8"),
        (
            file_bytes([ALIGNED], [info("t", offset=32)], data=bytes(99)),
            "tensor 't' starts at offset 32, not a multiple of the alignment of 64",
        ),
        (file_bytes(infos=[info("t", dims=())], data=bytes(32)), "tensor 't' has 0 dimensions"),
        (file_bytes(infos=[info("t", dims=(1,) * 5)], data=bytes(32)), "tensor 't' has 5 dimensions"),
        (
            file_bytes(infos=[info("t", dims=(4, 0))], data=bytes(32)),
            r"tensor 't' has no elements: its shape is \[0, 4\]",
        ),
        (file_bytes(infos=[info("t", dims=(2**63, 2**63))], data=bytes(32)), "tensor 't' ends at byte"),
        (file_bytes(infos=[info("t", type_id=4)], data=bytes(32)), "tensor 't' has the unknown type 4"),
        (
            file_bytes(infos=[info("t", dims=(33,), type_id=8)], data=bytes(99)),
            "tensor 't' has rows of 33 elements; Q8_0 has blocks of 32",
        ),
        (file_bytes([pair("general.alignment", U32, u32(0))]), "general.alignment must be a power of two, got 0"),
        (file_bytes([pair("general.alignment", U32, u32(24))]), "general.alignment must be a power of two, got 24"),
        (file_bytes([pair("general.alignment", STRING, string("x"))]), "general.alignment must be a power of two"),
    ],
    ids=lambda v: v if isinstance(v, str) else "file",
)
def test_what_is_wrong_with_a_file_is_named(parse: Callable[[bytes], GgufFile], content: bytes, message: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"m\.gguf: {message}"):
        parse(content)


def test_a_name_from_the_file_cannot_flood_the_message(parse: Callable[[bytes], GgufFile]) -> None:
    with pytest.raises(ModelLoadError) as caught:
        parse(file_bytes([pair("k\x1b[2J" * 10_000, 13, b"")]))
    assert "\x1b" not in caught.value.message
    assert len(caught.value.message.removeprefix(str(caught.value.details["file"]))) < 300


@pytest.mark.parametrize("what", ["missing", "directory"])
def test_a_path_that_is_no_file_is_an_error(tmp_path: Path, what: str) -> None:
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_gguf(tmp_path / "missing.gguf" if what == "missing" else tmp_path)


def test_alignment_of_the_file_is_respected(parse: Callable[[bytes], GgufFile]) -> None:
    data = np.arange(8, dtype=np.float32).tobytes()
    head = file_bytes([ALIGNED], [info("t", offset=64)])
    file = parse(head + bytes(-len(head) % 64) + bytes(64) + data)
    assert dequantize(file.tensors["t"]).tobytes() == data
