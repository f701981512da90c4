"""Sharing a Raptor: saving it with its model card, and pushing both to the Hub."""

import tempfile
from os import PathLike
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.utils import validate_repo_id
from transformers import BaseImageProcessor, PreTrainedModel

from .model_card import UNNAMED, model_card

# Of the card that Transformers' own `push_to_hub` writes where there is none.
GENERIC_HEADING = "# Model Card for Model ID"
# All that travels to the Hub: a training folder also holds checkpoints, pickles and local paths.
PUSHED_FILES = [
    "README.md",
    "config.json",
    "preprocessor_config.json",
    "*.safetensors",
    "*.safetensors.index*.json",
    "configuration_raptor.py",
    "modeling_raptor.py",
    "patch_components.png",
]


def save_with_card(
    model: PreTrainedModel,
    image_processor: BaseImageProcessor | None,
    results: dict | None,
    folder: str | PathLike,
    **card_kwargs,
) -> Path:
    """
    Saves a Raptor (safetensors, each block once), its image processor and its card (README.md) to a folder.

    Args:
        image_processor: may be left out with `None`; the card's code then needs one from elsewhere.
        results: see [`model_card`], which also takes `card_kwargs`.

    Returns:
        The folder.
    """
    folder = Path(folder)
    card = model_card(model, results, **card_kwargs)
    model.save_pretrained(folder)
    if image_processor is not None:
        image_processor.save_pretrained(folder)
    card.save(folder / "README.md")
    return folder


def push_to_hub(
    model: PreTrainedModel | str | PathLike,
    repo_id: str,
    *,
    image_processor: BaseImageProcessor | None = None,
    results: dict | None = None,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload Raptor",
    **card_kwargs,
) -> str:
    """
    Pushes a Raptor with its card to the Hub; the repository is made if it isn't there.

    Only the model, its code, its image processor and its card are sent: nothing else that lies in the folder.

    Args:
        model: a Raptor, or a folder that [`save_with_card`] has written; the name is filled in in its card.
        repo_id: `user/name`, or `name` for the user's own.
        image_processor, results: see [`save_with_card`]; only with a model, as are the `card_kwargs`.
        token: defaults to that of `hf auth login`.
        private: whether a new repository is private.
        revision: the branch to push to, made from the main one if it isn't there.

    Returns:
        The address of the commit.

    Raises:
        ValueError: if the folder isn't a saved Raptor with its card, or `results` and the like are given for one.
        huggingface_hub.errors.HFValidationError: if `repo_id` is no name for a repository.
        huggingface_hub.errors.HfHubHTTPError: if the Hub refuses.
    """
    if isinstance(model, PreTrainedModel):
        with tempfile.TemporaryDirectory() as folder:
            save_with_card(model, image_processor, results, folder, **card_kwargs)
            return push_to_hub(
                folder, repo_id, token=token, private=private, revision=revision, commit_message=commit_message
            )
    if image_processor is not None or results is not None or card_kwargs:
        raise ValueError("A folder is pushed as it was saved: give image_processor and results to save_with_card.")
    validate_repo_id(repo_id)
    folder = Path(model)
    for name in ("config.json", "README.md"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: save the model there with raptor_hf.hub.save_with_card first.")
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    pushed = [path for path in folder.iterdir() if any(path.match(pattern) for pattern in PUSHED_FILES)]
    operations = [CommitOperationAdd(path.name, path) for path in sorted(pushed) if path.name != "README.md"]
    # The folder's own card keeps no name, so that it can be pushed to another.
    card = (folder / "README.md").read_text(encoding="utf-8").replace(UNNAMED, repo_id)
    operations.append(CommitOperationAdd("README.md", card.encode()))
    commit = api.create_commit(repo_id, operations, commit_message=commit_message, revision=revision)
    return commit.commit_url


def replace_generic_card(model: PreTrainedModel, folder: str | PathLike, repo_id: str):
    """Writes a Raptor's card over the card that Transformers makes up, keeping its tags; any other card stays."""
    path = Path(folder) / "README.md"
    generic = ModelCard.load(path)
    if GENERIC_HEADING in generic.text:
        card = model_card(model, repo_id=repo_id)
        card.data.tags += [tag for tag in generic.data.tags or [] if tag not in card.data.tags]
        card.save(path)
