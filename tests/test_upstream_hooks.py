"""What we override of megatron-core and megatron.training, or call although it is private, is as we know it.

A release that changes one of these fails here, by name, instead of somewhere in a run.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest

HOOKS: dict[str, set[str]] = {
    "megatron.core.transformer.transformer_layer:TransformerLayer.__init__": {
        "config", "submodules", "layer_number", "vp_stage"},
    "megatron.core.transformer.transformer_layer:TransformerLayer._forward_attention": {
        "hidden_states", "attention_mask", "context"},
    "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors": {
        "hidden_states", "key_value_states", "output_gate", "split_qkv"},
    "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate": {
        "tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "tensor_shape", "wait_on_reqs"},
    "megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss": {
        "labels", "logits"},
    "megatron.core.transformer.transformer_block:get_num_layers_to_build": {"config", "vp_stage", "pp_rank"},
    "megatron.core.transformer.utils:make_sharded_tensors_for_checkpoint": {
        "state_dict", "prefix", "tensor_parallel_layers_axis_map", "sharded_offsets", "tp_group", "dp_cp_group"},
    "megatron.core.utils:get_batch_on_this_tp_rank": {
        "batch", "has_cu_seqlens", "is_hybrid_cp", "create_attention_mask_in_dataloader", "broadcast_src_rank",
        "broadcast_group", "cp_size", "tp_rank", "micro_batch_size", "seq_length", "mtp_on_this_rank",
        "pipeline_model_parallel_size", "is_pipeline_first_stage", "is_pipeline_last_stage"},
    "megatron.core.utils:get_batch_on_this_cp_rank": {"batch", "is_hybrid_cp", "cp_group"},
    "megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.__init__": {
        "cls", "sizes", "is_built_on_rank", "config"},
    "megatron.training.initialize:_initialize_distributed": {
        "get_embedding_ranks", "get_position_embedding_ranks", "store"},
    "megatron.training.training:pretrain": {
        "train_valid_test_dataset_provider", "model_type", "forward_step_func", "p2p_communicator", "pg_collection"},
    "megatron.training.argument_utils:core_transformer_config_from_args": {"args", "config_class"},
    "megatron.training.argument_utils:gpt_config_from_args": {"args", "config", "model_config_cls"},
    "megatron.training.argument_utils:pretrain_cfg_container_from_args": {"args", "model_cfg"},
    "megatron.training.models.gpt:GPTModelBuilder.build_model": {
        "pg_collection", "pre_process", "post_process", "vp_stage"},
    "megatron.training.checkpointing:save_checkpoint": {"iteration", "model", "optimizer", "opt_param_scheduler"},
    "megatron.core.optimizer:get_megatron_optimizer": {"config", "model_chunks", "use_gloo_process_groups"},
    "megatron.core.optimizer.emerging_optimizers:_is_nonlinear_or_embedding": {"param"},
    "megatron.core.optimizer.emerging_optimizers:_muon_config_to_kwargs": {"config", "model_chunks", "pg_collection"},
    "megatron.core.optimizer.emerging_optimizers:EmergingOptimizerEntry": {
        "optimizer_cls", "config_to_kwargs", "default_param_overrides"},
    "megatron.core.optimizer.emerging_optimizers:TensorParallelMuon.__init__": {
        "momentum", "pg_collection", "tp_mode"},
    "megatron.training.training:wrap_model_chunks_with_ddp": {
        "model_chunks", "config", "ddp_config", "use_layer_wise_distributed_optimizer", "pg_collection",
        "bucket_sizes", "disable_bucketing_per_chunk"},
    "megatron.training.training:resolve_ddp_bucket_size": {
        "ddp_config", "dp_cp_group", "overlap_grad_reduce", "num_parameters"},
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fully_reshardable": {
        "model_sharded_state_dict", "is_loading", "metadata"},
    "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.write_preloaded_data": {
        "transform_list", "local_proc_idx", "write_bucket", "results_queue", "kwargs"},
    "megatron.core.dist_checkpointing.serialization:save": {
        "sharded_state_dict", "checkpoint_dir", "async_sharded_save"},
    "megatron.core.dist_checkpointing.serialization:save_config": {"config", "checkpoint_dir"},
    "megatron.core.dist_checkpointing.strategies.async_utils:AsyncCallsQueue._get_async_caller": {"self"},
    "megatron.core.dist_checkpointing.strategies.async_utils:AsyncCallsQueue.warmup_persistent_caller": {"rank"},
    "megatron.core.dist_checkpointing.strategies.async_utils:TemporalAsyncCaller.schedule_async_call": {"async_req"},
    "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.get_lr": {"param_group"},
    "megatron.training.utils:get_blend_and_blend_per_split": {"args"},
    "megatron.core.tensor_parallel.random:model_parallel_cuda_manual_seed": {"seed", "force_reset_rng"},
    "megatron.training.arguments:parse_and_validate_args": {"extra_args_provider"},
    "megatron.training.arguments:parse_args": {"extra_args_provider"},
    "megatron.training.initialize:initialize_megatron": {"allow_no_cuda"},
    "megatron.training.models.gpt:GPTModelBuilder.build_distributed_models": {
        "pg_collection", "ddp_config", "data_parallel_random_init", "model_type"},
    "megatron.training.vocab_utils:calculate_padded_vocab_size": {
        "vocab_size", "make_vocab_size_divisible_by", "tensor_model_parallel_size", "logging_enabled"},
    "megatron.core.models.gpt:GPTModel._preprocess": {"packed_seq_params"},
    "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.get_emb": {"max_seq_len"},
    "megatron.core.transformer.torch_norm:LayerNormBuilder.__call__": {"config", "hidden_size", "eps"},
    "megatron.training.training:num_floating_point_operations": {
        "args", "batch_size", "seqlen_squared_sum_in_batch", "total_real_tokens_in_batch"},
    "megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper:"
    "AbstractModelInferenceWrapper._allocate_recv_buffer": {"batch_size", "seq_len"},
    "megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper:"
    "AbstractModelInferenceWrapper._forward": {"inference_input"},
}  # fmt: skip
"""Function → the names of parameters that we rely on."""

FIELDS: dict[str, set[str]] = {
    "megatron.core.transformer:TransformerConfig": {
        "attention_output_gate", "qk_layernorm", "hetereogenous_dist_checkpoint", "pipeline_model_parallel_layout",
        "distribute_saved_activations", "fp32_residual_connection", "mtp_num_layers", "flash_decode",
        "fused_single_qkv_rope", "cuda_graph_impl", "transformer_impl"},
    "megatron.core.datasets.gpt_dataset:GPTDatasetConfig": {
        "random_seed", "sequence_length", "blend", "blend_per_split", "split", "tokenizer", "path_to_cache",
        "reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask",
        "drop_last_partial_validation_sequence"},
    "megatron.core.packed_seq_params:PackedSeqParams": {"qkv_format", "max_seqlen_q", "max_seqlen_kv", "cp_group"},
    "megatron.training.models.gpt:GPTModelConfig": {"transformer", "vocab_size", "should_pad_vocab", "seq_length"},
    "megatron.core.transformer.transformer_layer:TransformerLayerSubmodules": {
        "input_layernorm", "self_attention", "self_attn_bda", "pre_mlp_layernorm", "mlp", "mlp_bda",
        "sharded_state_dict_keys_map"},
}  # fmt: skip
"""Dataclass → the fields that we set or read."""


REPLACEMENTS: dict[str, str] = {
    "megatron_exo.model.attention:ExoSelfAttention.get_query_key_value_tensors": (
        "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors"
    ),
    "megatron_exo.model.backend:LocalBackend.layer_norm": (
        "megatron.core.models.backends:LocalSpecProvider.layer_norm"
    ),
    "megatron_exo.model.core_attention:SDPACoreAttention.__init__": (
        "megatron.core.transformer.attention:CoreAttentionBuilder.__call__"
    ),
    "megatron_exo.model.core_attention:SDPACoreAttention.forward": (
        "megatron.core.transformer.attention:CoreAttentionInterface.forward"
    ),
    "megatron_exo.model.gpt:ExoGPTModel.compute_language_model_loss": (
        "megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss"
    ),
    "megatron_exo.builder:ExoModelBuilder.build_model": "megatron.training.models.gpt:GPTModelBuilder.build_model",
    "megatron_exo.optimizer.muon:ExoMuon._apply_weight_decay_inplace": (
        "emerging_optimizers.mixin:WeightDecayMixin._apply_weight_decay_inplace"
    ),
    "megatron_exo.optimizer.muon:ExoMuon._init_group": (
        "megatron.core.optimizer.emerging_optimizers:TensorParallelMuon._init_group"
    ),
    "megatron_exo.platform.cpu:fork_rng": "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork",
    "megatron_exo.platform.cpu:manual_seed": "torch.cuda:manual_seed",
}
"""What we put in the place of something of Megatron's or torch's → that."""


def _look_up(target: str) -> Any:
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("target", HOOKS)
def test_functions_take_the_parameters_that_we_rely_on(target: str) -> None:
    assert HOOKS[target] <= set(inspect.signature(_look_up(target)).parameters)


@pytest.mark.parametrize("target", FIELDS)
def test_configurations_have_the_fields_that_we_rely_on(target: str) -> None:
    assert FIELDS[target] <= {field.name for field in dataclasses.fields(_look_up(target))}


@pytest.mark.parametrize("ours", REPLACEMENTS)
def test_what_replaces_a_function_takes_everything_that_it_takes(ours: str) -> None:
    theirs = inspect.signature(_look_up(REPLACEMENTS[ours])).parameters
    accepted = set(inspect.signature(_look_up(ours)).parameters)
    assert {name for name in theirs if name != "self"} <= accepted


def test_every_field_that_is_refused_exists() -> None:
    # A guard on a field that was renamed would never refuse anything.
    from megatron.core.transformer import TransformerConfig

    from megatron_exo.model.config import _UNSUPPORTED

    assert set(_UNSUPPORTED) <= {field.name for field in dataclasses.fields(TransformerConfig)}


def test_a_layer_is_called_with_context_and_returns_it() -> None:
    source = inspect.getsource(_look_up("megatron.core.transformer.transformer_block:TransformerBlock.forward"))
    assert "hidden_states, context = layer(" in source
    assert "context=context" in source


def test_recompute_passes_context_as_a_tensor_argument() -> None:
    source = inspect.getsource(_look_up("megatron.core.recompute:checkpointed_forward"))
    assert "args = (hidden_states, attention_mask, context," in source


@pytest.mark.parametrize("caller", ["train", "training_log"])
def test_operations_are_counted_by_a_function_of_the_training_module(caller: str) -> None:
    # Under this name the program puts its own count.
    source = inspect.getsource(_look_up(f"megatron.training.training:{caller}"))
    assert "num_floating_point_operations(\n" in source


def test_muon_asks_for_an_update_before_it_changes_a_weight_and_reads_the_momentum_of_the_group() -> None:
    # The decay, which depends on the update, is part of what we give back; the schedule writes the momentum.
    source = inspect.getsource(_look_up("megatron.core.optimizer.emerging_optimizers:TensorParallelMuon.step"))
    orthogonalize = source.index("orth_grad = self.orthogonalize(p, grad, **group_kwargs)")
    assert source.index('lerp_(grad, 1 - group["momentum"])') < orthogonalize
    assert orthogonalize < source.index('p.add_(orth_grad, alpha=-group["lr"])')


def test_a_checkpoint_ends_with_its_index_files_and_then_the_tracker() -> None:
    # The manifest is written after the first two, and old checkpoints go after the third.
    source = inspect.getsource(_look_up("megatron.core.dist_checkpointing.serialization:save"))
    assert source.index("def metadata_finalize_fn():") < source.index("save_config(")
    assert "async_request.finalize_fns.append(metadata_finalize_fn)" in source
    source = inspect.getsource(_look_up("megatron.training.checkpointing:save_checkpoint"))
    save = source.index("dist_checkpointing.save("), source.index("with maybe_msc.open(tracker_filename, 'w') as f:")
    assert save[0] < save[1] < source.index("async_save_request.add_finalize_fn(iter_finalize_fn)")


def test_saving_in_the_background_is_switched_off_without_the_persistent_worker() -> None:
    # Our default asks for it, and on a CPU puts another one in its place.
    source = inspect.getsource(_look_up("megatron.training.arguments:validate_args"))
    assert "if not args.use_persistent_ckpt_worker:" in source


def test_a_data_loader_finds_the_batch_sizes_of_evaluation_by_the_split_of_its_dataset() -> None:
    source = inspect.getsource(_look_up("megatron.training.datasets.data_samplers:build_pretraining_data_loader"))
    assert "split = dataset.split" in source
    assert "is_eval = split in (Split.valid, Split.test)" in source


def test_the_masks_of_a_dataset_are_cached_if_an_attribute_says_so_and_padding_is_a_token() -> None:
    source = inspect.getsource(_look_up("megatron.core.datasets.gpt_dataset:GPTDataset"))
    assert "not self.masks_and_position_ids_are_cacheable" in source
    assert "loss_mask[labels == self._pad_token_id] = 0.0" in source
