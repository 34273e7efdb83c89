"""GPT-2's way to write any byte as a printable character, and back. Knows nothing else."""


def _table() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = [chr(byte) for byte in range(256)]
    for index, byte in enumerate(others):
        table[byte] = chr(256 + index)
    return table


_CHARACTERS = _table()
_BYTES = {character: byte for byte, character in enumerate(_CHARACTERS)}


def bytes_to_characters(data: bytes) -> str:
    return "".join([_CHARACTERS[byte] for byte in data])


def characters_to_bytes(text: str) -> bytes:
    """The bytes that `text` stands for; a character outside the table stands for itself."""
    try:
        return bytes([_BYTES[character] for character in text])
    except KeyError:
        return b"".join(bytes([_BYTES[c]]) if c in _BYTES else c.encode("utf-8") for c in text)
