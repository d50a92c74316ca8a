"""What an ExoFormer is: one frozen value with one field per axis of variation.

Source: arXiv 2601.08131 ("Attention Projection Mixing with Exogenous Anchors"). A variant of the paper is
a point on these axes (see :mod:`megatron_exo.variants`), never a fork of the model code. This module does not
import torch, so that tools can reason about variants cheaply.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_exo.errors import UserError

PATHWAYS = "qkvg"
"""The four projections of a layer that can be mixed: query, key, value and gate logits."""

GATES = ("none", "elementwise")
ANCHORS = ("none", "internal", "h0", "h1", "h2")
GRANULARITIES = ("scalar", "headwise", "elementwise")
MIXINGS = ("static", "dynamic")
ANCHOR_WEIGHTS = ("learned", "frozen")
CONTROLS = ("none", "qk-bias", "embedding-residual")


def parse_pathways(text: str) -> str:
    """Return the canonical form of a subset of Q, K, V, G: its letters in the order ``qkvg``.

    ``"none"`` and ``""`` are the empty subset, ``"all"`` is the full one; commas and case do not matter.
    Raises ``ValueError`` for any other letter or a letter given twice.
    """
    letters = text.lower().replace(",", "").replace(" ", "")
    letters = {"none": "", "all": PATHWAYS}.get(letters, letters)
    if not set(letters) <= set(PATHWAYS) or len(set(letters)) != len(letters):
        raise ValueError(
            f"{text!r} is not a subset of the pathways Q, K, V, G; write for example 'qkvg', 'v' or 'none'"
        )
    return "".join(sorted(letters, key=PATHWAYS.index))


class ExoConfigError(UserError):
    """A combination of axes that has no meaning or is not supported: what, why, and what instead."""


def _words(axis: str) -> str:
    return "exo " + axis.replace("_", " ")


@dataclass(frozen=True)
class ExoConfig:
    """One point on the axes of the paper.

    Subsets of pathways are strings over ``qkvg`` (see :func:`parse_pathways`).

    Raises:
        ExoConfigError: for contradictory axes, on construction.
    """

    gate: str = "none"
    """``elementwise`` multiplies the attention output by sigmoid(gate logits), one logit per channel."""
    anchor: str = "none"
    """Where the anchor comes from: ``internal`` (layer 1's own projections), or matrices of its own applied
    to ``h0`` (the input embeddings), ``h1`` or ``h2`` (the output of layer 1 or 2)."""
    pathways: str = ""
    """The pathways that are mixed with the anchor."""
    anchor_norm: str = ""
    """The pathways whose anchor is RMS-normalised per head with a learned gain before mixing."""
    post_norm: str = ""
    """The pathways of ``vg`` that are normalised per head again after mixing (Q and K always are: QK-norm)."""
    granularity: str = "elementwise"
    """Shape of the coefficients λ of a layer: one, one per head, or one per head and channel."""
    mixing: str = "static"
    """``dynamic`` multiplies λ by γ, one sigmoid scalar per token and term, from a small MLP of the normed input."""
    anchor_weights: str = "learned"
    """``frozen`` keeps the anchor's matrices at their random initial values (gains and λ are still learned)."""
    control: str = "none"
    """A control in place of the anchor: ``qk-bias`` (a learned bias per layer on Q and K) or
    ``embedding-residual`` (the input embeddings, weighted per channel, added to the residual stream of each layer)."""
    drop_anchor: str = ""
    """Intervention at inference: pathways whose anchor term is removed."""
    drop_current: str = ""
    """Intervention at inference: pathways whose current term is removed."""
    dynamic_hidden_size: int = 16
    """Width of the hidden layer of the dynamic-mixing MLP."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("gate", GATES),
            ("anchor", ANCHORS),
            ("granularity", GRANULARITIES),
            ("mixing", MIXINGS),
            ("anchor_weights", ANCHOR_WEIGHTS),
            ("control", CONTROLS),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise ExoConfigError(f"{_words(name)} {value!r} is unknown; choose one of {', '.join(choices)}")
        for name in ("pathways", "anchor_norm", "post_norm", "drop_anchor", "drop_current"):
            try:
                object.__setattr__(self, name, parse_pathways(getattr(self, name)))
            except ValueError as error:
                raise ExoConfigError(f"{_words(name)}: {error}") from None
        if self.dynamic_hidden_size < 1:
            raise ExoConfigError(f"exo dynamic hidden size must be at least 1, not {self.dynamic_hidden_size}")
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        if self.anchor == "none":
            neutral = {"pathways": "", "anchor_norm": "", "post_norm": "", "mixing": "static"}
            neutral |= {"anchor_weights": "learned", "drop_anchor": "", "drop_current": ""}
            if self.control != "embedding-residual":
                neutral["granularity"] = "elementwise"
            for name, value in neutral.items():
                if getattr(self, name) != value:
                    raise ExoConfigError(
                        f"{_words(name)} {getattr(self, name)!r} has no effect without an anchor; "
                        f"choose an anchor (--exo-anchor), or give it as {value or 'none'!r}"
                    )
        elif not self.pathways:
            raise ExoConfigError(
                "an anchor that is mixed into no pathway does nothing; give pathways such as 'qkvg', or anchor 'none'"
            )
        if "g" in self.pathways and not self.has_gate:
            raise ExoConfigError(
                "pathway G is mixed but the model has no gate; use --exo-gate elementwise, or pathways without 'g'"
            )
        for name in ("anchor_norm", "post_norm", "drop_anchor", "drop_current"):
            extra = set(getattr(self, name)) - set(self.pathways)
            if extra:
                raise ExoConfigError(
                    f"{_words(name)} names {''.join(sorted(extra, key=PATHWAYS.index)).upper()}, "
                    f"which is not mixed (pathways {self.pathways!r}); name only mixed pathways"
                )
        if set(self.post_norm) & set("qk"):
            raise ExoConfigError(
                "Q and K are always normalised after mixing (QK-norm); exo post norm takes only 'v' and 'g'"
            )
        if set(self.drop_anchor) & set(self.drop_current):
            raise ExoConfigError(
                "dropping both terms of one pathway leaves nothing of it; drop the anchor or the current term"
            )
        if self.anchor_weights == "frozen" and self.anchor == "internal":
            raise ExoConfigError("an internal anchor has no matrices of its own to freeze; use anchor h0, h1 or h2")
        if self.control != "none" and self.anchor != "none":
            raise ExoConfigError(f"control {self.control!r} stands in place of the anchor; use anchor 'none' with it")
        if self.control == "embedding-residual" and self.granularity == "headwise":
            raise ExoConfigError(
                "the residual stream has no heads; use granularity scalar or elementwise with this control"
            )

    # -- what follows from the axes -------------------------------------------------------------------------

    @property
    def has_gate(self) -> bool:
        return self.gate != "none"

    @property
    def is_dynamic(self) -> bool:
        return self.mixing == "dynamic"

    @property
    def is_exogenous(self) -> bool:
        """Whether the anchor has projection matrices of its own."""
        return self.anchor in ("h0", "h1", "h2")

    @property
    def components(self) -> str:
        """The projections that a layer computes, in the order of a packed row block: q, (g,) k, v."""
        return "qgkv" if self.has_gate else "qkv"

    @property
    def source_layer(self) -> int | None:
        """The layer (counted from 1) that makes the anchor, or hands on the embeddings; ``None`` without one.

        ``h0`` and the embedding residual are taken from the *input* of layer 1, everything else from what
        the named layer computes.
        """
        if self.control == "embedding-residual":
            return 1
        return {"none": None, "internal": 1, "h0": 1, "h1": 1, "h2": 2}[self.anchor]

    @property
    def first_mixed_layer(self) -> int:
        """The first layer (counted from 1) that mixes: layers up to and including the source are not mixed,
        except that ``h0`` precedes layer 1 (paper §3, SPEC §1)."""
        return {"none": 1, "internal": 2, "h0": 1, "h1": 2, "h2": 3}[self.anchor]

    def mixes(self, layer_number: int) -> bool:
        """Whether the layer (counted from 1) mixes the anchor into its projections."""
        return self.anchor != "none" and layer_number >= self.first_mixed_layer

    @property
    def lambda_init(self) -> float:
        """Initial value of every λ: 0.5 for static mixing; 1.0 for dynamic, whose γ starts at 0.5."""
        return 1.0 if self.is_dynamic else 0.5

    @property
    def num_dynamic_outputs(self) -> int:
        """Two γ per mixed pathway: eight for Q, K, V, G; six without a gate."""
        return 2 * len(self.pathways)

    def replace(self, **changes: object) -> ExoConfig:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def describe(self) -> str:
        """One line for plans and model cards, naming gate and anchor in every row."""
        gate = f"gate {self.gate}"
        if self.control != "none":
            return f"{gate}, no anchor, control {self.control}"
        if self.anchor == "none":
            return f"{gate}, no anchor"
        parts = [
            gate,
            f"anchor {self.anchor}" + (" (frozen)" if self.anchor_weights == "frozen" else ""),
            f"mixes {self.pathways.upper()} {self.granularity} {self.mixing}",
            f"anchor norm {self.anchor_norm.upper() or 'none'}",
        ]
        parts += [f"post-norm {self.post_norm.upper()}"] if self.post_norm else []
        parts += [f"without anchor term of {self.drop_anchor.upper()}"] if self.drop_anchor else []
        parts += [f"without current term of {self.drop_current.upper()}"] if self.drop_current else []
        return ", ".join(parts)
