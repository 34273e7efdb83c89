"""The ways in which a stored model was found damaged: each takes the model's folder, with one GGUF file in it."""

import os
from collections.abc import Callable
from pathlib import Path


def _gguf(folder: Path) -> Path:
    [path] = folder.glob("*.gguf")
    return path


def _zero_the_beginning(folder: Path) -> None:
    with _gguf(folder).open("r+b") as file:
        file.write(bytes(200))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda folder: os.truncate(_gguf(folder), 100),
    "deleted": lambda folder: _gguf(folder).unlink(),
    "zeroed": _zero_the_beginning,
    "manifest": lambda folder: (folder / "manifest.json").write_text("[]"),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
}
