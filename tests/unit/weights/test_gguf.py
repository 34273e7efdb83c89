"""The GGUF reader: what it yields for honest files, and which error each kind of lie gets."""

import struct
from pathlib import Path

import gguf as reference
import numpy as np
import pytest

from potluck.core.errors import BadModelFile, UnknownFormat
from potluck.weights.gguf import MAX_ARRAY_ELEMENTS, MAX_TENSORS, GgufFile, read_gguf
from potluck.weights.mapped_file import MappedFile
from tests.support.gguf_files import KINDS, Tensor, Typed, gguf_bytes, string
from tests.support.tiny_models import tiny_gguf


def parse(tmp_path: Path, data: bytes) -> GgufFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return read_gguf(MappedFile(path))


def parse_metadata(tmp_path: Path, **values: object) -> dict[str, object]:
    return dict(parse(tmp_path, gguf_bytes(values, {})).metadata)


def refusal(tmp_path: Path, data: bytes) -> BadModelFile:
    with pytest.raises(BadModelFile) as caught:
        parse(tmp_path, data)
    assert "model.gguf" in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("u8", 255),
        ("i8", -128),
        ("u16", 65535),
        ("i16", -32768),
        ("u32", 2**32 - 1),
        ("i32", -(2**31)),
        ("u64", 2**64 - 1),
        ("i64", -(2**63)),
        ("f32", 0.5),
        ("f64", 0.1),
        ("bool", True),
        ("str", "Grüße"),
    ],
)
def test_every_value_type_alone_and_in_arrays(tmp_path: Path, kind: str, value: object) -> None:
    found = parse_metadata(tmp_path, one=Typed(kind, value), many=Typed("array", [value, value], kind))
    assert found == {"one": value, "many": [value, value]}
    assert type(found["one"]) is type(value)


def test_arrays_of_arrays_up_to_two_deep(tmp_path: Path) -> None:
    assert parse_metadata(tmp_path, pairs=[[1, 2], [3]])["pairs"] == [[1, 2], [3]]
    error = refusal(tmp_path, gguf_bytes({"deep": [[[1]]]}, {}))
    assert error.field == "deep"


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_lie_where_the_reference_writer_put_them(tmp_path: Path, version: int) -> None:
    path = tmp_path / "reference.gguf"
    writer = reference.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", ""])
    writer.add_custom_alignment(64)
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("matrix", matrix)
    writer.add_tensor("norm", np.ones(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = bytearray(path.read_bytes())
    data[4] = version
    path.write_bytes(data)

    found = read_gguf(MappedFile(path))
    tensor = found.tensors["matrix"]
    assert (tensor.format, tensor.shape, tensor.offset % 64) == ("F32", (3, 4), 0)
    assert bytes(found.mapped.view(tensor.offset, tensor.size_bytes)) == matrix.tobytes()
    assert found.tensors["norm"].format == "F16"
    assert found.metadata["tokenizer.ggml.tokens"] == ["a", "bc", ""]
    assert found.version == version


def test_only_tokens_may_hold_pieces_of_characters(tmp_path: Path) -> None:
    found = parse(tmp_path, gguf_bytes({"tokenizer.ggml.tokens": [b"\xff\xfe", b"ok"]}, {}))
    assert found.metadata["tokenizer.ggml.tokens"] == ["\ufffd\ufffd", "ok"]
    assert "string 1 is not UTF-8" in str(refusal(tmp_path, gguf_bytes({"merges": [b"ok", b"\xff"]}, {})))
    assert "not UTF-8" in str(refusal(tmp_path, gguf_bytes({"general.name": b"\xc3"}, {})))
    assert "not UTF-8" in str(refusal(tmp_path, gguf_bytes({b"\xc3\x28": 1}, {})))


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    assert refusal(tmp_path, gguf_bytes({}, {}, magic=b"GGML")).field == "magic"
    assert refusal(tmp_path, b"GG").field == "magic"
    assert "version" in str(refusal(tmp_path, gguf_bytes({}, {}, version=1)))
    assert "big-endian" in str(refusal(tmp_path, gguf_bytes({}, {}, version=0x03000000)))


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    data = gguf_bytes({"a.b": "text", "list": ["x", "yz"], "numbers": [1, 2, 3]}, {"t": Tensor("F32", (2, 8))})
    for length in range(1, len(data)):
        refusal(tmp_path, data[:length])


def test_counts_are_checked_before_memory_is_taken(tmp_path: Path) -> None:
    huge = 2**62
    assert refusal(tmp_path, gguf_bytes({}, {}, tensor_count=huge)).field == "tensor count"
    assert refusal(tmp_path, gguf_bytes({}, {}, key_count=huge)).field == "metadata count"
    assert "rest of the file" in str(refusal(tmp_path, gguf_bytes({}, {}, tensor_count=MAX_TENSORS)))
    for element in ("u8", "str", "array", "f64"):
        for count in (huge, MAX_ARRAY_ELEMENTS):
            raw = struct.pack("<IQ", KINDS[element], count)
            assert refusal(tmp_path, gguf_bytes({"list": Typed("array", raw=raw)}, {})).field == "list"
    for length in (huge, 1 << 22, 100):
        raw = struct.pack("<Q", length) + b"short"
        assert refusal(tmp_path, gguf_bytes({"text": Typed("str", raw=raw)}, {})).field == "text"
        lying = struct.pack("<IQ", KINDS["str"], 1) + raw
        assert refusal(tmp_path, gguf_bytes({"texts": Typed("array", raw=lying)}, {})).field == "texts"


def test_all_arrays_share_one_limit(tmp_path: Path) -> None:
    full = Typed("array", raw=struct.pack("<IQ", KINDS["u8"], MAX_ARRAY_ELEMENTS) + bytes(MAX_ARRAY_ELEMENTS))
    assert parse_metadata(tmp_path, one=full, two=Typed("array", [], "u8"))["two"] == []
    assert refusal(tmp_path, gguf_bytes({"one": full, "two": [1]}, {})).field == "two"


def test_unknown_types(tmp_path: Path) -> None:
    assert "unknown value type 99" in str(refusal(tmp_path, gguf_bytes({"odd": Typed("?", raw=b"\0" * 8)}, {})))
    raw = struct.pack("<IQ", 77, 1) + b"\0" * 8
    assert "unknown array element type 77" in str(refusal(tmp_path, gguf_bytes({"odd": Typed("array", raw=raw)}, {})))
    assert "neither 0 nor 1" in str(refusal(tmp_path, gguf_bytes({"odd": Typed("bool", raw=b"\2")}, {})))


@pytest.mark.parametrize(
    ("type_id", "name"), [(16, "IQ2_XXS"), (10, "Q2_K"), (39, "MXFP4"), (31, "Q4_0_4_4"), (777, "777")]
)
def test_formats_we_cannot_size_are_refused_by_name(tmp_path: Path, type_id: int, name: str) -> None:
    error = refusal(tmp_path, gguf_bytes({}, {"w": Tensor("F32", (1, 256), type_id=type_id)}))
    assert isinstance(error, UnknownFormat)
    assert name in error.problem
    assert "Q4_K" in error.problem
    assert error.field == "tensor w"


def test_nothing_stands_twice(tmp_path: Path) -> None:
    entry = string("key") + struct.pack("<IB", KINDS["u8"], 1)
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entry + entry
    assert "twice" in str(refusal(tmp_path, data))
    info = string("t") + struct.pack("<IQIQ", 1, 8, 0, 0)
    data = b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + info + info + bytes(128)
    assert "twice" in str(refusal(tmp_path, data))


def test_tensors_neither_overlap_nor_leave_the_file(tmp_path: Path) -> None:
    two = {"a": Tensor("F32", (8,)), "b": Tensor("F32", (8,), offset=0)}
    assert "overlaps" in str(refusal(tmp_path, gguf_bytes({}, two)))
    assert "past the end" in str(refusal(tmp_path, gguf_bytes({}, {"a": Tensor("F32", (8,), offset=4096)})))
    assert "past the end" in str(refusal(tmp_path, gguf_bytes({}, {"a": Tensor("F32", (8,), offset=2**64 - 32)})))
    assert "multiple of the alignment" in str(refusal(tmp_path, gguf_bytes({}, {"a": Tensor("F32", (8,), offset=4)})))


def test_dimensions(tmp_path: Path) -> None:
    huge = Tensor("F32", (2**63, 2**63, 2**63, 2**63), data=b"")
    assert "past the end" in str(refusal(tmp_path, gguf_bytes({}, {"a": huge})))
    assert "dimensions" in str(refusal(tmp_path, gguf_bytes({}, {"a": Tensor("F32", (1, 1, 1, 1, 1))})))
    assert "dimensions" in str(refusal(tmp_path, gguf_bytes({}, {"a": Tensor("F32", ())})))
    assert "empty dimension" in str(refusal(tmp_path, gguf_bytes({}, {"a": Tensor("F32", (0, 4))})))
    assert "blocks of 32" in str(refusal(tmp_path, gguf_bytes({}, {"a": Tensor("Q4_0", (2, 48))})))


@pytest.mark.parametrize("alignment", [0, 3, 4, 1 << 20, "32", True, Typed("i32", -32), Typed("f32", 32.0)])
def test_alignment_is_a_sensible_power_of_two(tmp_path: Path, alignment: object) -> None:
    error = refusal(tmp_path, gguf_bytes({"general.alignment": alignment}, {"a": Tensor("F32", (8,))}))
    assert error.field == "general.alignment"


def test_names_in_messages_are_short_and_printable(tmp_path: Path) -> None:
    error = refusal(tmp_path, gguf_bytes({"\x1b[31m" + "k" * 200: Typed("?", raw=b"")}, {}))
    assert error.field.isprintable()
    assert len(error.field) <= 80
    assert "limit" in str(refusal(tmp_path, gguf_bytes({"k" * 300: 1}, {})))
    assert refusal(tmp_path, gguf_bytes({"": 1}, {})).field == "metadata key 0"


def test_what_is_not_a_regular_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for path in (tmp_path, tmp_path / "missing", tmp_path / "empty", Path("/dev/null")):
        with pytest.raises(BadModelFile):
            MappedFile(path)


def test_views_outlive_the_mapping(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(tiny_gguf())
    mapped = MappedFile(tmp_path / "model.gguf")
    view = mapped.view(0, 4)
    mapped.close()
    assert bytes(view) == b"GGUF"
    assert view.readonly
