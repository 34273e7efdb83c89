"""Where the `potluck` script begins: before anything is imported that takes its time, so that Ctrl-C is one line from the start."""

import sys


def main() -> None:
    try:
        from potluck.cli.main import run
        from potluck.core.core_dumps import forbid_core_dumps
    except KeyboardInterrupt:
        print("error: interrupted [interrupted]", file=sys.stderr)
        sys.exit(130)
    forbid_core_dumps()
    sys.exit(run(sys.argv[1:]))
