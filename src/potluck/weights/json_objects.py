"""JSON objects out of model folders: bounded in size, no key twice, every fault a BadModelFile. Knows no schema."""

import json
from pathlib import Path

from potluck.core.errors import BadModelFile
from potluck.weights.source_tensor import shown


class _KeyTwiceError(ValueError):
    pass


def parse_json_object(data: bytes, file: Path, field: str) -> dict[str, object]:
    """`field` is what the errors call the text. The caller has bounded its length."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except _KeyTwiceError as error:
        raise BadModelFile(file, field, f"key {error} stands twice in one object") from None
    except ValueError as error:  # also bad UTF-8 and integers of thousands of digits
        raise BadModelFile(file, field, f"is not JSON: {shown(str(error), 120)}") from None
    except RecursionError:
        raise BadModelFile(file, field, "is nested too deeply") from None
    if not isinstance(value, dict):
        raise BadModelFile(file, field, "is not a JSON object")
    return value


def read_json_object(path: Path, limit_bytes: int) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
    except OSError as error:
        raise BadModelFile(path, "file", f"cannot be read: {error}") from error
    if len(data) > limit_bytes:
        raise BadModelFile(path, "file", f"is longer than {limit_bytes} bytes")
    return parse_json_object(data, path, "content")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # Two readers of one file must not be able to see different values.
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise _KeyTwiceError(shown(key))
        result[key] = value
    return result
