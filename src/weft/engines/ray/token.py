"""The token by which machines of one user know each other.

It is derived from the user's key, as it travels with every message and can be overheard: it opens
the clusters of that key, and nothing else that the key does.
"""

from __future__ import annotations

import hashlib
import os
import shlex

from weft.engines import key as user_key
from weft.errors import InvalidValue

#: characters of a key that hold against guessing
_LEAST_KEY = 16


def make_token() -> str:
    """Return the token of this user's clusters; the key is made at first use. Raises Refused,
    InvalidValue."""
    return _derive(user_key.read_key())


def find_token() -> str | None:
    """Return the token of this user's clusters, None if this machine has no key. Raises Refused,
    InvalidValue."""
    key = user_key.find_key()
    return None if key is None else _derive(key)


def no_key(cluster: str) -> str:
    """Return what to tell a user who has no key here."""
    return (
        f"this machine has no key for the cluster {cluster}: copy it from there to "
        f"{user_key.key_file()}, by the line that weft open has printed, or set "
        f"{user_key.VARIABLE}"
    )


def copy_line() -> str:
    """Return the line that copies the key to another machine, for this machine's shell."""
    if os.environ.get(user_key.VARIABLE):
        return f"export {user_key.VARIABLE}=...  # there, as it is here"
    there = '"${XDG_CONFIG_HOME:-$HOME/.config}/weft"'
    command = f"umask 077; mkdir -p {there} && cat > {there}/key"
    return f"ssh MACHINE '{command}' < {shlex.quote(str(user_key.key_file()))}"


def _derive(key: bytes) -> str:
    key = key.strip()  # a copied key may end with a line break
    if len(key) < _LEAST_KEY:
        raise InvalidValue(
            f"the key has {len(key)} characters; for other machines, where many can try, expected "
            f"{_LEAST_KEY} or more: unset {user_key.VARIABLE}, or remove {user_key.key_file()}, "
            "and one is made"
        )
    return hashlib.sha256(b"weft cluster " + key).hexdigest()
