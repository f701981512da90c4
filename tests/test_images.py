import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from tiny import picture
from transformers import BitImageProcessorPil, Siglip2ImageProcessorPil

from raptor_hf.images import (
    CenterCrop,
    EpochSampler,
    PixelValues,
    RandomResizedCrop,
    StreamedPixelValues,
    crop_size,
    load_image_dataset,
    load_image_processor,
    split_names,
    take_images,
    to_rgb,
)

PROCESSOR = BitImageProcessorPil(
    size={"shortest_edge": 32}, crop_size={"height": 28, "width": 28}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2] * 3
)


def dataset_of(pictures, column="image"):
    return datasets.Dataset.from_dict(
        {column: pictures, "n": list(range(len(pictures)))},
        features=datasets.Features({column: datasets.Image(), "n": datasets.Value("int64")}),
    )


@pytest.fixture
def folder(tmp_path):
    """The same four pictures in each form that a data set comes in."""
    pictures = [picture(seed) for seed in range(4)]
    (tmp_path / "images" / "train").mkdir(parents=True)
    for index, image in enumerate(pictures):
        image.save(tmp_path / "images" / "train" / f"{index}.png")
    dataset = dataset_of(pictures)
    (tmp_path / "parquet").mkdir()
    dataset.to_parquet(tmp_path / "parquet" / "train.parquet")
    dataset.save_to_disk(tmp_path / "disk")
    datasets.DatasetDict(train=dataset).save_to_disk(tmp_path / "disk_dict")
    return tmp_path


@pytest.mark.parametrize("name", ["images", "parquet", "parquet/train.parquet", "disk", "disk_dict"])
@pytest.mark.parametrize("streaming", [False, True])
def test_every_form_of_data_set_gives_the_same_pictures(folder, name, streaming):
    dataset = load_image_dataset(str(folder / name), "train", streaming=streaming)
    rows = list(dataset)
    assert len(rows) == 4
    for seed, row in enumerate(rows):
        np.testing.assert_array_equal(np.array(row["image"]), np.array(picture(seed)))


def test_parquet_without_image_features_holds_bytes(tmp_path):
    dataset = dataset_of([picture(0)]).cast_column("image", datasets.Image(decode=False))
    raw = datasets.Dataset.from_list([{"photo": row["image"]} for row in dataset])
    raw.to_parquet(tmp_path / "raw.parquet")
    (row,) = load_image_dataset(str(tmp_path / "raw.parquet"))
    np.testing.assert_array_equal(np.array(row["image"]), np.array(picture(0)))


def test_columns_are_found_or_named(tmp_path):
    features = datasets.Features({"photo": datasets.Image(), "mask": datasets.Image()})
    datasets.Dataset.from_dict({"photo": [picture(0)], "mask": [picture(1)]}, features=features).save_to_disk(tmp_path)
    with pytest.raises(ValueError, match="2 image columns among photo, mask: name one with"):
        load_image_dataset(str(tmp_path))
    with pytest.raises(ValueError, match="no column picture"):
        load_image_dataset(str(tmp_path), image_column="picture")
    (row,) = load_image_dataset(str(tmp_path), image_column="mask")
    np.testing.assert_array_equal(np.array(row["image"]), np.array(picture(1)))


def test_refuses_what_is_not_there(folder):
    with pytest.raises(ValueError, match=r"Data set .*nothing can't be loaded"):
        load_image_dataset(str(folder / "nothing"))
    with pytest.raises(ValueError, match="has no split dev: it has train"):
        load_image_dataset(str(folder / "parquet"), "dev")
    dataset_of([]).to_parquet(folder / "empty.parquet")
    with pytest.raises(ValueError, match="no data"):
        load_image_dataset(str(folder / "empty.parquet"))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "CMYK", "1", "YCbCr"])
def test_eight_bit_modes_become_rgb(mode):
    image = to_rgb(picture(0, mode=mode))
    assert image.mode == "RGB"
    assert np.array(image).std() > 10


def test_sixteen_bit_and_float_images_are_scaled_not_clipped():
    grey = np.arange(0, 256, dtype=np.uint8).reshape(16, 16)
    expected = np.repeat(grey[..., None], 3, axis=2)
    for pixels in (grey.astype(np.uint16) * 257, grey.astype(np.int32) * 257, grey.astype(np.float32) / 255):
        np.testing.assert_allclose(np.array(to_rgb(Image.fromarray(pixels))), expected, atol=1)
    np.testing.assert_allclose(np.array(to_rgb(Image.fromarray(grey.astype(np.float32)))), expected, atol=1)


def test_random_crop_is_the_picture_when_it_is_all_of_it(monkeypatch):
    image = picture(0, (28, 28))
    crop = RandomResizedCrop(PROCESSOR, 28, scale=(1, 1), flip=False)
    monkeypatch.setattr("raptor_hf.images.crops.CROP_RATIO", (1, 1))
    pixels = crop(image, np.random.default_rng(0))
    plain = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    mean = torch.tensor([0.4, 0.5, 0.6])[:, None, None]
    torch.testing.assert_close(pixels, (plain - mean) / 0.2)


def test_random_crop_covers_its_share_and_flips_half_the_time():
    ramp = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), (256, 1)))
    crop = RandomResizedCrop(PROCESSOR, 28, scale=(0.25, 0.25))
    rows = torch.stack([crop(ramp, np.random.default_rng(seed))[0, 0] for seed in range(400)]) * 0.2 + 0.4
    widths = (rows[:, -1] - rows[:, 0]).abs() * 28 / 27
    assert 0.4 < widths.min() < 0.46 and 0.54 < widths.max() < 0.6
    assert 0.4 < (rows[:, 0] > rows[:, -1]).float().mean() < 0.6
    assert rows.min() < 0.03 and rows.max() > 0.97


def test_centre_crop_is_the_processors(tmp_path):
    image = picture(1, (64, 40), mode="P")
    pixels = CenterCrop(PROCESSOR)(image, np.random.default_rng(0))
    torch.testing.assert_close(pixels, PROCESSOR(image.convert("RGB"), return_tensors="pt")["pixel_values"][0])
    PROCESSOR.save_pretrained(tmp_path)
    resized = load_image_processor(str(tmp_path), 56)
    assert crop_size(resized) == 56 and resized.size["shortest_edge"] == 64
    assert CenterCrop(resized)(image, None).shape == (3, 56, 56)


def test_a_model_without_a_processor_gets_dinov2s_own(tmp_path):
    processor = load_image_processor(str(tmp_path), 112)
    assert crop_size(processor) == 112 and processor.size["shortest_edge"] == 128
    assert list(processor.image_mean) == [0.485, 0.456, 0.406]


def test_the_same_index_gives_the_same_crop_and_another_epoch_another():
    dataset = dataset_of([picture(seed) for seed in range(3)])
    rows = PixelValues(dataset, RandomResizedCrop(PROCESSOR, 28), seed=5)
    again = PixelValues(dataset, RandomResizedCrop(PROCESSOR, 28), seed=5)
    torch.testing.assert_close(rows[4]["pixel_values"], again[4]["pixel_values"], rtol=0, atol=0)
    assert not torch.equal(rows[1]["pixel_values"], rows[4]["pixel_values"])
    other = PixelValues(dataset, RandomResizedCrop(PROCESSOR, 28), seed=6)
    assert not torch.equal(rows[4]["pixel_values"], other[4]["pixel_values"])


def test_sampler_shuffles_each_epoch_anew_and_repeats_itself():
    orders = [list(EpochSampler(10, 0, lambda epoch=epoch: epoch)) for epoch in (0, 1, 1)]
    assert orders[1] == orders[2]
    assert sorted(orders[0]) == list(range(10)) and sorted(orders[1]) == list(range(10, 20))
    assert [i % 10 for i in orders[0]] != [i % 10 for i in orders[1]]


def test_stream_gives_every_row_once_in_each_epoch_across_workers(folder):
    dataset = load_image_dataset(str(folder / "disk"), "train", streaming=True)
    stream = StreamedPixelValues(dataset, lambda image, rng: torch.tensor(np.array(image)).float().mean(), seed=1)
    expected = sorted(float(np.array(picture(seed)).mean()) for seed in range(4))
    for workers in (0, 2):
        loader = iter(torch.utils.data.DataLoader(stream, batch_size=1, num_workers=workers))
        for _ in range(3):
            assert sorted(next(loader)["pixel_values"].item() for _ in range(4)) == pytest.approx(expected, abs=1e-3)


def test_images_taken_from_a_stream_keep_their_bytes(tmp_path):
    (tmp_path / "images").mkdir()
    picture(0).save(tmp_path / "images" / "0.jpg", quality=30)
    stream = load_image_dataset(str(tmp_path / "images"), streaming=True)
    (row,) = take_images(stream, 5)
    np.testing.assert_array_equal(np.array(row["image"]), np.array(Image.open(tmp_path / "images" / "0.jpg")))


def test_a_single_split_is_not_given_under_another_name(folder):
    for name in ("parquet/train.parquet", "disk"):
        assert split_names(str(folder / name)) == ["train"]
        with pytest.raises(ValueError, match="has no split validation: it has train"):
            load_image_dataset(str(folder / name), "validation")


def test_a_processor_without_a_crop_is_resized_to_the_size_asked_for(tmp_path):
    whole = BitImageProcessorPil(size={"height": 32, "width": 32}, do_center_crop=False)
    whole.save_pretrained(tmp_path)
    resized = load_image_processor(str(tmp_path), 64)
    assert crop_size(resized) == 64
    assert CenterCrop(resized)(picture(0), None).shape == (3, 64, 64)


def test_an_epoch_leaves_out_what_does_not_fill_a_global_batch():
    sampler = EpochSampler(10, 0, lambda: 2, multiple_of=4)
    assert len(sampler) == len(list(sampler)) == 8
    assert len(set(sampler)) == 8 and set(sampler) <= set(range(20, 30))


def test_the_processor_of_a_model_that_takes_patches_gives_images(tmp_path):
    Siglip2ImageProcessorPil(patch_size=16, max_num_patches=256).save_pretrained(tmp_path)
    for size in (None, 64):
        processor = load_image_processor(str(tmp_path), size)
        pixels = processor(picture(0), return_tensors="pt")["pixel_values"]
        assert pixels.shape == (1, 3, size or 256, size or 256)
