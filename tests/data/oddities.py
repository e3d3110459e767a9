"""Damaged and odd inputs, each as a shard with one odd sample (key ``a``), and what must become of it.

``python -m tests.data.oddities FOLDER`` writes them all, to look at or to try on something else.
"""

from __future__ import annotations

import io
import json
import struct
import sys
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops
from tests.data.pictures import corners, encode, noise, write_shard

Member = tuple[str, bytes]
CAPTION: Member = ("a.txt", b"odd")
NEIGHBOUR: tuple[Member, ...] = (("z.png", encode(Image.new("RGB", (4, 4), "red"))), ("z.txt", b"sound"))


@dataclass(frozen=True)
class Oddity:
    """One odd sample in a shard of its own, before a sound one, and its right outcome: exactly one of the three."""

    name: str
    members: tuple[Member, ...]
    picture: Image.Image | None = None
    """It is decoded to (nearly) this."""
    skipped: str | None = None
    """It is skipped and counted, for a reason that matches this."""
    refused: str | None = None
    """The shard is refused at once, with an error that matches this."""
    shard: bytes | None = None
    """The whole shard, in place of members."""

    def write(self, folder: Path) -> Path:
        """The shard as a file."""
        path = folder / f"{self.name.replace(' ', '-')}.tar"
        if self.shard is not None:
            path.write_bytes(self.shard)
            return path
        return write_shard(path, [*self.members, *NEIGHBOUR])


def shown(name: str, data: bytes, picture: Image.Image | None = None, extension: str = "png") -> Oddity:
    return Oddity(name, ((f"a.{extension}", data), CAPTION), picture=picture or corners())


def skipped(name: str, data: bytes, reason: str) -> Oddity:
    return Oddity(name, (("a.jpg", data), CAPTION), skipped=reason)


def png(rows: Sequence[bytes], width: int, depth: int, colour: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of packed rows: bit depths and colour types that Pillow does not write."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, len(rows), depth, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + b"".join(chunk(*one) for one in chunks)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def grey(levels: NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(levels)


def packed(levels: NDArray[np.uint8], bits: int) -> list[bytes]:
    """Rows of ``bits`` bits per pixel, from values that fit into them."""
    expanded = (levels[:, :, None] >> np.arange(bits - 1, -1, -1)) & 1
    return [np.packbits(row).tobytes() for row in expanded.reshape(len(levels), -1).astype(np.uint8)]


def ramp(bits: int) -> NDArray[np.uint8]:
    return np.tile(np.arange(2**bits, dtype=np.uint8).repeat(2), (4, 1))


def depths() -> Iterator[Oddity]:
    for bits in (1, 2, 4):
        scaled = (ramp(bits).astype(int) * 255 // (2**bits - 1)).astype(np.uint8)
        yield shown(f"png grey {bits} bit", png(packed(ramp(bits), bits), ramp(bits).shape[1], bits, 0), grey(scaled))
    colours = bytes(np.random.default_rng(3).integers(0, 256, 48, dtype=np.uint8))
    pixels = np.frombuffer(colours, np.uint8).reshape(16, 3)[ramp(4)]
    yield shown("png palette 4 bit", png(packed(ramp(4), 4), 32, 4, 3, (b"PLTE", colours)), Image.fromarray(pixels))
    wide = np.asarray(corners()).astype(">u2") * 257
    yield shown("png rgb 16 bit", png([row.tobytes() for row in wide], 24, 16, 2))
    alpha = np.concatenate([wide, np.full((16, 24, 1), 65535, ">u2")], axis=2)
    yield shown("png rgba 16 bit", png([row.tobytes() for row in alpha], 24, 16, 6))
    levels = np.linspace(0, 65535, 64).astype(np.uint16).reshape(4, 16)
    high = grey((levels >> 8).astype(np.uint8))
    yield shown("png grey 16 bit", encode(Image.fromarray(levels)), high)
    yield shown("tiff grey 16 bit", encode(Image.fromarray(levels), "TIFF"), high, "tiff")
    two = np.stack([levels, np.full_like(levels, 65535)], axis=2).astype(">u2")
    yield shown("png grey alpha 16 bit", png([row.tobytes() for row in two], 16, 16, 4), high)


def modes() -> Iterator[Oddity]:
    picture = corners()
    best = {"quality": 95}
    yield shown("jpeg", encode(picture, "JPEG", **best), extension="jpg")
    yield shown("jpeg progressive", encode(picture, "JPEG", progressive=True, **best), extension="jpeg")
    yield shown("jpeg cmyk", encode(picture.convert("CMYK"), "JPEG", **best))
    yield shown("jpeg cmyk progressive", encode(picture.convert("CMYK"), "JPEG", progressive=True, **best))
    yield shown("jpeg grey", encode(picture.convert("L"), "JPEG", **best), picture.convert("L"))
    yield shown("png palette", encode(picture.quantize(4)))
    yield shown("png rgba opaque", encode(picture.convert("RGBA")))
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    yield shown("png clear", encode(clear), Image.new("RGB", (8, 8), "white"))
    half = Image.new("LA", (8, 8), (0, 128))
    yield shown("png grey alpha", encode(half), Image.new("RGB", (8, 8), (127,) * 3))
    keyed = Image.new("P", (8, 8), 0)
    keyed.putpalette([10, 20, 30])
    yield shown("png palette clear", encode(keyed, transparency=0), Image.new("RGB", (8, 8), "white"))
    film = [picture, ImageChops.invert(picture)]
    yield shown("gif film", encode(film[0], "GIF", save_all=True, append_images=film[1:]), extension="gif")
    yield shown("webp film", encode(film[0], "WEBP", save_all=True, append_images=film[1:], lossless=True))
    yield shown("webp", encode(picture, "WEBP", **best), extension="webp")
    yield shown("webp alpha", encode(clear, "WEBP", lossless=True), Image.new("RGB", (8, 8), "white"))
    yield shown("bmp", encode(picture, "BMP"), extension="bmp")
    yield shown("bmp palette", encode(picture.quantize(4), "BMP"))
    yield shown("bmp 1 bit", encode(Image.new("1", (9, 9), 1), "BMP"), Image.new("RGB", (9, 9), "white"))
    yield shown("tiff", encode(picture, "TIFF"), extension="tif")
    yield shown("tiff lzw", encode(picture, "TIFF", compression="tiff_lzw"))
    yield shown("tiff pages", encode(film[0], "TIFF", save_all=True, append_images=film[1:]))
    yield shown("tiff cmyk", encode(picture.convert("CMYK"), "TIFF"))
    for orientation, turn in ((3, "ROTATE_180"), (5, "TRANSPOSE"), (6, "ROTATE_90"), (8, "ROTATE_270")):
        exif = Image.Exif()
        exif[0x0112] = orientation
        stored = picture.transpose(Image.Transpose[turn])
        yield shown(f"exif orientation {orientation}", encode(stored, "JPEG", exif=exif, **best))
    zero = b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 0x011A, 5, 1, 26) + b"\0\0\0\0" + struct.pack("<II", 1, 0)
    for name, block in (("zero denominator", zero), ("nonsense", b"nonsense"), ("cut", zero[:13])):
        yield shown(f"exif {name}", encode(picture, "JPEG", exif=b"Exif\0\0" + block, **best))
    yield shown("icc nonsense", encode(picture, "PNG", icc_profile=b"no profile"))
    yield shown("bytes behind the end", encode(picture) + b"more" * 99)
    yield shown("one pixel", encode(Image.new("RGB", (1, 1), "red")), Image.new("RGB", (1, 1), "red"))
    yield shown("thin strip", encode(Image.new("L", (5000, 1), 7)), Image.new("L", (5000, 1), 7))


def broken() -> Iterator[Oddity]:
    jpeg, whole = encode(noise(32), "JPEG"), encode(noise(32))
    undecodable = "cannot be decoded|not a picture"
    yield skipped("empty", b"", "image is empty")
    yield skipped("html", b"<!DOCTYPE html><title>404</title>", "not a picture")
    yield skipped("svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a picture")
    yield skipped("postscript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture")
    yield skipped("pdf", b"%PDF-1.7\n1 0 obj", "not a picture")
    yield skipped("zeros", bytes(500), "not a picture")
    yield skipped("jpeg cut", jpeg[: len(jpeg) * 6 // 10], "cannot be decoded.*truncated")
    yield skipped("jpeg start only", jpeg[:20], undecodable)
    yield skipped("png cut", whole[: len(whole) * 6 // 10], "cannot be decoded")
    yield skipped("png flipped bit", whole[:300] + bytes([whole[300] ^ 1]) + whole[301:], "cannot be decoded")
    yield skipped("gif cut", encode(noise(32), "GIF")[:900], undecodable)
    yield skipped("webp cut", encode(noise(32), "WEBP")[:300], undecodable)
    yield skipped("tiff cut", encode(noise(32), "TIFF")[:400], undecodable)
    yield skipped("bmp cut", encode(noise(32), "BMP")[:400], "cannot be decoded")
    yield skipped("tiff floats", encode(Image.new("F", (4, 4), 0.5), "TIFF"), "floating-point pixels")
    tall = struct.pack(">IIBBBBB", 20_000, 20_000, 1, 0, 0, 0, 0)
    header = b"IHDR" + tall
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)) + whole[33:]
    yield skipped("png claims 400 megapixels", bomb, "over the limit|exceeds limit")
    text = zlib.compress(bytes(80 << 20), 1)
    fat = png([bytes(3)] * 2, 3, 8, 0, (b"zTXt", b"k\0\0" + text))
    yield Oddity("png text bomb", (("a.png", fat), CAPTION), skipped="cannot be decoded|not a picture")


def members() -> Iterator[Oddity]:
    image = encode(corners())
    picture: Member = ("a.png", image)
    yield Oddity("no caption", (picture,), skipped="no caption member")
    yield Oddity("no picture", (CAPTION,), skipped="no image member")
    yield Oddity("caption empty", (picture, ("a.txt", b" \n")), skipped="caption is empty")
    yield Oddity("caption latin-1", (picture, ("a.txt", "B\u00e4r".encode("latin-1"))), skipped="not UTF-8")
    yield Oddity("caption utf-16", (picture, ("a.txt", "hi".encode("utf-16"))), skipped="not UTF-8")
    yield Oddity("json broken", (picture, ("a.json", b"{")), skipped="not valid JSON")
    yield Oddity("json without caption", (picture, ("a.json", b'{"alt": "x"}')), skipped='no text under "caption"')
    yield Oddity("json null", (picture, ("a.json", b'{"caption": null}')), skipped='no text under "caption"')
    yield Oddity("json deep", (picture, ("a.json", b"[" * 100_000)), skipped="not valid JSON")
    half = json.dumps({"caption": "\ud83d"}).encode()
    yield Oddity("json half a surrogate", (picture, ("a.json", half)), skipped="lone surrogate")
    yield Oddity("caption with mark", (picture, ("a.txt", b"\xef\xbb\xbfodd\r\n")), picture=corners())
    yield Oddity("caption in json", (picture, ("a.json", b'{"caption": "odd"}')), picture=corners())
    yield Oddity("capitals", (("a.PNG", image), ("a.TXT", b"odd")), picture=corners())
    yield Oddity("wrong extension", (("a.jpg", image), CAPTION), picture=corners())
    yield Oddity("dots in names", (("a.b.png", image), ("a.b.txt", b"odd")), picture=corners())
    yield Oddity("dot in a folder", (("v1.0/a.png", image), ("v1.0/a.txt", b"odd")), picture=corners())
    hidden = (("._a.png", b"x"), (".DS_Store", b"x"), ("README", b"x"))
    yield Oddity("hidden files", (*hidden, picture, CAPTION), picture=corners())
    yield Oddity("other members", (("a.cls", b"7"), picture, CAPTION, ("a.npy", b"x")), picture=corners())
    yield Oddity("two pictures", (picture, ("a.jpg", image), CAPTION), refused="has jpg and png")
    yield Oddity("key twice", (picture, CAPTION, picture, CAPTION), refused="occurs twice")
    apart = (picture, ("b.png", image), CAPTION, ("b.txt", b"x"))
    yield Oddity("members apart", apart, refused="do not lie together")


def shards() -> Iterator[Oddity]:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in (("a.png", encode(corners())), CAPTION):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    whole = out.getvalue()
    end = whole.rindex(b"odd") + 512 - whole.rindex(b"odd") % 512
    yield Oddity("shard of nothing", (), shard=b"", refused="not a readable|truncated|no samples")
    yield Oddity("shard is a page", (), shard=b"<html>503</html>" * 99, refused="not a readable")
    yield Oddity("shard cut in a member", (), shard=whole[:700], refused="truncated|not a readable")
    yield Oddity("shard unclosed", (), shard=whole[:end], refused="truncated: no end-of-archive")
    yield Oddity("shard damaged", (), shard=whole[:1024] + b"x" * 512 + whole[1536:], refused="damaged|not a readable")
    yield Oddity("shard of no samples", (), shard=bytes(10240), refused="no samples")


def oddities() -> list[Oddity]:
    """All of them, by name."""
    return sorted((*depths(), *modes(), *broken(), *members(), *shards()), key=lambda oddity: oddity.name)


if __name__ == "__main__":
    for oddity in oddities():
        print(oddity.write(Path(sys.argv[1])))
