"""What `potluck pull` is to do: reading its argument, choosing files from a listing, naming the model. Pure, no I/O."""

import re
from collections.abc import Collection, Iterable, Sequence

import msgspec

from potluck.core.errors import BadModelFile, BadRequest, ModelNotFound
from potluck.weights.store import StoredFormat

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_QUANTISATION = re.compile(r"[A-Za-z0-9_]{2,20}", re.ASCII)
_SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_NOT_IN_IDS = re.compile(r"[^a-z0-9._-]+")
_SHOWN_NAMES = 12

# What a Hugging Face folder needs besides its weights. Nothing that is code or a pickle is ever taken.
_FOLDER_FILES = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
}


class NamedSource(msgspec.Struct, frozen=True):
    """A name from the catalogue."""

    name: str


class LocalSource(msgspec.Struct, frozen=True):
    """A GGUF file or a Hugging Face folder on this machine."""

    path: str


class HubSource(msgspec.Struct, frozen=True):
    """A repository on a model hub, perhaps with the one file or the quantisation that is wanted."""

    repository: str
    file: str | None = None
    quantisation: str | None = None

    def __str__(self) -> str:
        if self.file is not None:
            return f"hf:{self.repository}/{self.file}"
        return f"hf:{self.repository}" + (f":{self.quantisation}" if self.quantisation is not None else "")


Source = NamedSource | LocalSource | HubSource


class ListedFile(msgspec.Struct, frozen=True):
    """A file as a hub or a folder lists it; the hashes are what the hub knows."""

    path: str
    size_bytes: int
    sha256: str | None = None
    git_sha1: str | None = None

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]


class Choice(msgspec.Struct, frozen=True):
    format: StoredFormat
    files: tuple[ListedFile, ...]  # small ones first, so that what is wrong with a model shows early


def parse_source(text: str, catalogue: Collection[str], is_on_disk: bool) -> Source:
    """Reads NAME, PATH or hf:REPO[/FILE or :QUANT]. A catalogue name wins over a file of the same name."""
    if text.startswith("hf:"):
        return _parse_hub(text)
    if text in catalogue:
        return NamedSource(text)
    if is_on_disk:
        return LocalSource(text)
    if "/" in text or "\\" in text or text.startswith(("~", ".")) or text.endswith(".gguf"):
        raise ModelNotFound(f"there is no file or folder {text}")
    raise ModelNotFound(_unknown_name(text, catalogue))


def _unknown_name(text: str, catalogue: Collection[str]) -> str:
    import difflib

    near = difflib.get_close_matches(text, catalogue, n=1)
    hint = f"did you mean `potluck pull {near[0]}`?" if near else f"known names: {', '.join(sorted(catalogue))};"
    return f"no model is called {text!r}; {hint} A file or folder goes by its path, a hub's model as hf:OWNER/NAME"


def _parse_hub(text: str) -> HubSource:
    rest = text.removeprefix("hf:")
    head, _, quantisation = rest.partition(":")
    parts = head.split("/", 2)
    repository = "/".join(parts[:2])
    file = parts[2] if len(parts) == 3 else None
    is_odd_file = file is not None and any(part in ("", ".", "..") for part in file.split("/"))
    is_odd_quantisation = ":" in rest and (file is not None or _QUANTISATION.fullmatch(quantisation) is None)
    if _REPOSITORY.fullmatch(repository) is None or is_odd_file or is_odd_quantisation:
        raise BadRequest(
            f"{text!r} is not a hub's model; write hf:OWNER/NAME, hf:OWNER/NAME:Q4_K_M or hf:OWNER/NAME/FILE.gguf"
        )
    return HubSource(repository, file, quantisation or None)


def choose_files(
    listing: Sequence[ListedFile], source: str, file: str | None = None, quantisation: str | None = None
) -> Choice:
    """Which files make the model: the GGUF file asked for, or the folder's weights, or the only GGUF file there is."""
    if file is not None:
        return _gguf(_named(listing, file, source))
    if quantisation is not None:
        return _gguf(_quantised(listing, quantisation, source))
    names = {listed.path for listed in listing}
    if "config.json" in names and any("/" not in name and name.endswith(".safetensors") for name in names):
        return _folder(listing)
    return _gguf(_only_gguf(listing, source))


def _folder(listing: Sequence[ListedFile]) -> Choice:
    top = [file for file in listing if "/" not in file.path]
    weights = [file for file in top if file.name.endswith(".safetensors")]
    # Some repositories hold a second copy in the author's own layout (`consolidated.safetensors`).
    usual = [file for file in weights if file.name.startswith("model")]
    small = [file for file in top if file.name in _FOLDER_FILES]
    return Choice("safetensors", (*_by_name(small), *_by_name(usual or weights)))


def _gguf(file: ListedFile) -> Choice:
    if not file.name.endswith(".gguf"):
        raise BadRequest(f"{file.path} is not a GGUF file; give the whole repository or folder for safetensors")
    if _SPLIT_GGUF.search(file.name):
        raise BadModelFile(file.path, "file", "is one piece of a split GGUF file; only whole ones are read")
    return Choice("gguf", (file,))


def _named(listing: Sequence[ListedFile], path: str, source: str) -> ListedFile:
    for file in listing:
        if file.path == path:
            return file
    raise ModelNotFound(f"{source} has no such file; it has {_shown(_ggufs(listing))}")


def _quantised(listing: Sequence[ListedFile], quantisation: str, source: str) -> ListedFile:
    pattern = re.compile(rf"(?<![a-z0-9]){re.escape(quantisation)}(?![a-z0-9_])", re.IGNORECASE)
    matches = [file for file in _ggufs(listing) if pattern.search(file.name)]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise ModelNotFound(f"{source} has no such GGUF file; it has {_shown(_ggufs(listing))}")
    raise BadRequest(f"{source} has several such files ({_shown(matches)}); name one as hf:OWNER/NAME/FILE.gguf")


def _only_gguf(listing: Sequence[ListedFile], source: str) -> ListedFile:
    candidates = _ggufs(listing)
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise ModelNotFound(f"{source} holds neither a GGUF file nor config.json with .safetensors files")
    raise BadRequest(f"{source} holds several GGUF files ({_shown(candidates)}); say which one")


def _ggufs(listing: Sequence[ListedFile]) -> Sequence[ListedFile]:
    # A vision projector is no model of its own.
    return _by_name(file for file in listing if file.name.endswith(".gguf") and not file.name.startswith("mmproj"))


def _by_name(files: Iterable[ListedFile]) -> list[ListedFile]:
    return sorted(files, key=lambda file: file.path)


def _shown(files: Sequence[ListedFile]) -> str:
    names = [file.path for file in files[:_SHOWN_NAMES]]
    rest = f" and {len(files) - _SHOWN_NAMES} more" if len(files) > _SHOWN_NAMES else ""
    return (", ".join(names) or "no GGUF file at all") + rest


def suggest_id(text: str) -> str:
    """A model id out of a file's or repository's name."""
    name = text.rsplit("/", 1)[-1].lower().removesuffix(".gguf")
    return _NOT_IN_IDS.sub("-", name).lstrip("._-")[:64] or "model"
