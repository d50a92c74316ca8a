"""The user's command works both ways: ``torchrun examples/pretrain_exoformer.sh`` and ``bash examples/…``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_exo import launch
from megatron_exo.errors import UserError
from tests.programs import run_program

ROOT = Path(__file__).parent.parent
TORCHRUN = str(Path(sys.executable).parent / "torchrun")
SCRIPT = "examples/pretrain_exoformer.sh"
SMALL = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 64 --num-layers 2 --hidden-size 32 "
    "--num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 "
    "--train-iters 3 --lr 1e-3 --eval-iters 1 --eval-interval 3 --log-interval 1 --num-workers 0 "
    "--tensor-model-parallel-size 2"
).split()


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2", SCRIPT],
            id="torchrun",
        ),
        pytest.param(["bash", SCRIPT, "--nproc-per-node", "2"], id="bash", marks=pytest.mark.slow),
    ],
)
def test_the_users_command_trains_with_its_arguments_passed_through(command: list[str], tmp_path: Path) -> None:
    done = _run([*command, *SMALL, "--exo-variant", "h-nuresformer", "--save", str(tmp_path), "--save-interval", "3"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "h-nuresformer" in done.stdout
    assert "tp 2" in done.stdout
    assert len(done.stdout.splitlines()) < 30, "a person's screen is flooded"
    records = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [r["iteration"] for r in records if r["kind"] == "train"] == [1, 2, 3]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_the_script_without_data_and_without_a_prepared_demo_says_how_to_get_data(tmp_path: Path) -> None:
    done = run_program(launch.train, ["--preset", "demo"], environment={"MEGATRON_EXO_DEMO": str(tmp_path)})
    assert done.status != 0
    errors = [line for line in done.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "quickstart" in errors[0]


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.idx").touch()
    monkeypatch.setenv("MEGATRON_EXO_DEMO", str(tmp_path))
    return tmp_path / "data"


def test_without_data_arguments_the_demo_preset_and_its_data_are_used(prepared: Path) -> None:
    arguments = launch.with_demo(["--exo-variant", "base"])
    assert arguments[arguments.index("--train-data-path") + 1] == str(prepared / "train")
    assert arguments[arguments.index("--tokenizer-model") + 1] == str(prepared / "tokenizer.model")
    assert arguments[arguments.index("--preset") + 1] == "demo"
    assert arguments[-2:] == ["--exo-variant", "base"]


@pytest.mark.parametrize("given", [["--mock-data"], ["--data-path", "x"], ["--data-path=x"], ["--help"]])
def test_arguments_that_name_data_are_left_alone(prepared: Path, given: list[str]) -> None:
    assert launch.with_demo(given) == given


def test_a_run_file_stands_for_itself(prepared: Path) -> None:
    assert launch.with_demo(["--run-file", "a.toml"]) == ["--run-file", "a.toml"]


def test_a_given_preset_is_kept_for_the_demo_data(prepared: Path) -> None:
    assert launch.with_demo(["--preset", "450M"]).count("--preset") == 1


def test_torchruns_options_are_told_from_trainings() -> None:
    launcher, training = launch.split_arguments(
        ["--nproc-per-node", "2", "--bf16", "--nnodes=2", "--lr", "1e-3", "--master_port", "1"]
    )
    assert launcher == ["--nproc-per-node", "2", "--nnodes=2", "--master_port", "1"]
    assert training == ["--bf16", "--lr", "1e-3"]


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ([], ["--standalone", "--nproc-per-node", "1"]),
        (["--nproc-per-node", "2"], ["--standalone"]),
        (["--nnodes=1", "--nproc-per-node=8"], ["--standalone"]),
        (["--nnodes", "4", "--nnodes", "1"], ["--standalone"]),  # a run file's, and the command line's
        (["--nnodes=2", "--master-addr", "a"], []),
        (["--nnodes=2", "--rdzv_endpoint=a:1"], []),
    ],
)
def test_ranks_of_one_machine_meet_on_it_and_others_where_they_are_told(given: list[str], added: list[str]) -> None:
    assert launch.torchrun_words(given, {}) == [*added, *given]


def test_several_nodes_that_are_not_told_where_to_meet_are_refused() -> None:
    with pytest.raises(UserError, match="4 nodes, and nothing says where they meet; start this on each with --master"):
        launch.torchrun_words(["--nnodes=4"], {})
    assert launch.torchrun_words(["--nnodes=4"], {"PET_MASTER_ADDR": "a"}) == ["--nnodes=4"]


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node7", "node7"),
        ("gpu-a,gpu-b", "gpu-a"),
        ("node[03-06,9],other", "node03"),
        ("rack[12,14]-gpu", "rack12-gpu"),
    ],
)
def test_nodes_of_slurm_meet_on_the_first(nodelist: str, first: str) -> None:
    words = launch.torchrun_words(["--nnodes=4"], {"SLURM_NODEID": "2", "SLURM_JOB_NODELIST": nodelist})
    assert words == ["--node-rank", "2", "--master-addr", first, "--nnodes=4"]


def test_a_dry_run_plans_for_the_ranks_that_would_be_started() -> None:
    assert launch.planned_world_size(["--nnodes=4", "--nproc-per-node=8", "--nnodes", "2"]) == 16
    assert launch.planned_world_size([]) == 1
    with pytest.raises(UserError, match="cannot plan for --nproc-per-node gpu, which is no number; pass"):
        launch.planned_world_size(["--nproc-per-node", "gpu"])
