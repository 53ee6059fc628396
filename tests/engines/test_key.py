"""The user's key, and the token that is derived from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.engines import key
from weft.engines.ray.token import copy_line, find_token, make_token
from weft.errors import InvalidValue, Refused


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(key.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "weft"


def test_the_file(folder: Path) -> None:
    """Made at first use, for the user alone; refused once others may read it."""
    assert key.find_key() is None
    assert find_token() is None
    made = key.read_key()
    assert len(made) == 64
    assert made == key.read_key() == key.find_key() == (folder / "key").read_bytes()
    assert [path.name for path in folder.iterdir()] == ["key"]
    assert [oct(path.stat().st_mode & 0o777) for path in (folder, folder / "key")] == [
        "0o700",
        "0o600",
    ]
    (folder / "key").chmod(0o640)
    for read in (key.read_key, key.find_key, make_token, find_token):
        with pytest.raises(Refused, match=r"can be read by others; make it private: chmod 600"):
            read()


def test_the_variable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for the file, which is not made."""
    monkeypatch.setenv(key.VARIABLE, "sixteen letters.")
    assert key.read_key() == key.find_key() == b"sixteen letters."
    assert copy_line().startswith("export WEFT_KEY=...")
    assert not folder.exists()


def test_the_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is not the key; is the same for a copy that ends with a line break; short keys have none."""
    token = make_token()
    assert token == find_token()
    assert token != key.read_key().decode()
    file = folder / "key"
    file.write_text(file.read_text() + "\n")
    assert make_token() == token
    monkeypatch.setenv(key.VARIABLE, "sixteen letters.")
    assert make_token() != token
    monkeypatch.setenv(key.VARIABLE, "fifteen letters")
    with pytest.raises(InvalidValue, match=r"the key has 15 characters; .* expected 16 or more"):
        make_token()
