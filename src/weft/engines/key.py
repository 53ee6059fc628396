"""The user's key: who has it may use the user's workers, behind named pipes and on other machines.

It is in a file that only the user can read, or in a variable. On one machine it proves who asks,
and never leaves it (`local/pool/named_pipe.py`); between machines a token that is derived from it
travels with every message (`ray/token.py`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from weft.errors import Refused

#: the environment variable that holds the key itself, in place of the user's key file
VARIABLE = "WEFT_KEY"


def read_key() -> bytes:
    """Return this user's key, which is made at first use. Raises Refused if others could read
    it."""
    return _from_variable() or _read(make_key())


def find_key() -> bytes | None:
    """Return this user's key, None if there is none. Raises Refused if others could read it."""
    path = key_file()
    return _from_variable() or (_read(path) if path.exists() else None)


def key_file() -> Path:
    """Return where the key is, unless the variable has it."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "weft" / "key"


def make_key() -> Path:
    """Write a new key, whole, unless there is one. Return its file."""
    path = key_file()
    if path.exists():
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"key.{os.getpid()}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def _from_variable() -> bytes | None:
    key = os.environ.get(VARIABLE)
    return key.encode() if key else None


def _read(path: Path) -> bytes:
    if path.stat().st_mode & 0o077:
        raise Refused(f"the key in {path} can be read by others; make it private: chmod 600 {path}")
    return path.read_bytes()
