"""A few photographs that come inside scikit-learn and scikit-image, as an image data set. No download."""

import datasets
from PIL import Image
from sklearn.datasets import load_sample_images

OF_SCIKIT_IMAGE = ("astronaut", "chelsea", "coffee", "rocket")


def load_photographs_dataset(split: str) -> datasets.Dataset:
    """
    The split `test`, with a column `image`: a temple and a flower of scikit-learn and, where scikit-image is
    installed, an astronaut, a cat, a cup of coffee and a rocket.

    Raises:
        KeyError: on another split.
    """
    if split != "test":
        raise KeyError(split)
    pictures = load_sample_images().images
    try:
        import skimage.data
    except ImportError:
        pass
    else:
        pictures += [getattr(skimage.data, name)() for name in OF_SCIKIT_IMAGE]
    rows = {"image": [Image.fromarray(picture) for picture in pictures]}
    return datasets.Dataset.from_dict(rows, features=datasets.Features({"image": datasets.Image()}))
