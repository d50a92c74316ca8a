"""Valid small files, made by the project's own writers."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np

_ROOT = Path(__file__).resolve().parent.parent.parent
STEP = "run/iter_0000004"
"""The checkpoint, in the folder of samples."""
UNFINISHED = (np.dtype("<u2"), {"made of": "a sample"})
"""Of an unfinished dataset among the samples: the type of its tokens, and the request for it."""
CONVERSION = {"source": "a sample"}
"""What the unfinished conversion among the samples is made of."""
_TEXTS = [
    f"Document {n}: the quick brown fox jumps over {n} lazy dogs, naïvely, at {n}.{n} km/h.\n\nA second "
    f"paragraph, with words such as anchor, projection, mixture and attention; {'and so on, ' * (n % 7)}to the end."
    for n in range(60)
]


def make_samples(folder: Path) -> None:
    """Write one valid file of every kind into ``folder``; takes half a minute, most of it for a checkpoint.

    Raises:
        RuntimeError: the run that saves the checkpoint failed.
    """
    import pyarrow
    import pyarrow.parquet
    import zstandard

    from megatron_exo.data.preprocess import preprocess
    from megatron_exo.data.tokenizer_training import train_tokenizer
    from megatron_exo.data.tokenizers import TokenizerSpec

    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text, "id": n}) + "\n" for n, text in enumerate(_TEXTS)).encode()
    (folder / "texts.jsonl").write_bytes(lines)
    (folder / "texts.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    (folder / "texts.jsonl.zst").write_bytes(zstandard.compress(lines))
    (folder / "texts.txt").write_text("\n\n".join(_TEXTS), encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.table({"text": _TEXTS, "id": range(60)}), folder / "texts.parquet")
    model = train_tokenizer([str(folder / "texts.jsonl")], str(folder / "tokenizer"), vocab_size=330)
    spec = TokenizerSpec("SentencePieceTokenizer", str(model))
    preprocess([str(folder / "texts.jsonl")], str(folder / "data"), spec)
    _make_shard(folder / "shard.bin")
    _make_unfinished(folder / "unfinished")
    _make_hugging_face(folder / "huggingface")
    _make_reference(folder / "reference.pt")
    _make_model(folder)
    _make_unfinished_conversion(folder / "conversion")
    _make_saved_tensors(folder)
    _make_texts_of_users(folder)
    _make_run(folder)


def _make_shard(path: Path) -> None:
    """There is no writer of shards here; tests hold the reader to one that is written byte by byte."""
    tokens = np.arange(2000, dtype="<u2")
    tokens[::100] = 50256
    path.write_bytes(struct.pack("<iii1012x", 20240520, 1, len(tokens)) + tokens.tobytes())


def _make_unfinished(prefix: Path) -> None:
    from megatron_exo.data.unfinished import unfinished_dataset

    with unfinished_dataset(str(prefix), *UNFINISHED) as dataset:
        dataset.append(np.arange(300, dtype="<u2"), np.array([100, 200]))
        dataset.mark({"reader": {"input": 0, "documents": 2}})
        dataset.save()


def _make_hugging_face(folder: Path) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": special[0]}))


def _make_reference(path: Path) -> None:
    import torch

    from megatron_exo.convert.reference import reference_table, state_to_reference
    from megatron_exo.sizes import ModelSizes
    from megatron_exo.variants import VARIANTS

    exo = VARIANTS["e-exoformer"].exo
    sizes = ModelSizes(
        num_layers=2, hidden_size=8, num_attention_heads=2, num_query_groups=2, kv_channels=4, ffn_hidden_size=16,
        vocab_size=16, seq_length=8,
    )  # fmt: skip
    state = {row.ours: torch.ones(row.our_shape()) for row in reference_table(exo, sizes)}
    args = {"block_size": 8, "vocab_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 8, "mlp_hidden_dim": 32,
            "norm_pos": "before", "act_type": "swiglu", "gated_attention_enabled": True, "decouple_anchor": True,
            "residual_mode": "elementwise", "dynamic_mixing_enabled": False,
            **{f"{word}_res_enabled": True for word in ("query", "key", "value", "gate")},
            **{f"{c}_residual_norm_enabled": True for c in "qkvg"}}  # fmt: skip
    model = state_to_reference(exo, sizes, state)
    torch.save({"model": model, "model_args": args, "step": 3, "tokens_processed": 9, "config": {}}, path)


def _make_model(folder: Path) -> None:
    """A Hugging Face folder of an ExoFormer, in several files, with a tokenizer."""
    from megatron_exo.convert.exporting import Options, export_reference

    export_reference(folder / "reference.pt", folder / "model", Options(shard_size=8000, verify=False))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / "huggingface" / name, folder / "model" / name)


def _make_unfinished_conversion(out: Path) -> None:
    from megatron_exo.checkpoints.integrity import sha256_of
    from megatron_exo.convert.unfinished import unfinished

    class StopError(Exception):
        pass

    with contextlib.suppress(StopError), unfinished(out, CONVERSION) as conversion:
        (conversion.path / "weights").write_bytes(b"weights")
        conversion.finish("weights", sha256_of(conversion.path / "weights"))
        raise StopError


def _make_saved_tensors(folder: Path) -> None:
    import torch

    from megatron_exo.nonfinite import StepBatches

    batches, tokens = StepBatches(), torch.arange(24).reshape(2, 12)
    for _ in range(2):
        ones = torch.ones(2, 12)
        batches.note(1, {"tokens": tokens, "labels": tokens + 1, "loss_mask": ones, "position_ids": tokens % 12})
    batches.save(folder / "batch.pt", iteration=1, rank=0)
    torch.save(tokens, folder / "tokens.pt")
    (folder / "ranks" / "mp_rank_00").mkdir(parents=True)  # Megatron's older format, which is only read here
    torch.save({"iteration": 4, "model": {"weight": torch.ones(4)}}, folder / "ranks/mp_rank_00/model_optim_rng.pt")


def _make_texts_of_users(folder: Path) -> None:
    import torch

    from megatron_exo.data.sample_log import SAMPLE_ID, SampleLog

    log = SampleLog(folder / "samples-dp0.jsonl")
    for iteration in (1, 2, 3, 2, 3, 4):  # resumed after the first
        log.note(iteration, {SAMPLE_ID: torch.tensor([[iteration], [iteration + 10]])})
    (folder / "prompts.txt").write_text("The list of all\n\nnaïvely, at 3 km/h\n", encoding="utf-8")
    (folder / "data.args").write_text("0.5 data 0.5 data\n")
    parts = {"train": ["0.5", "data", "0.5", "data"], "valid": ["data"], "test": "data"}
    (folder / "data.json.args").write_text(json.dumps(parts))
    (folder / "run.toml").write_text(
        'preset = "demo"\nexo-variant = "e-exoformer"\nnproc-per-node = 2\nlr = 1e-3\nbf16 = true\nseed = 7\n'
        'data-path = ["0.7", "data/a", "0.3", "data/b"]\nsave = "runs/{exo-variant}-{seed}"\n'
    )


def _make_run(folder: Path) -> None:
    """Train for four iterations in a process of its own, as a user would."""
    words = (
        "--exo-variant e-exoformer --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
        "--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-3 "
        "--eval-iters 1 --eval-interval 2 --log-interval 1 --num-workers 0 --save-interval 4 --mock-data "
        f"--tokenizer-type NullTokenizer --vocab-size 32 --save {folder.resolve() / 'run'}"
    )
    environment = os.environ | {"MEGATRON_EXO_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "megatron_exo.pretrain", *words.split()]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the sample run failed:\n{done.stderr[-2000:]}")
