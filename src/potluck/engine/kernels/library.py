"""The kernels that a model needs, compiled for this processor on first use and kept on disk afterwards."""

import contextlib
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from potluck.core.errors import BadRequest
from potluck.engine.kernels import COMPILED_FOLDER
from potluck.engine.kernels.attention import attend_kernel, finish_kernel, place_kernel
from potluck.engine.kernels.layout import LAYOUTS
from potluck.engine.kernels.matmul import matmul_kernel
from potluck.engine.kernels.processor import PROCESSORS, detect
from potluck.engine.kernels.rows import activate_kernel, residual_norm_kernel, soft_cap_kernel
from potluck.weights.host_files import exclusive_lock

Notice = Callable[[str], None]
_LONGEST_COMPILATION_S = 120.0
_LOADED: dict[str, dict[str, Any]] = {}  # by processor: a process loads each kernel once, however many engines it has


class KernelLibrary:
    """Addresses of compiled kernels. `notice` is told before a kernel is compiled for the first time on this machine."""

    def __init__(self, processor: str | None = None, notice: Notice | None = None) -> None:
        self.processor = processor or detect()
        self._index = list(PROCESSORS).index(self.processor)
        self._notice = notice
        self._kernels = _LOADED.setdefault(self.processor, {})

    def __repr__(self) -> str:
        return f"<KernelLibrary {self.processor}: {', '.join(sorted(self._kernels))}>"

    def _address(self, name: str, build: Callable[[], Any]) -> int:
        if name not in self._kernels:
            marker = COMPILED_FOLDER / f"{name}-{self.processor}.compiled"
            with contextlib.nullcontext() if marker.exists() else _one_at_a_time(marker):
                is_known = marker.exists()
                if not is_known and self._notice is not None:
                    self._notice(f"compiling {name} for this processor ({self.processor}), once")
                self._kernels[name] = build()
                if not is_known:
                    _touch(marker)
        return int(self._kernels[name].address)

    def matmul(self, format_name: str) -> int:
        return self._address(f"matmul-{format_name}", lambda: matmul_kernel(LAYOUTS[format_name].code, self._index))

    def place(self, is_half: bool) -> int:
        return self._address(f"place-{16 if is_half else 32}", lambda: place_kernel(self._index, int(is_half)))

    def attend(self, is_half: bool) -> int:
        return self._address(f"attend-{16 if is_half else 32}", lambda: attend_kernel(self._index, int(is_half)))

    @cached_property
    def finish(self) -> int:
        return self._address("finish", finish_kernel)

    @cached_property
    def residual_norm(self) -> int:
        return self._address("residual-norm", residual_norm_kernel)

    @cached_property
    def activate(self) -> int:
        return self._address("activate", activate_kernel)

    @cached_property
    def soft_cap(self) -> int:
        return self._address("soft-cap", soft_cap_kernel)


def _one_at_a_time(marker: Path) -> contextlib.ExitStack:
    """Workers that start together must not all compile the same kernel: the others wait and find it done.

    A lock that cannot be had for long (or at all, on a read-only folder) is done without: compiling twice is only slower.
    """
    held = contextlib.ExitStack()
    deadline = time.monotonic() + _LONGEST_COMPILATION_S
    while time.monotonic() < deadline:
        try:
            held.enter_context(exclusive_lock(marker.with_suffix(".lock"), "another process is compiling it"))
            return held
        except BadRequest:
            time.sleep(0.05)
        except OSError:
            return held
    return held


def _touch(marker: Path) -> None:
    try:
        marker.touch()
    except OSError:
        # A read-only cache folder: compiling again next time is slower, not wrong.
        return
