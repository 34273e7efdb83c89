"""Where `potluck join` takes its invite from, and what people paste around it. Nothing here prints any of it."""

import getpass
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from potluck.core.errors import BadInvite, BadRequest

if TYPE_CHECKING:
    from potluck.trust.invites import Invite

_MOST_CHARACTERS = 8192
# Quotes of shells, mails and office programs, and what cannot be seen; and their notions of a hyphen.
_IGNORED = "\"'`´“”„‟‘’‚‛«»‹›<>\u200b\u200c\u200d\u2060\ufeff"
_MEANT = str.maketrans(dict.fromkeys(_IGNORED, "") | dict.fromkeys("‐‑‒–—−", "-"))
_COMMAND = ["potluck", "join"]


def read_invite(arguments: Sequence[str]) -> "Invite":
    """From the arguments; without any, or with -, from the terminal (unseen) or a pipe. Raises BadInvite, BadRequest."""
    from potluck.trust.invites import decode_invite

    if arguments and list(arguments) != ["-"]:
        text = " ".join(arguments)
    else:
        text = getpass.getpass("invite (it is not shown): ") if sys.stdin.isatty() else _piped()
    bare = bare_invite(text)
    if not bare:
        raise BadRequest("there is no invite; `potluck invite` on a machine of the swarm prints one")
    return decode_invite(bare)


def bare_invite(text: str) -> str:
    """Without quotes and white space, and without the words `potluck join` where the whole line was pasted."""
    words = text.translate(_MEANT).split()
    while [word.lower() for word in words[:2]] == _COMMAND:
        words = words[2:]
    return "".join(words)


def _piped() -> str:
    """Line by line until it is whole: whoever types into a pipe need not end it, and mail programs break long lines."""
    text = ""
    while len(text) < _MOST_CHARACTERS and (line := sys.stdin.readline(_MOST_CHARACTERS)):
        text += line
        if _is_whole(text):
            break
    return text


def _is_whole(text: str) -> bool:
    from potluck.trust.invites import decode_invite

    try:
        decode_invite(bare_invite(text))
    except BadInvite:
        return False
    return True
