"""Which of a library's pages may be given back: those that are as its file has them."""

import ctypes
import sys
from pathlib import Path

import pytest

from potluck.engine.kernels.compiler_pages import clean_pages_of, give_back_compiler_pages

MAPS = """\
7f0000000000-7f0000001000 r--p 00000000 fd:00 77 /lib with a space/libllvmlite.so
Rss:                   4 kB
Anonymous:             0 kB
VmFlags: rd mr mw me
7f0000001000-7f0000004000 r-xp 00001000 fd:00 77 /lib with a space/libllvmlite.so
Anonymous:             0 kB
7f0000004000-7f0000006000 r--p 00004000 fd:00 77 /lib with a space/libllvmlite.so
Anonymous:             4 kB
7f0000006000-7f0000007000 rw-p 00006000 fd:00 77 /lib with a space/libllvmlite.so
Anonymous:             0 kB
7f0000007000-7f0000008000 r-xp 00000000 fd:00 78 /lib/libc.so.6
Anonymous:             0 kB
7f0000008000-7f0000009000 r--p 00000000 00:00 0
Anonymous:             0 kB
""".splitlines(keepends=True)


def test_what_the_loader_or_anybody_else_wrote_stays() -> None:
    assert list(clean_pages_of("libllvmlite", MAPS)) == [(0x7F0000000000, 0x1000), (0x7F0000001000, 0x3000)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_compiler_works_on_afterwards_with_its_pages_gone() -> None:
    from llvmlite import binding

    function = "define i32 @answer() {\n  ret i32 42\n}\n"
    for _ in range(2):
        give_back_compiler_pages()
        assert resident_clean_bytes() < 1 << 20
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        target = binding.Target.from_default_triple().create_target_machine()
        engine = binding.create_mcjit_compiler(binding.parse_assembly(function), target)
        engine.finalize_object()
        assert ctypes.CFUNCTYPE(ctypes.c_int)(engine.get_function_address("answer"))() == 42


def resident_clean_bytes() -> int:
    lines = Path("/proc/self/smaps").read_text(errors="replace").splitlines(keepends=True)
    starts = {start for start, _ in clean_pages_of("libllvmlite", lines)}
    resident, is_ours = 0, False
    for line in lines:
        name, *rest = line.split()
        if not name.endswith(":"):
            is_ours = int(name.split("-")[0], 16) in starts
        elif is_ours and name == "Rss:":
            resident += int(rest[0]) * 1024
    return resident
