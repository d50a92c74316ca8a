"""Imported once by the process that all workers are forked from: what readers need, on the platform of the programs."""

# ruff: noqa: F401
import os
import warnings

os.environ["MEGATRON_EXO_DEVICE"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"  # read at the import; no reader may need a network

from megatron_exo import platform

platform.activate()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pyarrow.parquet
    import sentencepiece
    import tokenizers
    import zstandard

    import megatron_exo.arguments
    import megatron_exo.convert.exporting
    import megatron_exo.convert.importing
    import megatron_exo.curves
    import megatron_exo.data.readers
    import megatron_exo.data.shard_conversion
    import megatron_exo.data.validate
    import megatron_exo.hf.generating
    import megatron_exo.replay
    import megatron_exo.resume
    import megatron_exo.trained_model
