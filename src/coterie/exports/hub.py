"""Uploads of exported folders to the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import HfApi

from coterie.errors import CoterieError


def push(folder: Path, name: str) -> str:
    """Upload a folder to a repository on the hub; return the repository's address.

    A repository that does not exist is created as a private one. An existing repository keeps its
    visibility.

    Args:
        folder: The folder.
        name: The repository, such as "anna/model".

    Raises:
        CoterieError: The upload failed.
    """
    api = HfApi()
    try:
        url = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(
            folder_path=folder, repo_id=url.repo_id, commit_message="Export from Coterie"
        )
    except Exception as error:  # exception classes depend on the hub's client and the network
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CoterieError(
            f"The export is in {folder}, but could not be uploaded to {name!r}: {reason} Log in "
            "with `hf auth login`, or upload the folder later with `hf upload`."
        ) from error
    return str(url)
