"""What the README says can be copied and run."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\b(?:training|tests|raptor_hf)/[\w./]*\w", README))))
def test_every_path_that_the_readme_names_is_there(name):
    assert (Path(__file__).parents[1] / name).exists()
