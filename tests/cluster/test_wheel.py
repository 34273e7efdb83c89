"""What people install is the wheel: built here, put into an empty environment, it serves its page and its API."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALONE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel and what it asks for, and nothing of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", "--quiet", "--no-deps", "-w", folder, ROOT], check=True, timeout=300, env=ALONE)
    [wheel] = folder.glob("potluck-*.whl")
    # With the pip that is here, and no byte code for what is never imported: both halve the time that this takes.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True, timeout=120)
    python = folder / "env" / "bin" / "python"
    install = [*PIP, "--python", python, "install", "--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt"]
    subprocess.run([*install, f"{wheel}[cpu]"], check=True, timeout=600, env=ALONE)
    return python


def fetch(url: str, accept: str) -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.status, answer.read()


def test_the_wheel_brings_no_torch_and_serves_the_page_and_the_api(
    installed: Path, tmp_path: Path, models_home: Path
) -> None:
    environment = ALONE | {"POTLUCK_HOME": str(tmp_path), "POTLUCK_CACHE": str(models_home / "cache")}
    without = "import importlib.util as u; print([m for m in ('torch', 'transformers', 'pytest') if u.find_spec(m)])"
    done = subprocess.run([installed, "-c", without], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"
    (tmp_path / "models").symlink_to(models_home / "models")
    node = subprocess.Popen(
        [installed.with_name("potluck"), "up", "--model", "smollm2-135m", "--listen", "127.0.0.1:0", "--api", "127.0.0.1:0", "--json"],
        stdout=subprocess.PIPE, env=environment, cwd=tmp_path,
    )  # fmt: skip
    try:
        assert node.stdout is not None
        url = f"http://{json.loads(node.stdout.readline())['api']}"
        status, page = fetch(f"{url}/", "text/html")
        assert status == 200
        assert b"<title>" in page
        for name in ("main.js", "base.css", "icon.svg"):
            assert fetch(f"{url}/page/{name}", "*/*")[0] == 200
        deadline_s = time.monotonic() + 90
        while not json.loads(fetch(f"{url}/v1/models", "application/json")[1])["data"]:
            assert time.monotonic() < deadline_s, "no model is on offer"
            time.sleep(0.5)
    finally:
        node.terminate()
        node.wait(20)
        assert node.stdout is not None
        node.stdout.close()
