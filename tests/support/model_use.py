"""What a node does with a model that it was given, short of computing. As a program: the same in little memory.

    python -m tests.support.model_use HONEST HOSTILE

opens HONEST first, so that everything is loaded, then HOSTILE, and prints the outcome, by how many bytes the
process grew at its largest, and the seconds that it took.
"""

import re
import sys
import time
from pathlib import Path

import msgspec

from potluck.core.errors import BadModelFile, PotluckError
from potluck.core.tokenizer_spec import TokenizerSpec
from potluck.text.chat_template import ChatTemplate
from potluck.text.tokenizer import Tokenizer
from potluck.weights.manifest import Manifest, build_manifest, decode_manifest, encode_manifest
from potluck.weights.open_model import open_checkpoint
from potluck.weights.partial_model import decode_tokenizer
from tests.support.memory_limits import little_more_memory

ROOM_BYTES = 1 << 30  # what is far too large must not reach the machine's end either
TEXT = "hello world!\n it's 42 <tool>"


def use(path: Path) -> str:
    """Opens a model and touches all that it offers; the outcome, for the statistics."""
    try:
        use_all(path)
        return "opened"
    except PotluckError as error:
        refusal = error
    str(refusal).encode("utf-8")  # it goes to the API and to the log
    if isinstance(refusal, BadModelFile):
        assert refusal.file
        assert refusal.field
        assert refusal.field.isprintable()
        assert len(str(refusal)) < 2000
    return refusal.code


def use_all(path: Path) -> None:
    """Raises PotluckError, and nothing else."""
    with open_checkpoint(path) as checkpoint:
        manifest = build_manifest(checkpoint)
        assert decode_manifest(encode_manifest(manifest)) == manifest
        if checkpoint.tokenizer is not None:
            use_tokenizer(checkpoint.tokenizer, manifest)


def use_tokenizer(spec: TokenizerSpec, manifest: Manifest) -> None:
    assert decode_tokenizer(msgspec.json.encode(spec), manifest, "what a peer sent") == spec
    tokenizer, template = Tokenizer(spec), ChatTemplate(spec.chat_template, spec)
    for parse_special in (True, False):
        tokenizer.decode(tokenizer.encode(TEXT, parse_special=parse_special))
    tokenizer.decode(range(min(tokenizer.vocabulary_size, 64)), skip_special=True)
    tokenizer.encode_prompt(template.render([{"role": "user", "content": TEXT}]))


def main() -> None:
    honest, hostile = map(Path, sys.argv[1:])
    assert use(honest) == "opened"
    before_bytes, start_s = peak_bytes(), time.perf_counter()
    with little_more_memory(ROOM_BYTES):
        outcome = use(hostile)
    print(outcome, peak_bytes() - before_bytes, time.perf_counter() - start_s)


def peak_bytes() -> int:
    """Of this program alone: getrusage also counts whoever started it."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
