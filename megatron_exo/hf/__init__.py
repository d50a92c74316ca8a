"""ExoFormer as a model of transformers; importing this package registers it with the Auto classes.

The two files ``configuration_exoformer.py`` and ``modeling_exoformer.py`` need nothing else of ``megatron_exo``:
:func:`megatron_exo.hf.export.write_code_and_config` puts them into a model's folder, which then loads anywhere.
"""

from megatron_exo.errors import UserError

try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise UserError(
        "transformers is not installed, and the model is one of its; pip install 'megatron-exo[hf]'"
    ) from None

from megatron_exo.hf.configuration_exoformer import ExoFormerConfig
from megatron_exo.hf.modeling_exoformer import ExoFormerForCausalLM, ExoFormerModel

AutoConfig.register(ExoFormerConfig.model_type, ExoFormerConfig)
AutoModel.register(ExoFormerConfig, ExoFormerModel)
AutoModelForCausalLM.register(ExoFormerConfig, ExoFormerForCausalLM)

# Folders written by ``save_pretrained`` get the code too, so that they load as the folder that they came from did.
ExoFormerConfig.register_for_auto_class()
ExoFormerModel.register_for_auto_class("AutoModel")
ExoFormerForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = ["ExoFormerConfig", "ExoFormerForCausalLM", "ExoFormerModel"]
