"""Bad images: what each of them gets, and that a run passes over them the same way every time."""

import io
import struct
import zlib

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tiny import picture

from raptor_hf.images import (
    BadImageError,
    CenterCrop,
    PixelValues,
    RandomResizedCrop,
    StreamedPixelValues,
    decode_image,
    load_image_dataset,
    load_image_processor,
    read_report,
    take_images,
    without_bad_images,
)

PROCESSOR = load_image_processor("no model here", 28)


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that says how large it is, and holds nothing."""
    chunks = b""
    for name, content in ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", b"")):
        chunks += struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    return b"\x89PNG\r\n\x1a\n" + chunks


def not_finite(value: float) -> bytes:
    pixels = np.full((8, 8), 0.5, dtype=np.float32)
    pixels[3, 3] = value
    return encoded(Image.fromarray(pixels), "TIFF")


BAD = {
    "none": (None, "no image"),
    "neither bytes nor path": ({"bytes": None, "path": None}, "both are None"),
    "zero bytes": (b"", "cannot identify image file"),
    "text": (b"<html>404</html>", "cannot identify image file"),
    "PostScript": (encoded(picture(0), "EPS"), "cannot identify image file"),
    "an address": ({"bytes": None, "path": "http://127.0.0.1:9/photo.jpg"}, "an address in place of an image"),
    "an address in disguise": (
        {"bytes": None, "path": 'reference::data:,{"version":1,"refs":{"":["http://127.0.0.1:9/x"]}}'},
        "an address in place of an image",
    ),
    "a device": ({"bytes": None, "path": "/dev/zero"}, "no file in place of an image"),
    "truncated JPEG": (encoded(picture(0), "JPEG")[:-40], "truncated"),
    "truncated PNG": (encoded(picture(0))[:-60], ""),
    "damaged PNG": (encoded(picture(0)).replace(b"IDAT", b"IDAX"), ""),
    "missing file": ({"bytes": None, "path": "/nowhere/photo.jpg"}, "No such file"),
    "bomb": (png_header(20_000, 20_000), "decompression bomb"),
    "half a bomb": (png_header(10_000, 10_000), "decompression bomb"),
    "strip": (encoded(Image.new("RGB", (1, 4000))), "a strip of 1 x 4000 pixels"),
    "NaN pixel": (not_finite(float("nan")), "a pixel that is not finite"),
    "infinite pixel": (not_finite(float("inf")), "a pixel that is not finite"),
}


def as_value(content):
    return {"bytes": content, "path": None} if isinstance(content, bytes) else content


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_refused_in_one_line(name):
    content, message = BAD[name]
    with pytest.raises(BadImageError) as info:
        decode_image(as_value(content))
    assert message in str(info.value) and "\n" not in str(info.value)
    assert "0x" not in str(info.value) and "/nowhere" not in str(info.value)


@pytest.mark.parametrize("size", [(1, 1), (2, 90), (90, 2), (3000, 40)])
def test_tiny_and_narrow_images_are_taken(size):
    image = decode_image(as_value(encoded(picture(0, size))))
    assert image.size == size
    for crop in (CenterCrop(PROCESSOR), RandomResizedCrop(PROCESSOR, 28)):
        pixels = crop(image, np.random.default_rng(0))
        assert pixels.shape == (3, 28, 28) and pixels.isfinite().all()


def dataset_with_bad_rows(bad=(2, 5), length=8) -> datasets.Dataset:
    rows = [encoded(picture(seed)) for seed in range(length)]
    for row in bad:
        rows[row] = rows[row][:-60]
    features = datasets.Features({"image": datasets.Image()})
    values = [{"bytes": content, "path": f"{i}.png"} for i, content in enumerate(rows)]
    return datasets.Dataset.from_dict({"image": values}, features=features)


def mean_of(image: Image.Image, rng) -> torch.Tensor:
    return torch.tensor(np.asarray(image)).float().mean()


def test_by_default_a_bad_image_is_named():
    with pytest.raises(BadImageError, match=r"An image can't be read \(2.png: .*\): mend it"):
        PixelValues(dataset_with_bad_rows(), mean_of)[2]


def test_another_row_takes_its_place_by_seed_and_index_alone():
    rows, again = (PixelValues(dataset_with_bad_rows(), mean_of, seed=3, replace_bad=True) for _ in range(2))
    good = [rows[index]["pixel_values"] for index in (0, 1, 3, 4, 6, 7)]
    replaced = [rows[2 + 8 * epoch]["pixel_values"] for epoch in range(12)]
    assert all(any(torch.equal(pixels, other) for other in good) for pixels in replaced)
    assert len({pixels.item() for pixels in replaced}) > 2
    for index in (5, 2, 10):
        assert torch.equal(rows[index]["pixel_values"], again[index]["pixel_values"])
    assert rows[2]["bad_images"] == 1 and rows[3]["bad_images"] == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_passed_over_comes_with_the_batch(workers):
    rows = PixelValues(dataset_with_bad_rows(), mean_of, replace_bad=True)
    batches = list(torch.utils.data.DataLoader(rows, batch_size=4, num_workers=workers))
    assert [int(batch["bad_images"].sum()) for batch in batches] == [1, 1]
    assert [text.split(":")[0] for batch in batches for text in read_report(batch)] == ["2.png", "5.png"]


def test_where_nothing_can_be_read_it_ends():
    dataset = dataset_with_bad_rows(bad=range(8))
    with pytest.raises(BadImageError, match="100 images in a row can't be read"):
        PixelValues(dataset, mean_of, replace_bad=True)[0]
    with pytest.raises(BadImageError, match="100 images in a row can't be read"):
        next(iter(StreamedPixelValues(dataset.to_iterable_dataset(), mean_of)))


def test_a_stream_goes_on_with_the_next_image_and_repeats_itself():
    def rows(count):
        stream = dataset_with_bad_rows().to_iterable_dataset(num_shards=2)
        iterator = iter(StreamedPixelValues(stream, mean_of, seed=1))
        return [next(iterator) for _ in range(count)]

    first, again = rows(13), rows(13)
    assert [row["pixel_values"] for row in first] == [row["pixel_values"] for row in again]
    # Thirteen good images are two passes and one image; in a pass two are bad.
    assert 4 <= sum(int(row["bad_images"]) for row in first) <= 6
    good = {mean_of(picture(seed), None).item() for seed in (0, 1, 3, 4, 6, 7)}
    assert {row["pixel_values"].item() for row in first[:6]} == good


def test_a_part_of_a_stream_goes_on_over_epochs_too():
    stream = dataset_with_bad_rows(bad=()).to_iterable_dataset(num_shards=2).take(3)
    iterator = iter(StreamedPixelValues(stream, mean_of))
    assert len({next(iterator)["pixel_values"].item() for _ in range(10)}) == 3


def test_images_to_measure_on_are_sorted_out_by_name():
    dataset, bad = without_bad_images(dataset_with_bad_rows())
    assert len(dataset) == 6 and [text.split(":")[0] for text in bad] == ["2.png", "5.png"]
    assert without_bad_images(dataset) == (dataset, [])
    with pytest.raises(ValueError, match=r"None of 2 images can be read \(0.png: .*\): give another data set"):
        without_bad_images(dataset_with_bad_rows((0, 1), length=2))


def named_rows(folder, paths) -> datasets.Dataset:
    """Of a parquet file whose rows name files and hold none."""
    schema = pa.schema({"image": pa.struct({"bytes": pa.binary(), "path": pa.string()})})
    rows = [{"image": {"bytes": None, "path": str(path)}} for path in paths]
    pq.write_table(pa.Table.from_pylist(rows, schema), folder / "named.parquet")
    return load_image_dataset(str(folder / "named.parquet"))


def test_files_that_rows_name_are_looked_at_again_once_they_have_changed(tmp_path):
    paths = [tmp_path / f"{seed}.png" for seed in range(3)]
    for seed, path in enumerate(paths):
        path.write_bytes(encoded(picture(seed)))
    paths[1].write_bytes(b"broken")
    assert [text.split(":")[0] for text in without_bad_images(named_rows(tmp_path, paths))[1]] == ["1.png"]
    paths[1].write_bytes(encoded(picture(1)))
    paths[2].write_bytes(b"broken as well")
    assert [text.split(":")[0] for text in without_bad_images(named_rows(tmp_path, paths))[1]] == ["2.png"]


def test_what_rows_name_is_not_read_where_it_is_no_image_file(tmp_path, monkeypatch):
    monkeypatch.setattr("fsspec.open", lambda *args, **kwargs: pytest.fail("an address was opened"))
    (tmp_path / "0.png").write_bytes(encoded(picture(0)))
    with (tmp_path / "huge.png").open("wb") as file:
        file.truncate(200 * 2**30)
    paths = [tmp_path / "0.png", tmp_path / "huge.png", "hf://datasets/a/b/x.png", "https://nowhere/x.png"]
    _, bad = without_bad_images(named_rows(tmp_path, paths))
    assert bad[0] == "huge.png: a file of 214,748,364,800 bytes"
    assert [text.split(": ")[1] for text in bad[1:]] == ["an address in place of an image"] * 2


def test_of_a_stream_files_on_the_hub_are_read(monkeypatch):
    monkeypatch.setattr("fsspec.open", lambda path, mode: io.BytesIO(encoded(picture(int(path[-5])))))
    rows = [{"image": {"bytes": None, "path": f"hf://datasets/a/b@main/{seed}.png"}} for seed in range(3)]
    features = datasets.Features({"image": datasets.Image()})
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows), features=features)
    taken, bad = without_bad_images(take_images(stream, 3))
    assert len(taken) == 3 and not bad
    first = next(iter(StreamedPixelValues(stream, mean_of)))["pixel_values"].item()
    assert first in {mean_of(picture(seed), None).item() for seed in range(3)}


def test_of_a_stream_files_on_the_hub_that_cannot_be_read_are_bad(monkeypatch):
    def refuse(path, mode):
        raise RuntimeError("no connection")

    monkeypatch.setattr("fsspec.open", refuse)
    rows = [{"image": {"bytes": None, "path": "hf://datasets/a/b@main/0.png"}}, {"image": picture(1)}]
    stream = datasets.IterableDataset.from_generator(
        lambda: iter(rows), features=datasets.Features({"image": datasets.Image()})
    )
    _, bad = without_bad_images(take_images(stream, 2))
    assert bad == ["0.png: an address in place of an image"]


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
def test_arrays_are_streamed_too(tmp_path, dtype):
    arrays = [np.full((3, 8, 8), value, dtype) / (1 if dtype == "uint8" else 255) for value in (0, 51, 255)]
    features = datasets.Features({"image": datasets.Array3D((3, 8, 8), dtype)})
    datasets.Dataset.from_dict({"image": arrays}, features=features).save_to_disk(str(tmp_path / "arrays"))
    stream = load_image_dataset(str(tmp_path / "arrays"), streaming=True, image_column="image")
    images = [row["image"] for row in stream.cast_column("image", datasets.Image(decode=True))]
    assert [image.getpixel((3, 3)) for image in images] == [(value,) * 3 for value in (0, 51, 255)]


@pytest.mark.parametrize("streaming", [False, True])
def test_an_empty_data_set_is_refused(tmp_path, streaming):
    datasets.Dataset.from_dict({"image": []}).to_parquet(tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match=r"can't be loaded|image columns|empty"):
        load_image_dataset(str(tmp_path / "empty.parquet"), streaming=streaming)
