"""`python -m tests.support.all_kernels` compiles every kernel that tests need, on all cores, into the folder that tests share.

Left to the tests, their workers would come to the same kernels at the same time, and wait for each other. Needs no package of the tests.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator

from tests.support.places import share_kernels

_COSTLIEST = ("attend", "matmul-Q6_K", "matmul-Q5_K", "matmul-Q4_K", "place")


def _compilations() -> Iterator[tuple[str, Callable[[], object]]]:
    share_kernels()
    from potluck.engine.kernels.layout import LAYOUTS
    from tests.support.kernel_calls import RUNNABLE, library_for

    for processor in RUNNABLE:
        library = library_for(processor)
        for is_half in (False, True):
            yield f"attend {is_half} {processor}", lambda it=library, half=is_half: it.attend(half)
            yield f"place {is_half} {processor}", lambda it=library, half=is_half: it.place(half)
        for name in LAYOUTS:
            yield f"matmul-{name} {processor}", lambda it=library, name=name: it.matmul(name)
        for name in ("finish", "residual_norm", "activate", "soft_cap"):
            yield f"{name} {processor}", lambda it=library, name=name: getattr(it, name)


def _compile_share(share: int, shares: int) -> None:
    # The costliest first, so that no process is left with one of them while the others have nothing to do.
    ordered = sorted(_compilations(), key=lambda named: not named[0].startswith(_COSTLIEST))
    for _, compile_it in ordered[share::shares]:
        compile_it()


def main() -> None:
    shares = os.cpu_count() or 1
    with multiprocessing.get_context("spawn").Pool(shares) as pool:
        pool.starmap(_compile_share, [(share, shares) for share in range(shares)], chunksize=1)


if __name__ == "__main__":
    main()
