"""Looks at a device and says what is free on it: `python -m potluck.worker.device_probe DEVICE`, started by a daemon.

A process of its own, because a daemon imports no torch, and because asking a GPU takes some of its memory until the process ends.
"""

import sys

import msgspec

from potluck.core.errors import PotluckError


def main(device: str) -> int:
    """Prints DeviceFacts as JSON, or why there are none."""
    from potluck.engine.factory import measure_device

    try:
        facts = measure_device(device)
    except (PotluckError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.write(msgspec.json.encode(facts).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
