"""Tasks of lm-evaluation-harness, run by the harness itself; only the computation of logits and texts is ours.

Every rank goes through the same questions; data-parallel replicas share the requests that these make.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import lm_eval.tasks
import torch
import torch.distributed as dist
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor
from transformers import PretrainedConfig

from megatron_exo import platform
from megatron_exo.errors import UserError
from megatron_exo.evaluation.subjects import Checkpoint, Folder, Subject
from megatron_exo.generation import Sampling, generate

PAPER_TASKS = ("arc_challenge", "arc_easy", "hellaswag", "openbookqa", "piqa", "winogrande")
PAPER_FEWSHOT = 5
"""The tasks of the paper's tables, and the examples before each question."""
_PAPER_FOLDERS = ("arc", "hellaswag", "openbookqa", "piqa", "winogrande")
"""Of the harness, where those tasks are described."""


@dataclass(frozen=True)
class TaskOptions:
    """How tasks are run.

    Args:
        num_fewshot: examples before each question; each task's own number if ``None``.
        limit: only so many questions of each task, for a trial.
        bootstrap_iters: for standard errors of metrics that have no formula.
        seed: of the choice of examples, and of whatever else a task draws.
    """

    batch_size: int
    num_fewshot: int | None = None
    limit: int | None = None
    bootstrap_iters: int = 100_000
    seed: int = 1234


class _Requests(HFLM):
    """Requests as the harness prepares and batches them for transformers; counts those that it has to cut."""

    subject: Subject
    cut = 0

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        self.cut += sum(len(context) + len(text) > self.max_length + 1 for _, context, text in requests)
        is_quiet = disable_tqdm or not self.subject.is_speaker
        compute = super()._loglikelihood_tokens
        return _shared(self.subject, requests, lambda mine: compute(mine, is_quiet, override_bs))

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        is_quiet = disable_tqdm or not self.subject.is_speaker
        compute = super().generate_until
        return _shared(self.subject, requests, lambda mine: compute(mine, is_quiet))


def _shared[Result](
    subject: Subject, requests: Sequence[Any], compute: Callable[[Sequence[Any]], list[Result]]
) -> list[Result]:
    """Compute every replica's share of the requests and put the results together, on every rank.

    The harness would share the questions themselves, and then draws other examples for them with each number of ranks.
    """
    if subject.replicas is None:
        return compute(requests)
    size = subject.replicas.size()
    mine = requests[subject.replica :: size]
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, compute(mine) if mine else [], group=subject.replicas)
    return [parts[number % size][number // size] for number in range(len(requests))]


class _FolderRequests(_Requests):
    def __init__(self, folder: Folder, batch_size: int) -> None:
        self.subject = folder
        super().__init__(folder.model, tokenizer=folder.tokenizer(), batch_size=batch_size, max_length=folder.longest)


class _Stub:
    """In place of a model of transformers: what the harness asks one for, but never to compute."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = PretrainedConfig(max_position_embeddings=checkpoint.longest)
        self.device = platform.device()
        self.name_or_path = str(checkpoint.path)


class _CheckpointRequests(_Requests):
    subject: Checkpoint

    def __init__(self, checkpoint: Checkpoint, batch_size: int) -> None:
        self.subject = checkpoint
        super().__init__(
            _Stub(checkpoint),
            backend="causal",
            tokenizer=checkpoint.tokenizer(),
            batch_size=batch_size,
            max_length=checkpoint.longest,
        )

    def _model_call(self, inps: Tensor, attn_mask: None = None, labels: None = None) -> Tensor:
        return self.subject.logits(inps)

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], *, attention_mask: Tensor, **settings: Any
    ) -> Tensor:
        """int64 [b, s], padded on the left → with new tokens behind it; by our own cache, which has no padding."""
        model, tokenizer = self.subject.model, self.tokenizer
        sampling = _sampling(settings, max_length - context.shape[1])
        prompts = [row[mask.bool()].tolist() for row, mask in zip(context, attention_mask, strict=True)]

        def is_finished(row: int, tokens: list[int]) -> bool:
            return any(text in tokenizer.decode(tokens) for text in stop)

        texts = generate(
            model.chunks[0],
            prompts,
            sampling,
            vocab_size=self.subject.vocab_size,
            eod=self.subject.eod,
            longest=self.max_length,
            config=self.subject.config,
            pg_collection=model.groups,
            is_finished=is_finished,
        )
        new = context.new_full((len(texts), max(map(len, texts), default=0)), tokenizer.eos_token_id)
        for row, tokens in enumerate(texts):
            new[row, : len(tokens)] = torch.tensor(tokens)
        return torch.cat([context, new], dim=1)


def _sampling(settings: dict[str, Any], max_new_tokens: int) -> Sampling:
    """What a task asks of transformers' ``generate``.

    Raises:
        UserError: it asks for what Megatron's side cannot do.
    """
    known = {"do_sample", "temperature", "top_k", "top_p"}
    if unknown := sorted(settings.keys() - known):
        raise UserError(
            f"the task generates with {', '.join(unknown)}, which checkpoints cannot; evaluate an exported folder"
        )
    temperature = settings.get("temperature") or 0.0
    if settings.get("do_sample") is False:
        temperature = 0.0
    elif settings.get("do_sample") and "temperature" not in settings:
        temperature = 1.0
    return Sampling(max_new_tokens, temperature, settings.get("top_k") or 0, settings.get("top_p") or 1.0)


def task_manager(names: Sequence[str], include: Sequence[Path]) -> TaskManager:
    """What finds tasks by name: the harness's, and those described by YAML files in folders of the user's.

    Raises:
        UserError: a folder is not there.
    """
    # Of metrics with default aggregations, numbers of examples, requests that are cut: what matters is in the results.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    for folder in include:
        if not folder.is_dir():
            raise UserError(f"--include-path {folder}: no such folder")
    # The harness has thousands of descriptions; reading all of them takes as long as many an evaluation.
    paper = [Path(lm_eval.tasks.__file__).parent / folder for folder in _PAPER_FOLDERS]
    few = TaskManager(include_path=list(map(str, [*paper, *include])), include_defaults=False)
    if all(few.match_tasks([name]) for name in names):
        return few
    return TaskManager(include_path=list(map(str, include)) or None)


def load_tasks(names: Sequence[str], manager: TaskManager) -> list[str]:
    """Load the data of tasks, downloading it if need be and possible, so that nothing fails later.

    Args:
        names: of tasks, groups and tags, or patterns of names.

    Returns:
        The names that they stand for.

    Raises:
        UserError: a task is unknown, or its data is neither here nor to be had.
    """
    found: list[str] = []
    for name in names:
        matching = manager.match_tasks([name])
        if not matching:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "`lm_eval ls tasks` lists them"
            raise UserError(f"there is no task {name!r}; {hint}")
        try:
            manager.load(matching)
        except (OSError, ValueError, RuntimeError) as error:  # what datasets raises without a network or a file
            raise UserError(
                f"the data of task {name} cannot be loaded ({type(error).__name__}: {str(error)[:200]}); where there "
                f"is a network, run `python tools/evaluate.py --download {name}`, and take the folder $HF_HOME along"
            ) from error
        found += matching
    return list(dict.fromkeys(found))


def run_tasks(
    subject: Subject, names: Sequence[str], manager: TaskManager, options: TaskOptions
) -> dict[str, Any] | None:
    """Evaluate tasks; call it on every rank.

    Returns:
        Plain data, as it goes into the file of results, on the rank that speaks; ``None`` elsewhere.
    """
    requests = (_CheckpointRequests if isinstance(subject, Checkpoint) else _FolderRequests)(
        subject,  # type: ignore[arg-type]
        options.batch_size,
    )
    try:
        found = simple_evaluate(
            model=requests,
            tasks=list(names),
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            bootstrap_iters=options.bootstrap_iters,
            task_manager=manager,
            random_seed=options.seed,
            numpy_random_seed=options.seed,
            torch_random_seed=options.seed,
            fewshot_random_seed=options.seed,
        )
    except ValueError as error:
        shots = "the task's" if options.num_fewshot is None else options.num_fewshot
        raise UserError(
            f"the harness cannot run {', '.join(names)} with {shots} examples before each question: {error}"
        ) from error
    if found is None or not subject.is_speaker:
        return None
    tasks = {name: _task(found, name) for name in found["samples"]}
    return {
        "harness": {"name": "lm-evaluation-harness", "version": version("lm-eval")},
        "tasks": tasks,
        "means": _means(tasks),
        "requests_cut_to_context": requests.cut,
    }


def _task(found: dict[str, Any], name: str) -> dict[str, Any]:
    """One task of the harness's results, with the score of every question."""
    better, metrics = found["higher_is_better"][name], {}
    for key, value in found["results"][name].items():
        metric, _, kind = key.partition(",")
        if kind and not metric.endswith("_stderr"):
            stderr = found["results"][name].get(f"{metric}_stderr,{kind}")
            metrics[metric if kind == "none" else f"{metric} ({kind})"] = {
                "value": value,
                "stderr": stderr if isinstance(stderr, float) else None,
                "higher_is_better": better.get(metric),
            }
    counts = found["n-samples"][name]
    return {
        "version": found["versions"][name],
        "num_fewshot": found["n-shot"][name],
        "n": counts["effective"],
        "n_of": counts["original"],
        "metrics": metrics,
        "items": [_item(sample) for sample in sorted(found["samples"][name], key=lambda item: item["doc_id"])],
    }


def _item(sample: dict[str, Any]) -> dict[str, Any]:
    """What a paired test needs of a question: which one it is, and its score by every metric."""
    return {
        "doc_id": sample["doc_id"],
        "doc_hash": sample["doc_hash"],
        "filter": sample["filter"],
        "target": sample["target"],
        "responses": sample["filtered_resps"],
        "metrics": {metric: sample[metric] for metric in sample["metrics"]},
    }


def _means(tasks: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Of accuracies over tasks, where every task has one."""
    accuracies = [task["metrics"].get("acc", {}).get("value") for task in tasks.values()]
    normalised = [task["metrics"].get("acc_norm", {}).get("value") for task in tasks.values()]
    either = [a if n is None else n for a, n in zip(accuracies, normalised, strict=True)]
    if len(tasks) < 2 or None in accuracies:
        return {}
    return {"acc": fmean(accuracies), "acc_norm, or acc where a task has none": fmean(either)}
