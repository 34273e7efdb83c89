"""What an answer must look like: a JSON object, a JSON schema, a regular expression or a Lark grammar. Pure data."""

from typing import Annotated, Literal

import msgspec

MAX_GRAMMAR_CHARACTERS = 256 << 10


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """`text` is the schema, expression or grammar; empty for "json_object", which is any JSON object."""

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    text: Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_CHARACTERS)] = ""
