"""What a command line cannot mean, seen before anything is built, read or connected."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from megatron_exo import platform, presets
from megatron_exo.arguments import exo_config_from_args, option
from megatron_exo.config import ExoConfig, ExoConfigError
from megatron_exo.optimizer import recipe as muon


def check_arguments(args: Namespace) -> None:
    """Refuse what can be seen before anything is built.

    Raises:
        ExoConfigError: one line that says what, why, and what instead.
    """
    exo = exo_config_from_args(args)
    problems = (
        _missing(args),
        _data_problems(args),
        _tokenizer_problems(args),
        _misfits(args, exo),
        _schedule_problems(args),
        _optimizer_problems(args),
        _checkpoint_problems(args),
    )
    for problem in chain(*problems, _layout_problems(args)):
        raise ExoConfigError(problem)


def _missing(args: Namespace) -> Iterator[str]:
    """What Megatron has no default for, and partly asks for only after the model is built."""
    needed = ["num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings"]
    needed += ["micro_batch_size", *([] if args.skip_train else ["lr"]), "eval_interval"]
    if missing := [option(name) for name in needed if getattr(args, name) is None]:
        yield (
            f"the size of the model or of the run is not given: {', '.join(missing)}; pass these, "
            f"or --preset with one of {', '.join(presets.PRESETS)}"
        )
    if not (args.train_iters or args.train_samples or args.skip_train):
        yield "the length of the run is not given; pass --train-iters, --train-samples or --preset"
    if args.save is not None and not args.save_interval:
        yield "--save without --save-interval; pass the number of iterations between checkpoints"
    if args.exo_log_samples and args.save is None:
        yield "--exo-log-samples writes into the folder of --save; pass --save"


NO_DATA = (
    "no data: pass --data-path PREFIX (tools/preprocess_data.py makes one), --mock-data, "
    "or run examples/quickstart.sh once and train without naming data"
)


def _data_problems(args: Namespace) -> Iterator[str]:
    named = (args.data_path, args.data_args_path, args.train_data_path, args.valid_data_path, args.test_data_path)
    if not (args.mock_data or args.per_split_data_args_path or any(named)):
        yield NO_DATA


def _tokenizer_problems(args: Namespace) -> Iterator[str]:
    if args.trust_remote_code:
        yield "--trust-remote-code would run code that comes with a tokenizer; leave it out, and use one without code"
    if args.tokenizer_type is None:
        yield (
            "no tokenizer; pass --tokenizer-type and --tokenizer-model as the data was made with "
            "(--tokenizer-type NullTokenizer --vocab-size N for --mock-data)"
        )
    elif args.tokenizer_type == "SentencePieceTokenizer" and not Path(args.tokenizer_model or "").is_file():
        yield f"--tokenizer-model {args.tokenizer_model} is no file; pass the SentencePiece .model that made the data"
    elif args.tokenizer_type == "NullTokenizer" and args.vocab_size is None:
        yield "--tokenizer-type NullTokenizer has no vocabulary of its own; pass --vocab-size"
    elif args.tokenizer_type == "HuggingFaceTokenizer" and find_spec("transformers") is None:
        yield "--tokenizer-type HuggingFaceTokenizer needs the package transformers; pip install 'megatron-exo[hf]'"


def _misfits(args: Namespace, exo: ExoConfig) -> Iterator[str]:
    """What goes neither with ExoFormer nor with this machine."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if args.transformer_impl == "transformer_engine" and not (HAVE_TE and platform.is_gpu()):
        why = "it is not installed" if not HAVE_TE else "it needs a CUDA device"
        yield (
            f"--transformer-impl transformer_engine cannot be used here: {why}; use --transformer-impl local "
            "(python -m megatron_exo.doctor says what is missing)"
        )
    if (exo.drop_anchor or exo.drop_current) and not args.skip_train:
        yield (
            "--exo-drop-anchor and --exo-drop-current are interventions at inference; "
            "leave them out, or evaluate with --skip-train"
        )
    if args.exo_z_loss_weight < 0:
        yield f"--exo-z-loss-weight must not be negative, got {args.exo_z_loss_weight}; pass 0 for none"
    for name in ("reset_attention_mask", "reset_position_ids", "dataloader_inter_document_masking"):
        if getattr(args, name):
            yield f"{option(name)} does not reach an ExoFormer's attention; pass --exo-documents masked or restarted"
    if args.exo_documents == "restarted":
        if args.position_embedding_type != "rope":
            yield "--exo-documents restarted is about rotary positions; pass --position-embedding-type rope, or masked"
        elif args.apply_rope_fusion:
            yield (
                "--exo-documents restarted does not go with Transformer Engine's fused rotary embedding, which has one "
                "position for a column of the batch; pass --no-rope-fusion, or --exo-documents masked, which computes "
                "the same"
            )
    if args.use_checkpoint_args:
        yield (
            "--use-checkpoint-args reads the checkpoint before it has been checked, and could run code in it; "
            "pass the arguments (tools/inspect_checkpoint.py shows them)"
        )
    other_paths = ("use_megatron_fsdp", "use_torch_fsdp2", "hybrid_layer_pattern", "sft", "perform_rl_step")
    for name in (*other_paths, "multi_latent_attention"):  # Megatron would choose another configuration class
        if getattr(args, name):
            yield f"{option(name)} is not supported with ExoFormer; leave it out"


def _schedule_problems(args: Namespace) -> Iterator[str]:
    """What Megatron's scheduler would assert after the model is built, or ignore."""
    if args.rampup_batch_size is not None:
        yield (
            "Megatron ignores --rampup-batch-size; pass --step-batch-size-schedule 'TOKENS:BATCH TOKENS:BATCH …', such "
            "as '0:32 1B:64 4B:128', in place of it and of --global-batch-size"
        )
    if args.step_batch_size_schedule is not None and args.train_iters:
        yield "--step-batch-size-schedule with --train-iters; pass the length as --train-tokens or --train-samples"
    if args.skip_train or not (args.train_iters or args.train_samples):
        return
    unit = "iters" if args.train_iters else "samples"
    length = getattr(args, f"lr_decay_{unit}") or getattr(args, f"train_{unit}")
    warmup = getattr(args, f"lr_warmup_{unit}")
    if warmup >= length:
        yield (
            f"--lr-warmup-{unit} {warmup} is not shorter than the schedule of {length} {unit}; "
            "pass a shorter warm-up or a longer run"
        )
    if args.lr < args.min_lr:
        yield f"--lr {args.lr:g} is below --min-lr {args.min_lr:g}, which the schedule ends at; pass a smaller --min-lr"
    if args.lr_decay_style == "WSD" and getattr(args, f"lr_wsd_decay_{unit}") is None:
        yield f"--lr-decay-style WSD without --lr-wsd-decay-{unit}; pass the length of its last part"


def _optimizer_problems(args: Namespace) -> Iterator[str]:
    """What Muon cannot do, or what would be ignored."""
    if args.optimizer in ("dist_muon", "adaptive_muon"):
        yield (
            f"--optimizer {args.optimizer} is not supported; pass --optimizer muon, which has a row or column second "
            "moment, and --use-distributed-optimizer to share its state among data-parallel ranks"
        )
    if args.optimizer != "muon":
        for name in muon.ARGUMENTS:
            if getattr(args, name) is not None:
                yield f"{option(name)} belongs to --optimizer muon, not to {args.optimizer}; leave one of them out"
        return
    if find_spec("emerging_optimizers") is None and not args.dry_run:
        yield "--optimizer muon needs the package emerging-optimizers; bash tools/setup_env.sh muon installs it"
    if args.fp16:
        yield "--optimizer muon has no loss scaling for --fp16; use --bf16"
    if args.use_distributed_optimizer and not args.bf16:
        yield "--use-distributed-optimizer shares the state of --optimizer muon only with --bf16; add that"
    for name, instead in (
        ("decoupled_lr", "--exo-adam-lr is the rate of the embedding, the head and all that is no matrix"),
        ("apply_wd_to_qk_layernorm", "what AdamW has is not decayed"),
        ("overlap_param_gather_with_optimizer_step", "use --overlap-param-gather"),
        ("use_precision_aware_optimizer", "main weights and state are float32"),
        ("use_mup", "--muon-scale-mode scales matrices"),
    ):
        if getattr(args, name):
            yield f"{option(name)} does not go with --optimizer muon: {instead}; leave it out"
    if not args.use_layer_wise_param_layout:
        yield "--no-use-layer-wise-param-layout does not go with --optimizer muon here; leave it out"
    if args.num_distributed_optimizer_instances > 1:
        yield "--num-distributed-optimizer-instances does not go with --optimizer muon; leave it out"
    if args.muon_scalar_optimizer != "adam":
        yield f"--muon-scalar-optimizer {args.muon_scalar_optimizer} is not supported; leave it out, AdamW is used"
    if not args.muon_split_qkv and args.exo_muon_split not in (None, "fused"):
        yield f"--muon-no-split-qkv contradicts --exo-muon-split {args.exo_muon_split}; leave one of them out"
    if args.muon_coefficient_type == muon.COEFFICIENTS and args.muon_num_ns_steps != len(muon.POLAR_EXPRESS):
        yield (
            f"--muon-num-ns-steps {args.muon_num_ns_steps} does not fit the coefficients of the paper's recipe, which "
            f"are for {len(muon.POLAR_EXPRESS)}; leave it out, or pass --muon-coefficient-type polar_express, too"
        )
    if args.step_batch_size_schedule is not None and args.exo_muon_momentum_cooldown != 0:
        yield (
            "the momentum falls over the last updates, and how many there are is not known with "
            "--step-batch-size-schedule; pass --exo-muon-momentum-cooldown 0"
        )


def _checkpoint_problems(args: Namespace) -> Iterator[str]:
    """What Megatron would find out at the first save, what would remove more than is meant, or be loaded unchecked."""
    if args.non_persistent_ckpt_type is not None:
        yield "--non-persistent-ckpt-type: such checkpoints would be loaded unchecked; leave it out"
    keeps = [name for name in ("keep_last", "keep_every") if getattr(args, name) is not None]
    for name in keeps:
        if getattr(args, name) < 1:
            yield f"{option(name)} {getattr(args, name)} would keep none; pass 1 or more, or leave it out to keep all"
        if args.save_retain_interval is not None:
            yield f"{option(name)} and --save-retain-interval both say what to remove; leave one of them out"
    for name in (*keeps, *(["async_save"] if args.async_save else [])):
        if args.ckpt_format != "torch_dist":
            yield f"{option(name)} needs --ckpt-format torch_dist, not {args.ckpt_format}; leave one of them out"
    if args.async_save and args.async_strategy == "nvrx":
        if not platform.is_gpu():
            yield "--async-strategy nvrx needs a CUDA device; leave it out, Megatron's own is used then"
        elif find_spec("nvidia_resiliency_ext") is None:
            yield "--async-strategy nvrx needs the package nvidia-resiliency-ext; install it, or leave the option out"


def _layout_problems(args: Namespace) -> Iterator[str]:
    """How the model cannot be spread over the processes."""
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    if args.world_size % (tp * pp * cp):
        yield (
            f"{args.world_size} processes cannot be divided into groups of "
            f"tp {tp} x pp {pp} x cp {cp} = {tp * pp * cp}; "
            "start torchrun with --nproc-per-node (times --nnodes) a multiple of that"
        )
    if args.num_attention_heads % tp:
        yield (
            f"--num-attention-heads {args.num_attention_heads} is not divisible by --tensor-model-parallel-size {tp}: "
            "each rank holds whole heads; use a tensor-parallel size that divides the heads"
        )
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if args.num_layers % pp and not (args.pipeline_model_parallel_layout or first or last):
        yield (
            f"--num-layers {args.num_layers} is not divisible by --pipeline-model-parallel-size {pp}; use a size that "
            "divides the layers, or --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
        )
    samples = args.micro_batch_size * (args.world_size // (tp * pp * cp))
    varies = args.step_batch_size_schedule or args.decrease_batch_size_if_needed
    if args.global_batch_size is not None and args.global_batch_size % samples and not varies:
        yield (
            f"--global-batch-size {args.global_batch_size} is not divisible by --micro-batch-size "
            f"{args.micro_batch_size} x {samples // args.micro_batch_size} data-parallel processes; change one of them"
        )
