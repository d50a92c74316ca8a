"""The layers that ``--transformer-impl transformer_engine`` builds: their classes, parameters and checkpoint keys.

No numerics without a GPU: Transformer Engine has no CPU kernels, so models are constructed here and never run.

Besides tensors, checkpoints hold one ``_extra_state`` per module for the scales of low-precision formats. Megatron's
local linear layers write empty ones; norms have no such scales, and our model writes none for them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_exo.variants import get_variant
from tests.plain_reference import parameter_shapes
from tests.te.cases import PACKED, PLACES, SIZES, VARIANTS, WRONGLY_FUSED
from tests.te.wheel import unpacked_wheel

pytestmark = pytest.mark.slow

# Packages and classes; TENorm makes Transformer Engine's own RMSNorm.
LINEAR, FUSED_LINEAR = "megatron.TEColumnParallelLinear", "megatron.TELayerNormColumnParallelLinear"
NORM, NOTHING = "transformer_engine.RMSNorm", "megatron.IdentityOp"
STATIC_LAYER = {
    "input_layernorm": NOTHING,
    "self_attention.linear_qkv": FUSED_LINEAR,
    "self_attention.q_layernorm": NORM,
    "self_attention.k_layernorm": NORM,
    "self_attention.core_attention": "megatron_exo.TEDocumentAttention",
    "self_attention.linear_proj": "megatron.TERowParallelLinear",
    "pre_mlp_layernorm": NOTHING,
    "mlp.linear_fc1": FUSED_LINEAR,
    "mlp.linear_fc2": "megatron.TERowParallelLinear",
}
DYNAMIC_LAYER = STATIC_LAYER | {"input_layernorm": NORM, "self_attention.linear_qkv": LINEAR}


@pytest.fixture(scope="module")
def described(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Backend → "variant place" → what :mod:`tests.te.describe` says of that model."""
    assert request.config.cache is not None
    wheel = unpacked_wheel(request.config.cache.mkdir("transformer_engine"))
    folder = tmp_path_factory.mktemp("described")
    environment = os.environ | {"MEGATRON_EXO_DEVICE": "cpu", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(wheel)}
    without_wheel = environment | {"PYTHONPATH": ""}
    programs = {
        "local": start(["tests.te.describe", "local", str(folder / "local")], without_wheel),
        "transformer_engine": start(
            ["tests.te.stub", "tests.te.describe", "transformer_engine", str(folder / "transformer_engine")],
            environment,
        ),
    }
    try:
        for program in programs.values():
            _, errors = program.communicate(timeout=300)
            assert program.returncode == 0, errors
    finally:
        for program in programs.values():
            program.kill()
    return {backend: json.loads((folder / backend).read_text()) for backend in programs}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_are_built_of_transformer_engines_classes(
    described: dict[str, dict[str, Any]], variant: str, place: str
) -> None:
    exo = get_variant(variant).exo
    classes = described["transformer_engine"][f"{variant} {place}"]["classes"]
    check_layers(classes, DYNAMIC_LAYER if exo.is_dynamic else STATIC_LAYER)
    assert classes["decoder.final_layernorm"] == NORM
    anchors = {name: kind for name, kind in classes.items() if name.endswith(".anchor.linear_qkv")}
    assert anchors == ({"decoder.layers.0.anchor.linear_qkv": LINEAR} if exo.is_exogenous else {})


def test_a_dynamic_variant_whose_norm_is_fused_would_be_noticed(described: dict[str, dict[str, Any]]) -> None:
    wrong = described["transformer_engine"][WRONGLY_FUSED]
    # Names and shapes cannot tell: by design they do not depend on what is fused. The mixing would read unnormed input.
    right = described["transformer_engine"][f"dynamic-e-exoformer {PLACES[0]}"]
    assert (wrong["tensors"], wrong["parameters"]) == (right["tensors"], right["parameters"])
    with pytest.raises(AssertionError, match="input_layernorm"):
        check_layers(wrong["classes"], DYNAMIC_LAYER)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpoints_have_the_keys_shapes_and_offsets_of_the_local_backend(
    described: dict[str, dict[str, Any]], variant: str, place: str
) -> None:
    local, te = (described[backend][f"{variant} {place}"] for backend in ("local", "transformer_engine"))
    assert te["tensors"] == local["tensors"]
    assert sorted(te["objects"]) == sorted(local["objects"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_have_the_names_and_shapes_of_the_plain_model(
    described: dict[str, dict[str, Any]], variant: str
) -> None:
    parameters = described["transformer_engine"][f"{variant} {PLACES[0]}"]["parameters"]
    shapes = {name: tuple(shape) for name, (shape, _) in parameters.items()}
    assert shapes == parameter_shapes(get_variant(variant).exo, SIZES)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_cut_and_synchronised_as_those_of_the_local_backend(
    described: dict[str, dict[str, Any]], variant: str, place: str
) -> None:
    local, te = (described[backend][f"{variant} {place}"] for backend in ("local", "transformer_engine"))
    assert te["parameters"] == local["parameters"]


def test_masked_documents_are_asked_for_as_packed_sequences(described: dict[str, dict[str, Any]]) -> None:
    packed = described["transformer_engine"][PACKED]
    assert packed["differences"].keys() == {"cp1-rank0", "cp2-rank0", "cp2-rank1"}
    assert max(packed["differences"].values()) < 1e-6
    # Transformer Engine's own exchange over context-parallel ranks would cut each document by itself.
    assert packed["masks"] == ["padding_causal", "padding_causal_bottom_right", "padding_causal_bottom_right"]
    assert packed["groups"] == [None, None, None]
    assert packed["group afterwards"] == "the ranks that share a row"


def start(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """A Python module as a program, at the root of the repository."""
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env=environment,
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        text=True,
    )


def check_layers(classes: dict[str, str], expected: dict[str, str]) -> None:
    """Every layer has the ``expected`` class under each name."""
    for layer in range(SIZES.num_layers):
        found = {name: classes[f"decoder.layers.{layer}.{name}"] for name in expected}
        assert found == expected, f"layer {layer}"
