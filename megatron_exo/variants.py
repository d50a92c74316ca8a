"""The named variants of the paper, each a point on the axes of :class:`megatron_exo.config.ExoConfig`.

To add a variant: add one line to ``_VARIANTS``; everything else (arguments, plans, documentation) reads it.
Reported figures are those of arXiv 2601.08131 v4 at 450M parameters and 10B tokens, one run each, no seeds.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from megatron_exo.config import ExoConfig, ExoConfigError


@dataclass(frozen=True)
class Variant:
    """A name, its axes, and what the paper reports for it (``None`` where it reports nothing)."""

    name: str
    exo: ExoConfig
    reported_perplexity: float | None = None
    """Validation perplexity, 450M, 10B tokens."""
    reported_accuracy: float | None = None
    """Mean accuracy of six tasks in percent, 450M, 10B tokens."""


_BASE = ExoConfig()
_GATED = ExoConfig(gate="elementwise")
_NU = _GATED.replace(anchor="internal", pathways="qkvg", anchor_norm="qkvg")
_EXO = _NU.replace(anchor="h0")
_DYN = _EXO.replace(mixing="dynamic")
_DYN_NU = _NU.replace(mixing="dynamic")
_VALUE = _BASE.replace(anchor="internal", pathways="v", granularity="scalar")

_VARIANTS = [
    Variant("base", _BASE, 14.79, 48.14),
    Variant("gated", _GATED, 14.64, 48.80),
    Variant("resformer", _VALUE, 14.32, 49.65),
    Variant("gated-resformer", _VALUE.replace(gate="elementwise"), 14.25, 49.09),
    Variant("s-nuresformer", _NU.replace(granularity="scalar")),
    Variant("h-nuresformer", _NU.replace(granularity="headwise"), None, 49.42),
    Variant("e-nuresformer", _NU, 14.15, 49.68),
    Variant("s-nuresformer-qk-norm", _NU.replace(granularity="scalar", anchor_norm="qk"), None, 49.83),
    Variant("s-exoformer", _EXO.replace(granularity="scalar")),
    Variant("h-exoformer", _EXO.replace(granularity="headwise"), None, 49.23),
    Variant("e-exoformer", _EXO, 14.13, 49.85),
    Variant("e-exoformer-no-norm", _EXO.replace(anchor_norm=""), 14.30),
    Variant("e-exoformer-vg", _EXO.replace(pathways="vg", anchor_norm="vg")),
    Variant("e-exoformer-postnorm-v", _EXO.replace(post_norm="v"), 14.08),
    Variant("e-exoformer-postnorm-vg", _EXO.replace(post_norm="vg"), 14.07),
    Variant("e-exoformer-h1", _EXO.replace(anchor="h1"), 14.07),
    Variant("dynamic-s-exoformer", _DYN.replace(granularity="scalar")),
    Variant("dynamic-h-exoformer", _DYN.replace(granularity="headwise")),
    Variant("dynamic-e-exoformer", _DYN, 14.09, 50.27),
    Variant("dynamic-e-exoformer-h1", _DYN.replace(anchor="h1"), 14.02),
    Variant("dynamic-e-exoformer-h2", _DYN.replace(anchor="h2"), 14.09),
    Variant("dynamic-s-nuresformer", _DYN_NU.replace(granularity="scalar")),
    Variant("dynamic-h-nuresformer", _DYN_NU.replace(granularity="headwise")),
    Variant("dynamic-e-nuresformer", _DYN_NU),
    Variant("e-exoformer-frozen-anchor", _EXO.replace(anchor_weights="frozen")),
    Variant("dynamic-e-exoformer-frozen-anchor", _DYN.replace(anchor_weights="frozen")),
    Variant("gated-qk-bias", _GATED.replace(control="qk-bias")),
    Variant("gated-embedding-residual", _GATED.replace(control="embedding-residual")),
]

VARIANTS: dict[str, Variant] = {variant.name: variant for variant in _VARIANTS}


def get_variant(name: str) -> Variant:
    """Look a variant up by its paper name; raises ``ExoConfigError`` with the nearest names otherwise."""
    if name in VARIANTS:
        return VARIANTS[name]
    near = difflib.get_close_matches(name, VARIANTS, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "see --help for the list"
    raise ExoConfigError(f"unknown variant {name!r}; {hint}")


def name_of(exo: ExoConfig) -> str | None:
    """The paper name of a point on the axes, or ``None`` where it has none."""
    return next((name for name, variant in VARIANTS.items() if variant.exo == exo), None)


def markdown_table() -> str:
    """All named variants with their anchor, gate and reported figures, for ``docs/variants.md``."""
    rows = ["| name | gate | anchor | mixes | anchor norm | post-norm | λ | mixing | reported |", "| --- " * 9 + "|"]
    for variant in VARIANTS.values():
        exo = variant.exo
        anchor = exo.anchor + (", frozen" if exo.anchor_weights == "frozen" else "")
        anchor = f"control: {exo.control}" if exo.control != "none" else anchor
        mixes = exo.anchor != "none"
        figures = (variant.reported_perplexity, variant.reported_accuracy)
        reported = " / ".join("–" if figure is None else f"{figure:.2f}" for figure in figures)
        cells = [
            f"`{variant.name}`",
            exo.gate,
            anchor,
            exo.pathways.upper() or "–",
            exo.anchor_norm.upper() or "–",
            exo.post_norm.upper() or "–",
            exo.granularity if mixes else "–",
            exo.mixing if mixes else "–",
            "–" if figures == (None, None) else reported,
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown_table())
