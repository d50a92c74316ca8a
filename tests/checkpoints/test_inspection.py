"""``tools/inspect_checkpoint.py``: what a checkpoint is, whether it is whole, and how two differ."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch

from megatron_exo.checkpoints.inspection import checkpoint_at, compare
from megatron_exo.checkpoints.integrity import MANIFEST, damages, read_manifest
from megatron_exo.checkpoints.reading import TRACKER, CheckpointError, read_index
from megatron_exo.data.preprocess import preprocess
from megatron_exo.data.tokenizer_training import train_tokenizer
from megatron_exo.data.tokenizers import TokenizerSpec
from tests.programs import MODEL, RUN
from tests.ranks import run_on_ranks
from tools import inspect_checkpoint


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and a dataset made with it."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text("\n\n".join(topics[name] for name in sorted(topics)[:12]))
    texts = []
    for name in sorted(topics)[:12]:
        texts.append(str(folder / f"{name}.txt"))
        Path(texts[-1]).write_text(topics[name])
    train_tokenizer(texts, str(folder / "tokenizer"), vocab_size=500)
    preprocess(texts, str(folder / "data"), TokenizerSpec("SentencePieceTokenizer", str(folder / "tokenizer.model")))
    return folder


def _pretrain(arguments: Sequence[str]) -> None:
    from megatron_exo.pretrain import main

    sys.argv = ["pretrain", *arguments]
    main()


def train(corpus: Path, save: Path, ranks: int, *words: str) -> Path:
    """Train two iterations on the corpus and save; the folder of the run."""
    arguments = [*MODEL.split(), *RUN.split(), "--num-workers", "0", "--use-distributed-optimizer"]
    arguments += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(corpus / "tokenizer.model")]
    arguments += ["--data-path", "1.0", str(corpus / "data"), "--split", "80,10,10"]
    arguments += ["--save", str(save), "--save-interval", "2", "--train-iters", "2"]
    run_on_ranks(ranks, _pretrain, [*arguments, *words], process_group=False)
    return save


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, saved in the background."""
    save = tmp_path_factory.mktemp("trained") / "run"
    return train(corpus, save, 2, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--async-save")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def inspect(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = inspect_checkpoint.main([str(word) for word in words])
    return status, *capsys.readouterr()


def change_one_tensor(folder: Path, name: str) -> None:
    """Change the last number of a tensor's last shard, in a checkpoint that has no manifest from then on."""
    part = [part for key, part in read_index(folder).storage_data.items() if key.fqn == name][-1]
    with (folder / part.relative_path).open("r+b") as file:
        file.seek(part.offset)
        stored = file.read(part.length)
        shard = torch.load(io.BytesIO(stored), weights_only=True)
        shard.view(-1)[-1] += 1e-6
        torch.save(shard, changed := io.BytesIO())
        assert changed.tell() == len(stored)
        file.seek(part.offset)
        file.write(changed.getvalue())
    (folder / MANIFEST).unlink()


# -- what it is -------------------------------------------------------------------------------------------------


def test_the_files_of_all_ranks_are_listed_with_the_digests_that_they_left(trained: Path) -> None:
    folder = trained / "iter_0000002"
    described = read_manifest(folder)
    assert described is not None
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert there == {*described["files"], MANIFEST}
    assert {"__0_0.distcp", "__1_0.distcp", "tokenizer/tokenizer.model"} < there
    assert damages(folder, checksums=True) == []


def test_the_tokenizer_travels_with_the_checkpoint_and_the_data_is_known_by_its_digests(
    trained: Path, corpus: Path
) -> None:
    described = read_manifest(trained / "iter_0000002")
    assert described is not None
    content = (corpus / "tokenizer.model").read_bytes()
    assert (trained / "iter_0000002" / "tokenizer" / "tokenizer.model").read_bytes() == content
    assert described["tokenizer"]["files"]["tokenizer.model"] == {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "copied": True,
    }
    (data,) = described["data"]["sets"]
    assert (data["part"], data["prefix"], data["weight"]) == ("all", str(corpus / "data"), 1.0)
    for kind, name in (("idx", "idx_sha256"), ("json", "sidecar_sha256")):
        assert data[name] == hashlib.sha256((corpus / f"data.{kind}").read_bytes()).hexdigest()
    assert described["layout"]["tensor_model_parallel_size"] == 2


def test_a_person_reads_what_a_checkpoint_is(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = inspect(capsys, trained, "--verify")
    assert (status, err) == (0, "")
    for part in (
        f"{trained / 'iter_0000002'}: iteration 2, 16 samples, 512 tokens",
        "dynamic-e-exoformer: gate elementwise",
        "vocabulary 500 (padded to 512)",
        "SentencePieceTokenizer, tokenizer.model (sha256 ",
        f"all {trained.parent.parent}",
        "split 80,10,10",
        "world size 2, tensor 2, pipeline 1",
        "megatron_core 0.19",
        "sizes and checksums agree",
        "iteration 2: whole",
    ):
        assert " ".join(part.split()) in " ".join(out.split()), part


def test_a_program_reads_the_same_as_json(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = inspect(capsys, trained, "--json")
    result = json.loads(out)
    assert (status, result["damages"], result["run"]) == (0, [], {"2": []})
    assert result["description"] == read_manifest(trained / "iter_0000002")


# -- damage -----------------------------------------------------------------------------------------------------


def test_each_damage_is_one_line_and_the_exit_status_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "iter_0000002"
    (folder / "__1_0.distcp").unlink()
    with (folder / "__0_0.distcp").open("r+b") as file:
        file.seek(1000)
        file.write(b"other")
    status, _, err = inspect(capsys, folder)
    assert (status, err) == (1, f"damage: {folder} is no complete checkpoint: __1_0.distcp is missing\n")
    status, _, err = inspect(capsys, folder, "--verify")
    assert status == 1
    assert err.splitlines() == [
        f"damage: {folder} is no complete checkpoint: __0_0.distcp is damaged: "
        "its SHA-256 is not the one it was saved with",
        f"damage: {folder} is no complete checkpoint: __1_0.distcp is missing",
    ]


def test_a_folder_without_a_tracker_is_told_apart_from_a_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / TRACKER).unlink()
    with pytest.raises(SystemExit):
        inspect(capsys, run)
    assert capsys.readouterr().err == (f"error: {run} has no {TRACKER}; give a folder iter_N in it (iterations: 2)\n")
    assert inspect(capsys, run / "iter_0000002")[0] == 0


@pytest.mark.parametrize("name", ["../run", "9" * 5000, "x\0", "٣", ""])
def test_a_tracker_names_an_iteration_and_nothing_else(run: Path, name: str) -> None:
    (run / TRACKER).write_text(name)
    with pytest.raises(CheckpointError, match=f"{TRACKER} does not name an iteration but '.*'; write the number of a"):
        checkpoint_at(run)
    (run / TRACKER).write_text("3")
    with pytest.raises(CheckpointError, match=f"{TRACKER} names iter_0000003, which is not there"):
        checkpoint_at(run)


def test_a_tensor_whose_bytes_are_damaged_is_named(trained: Path, run: Path) -> None:
    index = read_index(run / "iter_0000002")
    place = next(place for key, place in index.storage_data.items() if key.fqn == "decoder.final_layernorm.weight")
    with (run / "iter_0000002" / place.relative_path).open("r+b") as file:
        file.seek(place.offset)
        file.write(bytes(64))
    with pytest.raises(CheckpointError, match=r"decoder\.final_layernorm\.weight cannot be read: UnpicklingError"):
        compare(checkpoint_at(trained), run / "iter_0000002")


# -- differences ------------------------------------------------------------------------------------------------


def test_a_copy_does_not_differ(trained: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = inspect(capsys, trained, "--diff", run)
    assert status == 0
    assert out.endswith(" tensors are equal bit for bit, 0 differ\n")
    assert out.count("\n") == 1


def test_one_changed_bit_of_one_tensor_is_found(trained: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "decoder.layers.2.self_attention.mixing.lambda_v1"
    change_one_tensor(run / "iter_0000002", name)
    status, out, _ = inspect(capsys, trained, "--diff", run, "--json")
    difference = json.loads(out)
    assert status == 1
    assert difference["equal"] > 200
    (changed,) = difference["values"]
    assert changed["name"] == name
    assert 0 < changed["largest"] < 2e-6
    assert difference["only_first"] == difference["only_second"] == []
    assert difference["reshaped"] == {}


@pytest.mark.slow
def test_checkpoints_of_two_layouts_and_variants_are_compared_tensor_by_tensor(
    trained: Path, corpus: Path, tmp_path: Path
) -> None:
    one = train(corpus, tmp_path / "one", 1) / "iter_0000002"
    difference = compare(trained / "iter_0000002", one)
    assert difference.settings["layout.tensor_model_parallel_size"] == (2, 1)
    assert not difference.reshaped
    # Other roundings through one step of Adam: no number of a matrix is further off than its learning rate.
    assert all(each.largest < 1e-3 for each in difference.values)
    assert not any("optimizer" not in name and "/shard" not in name for name in difference.only_first)
    other = train(corpus, tmp_path / "other", 1, "--exo-variant", "s-exoformer", "--ffn-hidden-size", "32")
    difference = compare(one, other / "iter_0000002")
    assert difference.settings["model.exo.mixing"] == ("dynamic", "static")
    assert difference.settings["model.ffn_hidden_size"] == (64, 32)
    assert "decoder.layers.1.self_attention.dynamic_mixing.fc1.weight" in difference.only_first
    assert difference.reshaped["decoder.layers.1.mlp.linear_fc2.weight"] == ("float32 [32, 64]", "float32 [32, 32]")
