"""``manifest.json``: what a checkpoint contains. Pure: bytes in, bytes out.

The file is ``{"checksum": "<hex>",\\n"content": <JSON>}`` and a newline; the checksum is that of the
content's bytes as written, so any later edit shows, even one that keeps the JSON valid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planaria.state.checksum import BLOCK, DIGEST_BYTES, block_count, checksum
from planaria.state.index import Index

FORMAT = 4
NAME = "manifest.json"


class ManifestError(ValueError):
    """A manifest that cannot be written, or whose bytes are not what was written."""


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint.

    Attributes:
        step: number of completed optimizer steps.
        meta: the job's own JSON values (schedule, data position, config digest, layout).
        files: size in bytes of every shard file.
        index: where every slice is.
        block: most bytes of a slice under one digest.
    """

    step: int
    meta: Mapping[str, Any]
    files: Mapping[str, int]
    index: Index
    block: int = BLOCK

    def encode(self) -> bytes:
        """As the bytes of ``manifest.json``.

        Raises:
            ManifestError: ``meta`` is not JSON (NaN and infinity included), or a slice lacks digests.
        """
        self._check_blocks()
        content = {
            "format": FORMAT,
            "step": self.step,
            "block": self.block,
            "meta": dict(self.meta),
            "files": dict(sorted(self.files.items())),
            "tensors": self.index.to_json(),
        }
        try:
            same = json.loads(json.dumps(content["meta"], allow_nan=False)) == content["meta"]
        except (TypeError, ValueError) as error:
            raise ManifestError(f"meta must hold JSON values only: {error}") from None
        if not same:
            raise ManifestError("meta does not survive JSON: use text keys, and lists in place of tuples")
        body = json.dumps(content, separators=(",", ":"))
        raw = body.encode()
        return _PREFIX + checksum(raw).encode() + _MIDDLE + raw + _SUFFIX

    @classmethod
    def decode(cls, raw: bytes | bytearray) -> Manifest:
        """Inverse of :meth:`encode`.

        Raises:
            ManifestError: truncated, edited, or of another format version.
        """
        start = len(_PREFIX) + 2 * DIGEST_BYTES
        if not raw.startswith(_PREFIX) or raw[start : start + len(_MIDDLE)] != _MIDDLE or not raw.endswith(_SUFFIX):
            raise ManifestError("truncated or not a manifest")
        body = raw[start + len(_MIDDLE) : -len(_SUFFIX)]
        if checksum(body).encode() != raw[len(_PREFIX) : start]:
            raise ManifestError("its content does not match its checksum (edited or damaged)")
        try:
            content = json.loads(body)
            if content["format"] != FORMAT:
                raise ManifestError(f"format {content['format']}; this version reads format {FORMAT}")
            index = Index.from_json(content["tensors"])
            manifest = cls(content["step"], content["meta"], content["files"], index, content["block"])
            manifest._check_blocks()
            return manifest
        except ManifestError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManifestError(f"not readable: {error!r}") from None

    def _check_blocks(self) -> None:
        if self.block < 1:
            raise ManifestError(f"blocks of {self.block} bytes")
        for item in self.index:
            if len(item.checksums) != DIGEST_BYTES * block_count(item.nbytes, self.block):
                raise ManifestError(
                    f"slice {item} of {item.nbytes} bytes has {len(item.checksums)} bytes of digests, "
                    f"which is not one for each of its {block_count(item.nbytes, self.block)} blocks"
                )


_PREFIX, _MIDDLE, _SUFFIX = b'{"checksum":"', b'",\n"content":', b"}\n"
