import numpy as np
import pytest
from tiny import picture

from raptor_hf.images import RandomResizedCrop, load_image_processor
from raptor_hf.images.augmentation import OPERATIONS, trivial_augment


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("sign", [-1, 1])
def test_each_operation_gives_an_image_of_the_same_size(name, strength, sign):
    image = picture(0, (40, 32))
    result = OPERATIONS[name](image, strength, sign, (1, 2, 3))
    assert result.size == (40, 32) and result.mode == "RGB"
    same = np.array_equal(np.asarray(result), np.asarray(image))
    assert same or name != "identity"
    assert not same or strength < 1 or name in ("identity", "auto_contrast")


def test_it_is_decided_by_the_generator_alone():
    drawn = [np.asarray(trivial_augment(picture(0), np.random.default_rng(seed))) for seed in (1, 1, *range(2, 60))]
    assert np.array_equal(drawn[0], drawn[1])
    assert len({array.tobytes() for array in drawn}) > 40


def test_crops_are_altered_after_they_were_cut():
    processor = load_image_processor("no model here", 28)
    crops = [RandomResizedCrop(processor, 28, augment_ratio=ratio) for ratio in (0.0, 1.0)]
    differ = [
        not crops[0](picture(9), np.random.default_rng(s)).equal(crops[1](picture(9), np.random.default_rng(s)))
        for s in range(20)
    ]
    assert sum(differ) > 10
