"""A Hugging Face folder becomes a training checkpoint again, on any layout; folders that are wrong are refused."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_exo import pretrain
from megatron_exo.convert.checkpoint_tensors import CheckpointTensors
from megatron_exo.convert.hf_reading import read_folder
from megatron_exo.convert.hugging_face import hf_mapping
from megatron_exo.convert.mapping import export_state
from megatron_exo.errors import UserError
from megatron_exo.hf import ExoFormerConfig
from megatron_exo.hf.export import write_code_and_config
from megatron_exo.sizes import ModelSizes
from tests.convert.conversions import import_folder, import_reference, logits_of_folder
from tests.convert.test_export import SMALL, assert_equal, contents, export, weights
from tests.golden_values import GOLDEN, expected
from tests.hf.models import SIZES, TIED, VARIANTS_AND_MORE, hf_config, our_state
from tests.programs import one_line, run_program
from tests.ranks import run_on_ranks
from tools import convert_from_hf

EXO = VARIANTS_AND_MORE["dynamic-e-exoformer"]
TINY = ModelSizes(
    num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=4, kv_channels=4, ffn_hidden_size=24,
    vocab_size=57_601, seq_length=32,
)  # fmt: skip


def write_folder(folder: Path, sizes: ModelSizes, dtype: torch.dtype = torch.float32, name: str = "") -> Path:
    """As ``save_pretrained`` leaves it, in one file."""
    exo = VARIANTS_AND_MORE[name] if name else EXO
    folder.mkdir()
    write_code_and_config(ExoFormerConfig(**hf_config(exo, sizes), dtype=dtype), folder)
    state = export_state(hf_mapping(exo, sizes), our_state(exo, sizes))
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def newest(run: Path) -> Path:
    return max(run.glob("iter_*"))


QUICK = [("untied", 57_601, 2), ("tied", 50_257, 4)]


@pytest.mark.parametrize(
    ("tying", "vocab_size", "tp"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in ((tying, size, tp) for tying in ("tied", "untied") for size in (57_601, 50_257) for tp in (1, 2, 4))
    ],
)
def test_every_tensor_comes_back_exactly(tying: str, vocab_size: int, tp: int, tmp_path: Path) -> None:
    """From a folder to ``tp`` ranks, to the checkpoint that they save, and to a folder again."""
    sizes = dataclasses.replace(TINY, vocab_size=vocab_size, tied_embeddings=tying == "tied")
    folder = write_folder(tmp_path / "hf", sizes)
    layout = ("--tensor-model-parallel-size", str(tp))
    run_on_ranks(tp, import_folder, folder, tmp_path / "run", *layout, process_group=False)

    saved, state = CheckpointTensors(newest(tmp_path / "run")), our_state(EXO, sizes)
    assert set(saved) == set(state)
    for name, tensor in state.items():
        assert torch.equal(saved.read(name)[: tensor.shape[0]], tensor), name
    assert saved.shape("embedding.word_embeddings.weight")[0] % (128 * tp) == 0

    assert export((tmp_path / "run", tmp_path / "again", SMALL)) == [None]
    assert_equal(weights(tmp_path / "again"), load_file(folder / "model.safetensors"))
    configurations = [json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "again")]
    assert configurations[0] == configurations[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_weights_keep_their_dtype_on_the_way_back(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", SIZES, dtype)
    run_on_ranks(1, import_folder, folder, tmp_path / "run", process_group=False)
    saved = CheckpointTensors(newest(tmp_path / "run"))
    assert {saved.dtype(name) for name in saved} == {dtype}
    assert export((tmp_path / "run", tmp_path / "again", SMALL)) == [None]
    assert_equal(weights(tmp_path / "again"), load_file(folder / "model.safetensors"))


@pytest.mark.parametrize(
    ("folder", "name", "layout"),
    [
        ("variants", "dynamic_exoformer_elementwise", "--tensor-model-parallel-size 2"),
        pytest.param("variants", "nuresformer_scalar", "--pipeline-model-parallel-size 3", marks=pytest.mark.slow),
        pytest.param(
            "released_formats",
            "model2_nuresformer_elementwise",
            "--tensor-model-parallel-size 2 --sequence-parallel",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_golden_logits_hold_from_the_authors_file_over_two_checkpoints(
    folder: str, name: str, layout: str, tmp_path: Path
) -> None:
    """Import to ranks, to Hugging Face, back to Megatron, and run there."""
    words = layout.split()
    ranks, golden = int(words[1]), expected(folder, name)
    file = GOLDEN / folder / f"{name}.ckpt.pt"
    run_on_ranks(ranks, import_reference, file, tmp_path / "run", *words, process_group=False)
    assert export((tmp_path / "run", tmp_path / "hf", SMALL)) == [None]
    run_on_ranks(1, logits_of_folder, tmp_path / "hf", golden["tokens"], tmp_path / "logits.pt", process_group=False)
    logits = torch.load(tmp_path / "logits.pt", weights_only=True)
    assert (logits - golden["logits"]).abs().max() < 2e-5


def test_an_intervention_comes_back(tmp_path: Path) -> None:
    name = "without-anchor-of-kv"
    folder = write_folder(tmp_path / "hf", SIZES, name=name)
    run_on_ranks(1, import_folder, folder, tmp_path / "run", process_group=False)
    assert export((tmp_path / "run", tmp_path / "again", SMALL)) == [None]
    assert read_folder(tmp_path / "again").exo == VARIANTS_AND_MORE[name]


def test_training_goes_on_from_a_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", TIED)
    done = run_program(convert_from_hf.main, [folder, tmp_path / "run"])
    assert done.status == 0, done.err
    assert done.out.splitlines()[-1] == f"wrote {tmp_path / 'run' / 'iter_0000001'}"
    arguments = (
        "--exo-variant dynamic-e-exoformer --num-layers 3 --hidden-size 32 --num-attention-heads 4 --kv-channels 8 "
        "--ffn-hidden-size 64 --seq-length 32 --max-position-embeddings 64 --mock-data --vocab-size 64 --num-workers 0 "
        "--tokenizer-type NullTokenizer --micro-batch-size 2 --train-iters 2 --lr 1e-3 --eval-iters 1 "
        "--eval-interval 2 --log-interval 1 --tie-embeddings-and-output-weights --save-interval 2"
    )
    words = [*arguments.split(), "--pretrained-checkpoint", tmp_path / "run"]
    words += ["--save", tmp_path / "next", "--load", tmp_path / "next"]
    for loaded in (f"loaded the weights of {tmp_path / 'run'},", f"loaded checkpoint 2 from {tmp_path / 'next'}"):
        done = run_program(pretrain.main, words)
        assert done.status == 0, done.err
        assert loaded in done.out


# -- folders that are wrong ---------------------------------------------------------------------------------------

NORM = "model.norm.weight"


def _with_header(folder: Path, change: object) -> None:
    """Write the file anew with another header, by the letter of the format."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)  # type: ignore[operator]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def _index(folder: Path, **places: str) -> None:
    names = load_file(folder / "model.safetensors").keys()
    weight_map = dict.fromkeys(names, "model.safetensors") | places
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | {k.replace("__", "."): v for k, v in changes.items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / "model.safetensors")


def _config(folder: Path, **changes: object) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))


def _overlapping(header: dict[str, dict[str, object]]) -> None:
    header[NORM]["data_offsets"] = header["model.embed_tokens.weight"]["data_offsets"]


def _damage(folder: Path, damage: str) -> None:
    path = folder / "model.safetensors"
    match damage:
        case "an index that climbs out":
            _index(folder, **{NORM: "../x.safetensors"})
        case "an index with an absolute path":
            _index(folder, **{NORM: str(folder.parent / "x.safetensors")})
        case "an index that names a pickle":
            _index(folder, **{NORM: "pytorch_model.bin"})
        case "an index that names a file that is not there":
            _index(folder, **{NORM: "other.safetensors"})
        case "an index that names a tensor that is not there":
            _index(folder, nothing="model.safetensors")
        case "an index that is no JSON":
            (folder / "model.safetensors.index.json").write_text("[" * 100_000)
        case "a link to elsewhere":
            path.rename(folder.parent / f"{folder.name}.safetensors")
            path.symlink_to(folder.parent / f"{folder.name}.safetensors")
        case "overlapping tensors":
            _with_header(folder, _overlapping)
        case "a tensor beyond the file":
            _with_header(folder, lambda header: header[NORM].update(data_offsets=[0, 1 << 40], shape=[1 << 38]))
        case "a header of 2^62 bytes":
            path.write_bytes(struct.pack("<Q", 1 << 62) + path.read_bytes()[8:])
        case "a file that is cut off":
            os.truncate(path, path.stat().st_size - 10)
        case "an empty file":
            path.write_bytes(b"")
        case "a missing tensor":
            _tensors(folder, model__norm__weight=None)
        case "a tensor too many":
            _tensors(folder, extra=torch.ones(1))
        case "a wrong shape":
            _tensors(folder, model__norm__weight=torch.ones(31))
        case "a wrong dtype":
            _tensors(folder, model__norm__weight=torch.ones(32, dtype=torch.int64))
        case "padded rows left in":
            _tensors(folder, model__embed_tokens__weight=torch.ones(128, 32))
        case "an unknown axis value":
            _config(folder, anchor="h7")
        case "contradicting axes":
            _config(folder, gate="none")
        case "another model":
            _config(folder, model_type="llama")
        case "layers without end":
            _config(folder, num_hidden_layers=10**9)
        case "no heads":
            _config(folder, num_attention_heads=0)
        case "no configuration":
            (folder / "config.json").unlink()
        case "a configuration that is a list":
            (folder / "config.json").write_text("[]")
        case "a pickle in place of safetensors":
            path.unlink()
            (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))


REFUSED = {
    "an index that climbs out": f"puts {NORM} into '../x.safetensors', which is no safetensors file of the folder",
    "an index with an absolute path": f"puts {NORM} into '/",
    "an index that names a pickle": "into 'pytorch_model.bin', which is no safetensors file",
    "an index that names a file that is not there": "other.safetensors is missing",
    "an index that names a tensor that is not there": "lacks nothing, which the index says is in it",
    "an index that is no JSON": "model.safetensors.index.json is no JSON",
    "a link to elsewhere": "is a link to elsewhere",
    "overlapping tensors": "is no safetensors file, or damaged",
    "a tensor beyond the file": "is no safetensors file, or damaged",
    "a header of 2^62 bytes": "is no safetensors file, or damaged",
    "a file that is cut off": "is no safetensors file, or damaged",
    "an empty file": "is no safetensors file, or damaged",
    "a missing tensor": f"lacks {NORM}",
    "a tensor too many": "has unexpected extra",
    "a wrong shape": f"{NORM} has shape [31], expected [32]",
    "a wrong dtype": f"{NORM} is of I64",
    "padded rows left in": "model.embed_tokens.weight has shape [128, 32], expected [64, 32]",
    "an unknown axis value": "exo anchor 'h7' is unknown",
    "contradicting axes": "pathway G",
    "another model": "that of a 'llama' model",
    "layers without end": "config.json has 1000000000 layers, the files only",
    "no heads": "num_attention_heads is 0",
    "no configuration": "config.json is missing",
    "a configuration that is a list": "config.json is no JSON object",
    "a pickle in place of safetensors": "pytorch_model.bin is a pickle, which can run code",
}


@pytest.mark.parametrize("damage", REFUSED)
def test_a_folder_that_is_wrong_is_refused(damage: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", SIZES)
    read_folder(folder)
    before = sorted(tmp_path.iterdir())
    _damage(folder, damage)
    with pytest.raises(UserError) as refused:
        read_folder(folder)
    assert REFUSED[damage] in str(refused.value)
    assert "\n" not in str(refused.value)
    assert [each for each in sorted(tmp_path.iterdir()) if each.name != "hf.safetensors"] == before


def test_the_hubs_own_links_are_followed(tmp_path: Path) -> None:
    """Its library keeps files under ``blobs`` and links to them."""
    blobs, snapshots = tmp_path / "models--me--it" / "blobs", tmp_path / "models--me--it" / "snapshots"
    snapshots.mkdir(parents=True)
    blobs.mkdir()
    folder = write_folder(snapshots / "abc", SIZES)
    for file in list(folder.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(blobs / file.name)
    assert set(read_folder(folder).state) == set(our_state(EXO))


def test_a_refusal_is_one_line_of_the_tool(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", SIZES)
    _damage(folder, "a missing tensor")
    before = contents(folder)
    done = run_program(convert_from_hf.main, [folder, tmp_path / "run"])
    assert done.status == 1
    assert f"lacks {NORM}" in one_line(done.err)
    assert not (tmp_path / "run").exists()
    assert contents(folder) == before


def test_a_folder_that_holds_a_run_is_not_written_into(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", SIZES)
    (tmp_path / "run" / "iter_0005000").mkdir(parents=True)
    done = run_program(convert_from_hf.main, [folder, tmp_path / "run"])
    assert done.status == 1
    assert "holds checkpoints of a run already (iteration 5000)" in one_line(done.err)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["iter_0005000"]
