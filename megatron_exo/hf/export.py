"""What a model's folder needs besides weights to load on a machine that has transformers and not ``megatron_exo``."""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_exo.hf import ExoFormerConfig

CODE_FILES = tuple(Path(__file__).with_name(f"{name}_exoformer.py") for name in ("configuration", "modeling"))
"""Copied into folders as they are: they import only torch, transformers and each other."""

AUTO_MAP = {
    "AutoConfig": "configuration_exoformer.ExoFormerConfig",
    "AutoModel": "modeling_exoformer.ExoFormerModel",
    "AutoModelForCausalLM": "modeling_exoformer.ExoFormerForCausalLM",
}


def write_code_and_config(config: ExoFormerConfig, folder: Path) -> None:
    """Write ``config.json``, whose ``auto_map`` names the classes, and the two files that define them.

    Args:
        config: of the model; its ``dtype`` is that in which the weights load unless another is asked for.
        folder: must exist.
    """
    config.architectures = ["ExoFormerForCausalLM"]
    config.auto_map = dict(AUTO_MAP)
    config.save_pretrained(folder)
    for file in CODE_FILES:
        shutil.copyfile(file, folder / file.name)
