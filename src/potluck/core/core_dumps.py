"""What is left of a process that crashes."""

import sys


def forbid_core_dumps() -> None:
    """A core file would hold prompts, answers, activations and keys."""
    if sys.platform == "win32":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
