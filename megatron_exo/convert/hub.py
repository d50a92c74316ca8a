"""A folder to the Hugging Face hub, with the hub's own library."""

from __future__ import annotations

from pathlib import Path

from megatron_exo.errors import UserError, reason


def check_hub(repository: str) -> None:
    """Refuse before any work what could not be pushed after it.

    Raises:
        UserError: the library is missing or offline, the hub cannot be reached, or nobody is logged in.
    """
    try:
        from huggingface_hub import HfApi, constants
    except ImportError:
        raise UserError("--push-to-hub needs the package huggingface_hub; pip install 'megatron-exo[hf]'") from None
    if constants.HF_HUB_OFFLINE:
        raise UserError("--push-to-hub cannot be met: HF_HUB_OFFLINE is set; unset it, or leave out --push-to-hub")
    try:
        HfApi().whoami()
        HfApi().create_repo(repository, exist_ok=True, private=True)
    except Exception as error:  # of the library, or of the one that it speaks HTTP with
        raise UserError(
            f"--push-to-hub {repository} cannot be met: {reason(error)}; log in with `hf auth login`, check the "
            "network, or leave out --push-to-hub"
        ) from error


def push(folder: Path, repository: str) -> str:
    """Upload a finished folder; the address of the commit.

    Raises:
        UserError: the hub refuses it; the folder stays, and ``hf upload`` can try again.
    """
    from huggingface_hub import HfApi

    try:
        return str(HfApi().upload_folder(repo_id=repository, folder_path=folder))
    except Exception as error:  # of the library, or of the one that it speaks HTTP with
        raise UserError(
            f"{folder} is whole, but the hub did not take it: {reason(error)}; try again with "
            f"`hf upload {repository} {folder}`"
        ) from error
