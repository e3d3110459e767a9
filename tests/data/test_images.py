from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageChops
from tests.data.pictures import corners, encode, noise

from planaria.data.images import MAX_PIXELS, decode_image, fit, preprocess
from planaria.recipe import BadSample


def near(picture: np.ndarray, expected: Image.Image, tolerance: float = 12) -> bool:
    wanted = np.asarray(expected.convert("RGB"), dtype=np.int64)
    return picture.shape == wanted.shape and float(np.abs(picture - wanted).mean()) < tolerance


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_every_format(kind: str) -> None:
    options = {"quality": 95} if kind in ("JPEG", "WEBP") else {}
    picture = decode_image(encode(corners(), kind, **options), "k")
    assert picture.dtype == np.uint8 and near(picture, corners())


def test_cmyk_jpeg_keeps_its_colours() -> None:
    assert near(decode_image(encode(corners().convert("CMYK"), "JPEG", quality=95), "k"), corners())


def test_sixteen_bit_grey_keeps_its_levels() -> None:
    ramp = np.linspace(0, 65535, 256 * 4).astype(np.uint16).reshape(4, 256)
    picture = decode_image(encode(Image.fromarray(ramp)), "k")
    assert (picture[:, :, 0] == ramp >> 8).all() and (picture[:, :, 1] == picture[:, :, 2]).all()


def test_palette_with_transparency_is_laid_on_white() -> None:
    image = Image.new("P", (4, 2), 0)
    image.putpalette([10, 20, 30, 200, 100, 0])
    image.putpixel((1, 0), 1)
    picture = decode_image(encode(image, transparency=0), "k")
    assert picture[0, 0].tolist() == [255, 255, 255] and picture[0, 1].tolist() == [200, 100, 0]


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_transparent_colour_key_is_laid_on_white(mode: str) -> None:
    image = Image.new(mode, (2, 1), "black")
    image.putpixel((1, 0), 90 if mode == "L" else (90, 90, 90))
    picture = decode_image(encode(image, transparency=0 if mode == "L" else (0, 0, 0)), "k")
    assert picture.tolist() == [[[255] * 3, [90] * 3]]


@pytest.mark.parametrize(("mode", "colour"), [("LA", (0, 128)), ("RGBA", (0, 0, 0, 128))])
def test_half_transparency_blends_with_white(mode: str, colour: tuple[int, ...]) -> None:
    picture = decode_image(encode(Image.new(mode, (2, 2), colour)), "k")
    assert np.abs(picture.astype(int) - 127).max() <= 1


def test_animation_gives_its_first_frame() -> None:
    frames = [corners(), ImageChops.invert(corners())]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert Image.open(io.BytesIO(data)).n_frames == 2
    assert near(decode_image(data, "k"), corners())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation: int) -> None:
    turned = {  # what a camera stores so that orientation N shows the upright picture
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    stored = corners() if turned is None else corners().transpose(turned)
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert near(decode_image(encode(stored, "JPEG", quality=95, exif=exif), "k"), corners())


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_exif_does_not_cost_the_picture() -> None:
    # A TIFF block with one rational resolution of 1/0, then one cut in the middle.
    zero = b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 0x011A, 5, 1, 26) + b"\0\0\0\0" + struct.pack("<II", 1, 0)
    for block in (zero, b"II*\0\x08\0\0\0\xff\x00\x12", b"nonsense"):
        data = encode(corners(), "JPEG", quality=95, exif=b"Exif\0\0" + block)
        assert near(decode_image(data, "k"), corners())


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><title>404</title>", "not a picture"),
        (encode(noise(), "JPEG")[: int(len(encode(noise(), "JPEG")) * 0.6)], "cannot be decoded"),
        (encode(noise())[:2000], "cannot be decoded"),
        (encode(noise(), "WEBP")[:500], r"decoded|not a picture"),
        (encode(noise(), "JPEG")[:20], r"decoded|not a picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),
    ],
    ids=["zero-byte", "html", "jpeg-60%", "png", "webp", "jpeg-header", "postscript"],
)
def test_damage_is_a_bad_sample(data: bytes, cause: str) -> None:
    with pytest.raises(BadSample, match=cause) as caught:
        decode_image(data, "shard/key")
    assert caught.value.key == "shard/key"


def claim(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header claims a size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_pixel_bomb_is_refused_from_its_header() -> None:
    with pytest.raises(BadSample, match=r"exceeds limit|over the limit"):
        decode_image(claim(20_000, 20_000), "bomb")
    with pytest.raises(BadSample, match="over the limit"):
        decode_image(claim(1000, MAX_PIXELS // 1000 + 1), "bomb")


def test_preprocess_normalises_and_leaves_the_right_size_alone() -> None:
    rgb = np.random.default_rng(1).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 1.0)
    out = preprocess(rgb, 32, mean, std)
    assert out.dtype == np.float32 and out.shape == (3, 32, 32) and out.flags["C_CONTIGUOUS"]
    expected = (rgb.astype(np.float64) / 255 - mean) / std
    np.testing.assert_allclose(out.transpose(1, 2, 0), expected, rtol=1e-5, atol=1e-6)


def test_preprocess_takes_the_centre_and_keeps_proportions() -> None:
    rgb = np.zeros((10, 30, 3), dtype=np.uint8)
    rgb[:, 10:20] = 255
    assert (preprocess(rgb, 10, (0, 0, 0), (1, 1, 1)) == 1).all()
    tall = np.ascontiguousarray(rgb.transpose(1, 0, 2))
    assert preprocess(tall, 20, (0, 0, 0), (1, 1, 1)).mean() > 0.97
    # Upscaled and downscaled quarters stay where they were.
    square = np.asarray(corners(32, 32))
    for size in (16, 48):
        out = preprocess(square, size, (0, 0, 0), (1, 1, 1))
        assert out[:, 2, 2].tolist() == [1, 0, 0] and out[:, -3, 2].tolist() == [0, 0, 1]


def test_preprocess_of_a_thin_strip_is_cheap() -> None:
    assert preprocess(np.zeros((1, 500_000, 3), dtype=np.uint8), 224, (0, 0, 0), (1, 1, 1)).shape == (3, 224, 224)


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 4), (0, 4, 3)])
def test_preprocess_refuses_other_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected uint8"):
        preprocess(np.zeros(shape, dtype=np.uint8), 4, (0, 0, 0), (1, 1, 1))


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "I;16", "CMYK"])
@pytest.mark.parametrize("size", [(50, 30), (16, 16), (7, 90)])
def test_decoding_to_a_square_equals_decoding_and_then_fitting(mode: str, size: tuple[int, int]) -> None:
    random = np.random.default_rng(3)
    if mode == "I;16":
        image = Image.fromarray(random.integers(0, 2**16, size[::-1]).astype(np.uint16))
    else:
        image = Image.fromarray(random.integers(0, 256, (*size[::-1], 3)).astype(np.uint8)).convert(mode)
    data = io.BytesIO()
    image.save(data, "TIFF")
    picture = decode_image(data.getvalue(), "k", 16)
    assert picture.shape == (16, 16, 3) and picture.flags.c_contiguous
    assert (picture.transpose(2, 0, 1) == fit(decode_image(data.getvalue(), "k"), 16)).all()
