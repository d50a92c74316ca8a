"""Loads what is in a Hugging Face folder with transformers, as data: no code in it is run, nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from megatron_exo.convert.hf_reading import check_plain, read_folder
from megatron_exo.errors import UserError, reason
from megatron_exo.hf import ExoFormerForCausalLM


def load_model(kind: Any, folder: Path, **settings: Any) -> Any:
    """The model in a folder, in eval mode.

    Args:
        kind: the class of transformers that loads it. For an ExoFormer, its sizes and tensors are held against each
            other first: transformers makes what is missing, whatever its size.
        settings: of ``from_pretrained``.

    Raises:
        UserError: the folder does not hold the model, or holds it as pickles.
    """
    if check_plain(folder) or kind is ExoFormerForCausalLM:
        read_folder(folder)
    try:
        return kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, **settings
        ).eval()
    except Exception as error:  # transformers, and what it imports for a model, raise whatever they like
        raise UserError(f"{folder} cannot be loaded as a model: {reason(error)}; copy or export it again") from error


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder.

    Raises:
        UserError: there is none that can be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above; the tokenizers library raises bare Exception
        raise UserError(f"{folder} has no tokenizer that can be loaded: {reason(error)}; copy one there") from error
