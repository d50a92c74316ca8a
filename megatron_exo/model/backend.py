"""Which linear, norm and attention classes a layer is built of, asked for as Megatron does."""

from __future__ import annotations

from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer.torch_norm import LayerNormBuilder

from megatron_exo.model.core_attention import SDPACoreAttention
from megatron_exo.model.norm import RMSNorm


class LocalBackend(LocalSpecProvider):
    """Megatron's local linear layers, with a norm and an attention that need neither Transformer Engine nor Apex.

    Megatron's local norm refuses sequence parallelism, and its local attention keeps the [b, heads, s, s] scores.
    """

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> LayerNormBuilder:
        """The norm of layers, QK-norms and the final norm.

        Raises:
            ValueError: for any norm but RMSNorm, and for one that also returns its input.
        """
        if not rms_norm or has_residual:
            raise ValueError("the local backend has RMSNorm alone; ask for layer_norm(rms_norm=True)")
        return RMSNorm

    def core_attention(self) -> type:
        return SDPACoreAttention


def get_backend(transformer_impl: str) -> BackendSpecProvider:
    """The backend called ``"local"`` or ``"transformer_engine"``.

    Raises:
        ValueError: for any other name.
    """
    if transformer_impl == "local":
        return LocalBackend()
    if transformer_impl == "transformer_engine":
        from megatron_exo.model.te_attention import TEBackend

        return TEBackend()
    raise ValueError(f"transformer_impl {transformer_impl!r} is not supported; use local or transformer_engine")
