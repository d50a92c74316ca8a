#!/usr/bin/env python
"""Measure what the wire between pipeline stages costs: bytes per boundary, activations kept, and time per step.

  python tools/bench_wire.py                          # two stages; starts its ranks itself, on a GPU machine or a CPU
  python tools/bench_wire.py --virtual-stages 2       # interleaved
  python tools/bench_wire.py --tp 2 --markdown out.md

Three wires are compared, for multi-head attention and for grouped queries: anchors beside the hidden states, the
anchor's source beside them (--exo-wire source), and, for scale, the gated model without an anchor, whose stages send
hidden states alone. All models live in one process per rank and take turns at the steps, so that a noisy machine
disturbs them alike; times are given as ratios to the anchors' wire, the median of the rounds with their range.

Activations kept are counted, not sampled: the bytes of all tensors that autograd holds for the backward pass at once,
at their peak, parameters left out, on the first and the last stage. The time at the boundary is what the last stage
spends in sending, receiving and waiting for the others, their work included; interleaved, without what overlaps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_exo import platform
from megatron_exo.errors import UserError, one_line_errors

WIRES = {"anchors": "dynamic-e-exoformer", "source": "dynamic-e-exoformer", "no anchor": "gated"}
"""Wire → variant."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages (default: %(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size, with sequence parallelism above 1")
    parser.add_argument("--virtual-stages", type=int, default=1, help="chunks per rank (default: %(default)s)")
    parser.add_argument("--num-layers", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--hidden-size", type=int, default=512, help="(default: %(default)s)")
    parser.add_argument("--num-attention-heads", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--query-groups", type=int, default=2, help="of the grouped queries (default: %(default)s)")
    parser.add_argument("--seq-length", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=4, help="per step, of one sequence (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each model (default: %(default)s)")
    parser.add_argument("--bf16", action="store_true", help="bf16 instead of fp32")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything that was measured")
    parser.add_argument("--markdown", type=Path, metavar="OUT", help="write the table")
    return parser.parse_args(argv)


@dataclasses.dataclass
class Measured:
    """One model on one wire; bytes are those of the rank that writes the table unless said otherwise."""

    heads: str
    wire: str
    boundary_bytes: int = 0
    """Received over one boundary for one micro-batch."""
    times_hidden: float = 0.0
    """The same, in widths of the hidden states."""
    kept_first_stage: int = 0
    kept_last_stage: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)
    """Of each timed step."""
    waiting: list[float] = dataclasses.field(default_factory=list)
    """Of each timed step, seconds in which the last stage sent, received or waited for other stages."""


class KeptBytes:
    """Counts the bytes that autograd holds for the backward pass, storages once, parameters not."""

    def __init__(self, model: Any) -> None:
        self.now = self.peak = 0
        self._users: dict[int, int] = {}
        self._parameters = {p.untyped_storage().data_ptr() for chunk in model.chunks for p in chunk.parameters()}

    @contextmanager
    def counting(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Held(tensor, self), lambda held: held.tensor):
            yield

    def change(self, tensor: torch.Tensor, by: int) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._parameters:
            return
        users = self._users.get(storage.data_ptr(), 0)
        self._users[storage.data_ptr()] = users + by
        if users + by == 0 or users == 0:
            self.now += by * storage.nbytes()
            self.peak = max(self.peak, self.now)


class _Held:
    """A tensor that autograd holds; it is let go with this object."""

    def __init__(self, tensor: torch.Tensor, kept: KeptBytes) -> None:
        self.tensor, self._kept = tensor, kept
        kept.change(tensor, 1)

    def __del__(self) -> None:
        self._kept.change(self.tensor, -1)


class Boundary:
    """What this rank exchanges with other stages, noted by a wrapper around the communicator."""

    def __init__(self) -> None:
        from megatron_exo.model.wire import ExoP2PCommunicator

        self.received_bytes, self.seconds = 0, 0.0
        original = ExoP2PCommunicator._communicate

        def communicate(communicator: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            answer = original(communicator, **kwargs)
            self.seconds += time.perf_counter() - start
            if kwargs["recv_prev"]:
                self.received_bytes = answer[0].numel() * answer[0].element_size()
            return answer

        ExoP2PCommunicator._communicate = communicate  # type: ignore[method-assign]


def build(args: argparse.Namespace, wire: str, query_groups: int) -> Any:
    from megatron_exo.sizes import ModelSizes
    from megatron_exo.standalone import StandaloneModel, transformer_config
    from megatron_exo.variants import VARIANTS

    dtype = torch.bfloat16 if args.bf16 else torch.float32
    sizes = ModelSizes(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=query_groups,
        kv_channels=args.hidden_size // args.num_attention_heads,
        ffn_hidden_size=args.hidden_size * 11 // 4,
        vocab_size=1024,
        seq_length=args.seq_length,
    )
    config = transformer_config(
        VARIANTS[WIRES[wire]].exo,
        sizes,
        dtype,
        tensor_model_parallel_size=args.tp,
        sequence_parallel=args.tp > 1,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.virtual_stages if args.virtual_stages > 1 else None,
        batch_p2p_comm=args.virtual_stages == 1,
        overlap_p2p_comm=args.virtual_stages > 1,
        exo_wire="source" if wire == "source" else "anchors",
    )
    return StandaloneModel(config, sizes, init_recipe="megatron")


def measure(args: argparse.Namespace) -> list[Measured]:
    """Every wire for both kinds of heads; the results of the last rank are whole."""
    from megatron_exo.standalone import start_parallel_state

    start_parallel_state(args.tp, args.pp, args.virtual_stages if args.virtual_stages > 1 else None)
    boundary = Boundary()
    tokens = torch.randint(
        0, 1024, (args.micro_batches, args.seq_length + 1), generator=torch.Generator().manual_seed(1)
    )
    results = []
    for heads, groups in (("multi-head", args.num_attention_heads), ("grouped queries", args.query_groups)):
        wires = [wire for wire in WIRES if not (wire == "source" and args.virtual_stages > 1)]
        models = {wire: build(args, wire, groups) for wire in wires}
        rows = {wire: Measured(heads, wire) for wire in wires}
        for wire, model in models.items():
            kept = KeptBytes(model)
            with kept.counting():
                model.forward_backward(tokens[:, :-1], tokens[:, 1:])
            peaks = [torch.zeros(1, dtype=torch.int64, device=platform.device()) for _ in range(dist.get_world_size())]
            dist.all_gather(peaks, torch.tensor([kept.peak], device=platform.device()))
            row = rows[wire]
            row.kept_first_stage, row.kept_last_stage = int(peaks[0]), int(peaks[-1])
            row.boundary_bytes = boundary.received_bytes
            hidden_bytes = args.seq_length // args.tp * args.hidden_size * (2 if args.bf16 else 4)
            row.times_hidden = row.boundary_bytes / hidden_bytes
        for number in range(args.rounds):
            if dist.get_rank() == 0:
                print(f"{heads}: round {number + 1} of {args.rounds}, {len(models)} models", file=sys.stderr)
            for wire, model in models.items():
                dist.barrier()
                boundary.seconds, start = 0.0, time.perf_counter()
                model.forward_backward(tokens[:, :-1], tokens[:, 1:])
                dist.barrier()
                rows[wire].seconds.append(time.perf_counter() - start)
                rows[wire].waiting.append(boundary.seconds)
        results += rows.values()
    return results


def table(rows: list[Measured]) -> str:
    """Markdown."""
    lines = [
        "| heads | wire | KiB per boundary and micro-batch | in hidden states | activations kept, first stage (MiB) "
        "| last stage (MiB) | time per step, to anchors | of it at the boundary |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        anchors = next(other for other in rows if (other.heads, other.wire) == (row.heads, "anchors"))
        ratios = [mine / theirs for mine, theirs in zip(row.seconds, anchors.seconds, strict=True)]
        waiting = statistics.median(w / s for w, s in zip(row.waiting, row.seconds, strict=True))
        lines.append(
            f"| {row.heads} | {row.wire} | {row.boundary_bytes / 1024:,.0f} | {row.times_hidden:.2f} "
            f"| {row.kept_first_stage / 2**20:.1f} | {row.kept_last_stage / 2**20:.1f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {waiting:.0%} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with one_line_errors():
        if args.pp < 2:
            raise UserError("with one stage there is no boundary to measure; pass --pp 2 or more")
        if "RANK" not in os.environ:
            ranks = ["--standalone", "--nproc-per-node", str(args.pp * args.tp)]
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            words = [sys.executable, "-m", "torch.distributed.run", *ranks, str(Path(__file__)), *sys.argv[1:]]
            os.execv(sys.executable, words)
        platform.activate()
        logging.getLogger().setLevel(logging.ERROR)  # Megatron lists every parameter of every model
        dist.init_process_group(platform.communication_backend())
        rows = measure(args)
        if dist.get_rank() == dist.get_world_size() - 1:
            print(table(rows))
            command = shlex.join(["python", "tools/bench_wire.py", *sys.argv[1:]])
            if args.markdown is not None:
                args.markdown.write_text(f"`{command}`\n\n{table(rows)}\n")
            if args.json is not None:
                args.json.write_text(json.dumps({"command": command, "rows": [dataclasses.asdict(r) for r in rows]}))
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
