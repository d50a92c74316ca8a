#!/usr/bin/env python
"""Import a checkpoint of the paper author's code: write a training checkpoint, a Hugging Face folder, or logits.

  python tools/import_reference.py model.pt --save checkpoints/imported
  python tools/import_reference.py model.pt --hf models/imported
  python tools/import_reference.py model.pt --tokens tokens.pt --logits logits.pt
  torchrun --nproc-per-node 4 tools/import_reference.py model.pt --tokens tokens.pt --logits logits.pt \\
      --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

FILE is a .pt in the author's format (any of its five layouts); it is read as data, code in it is refused. TOKENS is an
int64 tensor [b, s] saved with torch.save; LOGITS becomes a float32 tensor [b, s, vocab]. Any further argument, such as
a layout, is Megatron's. The checkpoint holds weights only: go on from it with --load DIR --finetune.
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
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for a training checkpoint")
    parser.add_argument("--hf", type=Path, metavar="DIR", help="folder for transformers to load")
    parser.add_argument("--tokens", type=Path, metavar="TOKENS", help="tokens to compute logits for")
    parser.add_argument("--logits", type=Path, metavar="LOGITS", help="where to write them")
    args, megatron = parser.parse_known_args(argv)
    if (args.tokens is None) != (args.logits is None):
        parser.error("--tokens and --logits go together")
    if args.hf is not None and (args.save is not None or args.logits is not None or megatron):
        parser.error("--hf is written by one process without Megatron's arguments; give it alone")
    if args.hf is None and args.save is None and args.logits is None:
        parser.error("nothing to do: give --save DIR, --hf DIR, or --tokens and --logits")
    return args, megatron


def main() -> None:
    args, megatron = parse_args()
    with one_line_errors():
        platform.activate()
        if args.hf is not None:
            from megatron_exo.convert.exporting import Options, export_reference

            export_reference(args.file, args.hf, Options())
            return
        from megatron_exo.convert.importing import from_reference, import_model
        from megatron_exo.convert.reference import read_tokens

        tokens = None if args.tokens is None else read_tokens(args.tokens)
        import_model(from_reference(args.file), megatron, save=args.save, tokens=tokens, logits=args.logits)


if __name__ == "__main__":
    sys.exit(main())
