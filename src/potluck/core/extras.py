"""How to get what only some machines need. No package index has Potluck, so its extras come from its source folder too."""


def how_to_install(extra: str = "") -> str:
    """`extra`: one of pyproject.toml's; empty: what every machine needs."""
    what = f"'.[{extra}]'" if extra else "."
    return f"in Potluck's source folder: pip install -c constraints.txt {what}"
