"""Imported once by the process that all test ranks are forked from."""

import os
import warnings

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # as platform.activate() does, which comes only after the import here
os.environ["HF_HUB_OFFLINE"] = "1"  # read at the import; no test may need a network

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lm_eval.models.huggingface  # noqa: F401
    import megatron.training  # noqa: F401

    import megatron_exo.hf
    import megatron_exo.platform.patches  # noqa: F401
