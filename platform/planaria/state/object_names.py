"""Names of the objects that a vault keeps in a store without folders and renames. Pure.

``step-00000042/shard-00003-<token>-<nonce>.safetensors``  a shard; no two attempts ever share a name
``step-00000042/manifest.json``                            makes it a checkpoint: names the shards that belong to it
``step-00000042/manifest.old-<token>.json``                that of a checkpoint that is being replaced

The names of the vault's folders (:mod:`planaria.state.names`) are views of these: ``step-00000042`` is the manifest
with its shards, ``step-00000042.old-<token>`` likewise, and ``step-00000042.tmp-<token>`` the shards of that token
which no manifest names.
"""

from __future__ import annotations

import re

from planaria.state.manifest import NAME
from planaria.state.names import FolderName

_SHARD = re.compile(r"shard-\d{5,}-([A-Za-z0-9][A-Za-z0-9_-]*)-[0-9a-f]{8}\.safetensors")
_OLD = re.compile(r"manifest\.old-([A-Za-z0-9][A-Za-z0-9_-]*)\.json")


def shard_name(writer_id: int, token: str, nonce: str) -> str:
    """File name of a shard."""
    return f"shard-{writer_id:05d}-{token}-{nonce}.safetensors"


def token_of(file: str) -> str | None:
    """The token of a shard's file name; ``None`` for other files."""
    match = _SHARD.fullmatch(file)
    return match[1] if match else None


def manifest_name(folder: FolderName) -> str:
    """File name of a folder's manifest."""
    return f"manifest.old-{folder.token}.json" if folder.kind == "old" else NAME


def folder_of(step: FolderName, file: str) -> FolderName | None:
    """The visible folder that the manifest ``file`` makes; ``None`` for other files."""
    if file == NAME:
        return step
    match = _OLD.fullmatch(file)
    try:
        return FolderName(step.step, "old", match[1]) if match else None
    except ValueError:
        return None  # a token that is too long: not ours
