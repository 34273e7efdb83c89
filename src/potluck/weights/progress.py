"""How long work on model files reports what it does. The interface and a silent version; drawing bars is the CLI's."""

from typing import Protocol


class Progress(Protocol):
    """Told about one task at a time: `start`, `advance` as bytes are done, `finish`; `start` may come again."""

    def start(self, what: str, total_bytes: int) -> None:
        """A task begins, or begins again. `total_bytes` is 0 where nobody knows."""
        ...

    def advance(self, size_bytes: int) -> None: ...

    def finish(self) -> None: ...

    def say(self, message: str) -> None:
        """Something worth a line: a retry, a choice that was made."""
        ...


class Silence:
    """A Progress for callers who do not want any."""

    def start(self, what: str, total_bytes: int) -> None:
        pass

    def advance(self, size_bytes: int) -> None:
        pass

    def finish(self) -> None:
        pass

    def say(self, message: str) -> None:
        pass
