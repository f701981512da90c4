"""One image: from a file's bytes to 8-bit RGB, or why it is none."""

import io
import re
import warnings
from contextlib import contextmanager
from pathlib import Path

import datasets
import numpy as np
from PIL import Image

# Resizing the short side of a longer strip to that of a crop would take any amount of memory.
MAX_ASPECT_RATIO = 100
# Of a file that is opened. Of the largest image that may be decoded the pixels take some 700 MB.
MAX_FILE_BYTES = 2**30
# Those that Pillow decodes itself: PostScript, for one, it hands to an interpreter.
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "MPO", "JPEG2000", "AVIF", "TGA", "ICO", "HEIF")


class BadImageError(ValueError):
    """An image that can't be read, or holds nothing that can be learnt from."""


def decode_image(value: dict | Image.Image | None) -> Image.Image:
    """
    An image as 8-bit RGB.

    Args:
        value: `{"bytes": ..., "path": ...}`, as data sets store a file, or a decoded image.

    Raises:
        BadImageError: if it is missing, of no known format, cut short, a decompression bomb (more pixels than
            `PIL.Image.MAX_IMAGE_PIXELS`), a strip of more than `MAX_ASPECT_RATIO`, or has pixels that aren't finite.
    """
    image = open_image(value)
    if max(image.size) > MAX_ASPECT_RATIO * min(image.size):
        raise BadImageError(f"a strip of {image.width} x {image.height} pixels")
    with _as_bad_image():
        return to_rgb(image)


def open_image(value: dict | Image.Image | None) -> Image.Image:
    """The same of an image whose mode stays, such as a map of labels or of depth."""
    if value is None:
        raise BadImageError("no image")
    with _as_bad_image(), warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return value if isinstance(value, Image.Image) else _open_image(value)


@contextmanager
def _as_bad_image():
    try:
        yield
    except (BadImageError, MemoryError):
        raise
    # A decoder raises whatever a broken file leads it to.
    except Exception as error:
        # Without the addresses of objects and the folders of files.
        reason = re.sub(r"\s*(<[^>]*>|'[^']*[\\/][^']*')", "", str(error)).strip()
        raise BadImageError(reason.splitlines()[0] if reason else type(error).__name__) from error


def _open_image(value: dict) -> Image.Image:
    content, path = value["bytes"], value["path"]
    if content is None and path is not None:
        file = Path(path)
        # A row of a parquet file could name any address, device or pipe.
        if ":" in path and not file.is_file():
            raise BadImageError("an address in place of an image")
        if file.exists() and not file.is_file():
            raise BadImageError("no file in place of an image")
        size = file.stat().st_size
        if size > MAX_FILE_BYTES:
            raise BadImageError(f"a file of {size:,} bytes")
        content = file.read_bytes()
    if content is not None:
        Image.init()
        # Refuses a file by its first bytes, before anything else of it is read.
        Image.open(io.BytesIO(content), formats=[name for name in IMAGE_FORMATS if name in Image.OPEN])
    return datasets.Image().decode_example({"bytes": content, "path": path})


def to_rgb(image: Image.Image) -> Image.Image:
    """
    An image of any PIL mode (grey, palette, alpha, CMYK, 16 bit, float in 0..1 or 0..255) as 8-bit RGB.

    Raises:
        BadImageError: if a pixel is not finite.
    """
    if image.mode == "RGB":
        return image
    if image.mode.startswith(("I", "F")):
        # PIL clips these modes to 255 rather than scaling them.
        pixels = np.asarray(image, dtype=np.float32)
        if not np.isfinite(pixels).all():
            raise BadImageError("a pixel that is not finite")
        highest = pixels.max(initial=0.0)
        full_scale = 1.0 if image.mode == "F" and highest <= 1.0 else 255.0 if highest <= 255 else 65535.0
        image = Image.fromarray((pixels * (255.0 / full_scale)).clip(0, 255).astype(np.uint8))
    return image.convert("RGB")
