#!/usr/bin/env python
"""Convert a Hugging Face folder of an ExoFormer to a training checkpoint, which any layout of ranks loads.

  python tools/convert_from_hf.py models/a checkpoints/a
  torchrun --nproc-per-node 4 tools/convert_from_hf.py models/a checkpoints/a --tensor-model-parallel-size 4

FOLDER holds config.json and safetensors files; they are read as data, and no code in the folder is run. Any further
argument, such as a layout for a model that one process cannot hold, or --tokenizer-type and --tokenizer-model, is
Megatron's. The weights keep their dtype unless --bf16 or --fp16 is given. The checkpoint holds weights only: go on from
it with --load SAVE --finetune.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_exo import platform
from megatron_exo.errors import one_line_errors


def parse_args(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of a model that transformers loads")
    parser.add_argument("save", type=Path, metavar="SAVE", help="folder for the checkpoint")
    return parser.parse_known_args(argv)


def main() -> None:
    args, megatron = parse_args()
    with one_line_errors():
        platform.activate()
        from megatron_exo.convert.importing import from_hugging_face, import_model

        import_model(from_hugging_face(args.folder), megatron, save=args.save, tokens=None, logits=None)


if __name__ == "__main__":
    sys.exit(main())
