"""Which models are described, and by what names."""

from tests.plain_reference import PlainSizes

SIZES = PlainSizes(num_query_groups=2)
VARIANTS = (
    "base",
    "e-nuresformer",
    "e-exoformer",
    "e-exoformer-h1",
    "dynamic-e-exoformer",
    "gated-qk-bias",
    "gated-embedding-residual",
)
PLACES = ("tp1-rank0", "tp2-rank0", "tp2-rank1")
"""Tensor-parallel size and rank; with sequence parallelism where there are two."""
PACKED = "documents packed end to end"
"""What :mod:`tests.te.packed` found."""
WRONGLY_FUSED = "dynamic-e-exoformer with the layers of e-exoformer"
"""The negative control, at the first place."""
