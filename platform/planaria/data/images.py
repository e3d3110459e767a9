"""The one way from encoded pictures to arrays: bytes -> uint8 RGB -> the model's float32 input."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from planaria.data.sample import Pixels
from planaria.recipe import BadSample

MAX_PIXELS = 178_000_000
"""Largest picture that is decoded (0.5 GB as RGB): a few kilobytes of PNG can claim far more."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""What may be opened. The rest of Pillow's readers stay shut: some start other programs."""

_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def reuse_memory() -> None:
    """Let Pillow keep up to four freed pictures' memory (at most 16 MiB each) for the next ones.

    For processes that decode without end: fresh memory costs a page fault per 4 KiB, a third of the time of a JPEG.
    """
    Image.core.set_blocks_max(4)


def decode_image(data: bytes, key: str, side: int | None = None) -> Pixels:
    """Decode a picture of any supported format and mode to uint8 RGB [height, width, 3].

    The EXIF orientation is applied, transparency is laid on white, 16-bit greys keep their high byte,
    and an animation gives its first frame.

    Args:
        data: the encoded picture.
        key: names the sample in errors.
        side: makes it a square of this side, as :func:`fit` does; None: it keeps its size.

    Raises:
        BadSample: empty, truncated, no picture at all, or larger than :data:`MAX_PIXELS`.
    """
    if not data:
        raise BadSample(key, "the image is empty (0 bytes)")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:  # only the header has been read so far
                raise BadSample(key, f"the image has {width} x {height} pixels, over the limit of {MAX_PIXELS}")
            image.load()
            rgb = _to_rgb(_upright(image))
            return np.ascontiguousarray(rgb if side is None else _square(rgb, side), dtype=np.uint8)
    except (BadSample, MemoryError):
        raise
    except UnidentifiedImageError:
        raise BadSample(key, f"not a picture in a known format ({', '.join(FORMATS)}): {data[:16]!r}") from None
    except Exception as error:  # Pillow's readers raise nearly anything on damaged bytes
        raise BadSample(key, f"the image cannot be decoded: {type(error).__name__}: {error}") from error


def _upright(image: Image.Image) -> Image.Image:
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception:  # a broken EXIF block says nothing about the pixels
        return image
    if orientation not in _UPRIGHT:
        return image
    return image.transpose(_UPRIGHT[orientation])


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    if image.mode.startswith("I"):
        # convert("RGB") would clip 16-bit values at 255, which leaves nearly two levels.
        high = np.clip(np.asarray(image).astype(np.int64) >> 8, 0, 255).astype(np.uint8)
        return Image.fromarray(np.repeat(high[:, :, None], 3, axis=2))
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _square(image: Image.Image, size: int) -> Image.Image:
    if image.size == (size, size):
        return image
    width, height = image.size
    # Resizing only the centre box equals resize-then-crop, but a 1 x 100000 strip stays cheap.
    side = min(height, width)
    left, top = (width - side) / 2, (height - side) / 2
    return image.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))


def fit(rgb: Pixels, size: int, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """A picture in the model's size, channels first: uint8 [3, size, size].

    The shorter side is resized to ``size`` (bicubic) and the centre is cut out; a square picture is
    only resized, one of the right size is left alone.

    Args:
        rgb: uint8 [height, width, 3].
        size: side in pixels.
        out: where to write the result, e.g. a place in a batch; by default new memory.

    Raises:
        ValueError: ``rgb`` is not uint8 [height, width, 3].
    """
    if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != 3 or rgb.size == 0:
        raise ValueError(f"expected uint8 [height, width, 3] with pixels, found {rgb.dtype} {list(rgb.shape)}")
    if rgb.shape[:2] != (size, size):
        rgb = np.asarray(_square(Image.fromarray(rgb), size))
    if out is None:
        out = np.empty((3, size, size), np.uint8)
    out[...] = rgb.transpose(2, 0, 1)
    return out


def preprocess(rgb: Pixels, size: int, mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float32]:
    """Model input from one picture: float32 [3, size, size]; see :func:`fit` and :func:`normalise`."""
    return normalise(fit(rgb, size)[None], mean, std)[0]


def normalise(bytes_NCHW: NDArray[np.uint8], mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float32]:
    """``(bytes / 255 - mean) / std`` per channel: float32 [N, channels, height, width].

    Args:
        bytes_NCHW: pictures, channels first.
        mean: per channel, in 0..1.
        std: per channel.
    """
    out = np.empty(bytes_NCHW.shape, np.float32)
    for picture, found in zip(out, bytes_NCHW, strict=True):
        # Plane by plane and in place: a plane stays in the cache, whole arrays in between would not (4x faster).
        for channel, plane in enumerate(picture):
            plane[...] = found[channel]
            plane /= np.float32(255)
            plane -= np.float32(mean[channel])
            plane /= np.float32(std[channel])
    return out
