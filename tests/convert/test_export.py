"""A training checkpoint becomes a Hugging Face folder that computes the same, whatever happens in between."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_exo.checkpoints.reading import DamagedCheckpointError
from megatron_exo.convert.checkpoint_tensors import CheckpointTensors, model_of
from megatron_exo.convert.exporting import Options
from megatron_exo.convert.hugging_face import hf_mapping
from megatron_exo.convert.mapping import ConversionError, export_state
from megatron_exo.convert.unfinished import STATE
from megatron_exo.hf import ExoFormerForCausalLM
from tests.convert.checkpoints import read_index, write_checkpoint, write_index, write_manifest
from tests.convert.conversions import (
    PLACES,
    WRONG,
    Outcomes,
    Request,
    export_and_die,
    export_checkpoints,
    export_references,
    export_wrongly,
    save_by_megatron,
)
from tests.golden_values import GOLDEN, RELEASED_NAMES, VARIANT_NAMES, expected
from tests.hf.models import GROUPED, SIZES, SOME, TIED, VARIANTS_AND_MORE, our_state
from tests.programs import one_line, run_program
from tests.ranks import RankError, run_on_ranks
from tools import convert_to_hf, import_reference

NAME = "dynamic-e-exoformer"
EXO = VARIANTS_AND_MORE[NAME]
SMALL = Options(shard_size=40_000)
"""Several files for a small model."""
ALL_FILES = [("variants", name) for name in VARIANT_NAMES] + [("released_formats", name) for name in RELEASED_NAMES]
SOME_FILES = ALL_FILES[1::9]


def export(*requests: Request) -> Outcomes:
    """One after the other, in a process of their own."""
    return run_on_ranks(1, export_checkpoints, requests, process_group=False)[0]


def weights(folder: Path) -> dict[str, Tensor]:
    """By the index, as transformers reads them."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = {file: load_file(folder / file) for file in sorted(set(index["weight_map"].values()))}
    assert sum(map(len, tensors.values())) == len(index["weight_map"])
    return {name: tensors[file][name] for name, file in index["weight_map"].items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype, name
        assert torch.equal(ours[name], theirs[name]), name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two tensor-parallel ranks have saved; its vocabulary is padded."""
    root = tmp_path_factory.mktemp("checkpoints")
    run_on_ranks(2, save_by_megatron, [NAME], SIZES, root)
    return root / NAME


# -- the numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [SOME_FILES, pytest.param(ALL_FILES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_golden_logits_hold_in_a_folder_of_the_authors_files(names: list[tuple[str, str]], tmp_path: Path) -> None:
    requests = [(GOLDEN / folder / f"{name}.ckpt.pt", tmp_path / folder / name, SMALL) for folder, name in names]
    assert run_on_ranks(1, export_references, requests, process_group=False)[0] == [None] * len(names)
    for folder, name in names:
        golden = expected(folder, name)
        model = ExoFormerForCausalLM.from_pretrained(tmp_path / folder / name).eval()
        with torch.no_grad():
            difference = (model(golden["tokens"]).logits - golden["logits"]).abs().max()
        assert difference < 2e-5, (folder, name)


@pytest.mark.parametrize(
    ("names", "sizes"),
    [pytest.param(SOME[1:3], GROUPED, id="some")]
    + [
        pytest.param(list(VARIANTS_AND_MORE), sizes, id=name, marks=pytest.mark.slow)
        for name, sizes in {"all": SIZES, "all, grouped": GROUPED, "all, tied": TIED}.items()
    ],
)
def test_the_table_covers_what_megatron_saves_of_every_variant(names: list[str], sizes: object, tmp_path: Path) -> None:
    """Every key, no more and no less; and what comes out agrees with Megatron's model, loaded by Megatron."""
    (keys,) = run_on_ranks(1, save_by_megatron, names, sizes, tmp_path)
    for name in names:
        assert keys[name] == {row.ours for row in hf_mapping(VARIANTS_AND_MORE[name], sizes)}, name
    outcomes = export(*((tmp_path / name, tmp_path / "hf" / name, SMALL) for name in names))
    assert outcomes == [None] * len(names)
    for name in names:
        exo = VARIANTS_AND_MORE[name]
        assert_equal(weights(tmp_path / "hf" / name), export_state(hf_mapping(exo, sizes), our_state(exo, sizes)))


@pytest.fixture(scope="module")
def said_of_mistakes(checkpoint: Path) -> dict[str, str | None]:
    return run_on_ranks(1, export_wrongly, checkpoint, checkpoint.with_name("wrong"), process_group=False)[0]


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_conversion_is_refused(what: str, said_of_mistakes: dict[str, str | None], checkpoint: Path) -> None:
    words = "embedding.word_embeddings.weight has shape [256, 32]" if "padded" in what else "computes something else"
    assert words in str(said_of_mistakes[what])
    assert not (checkpoint.with_name("wrong") / what).exists()


def test_weights_are_cast_as_pytorch_casts_and_verified(checkpoint: Path, tmp_path: Path) -> None:
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    options = {name: dataclasses.replace(SMALL, dtype=dtype) for name, dtype in dtypes.items()}
    assert export(*((checkpoint, tmp_path / name, each) for name, each in options.items())) == [None] * 3
    state = export_state(hf_mapping(EXO, SIZES), our_state(EXO))
    for name, dtype in dtypes.items():
        assert_equal(weights(tmp_path / name), {key: tensor.to(dtype) for key, tensor in state.items()})
        assert ExoFormerForCausalLM.from_pretrained(tmp_path / name).dtype == dtype


def test_a_value_beyond_fp16_is_refused_by_the_name_of_its_tensor(tmp_path: Path) -> None:
    exo = VARIANTS_AND_MORE["base"]
    state = our_state(exo)
    state["decoder.layers.1.mlp.linear_fc2.weight"][3, 5] = 7e4
    write_checkpoint(tmp_path / "checkpoint", exo, SIZES, state)
    (found,) = export((tmp_path / "checkpoint", tmp_path / "hf", Options(dtype=torch.float16, verify=False)))
    assert "model.layers.1.mlp.down_proj.weight has values beyond 65504" in str(found)


# -- killed, and started again ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> Path:
    """The folder that is made of the checkpoint when nothing happens."""
    folder = checkpoint.with_name("hf")
    assert export((checkpoint, folder, SMALL)) == [None]
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


SOME_PLACES = ("in a later file", "before the folder is renamed")


@pytest.mark.parametrize(
    "where",
    [where if where in SOME_PLACES else pytest.param(where, marks=pytest.mark.slow) for where in PLACES],
)
def test_a_killed_conversion_leaves_nothing_that_looks_whole_and_goes_on(
    where: str, checkpoint: Path, whole: Path, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match="died without a word"):
        run_on_ranks(1, export_and_die, where, checkpoint, tmp_path / "hf", SMALL, process_group=False)
    assert not (tmp_path / "hf").exists()
    partial = tmp_path / "hf.partial"
    finished = json.loads((partial / STATE).read_text())["finished"]
    made = {name: (partial / name).stat().st_mtime_ns for name in finished}
    assert export((checkpoint, tmp_path / "hf", SMALL)) == [None]
    assert not partial.exists()
    assert contents(tmp_path / "hf") == contents(whole)
    assert {name: (tmp_path / "hf" / name).stat().st_mtime_ns for name in made} == made


def test_what_an_earlier_start_left_is_used_only_if_it_is_whole_and_of_the_same_source(
    checkpoint: Path, whole: Path, tmp_path: Path
) -> None:
    with pytest.raises(RankError):
        run_on_ranks(1, export_and_die, "after the weights", checkpoint, tmp_path / "hf", SMALL, process_group=False)
    shutil.copytree(tmp_path / "hf.partial", tmp_path / "other.partial")
    damaged = sorted((tmp_path / "hf.partial").glob("*.safetensors"))[1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    exo = VARIANTS_AND_MORE["e-nuresformer"]
    write_checkpoint(tmp_path / "another", exo, SIZES, our_state(exo))
    unverified = dataclasses.replace(SMALL, verify=False)
    requests = [(checkpoint, tmp_path / "hf", SMALL), (tmp_path / "another", tmp_path / "other", unverified)]
    assert export(*requests) == [None, None]
    assert contents(tmp_path / "hf") == contents(whole)
    assert_equal(weights(tmp_path / "other"), export_state(hf_mapping(exo, SIZES), our_state(exo)))
    assert len(list((tmp_path / "other").glob("*.safetensors"))) == len(
        {*json.loads((tmp_path / "other" / "model.safetensors.index.json").read_text())["weight_map"].values()}
    )


# -- refused ------------------------------------------------------------------------------------------------------


REFUSED = {
    # what is wrong with a checkpoint: what is said of it
    "a tensor is missing": "lacks decoder.layers.1.mlp.linear_fc2.weight",
    "a tensor too many": "has unexpected decoder.layers.0.extra",
    "tensors of another shape": "embedding.word_embeddings.weight has shape [256, 32], expected [64, 48]",
    "a dtype of another kind": "decoder.final_layernorm.weight is of torch.float64",
    "a chunk is missing": "decoder.layers.0.mlp.linear_fc1.weight cannot be read",
    "chunks overlap": "decoder.layers.0.mlp.linear_fc1.weight cannot be read",
    "an unknown variant": "exo anchor 'h7' is unknown",
    "a size of another kind": "does not say what model it is of: TypeError: num_layers is three",
    "layers without end": "says it has 1000000000 layers",
    "no query groups": "num_query_groups is 0",
    "a rotation that transformers lacks": "trained with rotary_percent=0.5",
    "a byte is flipped": "is damaged: its SHA-256",
    "a file is cut off": "is cut off",
}


@pytest.fixture(scope="module")
def said_of_damages(checkpoint: Path) -> dict[str, str | None]:
    root = checkpoint.with_name("damaged")
    for damage in REFUSED:
        _damage(shutil.copytree(checkpoint, root / damage), damage)
    # Only the flip needs the checksums that are read before anything else.
    options = {damage: dataclasses.replace(SMALL, verify="flipped" in damage) for damage in REFUSED}
    outcomes = export(*((root / damage, root / "hf" / damage, each) for damage, each in options.items()))
    return dict(zip(REFUSED, outcomes, strict=True))


@pytest.mark.parametrize("damage", REFUSED)
def test_a_checkpoint_that_cannot_be_converted_is_refused(
    damage: str, said_of_damages: dict[str, str | None], checkpoint: Path
) -> None:
    found = said_of_damages[damage]
    assert found is not None
    assert REFUSED[damage] in found
    assert "\n" not in found
    assert not (checkpoint.with_name("damaged") / "hf" / damage).exists()


def _damage(folder: Path, damage: str) -> None:
    index = read_index(folder)
    kinds = index.state_dict_metadata
    fc1 = "decoder.layers.0.mlp.linear_fc1.weight"
    changes: dict[str, object] = {}
    sizes = SIZES
    match damage:
        case "a tensor is missing":
            del kinds["decoder.layers.1.mlp.linear_fc2.weight"]
        case "a tensor too many":
            kinds["decoder.layers.0.extra"] = kinds["decoder.final_layernorm.weight"]
        case "tensors of another shape":
            sizes = dataclasses.replace(SIZES, hidden_size=48)
        case "a chunk is missing":
            kinds[fc1].chunks.pop()
        case "chunks overlap":
            kinds[fc1].chunks[1] = kinds[fc1].chunks[0]
        case "a dtype of another kind":
            kinds["decoder.final_layernorm.weight"].properties.dtype = torch.float64
        case "an unknown variant":
            changes["exo"] = dataclasses.asdict(EXO) | {"anchor": "h7"}
        case "a size of another kind":
            changes["num_layers"] = "three"
        case "layers without end":
            changes["num_layers"] = 10**9
        case "no query groups":
            changes["num_query_groups"] = 0
        case "a rotation that transformers lacks":
            changes["rotary_percent"] = 0.5
    write_index(folder, index)
    write_manifest(folder, EXO, sizes, changes)
    data = next(folder.glob("*.distcp"))
    if damage == "a byte is flipped":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    if damage == "a file is cut off":
        os.truncate(data, data.stat().st_size // 2)


def test_no_chunk_is_read_that_is_not_what_the_index_says(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    index = read_index(folder)
    places = index.storage_data
    for key in list(places):
        if key.fqn == "decoder.final_layernorm.weight":
            places[key] = dataclasses.replace(places[key], length=places[key].length // 2)
    write_index(folder, index)
    tensors = CheckpointTensors(folder)
    with pytest.raises(DamagedCheckpointError, match=r"decoder\.final_layernorm\.weight cannot be read"):
        tensors.read("decoder.final_layernorm.weight")


def test_what_is_not_a_model_of_ours_is_refused() -> None:
    with pytest.raises(ConversionError, match="does not say what model it is of"):
        model_of({"model": [], "arguments": {}})
    with pytest.raises(ConversionError, match="does not say what model it is of"):
        model_of({})


def test_requests_that_cannot_be_met_are_one_line(checkpoint: Path, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.partial").mkdir()
    (tmp_path / "mine.partial" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("")
    for arguments, words in (
        ([checkpoint, whole], "is not empty"),
        ([checkpoint, tmp_path / "file"], "is a file"),
        ([checkpoint, tmp_path / "mine"], "mine.partial is no unfinished conversion"),
        ([tmp_path / "nothing", tmp_path / "out"], "nothing is no folder"),
        ([tmp_path, tmp_path / "out"], "latest_checkpointed_iteration.txt"),
        ([checkpoint, tmp_path / "out", "--push-to-hub", "me/it"], "HF_HUB_OFFLINE is set"),
    ):
        done = run_program(convert_to_hf.main, arguments)
        assert done.status == 1
        assert words in one_line(done.err)
    assert (tmp_path / "mine.partial" / "thesis.txt").exists()
    assert not (tmp_path / "out").exists()


def test_a_hub_that_cannot_be_reached_is_one_line_before_any_work(checkpoint: Path, tmp_path: Path) -> None:
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_x"}
    line = [sys.executable, convert_to_hf.__file__, checkpoint, tmp_path / "out", "--push-to-hub", "me/it"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "--push-to-hub me/it cannot be met" in one_line(done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_the_tool_says_what_it_found(checkpoint: Path, tmp_path: Path) -> None:
    done = run_program(convert_to_hf.main, [checkpoint, tmp_path / "hf", "--dtype", "bf16"])
    assert done.status == 0, done.err
    assert "verified: largest logit difference" in done.out
    assert "mean KL" in done.out
    assert len(done.out.splitlines()) == 3


def test_the_importer_of_the_authors_files_writes_a_folder(tmp_path: Path) -> None:
    name = "nuresformer_headwise"
    done = run_program(import_reference.main, [GOLDEN / "variants" / f"{name}.ckpt.pt", "--hf", tmp_path / "hf"])
    assert done.status == 0, done.err
    assert "verified: largest logit difference" in done.out
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "h-nuresformer" in card
    assert "7 steps, 12,345 tokens" in card
    done = run_program(import_reference.main, ["x.pt", "--hf", tmp_path / "y", "--save", tmp_path / "z"])
    assert done.status == 2
    assert "give it alone" in done.err
