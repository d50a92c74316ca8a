"""The two kinds of models that are evaluated, behind one interface: a checkpoint on Megatron's ranks, a folder."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_exo import platform
from megatron_exo.checkpoints.inspection import checkpoint_at, read_description
from megatron_exo.checkpoints.manifest import TOKENIZER_FOLDER
from megatron_exo.convert.hf_tokenizer import write_tokenizer
from megatron_exo.data.validate import check_sidecar
from megatron_exo.errors import UserError
from megatron_exo.inference import compute_logits, compute_token_losses
from megatron_exo.trained_model import TrainedModel, load_trained_model


class Subject(Protocol):
    """A model under evaluation."""

    path: Path
    vocab_size: int
    longest: int
    """Tokens that it was trained to read at once."""
    eod: int | None
    """The token that ends a document."""
    replica: int
    """Which data-parallel replica this process belongs to."""
    replicas: dist.ProcessGroup | None
    """The same part of every replica; ``None`` for a single one."""
    is_speaker: bool
    """Whether this process prints and writes."""

    def logits(self, tokens: Tensor) -> Tensor:
        """int64 [b, s] → float32 [b, s, vocab_size], the same on every rank of a replica."""

    def token_losses(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """int64 [b, s] each → the cross-entropy of each label in nats, float32 [b, s], likewise."""

    def tokenizer(self) -> Any:
        """For transformers. Raises :class:`UserError` where there is none."""

    def check_dataset_tokenizer(self, prefix: str) -> None:
        """Raise :class:`UserError` for a dataset that another tokenizer made."""

    def describe(self) -> dict[str, Any]:
        """What a reader of its scores has to know; plain data."""


class Checkpoint:
    """A checkpoint of a run, on any layout of ranks without virtual pipeline stages.

    Args:
        path: of a run, or of one ``iter_N`` in it.
        megatron_arguments: the layout, and whatever else overrides what the checkpoint says.

    Raises:
        UserError: there is no checkpoint, it is damaged, or the layout cannot be used.
    """

    def __init__(self, path: Path, megatron_arguments: Sequence[str]) -> None:
        self.path = checkpoint_at(path)
        self.model: TrainedModel = load_trained_model(path, megatron_arguments)
        if len(self.model.chunks) > 1:
            raise UserError("evaluation runs one model chunk per rank; leave the arguments of virtual stages out")
        start = self.model.start
        self.config = start.model_config.transformer
        self.vocab_size, self.longest = start.vocab_size, start.args.max_position_embeddings
        self.eod = None if start.args.tokenizer_type == "NullTokenizer" else start.tokenizer.eod
        groups = self.model.groups
        self.replica = groups.dp.rank()
        self.replicas = groups.dp if groups.dp.size() > 1 else None
        self.is_speaker = dist.get_rank() == 0

    def logits(self, tokens: Tensor) -> Tensor:
        logits = compute_logits(
            self.model.chunks, tokens, self.vocab_size, self.config, self.model.groups, tokens.shape[0]
        )
        return self._from_last_stage(logits, (*tokens.shape, self.vocab_size))

    def token_losses(self, tokens: Tensor, labels: Tensor) -> Tensor:
        losses = compute_token_losses(
            self.model.chunks, tokens, labels, self.config, self.model.groups, tokens.shape[0]
        )
        return self._from_last_stage(losses, tuple(tokens.shape))

    def _from_last_stage(self, computed: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Every stage goes through the same program, so each must have the numbers."""
        group = self.model.groups.pp
        if computed is None:
            computed = torch.empty(shape, device=platform.device())
        if group.size() > 1:
            computed = computed.contiguous()
            dist.broadcast(computed, src=dist.get_global_rank(group, group.size() - 1), group=group)
        return computed

    def tokenizer(self) -> Any:
        from megatron_exo.hf.loading import load_tokenizer

        described = read_description(self.path).get("tokenizer", {})
        with tempfile.TemporaryDirectory() as folder:
            written = write_tokenizer(described, self.path / TOKENIZER_FOLDER, Path(folder), max_length=self.longest)
            if written.notice:
                raise UserError(f"tasks are text, and the checkpoint has {written.notice}")
            return load_tokenizer(Path(folder))

    def check_dataset_tokenizer(self, prefix: str) -> None:
        args = self.model.start.args
        check_sidecar(prefix, args.tokenizer_type, args.tokenizer_model, self.vocab_size)

    def describe(self) -> dict[str, Any]:
        args = self.model.start.args
        described = read_description(self.path)
        return {
            "kind": "training checkpoint",
            "path": str(self.path),
            "step": self.model.step,
            "tokens": described["consumed_tokens"],
            "model": described["model"],
            "dtype": str(self.config.params_dtype).removeprefix("torch."),
            "layout": {
                "tensor": args.tensor_model_parallel_size,
                "pipeline": args.pipeline_model_parallel_size,
                "context": args.context_parallel_size,
                "data": args.data_parallel_size,
            },
        }


class Folder:
    """A Hugging Face folder of any kind that transformers knows, ours by this package's code; no code in it is run.

    Args:
        path: with ``config.json``.
        dtype: what to compute in; as the folder says if ``None``.

    Raises:
        UserError: it cannot be loaded.
    """

    def __init__(self, path: Path, dtype: torch.dtype | None = None) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        from megatron_exo.hf.loading import load_model  # its package registers ExoFormer

        disable_progress_bar()
        self.path = path
        self.model = load_model(AutoModelForCausalLM, path, dtype=dtype or "auto").to(platform.device())
        config = self.model.config
        self.vocab_size, self.longest = config.vocab_size, config.max_position_embeddings
        eos = config.eos_token_id
        self.eod = eos[0] if isinstance(eos, list) else eos
        self.replica, self.is_speaker = 0, True
        self.replicas: dist.ProcessGroup | None = None

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        return self.model(tokens.to(self.model.device), use_cache=False).logits.float()

    @torch.no_grad()
    def token_losses(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(tokens.to(self.model.device), use_cache=False).logits
        labels = labels.to(logits.device)
        # A row at a time: a copy of all logits in float32 would be the largest tensor of all.
        rows = zip(logits, labels, strict=True)
        losses = [torch.nn.functional.cross_entropy(row.float(), label, reduction="none") for row, label in rows]
        return torch.stack(losses)

    def tokenizer(self) -> Any:
        from megatron_exo.hf.loading import load_tokenizer

        try:
            return load_tokenizer(self.path)
        except UserError as error:
            raise UserError(f"tasks are text, and {error}") from error

    def check_dataset_tokenizer(self, prefix: str) -> None:
        has_tokenizer = (self.path / "tokenizer.json").is_file()
        check_sidecar(prefix, "HuggingFaceTokenizer", self.path if has_tokenizer else None, self.vocab_size)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "Hugging Face folder",
            "path": str(self.path),
            "architecture": type(self.model).__name__,
            "dtype": str(self.model.dtype).removeprefix("torch."),
        }
