"""What is in an exported folder beside the weights, and what it takes to make it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from megatron_exo.convert.exporting import Options
from megatron_exo.convert.hf_tokenizer import write_tokenizer
from megatron_exo.convert.hugging_face import hf_mapping
from megatron_exo.convert.mapping import ConversionError
from megatron_exo.convert.model_card import Provenance, model_card
from megatron_exo.convert.safetensors_writing import Group, plan_shards
from megatron_exo.data.tokenizer_training import train_tokenizer
from megatron_exo.data.tokenizers import TokenizerError, TokenizerSpec
from megatron_exo.hf import ExoFormerForCausalLM
from megatron_exo.sizes import ModelSizes
from tests.convert.checkpoints import gigabytes, write_checkpoint, write_manifest
from tests.convert.conversions import export_checkpoints
from tests.hf.models import SIZES, VARIANTS_AND_MORE, our_state
from tests.programs import run_program
from tests.ranks import run_on_ranks
from tools import convert_to_hf

ROOT = Path(__file__).parent.parent.parent
EXO = VARIANTS_AND_MORE["dynamic-e-exoformer"]
TEXTS = ["The anchor's mixing, 3 times: naïve café, 日本語 🙂\n\n  indented </s> text", "x", "", "  two  spaces"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))))
    return file


@pytest.fixture(scope="module")
def sentencepiece(text: Path) -> Path:
    return train_tokenizer([str(text)], str(text.with_name("bpe.model")), 600)


def described(kind: str, *files: Path) -> dict[str, object]:
    return {"type": kind, "files": {file.name: {} for file in files}}


def gpt2_files(text: Path, folder: Path) -> list[Path]:
    tokenizer = LibraryTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    tokenizer.train([str(text)], trainer)
    folder.mkdir()
    return [Path(file) for file in tokenizer.model.save(str(folder))]


# -- tokenizers ---------------------------------------------------------------------------------------------------


def test_a_sentencepiece_tokenizer_becomes_one_of_transformers(sentencepiece: Path, tmp_path: Path) -> None:
    written = write_tokenizer(
        described("SentencePieceTokenizer", sentencepiece), sentencepiece.parent, tmp_path, max_length=64
    )
    ours = TokenizerSpec("SentencePieceTokenizer", str(sentencepiece)).load()
    assert (written.eos, written.notice) == (ours.eod, "")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == ours.eod
    assert theirs.pad_token_id is not None
    assert len(theirs) == ours.vocab_size
    for each in TEXTS:
        assert theirs(each, split_special_tokens=True).input_ids == ours.encode_batch([each])[0]
        assert theirs.decode(theirs(each, split_special_tokens=True).input_ids) == each
    assert (tmp_path / "tokenizer.model").read_bytes() == sentencepiece.read_bytes()


def test_gpt2_files_become_a_tokenizer_of_transformers(text: Path, tmp_path: Path) -> None:
    files = gpt2_files(text, tmp_path / "gpt2")
    written = write_tokenizer(described("GPT2BPETokenizer", *files), tmp_path / "gpt2", tmp_path, max_length=64)
    ours = TokenizerSpec("GPT2BPETokenizer", str(tmp_path / "gpt2")).load()
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.eos_token_id, written.eos) == (ours.eod, ours.eod)
    for each in TEXTS:
        assert theirs(each, split_special_tokens=True).input_ids == ours.encode_batch([each])[0]
        assert theirs.decode(theirs(each).input_ids) == each


def test_a_hugging_face_tokenizer_is_copied_without_leads_to_code(text: Path, tmp_path: Path) -> None:
    files = gpt2_files(text, tmp_path / "gpt2")
    (tmp_path / "first").mkdir()
    write_tokenizer(described("GPT2BPETokenizer", *files), tmp_path / "gpt2", tmp_path / "first", max_length=64)
    expected = AutoTokenizer.from_pretrained(tmp_path / "first")(TEXTS).input_ids
    config = tmp_path / "first" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"auto_map": {"AutoTokenizer": ["evil/repo--x.Y"]}}))
    (tmp_path / "out").mkdir()
    names = described("HuggingFaceTokenizer", tmp_path / "first" / "tokenizer.json", config)
    written = write_tokenizer(names, tmp_path / "first", tmp_path / "out", max_length=64)
    assert written.notice == ""
    assert "evil" not in (tmp_path / "out" / "tokenizer_config.json").read_text()
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(TEXTS).input_ids == expected


def test_tokenizers_that_cannot_be_written_are_spoken_of(tmp_path: Path) -> None:
    for kind, files, words in (
        ("NullTokenizer", [], "no tokenizer"),
        ("SentencePieceTokenizer", ["big.model"], "big.model was too large"),
    ):
        written = write_tokenizer({"type": kind, "files": dict.fromkeys(files)}, tmp_path, tmp_path, max_length=64)
        assert words in written.notice
    for name in ("../../etc/passwd", "/etc/passwd", ".."):
        with pytest.raises(ConversionError, match="no names of files"):
            write_tokenizer({"type": "HuggingFaceTokenizer", "files": {name: {}}}, tmp_path, tmp_path, max_length=64)
    (tmp_path / "broken.model").write_bytes(b"nothing")
    with pytest.raises(TokenizerError, match="not a SentencePiece model"):
        write_tokenizer(
            described("SentencePieceTokenizer", Path("broken.model")), tmp_path, tmp_path / "out", max_length=64
        )


# -- the folder as a whole ----------------------------------------------------------------------------------------

STRANGER = """
import sys
sys.modules["megatron_exo"] = sys.modules["megatron"] = sys.modules["sentencepiece"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
prompt = tokenizer(["The anchor", "x"], return_tensors="pt", padding=True)
print(model.generate(**prompt, max_new_tokens=12, do_sample=False).tolist())
"""


@pytest.fixture(scope="module")
def with_tokenizer(sentencepiece: Path) -> Path:
    """A folder made of a checkpoint with a copy of its tokenizer, and what its run has left in its logs."""
    run = sentencepiece.with_name("run")
    checkpoint = run / "iter_0000005"
    sizes = ModelSizes(**{**vars(SIZES), "vocab_size": 600})
    write_checkpoint(checkpoint, EXO, sizes, our_state(EXO, sizes), parts=2, padding=40)
    (checkpoint / "tokenizer").mkdir()
    shutil.copyfile(sentencepiece, checkpoint / "tokenizer" / "tokenizer.model")
    write_manifest(checkpoint, EXO, sizes, tokenizer=described("SentencePieceTokenizer", Path("tokenizer.model")))
    (run / "latest_checkpointed_iteration.txt").write_text("5")
    (run / "logs").mkdir()
    records = [
        {"kind": "validation", "iteration": 4, "lm_loss": 2.5},
        {"kind": "validation", "iteration": 5, "lm_loss": 2.25},
        {"kind": "validation", "iteration": 9, "lm_loss": 1.0},
    ]
    (run / "logs" / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    done = run_program(convert_to_hf.main, [run, run.with_name("hf"), "--no-verify", "--shard-size", "100kB"])
    assert done.status == 0, done.err
    return run.with_name("hf")


def test_a_moved_folder_generates_the_same_for_a_stranger(with_tokenizer: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(with_tokenizer, tmp_path / "elsewhere")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, str(folder)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tokenizer, model = AutoTokenizer.from_pretrained(folder), ExoFormerForCausalLM.from_pretrained(folder)
    prompt = tokenizer(["The anchor", "x"], return_tensors="pt", padding=True)
    text = model.generate(**prompt, max_new_tokens=12, do_sample=False).tolist()
    assert json.loads(done.stdout.splitlines()[-1]) == text


def test_the_folder_holds_what_transformers_and_people_look_for(with_tokenizer: Path) -> None:
    names = {path.name for path in with_tokenizer.iterdir() if path.suffix != ".safetensors"}
    assert names == {
        "README.md", "config.json", "configuration_exoformer.py", "generation_config.json", "modeling_exoformer.py",
        "model.safetensors.index.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    }  # fmt: skip
    generation = json.loads((with_tokenizer / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    card = (with_tokenizer / "README.md").read_text()
    assert "dynamic-e-exoformer" in card
    assert "5 steps, 640 tokens" in card
    assert "| validation | 5 | 2.2500 | 9.49 |" in card  # the last one that this checkpoint's weights had
    manifest = json.loads((with_tokenizer.with_name("run") / "iter_0000005" / "exo_manifest.json").read_text())
    assert f"converted from `iter_0000005`, sha256 {manifest['sha256']}" in card
    assert "Not verified" in card


def test_texts_of_a_checkpoint_stay_texts_in_the_card() -> None:
    come_from = Provenance(
        "`x`\n# Heading",
        "0" * 64,
        1,
        2,
        data={"sets": [{"part": "train", "prefix": "/a/b`\n<script>", "weight": None}], "split": "1", "seed": 1},
        versions={"torch": "2`\n# x"},
        command=["a", "```\n# escaped"],
    )
    lines = model_card(EXO, SIZES, "float32", 45_000, come_from, []).splitlines()
    assert [line for line in lines if line.startswith("# ")] == [
        "# dynamic-e-exoformer, 45,000 parameters",
        "# escaped'",
    ]
    assert not any(line.startswith("<script>") for line in lines)
    assert sum(line == "```" for line in lines) == 3  # the end of one block, and both ends of the command's


@pytest.mark.parametrize("data", [{"sets": [3]}, {"sets": 7}, {"sets": [{"bin_bytes": "x"}]}], ids=str)
def test_data_described_in_another_way_is_said_to_be_unknown(data: dict[str, Any]) -> None:
    card = model_card(EXO, SIZES, "float32", 45_000, Provenance("x", "0" * 64, 1, 2, data=data), [])
    assert "describes its data in a way that this version does not know" in card


def test_shards_are_filled_in_order_and_no_group_is_torn() -> None:
    table = hf_mapping(EXO, SIZES)
    groups = [Group(row, torch.float32) for row in table]
    for limit in (1, 20_000, 50_000, 10**9):
        shards = plan_shards(groups, limit)
        assert [group for shard in shards for group in shard] == groups
        assert all(len(shard) == 1 or sum(group.nbytes() for group in shard) <= limit for shard in shards)
        for shard, following in itertools.pairwise(shards):
            assert sum(group.nbytes() for group in shard) + following[0].nbytes() > limit
    mixed = [Group(row, torch.bfloat16 if number % 2 else torch.float32) for number, row in enumerate(table)]
    widths = [group.dtype.itemsize for shard in plan_shards(mixed, 10**9) for group in shard]
    assert widths == sorted(widths, reverse=True)


# -- memory -------------------------------------------------------------------------------------------------------

MEASURE = """
import json, resource, sys, time
sys.path.insert(0, sys.argv[1])
from tools.convert_to_hf import main
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
small, large, out, shard_size = sys.argv[2:]
main([small, out + "-small", "--no-verify"])  # imports all that a conversion needs
before, start = peak(), time.monotonic()
main([large, out, "--no-verify", "--shard-size", shard_size])
print(json.dumps({"bytes": peak() - before, "seconds": time.monotonic() - start}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_memory_stays_below_a_shard_and_the_largest_group(parts: int, tmp_path: Path) -> None:
    """Of more than a gigabyte, in chunks as one rank and as two tensor-parallel ranks save it."""
    sizes = ModelSizes(
        num_layers=12, hidden_size=1024, num_attention_heads=16, num_query_groups=16, kv_channels=64,
        ffn_hidden_size=2048, vocab_size=57_601, seq_length=64,
    )  # fmt: skip
    table = hf_mapping(EXO, sizes)
    generator = torch.Generator().manual_seed(0)
    state = {row.ours: torch.randn(row.our_shape(), generator=generator) for row in table}
    assert gigabytes(state) > 1.0
    largest = max(tensor.nbytes for tensor in state.values())
    write_checkpoint(tmp_path / "large", EXO, sizes, state, parts=parts, padding=127)
    write_checkpoint(tmp_path / "small", EXO, SIZES, our_state(EXO))
    del state
    arguments = [str(ROOT), str(tmp_path / "small"), str(tmp_path / "large"), str(tmp_path / "hf"), "300MB"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    files = [file.stat().st_size for file in (tmp_path / "hf").glob("*.safetensors")]
    assert len(files) >= 4
    print(measured, max(files), largest)
    assert measured["bytes"] <= 1.2 * (max(files) + largest)
    shutil.rmtree(tmp_path)


def test_a_checkpoint_that_says_nothing_of_its_model_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", EXO, SIZES, our_state(EXO))
    (tmp_path / "checkpoint" / "exo_manifest.json").unlink()
    request = (tmp_path / "checkpoint", tmp_path / "hf", Options(verify=False))
    ((found,),) = run_on_ranks(1, export_checkpoints, [request], process_group=False)
    assert "does not say what model it is of" in str(found)


@pytest.mark.parametrize("content", ['{"x": "\\ud800"}', "[]", "{", "[" * 100_000])
def test_settings_that_no_text_can_hold_are_refused(tmp_path: Path, sentencepiece: Path, content: str) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    write_tokenizer(described("SentencePieceTokenizer", sentencepiece), sentencepiece.parent, source, max_length=8)
    files = [source / "tokenizer.json", source / "tokenizer_config.json"]
    files[1].write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        write_tokenizer(described("HuggingFaceTokenizer", *files), source, out, max_length=8)
