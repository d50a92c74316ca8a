"""ExoFormer on Megatron: attention projections mixed with anchors, as megatron-core layers.

Importing the package is cheap: it imports neither torch nor Megatron and touches no device. See
:mod:`megatron_exo.config` and :mod:`megatron_exo.variants` for what an ExoFormer is, and run
``python -m megatron_exo.doctor`` to see what this machine can do.
"""

__version__ = "0.1.0"
