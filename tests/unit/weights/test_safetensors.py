"""The safetensors reader: honest files and folders, and which error each kind of lie gets."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from potluck.core.errors import BadModelFile, UnknownFormat
from potluck.weights.mapped_file import MappedFile
from potluck.weights.safetensors import MAX_HEADER_BYTES, open_safetensors_folder, read_safetensors
from potluck.weights.source_tensor import SourceTensor
from tests.support.tiny_models import safetensors_bytes, write_folder


def parse(tmp_path: Path, data: bytes) -> dict[str, SourceTensor]:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    return read_safetensors(MappedFile(path))


def refusal(tmp_path: Path, data: bytes) -> BadModelFile:
    with pytest.raises(BadModelFile) as caught:
        parse(tmp_path, data)
    assert "model.safetensors" in str(caught.value)
    return caught.value


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(start: int, stop: int, dtype: object = "F32", shape: object = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [(stop - start) // 4] if shape is None else shape, "data_offsets": [start, stop]}


def test_tensors_lie_where_the_reference_writer_put_them(tmp_path: Path) -> None:
    path = tmp_path / "reference.safetensors"
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    save_file({"matrix": matrix, "ids": np.arange(5), "half": np.ones(3, np.float16)}, path, {"format": "np"})
    mapped = MappedFile(path)
    tensors = read_safetensors(mapped)
    tensor = tensors["matrix"]
    assert (tensor.format, tensor.shape) == ("F32", (3, 4))
    assert bytes(mapped.view(tensor.offset, tensor.size_bytes)) == matrix.tobytes()
    assert {name: found.format for name, found in tensors.items()} == {"matrix": "F32", "ids": "I64", "half": "F16"}


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    data = safetensors_bytes({"a": ("F32", (2, 2), bytes(16)), "b": ("BF16", (3,), bytes(6))})
    assert set(parse(tmp_path, data)) == {"a", "b"}
    for length in range(1, len(data)):
        refusal(tmp_path, data[:length])


def test_the_header_length_is_checked_before_it_is_read(tmp_path: Path) -> None:
    for length in (2**63, 2**64 - 1, MAX_HEADER_BYTES + 1, MAX_HEADER_BYTES, 11):
        assert refusal(tmp_path, length.to_bytes(8, "little") + b"{}").field == "header length"


@pytest.mark.parametrize(
    "header",
    [b"", b"[]", b"nonsense", b"\xff{}", b'{"a":', b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b'{"a":1,"a":2}'],
)
def test_headers_that_are_no_json_objects(tmp_path: Path, header: bytes) -> None:
    assert refusal(tmp_path, with_header(header)).field == "header"


@pytest.mark.parametrize(
    "value",
    [
        7,
        None,
        {},
        {"dtype": "F32", "shape": [1]},
        entry(0, 4) | {"extra": 1},
        entry(0, 4, shape=[-1]),
        entry(0, 4, shape=[1.5]),
        entry(0, 4, shape=[True]),
        entry(0, 4, shape="1"),
        entry(0, 4, shape=[1] * 9),
        entry(0, 4, shape=[2**64]),
        entry(0, 4, shape=[2**48, 2**48, 2**48]),
        entry(0, 4, shape=[2]),
        entry(4, 0, shape=[1]),
        entry(0, 4, dtype=4),
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]},
    ],
)
def test_entries_that_lie(tmp_path: Path, value: object) -> None:
    assert refusal(tmp_path, with_header({"weights": value}, bytes(4))).field == "tensor weights"


def test_a_format_we_cannot_size(tmp_path: Path) -> None:
    error = refusal(tmp_path, with_header({"w": entry(0, 4, dtype="F4")}, bytes(4)))
    assert isinstance(error, UnknownFormat)
    assert "F4" in error.problem


def test_tensors_tile_the_file(tmp_path: Path) -> None:
    overlap = {"a": entry(0, 8), "b": entry(4, 12)}
    hole = {"a": entry(0, 4), "b": entry(8, 12)}
    assert "overlaps" in str(refusal(tmp_path, with_header(overlap, bytes(12))))
    assert "hole" in str(refusal(tmp_path, with_header(hole, bytes(12))))
    assert "belong to no tensor" in str(refusal(tmp_path, with_header({"a": entry(0, 4)}, bytes(12))))
    assert "overlaps" in str(refusal(tmp_path, with_header({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4))))


def test_a_folder_with_an_index(tmp_path: Path) -> None:
    single, _ = open_safetensors_folder(write_folder(tmp_path / "one"))
    several, files = open_safetensors_folder(write_folder(tmp_path / "three", files=3))
    assert set(single) == set(several)
    assert len(files) == 3
    assert several["lm_head.weight"].file in files


def index_refusal(folder: Path, index: object) -> BadModelFile:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadModelFile) as caught:
        open_safetensors_folder(folder)
    return caught.value


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/passwd.safetensors",
        "sub/inside.safetensors",
        "..\\outside.safetensors",
        "C:outside.safetensors",
        "nul\0.safetensors",
        "..",
        "",
        "link-out.safetensors",
        "link-to-itself.safetensors",
        "folder.safetensors",
        "missing.safetensors",
        "x" * 5000 + ".safetensors",
        "config.json",
    ],
)
def test_names_in_an_index_do_not_lead_elsewhere(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "model")
    content = (folder / "model.safetensors").read_bytes()
    (tmp_path / "outside.safetensors").write_bytes(content)
    (folder / "sub").mkdir()
    (folder / "sub" / "inside.safetensors").write_bytes(content)
    (folder / "folder.safetensors").mkdir()
    (folder / "link-out.safetensors").symlink_to(tmp_path / "outside.safetensors")
    (folder / "link-to-itself.safetensors").symlink_to(folder / "link-to-itself.safetensors")
    index_refusal(folder, {"weight_map": {"lm_head.weight": name}})


@pytest.mark.parametrize("index", [[], {}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_an_index_of_the_wrong_shape(tmp_path: Path, index: object) -> None:
    index_refusal(write_folder(tmp_path / "model"), index)


def test_an_index_that_promises_too_much(tmp_path: Path) -> None:
    error = index_refusal(write_folder(tmp_path / "model"), {"weight_map": {"ghost": "model.safetensors"}})
    assert "ghost" in error.field
