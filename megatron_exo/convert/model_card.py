"""The README.md of a Hugging Face folder: what the model is, what it was trained on, and where it comes from."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_exo.config import ExoConfig
from megatron_exo.curves import CurveError, read_run
from megatron_exo.sizes import ModelSizes
from megatron_exo.variants import name_of

_FRONT_MATTER = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- exoformer
- megatron-core
---
"""
_USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
```

`trust_remote_code` runs `modeling_exoformer.py` of this folder; with `megatron_exo` installed, `import megatron_exo.hf`
takes its place.
"""


@dataclass(frozen=True)
class Provenance:
    """Where weights come from; empty where that is not known."""

    source: str
    """The name of the checkpoint, without the machine's folders."""
    sha256: str
    """Of what names all of its bytes: a manifest, or the file itself."""
    step: int
    tokens: int
    data: Mapping[str, Any] = field(default_factory=dict)
    """As :func:`megatron_exo.checkpoints.sources.describe_data` describes it."""
    versions: Mapping[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    run: Path | None = None
    """The folder of the run, in whose logs its evaluations are."""


def model_card(
    exo: ExoConfig, sizes: ModelSizes, dtype: str, parameters: int, come_from: Provenance, notes: list[str]
) -> str:
    """The text of the card; ``notes`` are sentences such as what the conversion was held against."""
    name = name_of(exo) or "ExoFormer of no name"
    rows = {
        "variant": f"{name}: {exo.describe()}",
        "parameters": f"{parameters:,}, {dtype}",
        "layers": f"{sizes.num_layers} of hidden size {sizes.hidden_size}",
        "attention": f"{sizes.num_attention_heads} heads of {sizes.kv_channels} in {sizes.num_query_groups} groups",
        "MLP": f"SwiGLU of {sizes.ffn_hidden_size}",
        "vocabulary": f"{sizes.vocab_size:,}, {'tied to' if sizes.tied_embeddings else 'apart from'} the output layer",
        "context": f"{sizes.seq_length:,} tokens, rotary base {sizes.rotary_base:g}",
        "trained": f"{come_from.step:,} steps, {come_from.tokens:,} tokens",
    }
    parts = [
        _FRONT_MATTER,
        f"# {name}, {_millions(parameters)}\n",
        "An ExoFormer ([Attention Projection Mixing with Exogenous Anchors](https://arxiv.org/abs/2601.08131)).\n",
        _USE,
        "## Model\n",
        _table(("", ""), rows.items()),
        "## Data\n",
        "\n".join(_readable(come_from.data)) + "\n",
        "## Evaluation so far\n",
        _evaluation(come_from.run, come_from.step),
        "## Provenance\n",
        "\n".join(_provenance(come_from)) + "\n",
        "## Conversion\n",
        "\n".join(f"- {note}" for note in notes) + "\n",
    ]
    return "\n".join(parts)


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:,.0f}M parameters" if parameters >= 1e6 else f"{parameters:,} parameters"


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(each) for each in line) + " |" for line in lines) + "\n"


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def _code(value: object) -> str:
    """A text of elsewhere that cannot be taken for anything but text."""
    return "`" + " ".join(str(value).replace("`", "'").split()) + "`"


def _readable(data: Mapping[str, Any]) -> list[str]:
    try:
        return list(_data(data))
    except (AttributeError, TypeError):
        return ["The source describes its data in a way that this version does not know."]


def _data(data: Mapping[str, Any]) -> Iterator[str]:
    if not data:
        yield "Not known."
    elif data.get("mock"):
        yield f"Random tokens (`--mock-data`), seed {data.get('seed')}."
    for each in data.get("sets") or []:
        weight = "" if each.get("weight") is None else f", weight {each['weight']}"
        size = "" if each.get("bin_bytes") is None else f", {each['bin_bytes'] / 1e6:,.1f} MB of tokens"
        digest = "" if each.get("idx_sha256") is None else f", index sha256 {each['idx_sha256']}"
        yield f"- {each.get('part')}: {_code(Path(str(each.get('prefix'))).name)}{weight}{size}{digest}"
    if data.get("sets"):
        yield f"- split {_code(data.get('split'))}, seed {_code(data.get('seed'))}"


def _evaluation(run: Path | None, step: int) -> str:
    """The last evaluations up to the checkpoint's step, one row for each set."""
    try:
        records = [] if run is None else read_run(run).evaluations
    except CurveError:
        records = []
    last = {(r["kind"], r.get("set")): r for r in records if r["iteration"] <= step}
    rows = [
        (kind + (f" ({name})" if name else ""), record["iteration"], f"{loss:.4f}", f"{math.exp(min(loss, 700)):.2f}")
        for (kind, name), record in last.items()
        if isinstance(loss := record.get("lm_loss"), float) and math.isfinite(loss)
    ]
    if not rows:
        return "None was recorded.\n"
    return _table(("set", "step", "loss (nats per token)", "perplexity"), rows)


def _provenance(come_from: Provenance) -> Iterator[str]:
    yield f"- converted from {_code(come_from.source)}, sha256 {come_from.sha256}"
    if come_from.versions:
        yield f"- trained with {_code(', '.join(f'{name} {version}' for name, version in come_from.versions.items()))}"
    if come_from.command:
        yield f"- by\n\n```\n{shlex.join(map(str, come_from.command)).replace('```', '')}\n```"
