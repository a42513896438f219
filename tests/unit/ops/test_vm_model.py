"""The embedding model: whole and verified in its place, or not there at all."""

from __future__ import annotations

import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.vm import model

FILES = {"config.json": b"{}", "1_Pooling/config.json": b'{"mean": true}', "model.safetensors": b"weights" * 1000}
WANTED = {name: hashlib.sha256(text).hexdigest() for name, text in FILES.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model" / "abc"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """A server of these files, and what it was asked for."""
    root, asked = tmp_path / "hub", list[str]()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(root))  # type: ignore[arg-type]

        def log_message(self, format: str, *args: object) -> None:
            asked.append(self.path.lstrip("/"))

    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", root, asked
    server.shutdown()
    server.server_close()


def run(mode: str, folder: Path, base: str = "") -> None:
    model.main(mode, str(folder), base, *(f"{digest}  {name}" for name, digest in WANTED.items()))


def test_it_is_fetched_and_is_for_everybody_to_read(folder: Path, hub: tuple[str, Path, list[str]]) -> None:
    run("fetch", folder, hub[0])
    assert {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == FILES
    assert folder.stat().st_mode & 0o777 == 0o755
    assert (folder / "config.json").stat().st_mode & 0o777 == 0o644
    assert not model.part(folder).exists()


def test_what_is_there_already_is_not_fetched_again(folder: Path, hub: tuple[str, Path, list[str]]) -> None:
    (model.part(folder)).mkdir(parents=True)
    (model.part(folder) / "model.safetensors").write_bytes(FILES["model.safetensors"])
    (model.part(folder) / "config.json").write_bytes(b"half")
    run("fetch", folder, hub[0])
    assert sorted(hub[2]) == ["1_Pooling/config.json", "config.json"]


def test_a_file_with_another_checksum_is_not_taken(folder: Path, hub: tuple[str, Path, list[str]]) -> None:
    (hub[1] / "model.safetensors").write_bytes(b"evil")
    with pytest.raises(SystemExit, match=r"model.safetensors has the checksum .* it was not taken"):
        run("fetch", folder, hub[0])
    assert not folder.exists()
    assert not (model.part(folder) / "model.safetensors").exists()


def test_a_hub_that_is_not_reached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "PAUSE_S", 0.0)
    with pytest.raises(SystemExit, match="takes a folder on your machine"):
        run("fetch", folder, "http://127.0.0.1:9")
    assert not folder.exists()


def test_what_was_carried_is_checked_and_what_does_not_belong_there_goes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("missing", folder)
    assert capsys.readouterr().out.split() == sorted(FILES)
    for name, text in FILES.items():
        (model.part(folder) / name).parent.mkdir(parents=True, exist_ok=True)
        (model.part(folder) / name).write_bytes(text)
    (model.part(folder) / "pickle.bin").write_bytes(b"evil")
    run("place", folder)
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()) == sorted(FILES)


def test_half_of_it_is_not_placed(folder: Path) -> None:
    run("missing", folder)
    with pytest.raises(SystemExit, match="not as it should be"):
        run("place", folder)
    assert not folder.exists()
