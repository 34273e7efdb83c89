"""Compiled kernels. Importing this package tells numba where compiled code is kept: one folder per version of these sources.

numba notices a change in the file that defines a function, but not in those it calls; hence a folder named after all of them.
"""

import hashlib
from pathlib import Path

import numba

from potluck.core.paths import locate_folders


def _sources_hash() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    folder = Path(__file__).parent
    built_in = folder.parent / "kv_format.py"  # its constants
    for source in (*sorted(folder.glob("*.py")), built_in):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


COMPILED_FOLDER = locate_folders().cache / "kernels" / _sources_hash()
numba.config.CACHE_DIR = str(COMPILED_FOLDER)
