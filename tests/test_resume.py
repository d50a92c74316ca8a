"""Checkpoints that are damaged or another model's, and disks that fill up: one line, and nothing is lost."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_exo.checkpoints import reading
from megatron_exo.checkpoints.integrity import MANIFEST, read_manifest
from megatron_exo.checkpoints.reading import (
    TRACKER,
    CheckpointError,
    read_index,
    read_saved_arguments,
    read_shared_state,
)
from megatron_exo.config import ExoConfig
from megatron_exo.pretrain import main
from megatron_exo.resume import check_load, check_save, folder_to_load
from megatron_exo.schedule import is_extension
from tests.programs import MOCK_DATA, MODEL, RUN, Outcome, one_line, run_program

SAVING = "--save-interval 2 --log-interval 1 --num-workers 0"


def pretrain(run: Path, *words: str, largest_file: int | None = None) -> Outcome:
    """Train, or go on training, in the folder ``run``; every two iterations are saved."""
    arguments = f"{MODEL} {MOCK_DATA} {RUN} {SAVING}".split()
    return run_program(main, [*arguments, "--save", run, "--load", run, *words], largest_file=largest_file)


def error_of(outcome: Outcome) -> str:
    assert outcome.status == 1
    return one_line(outcome.err)


@pytest.fixture(scope="module")
def first_half(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The folder of a run that stopped after two of four iterations, and what it printed."""
    run = tmp_path_factory.mktemp("first-half") / "run"
    outcome = pretrain(run, "--exit-interval", "2")
    assert outcome.status == 0, outcome.err
    return run, outcome


@pytest.fixture
def run(first_half: tuple[Path, Outcome], tmp_path: Path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(first_half[0], tmp_path / "run"))


@pytest.fixture
def args(run: Path) -> Namespace:
    """The arguments with which the run would go on."""
    folder = run / "iter_0000002"
    saved = read_saved_arguments(folder, read_index(folder))
    saved.load = saved.save = str(run)
    return saved


def exo_of(args: Namespace, **changes: Any) -> ExoConfig:
    axes = {name: getattr(args, f"exo_{name}") for name in vars(ExoConfig())}
    return ExoConfig(**axes).replace(**changes)


# -- whole runs -------------------------------------------------------------------------------------------------


def test_a_first_start_with_load_says_that_there_is_nothing_to_load(first_half: tuple[Path, Outcome]) -> None:
    run, outcome = first_half
    assert "no checkpoint to load: random weights" in outcome.out
    assert (run / TRACKER).read_text() == "2"


def test_a_disk_that_fills_up_costs_only_the_checkpoint_it_had_no_room_for(run: Path) -> None:
    failed = pretrain(run, largest_file=500_000)
    assert error_of(failed) == (
        "rank 0: cannot write: File too large; the checkpoints before this one are whole, "
        "make room and start again with the same command"
    )
    assert (run / TRACKER).read_text() == "2"
    again = pretrain(run)
    assert again.status == 0, again.err
    assert f"loaded checkpoint 2 from {run}" in again.out
    assert (run / TRACKER).read_text() == "4"
    lost, made_up = (dict(re.findall(r"iteration (\d)/4  loss ([\d.]+)", outcome.out)) for outcome in (failed, again))
    assert list(lost) == list(made_up) == ["3", "4"]
    # As printed; the sum of the losses is rounded as the batch happens to lie in memory.
    assert list(map(float, made_up.values())) == pytest.approx(list(map(float, lost.values())), abs=1.01e-4)


def test_a_checkpoint_of_another_variant_is_refused_by_name(run: Path) -> None:
    folder = run / "iter_0000002"
    assert error_of(pretrain(run, "--exo-variant", "e-exoformer")) == (
        f"checkpoint {folder} is of another model: variant dynamic-e-exoformer (mixing dynamic), "
        "not e-exoformer; pass the arguments it was trained with, or another --load"
    )


# -- what is held against the run -------------------------------------------------------------------------------


def test_a_checkpoint_fits_the_run_that_saved_it(args: Namespace) -> None:
    assert folder_to_load(args) == Path(args.load) / "iter_0000002"
    check_load(args, exo_of(args))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", 5),
        ("hidden_size", 64),
        ("num_attention_heads", 2),
        ("kv_channels", 16),
        ("ffn_hidden_size", 96),
        ("vocab_size", 63),
        ("untie_embeddings_and_output_weights", False),
        ("rotary_base", 10_000),
        ("layernorm_epsilon", 1e-5),
    ],
)
def test_a_model_of_another_shape_is_refused_with_both_values(args: Namespace, name: str, value: object) -> None:
    saved = getattr(args, name)
    setattr(args, name, value)
    with pytest.raises(CheckpointError, match=f"is of another model: .*{name} {saved}, not {value}"):
        check_load(args, exo_of(args))


def test_fewer_query_groups_are_another_model_and_all_of_them_are_not(args: Namespace) -> None:
    args.group_query_attention, args.num_query_groups = True, args.num_attention_heads
    check_load(args, exo_of(args))
    args.num_query_groups = 2
    with pytest.raises(CheckpointError, match="num_query_groups 4, not 2"):
        check_load(args, exo_of(args))


def test_every_axis_that_differs_is_named(args: Namespace) -> None:
    with pytest.raises(CheckpointError, match=r"\(anchor h0, mixing dynamic\), not e-nuresformer"):
        check_load(args, exo_of(args, anchor="internal", mixing="static"))
    with pytest.raises(CheckpointError, match=r"\(dynamic hidden size 16\), not one without a name"):
        check_load(args, exo_of(args, dynamic_hidden_size=32))


def test_an_intervention_is_the_same_model(args: Namespace) -> None:
    check_load(args, exo_of(args, drop_anchor="qk", drop_current="v"))


def test_fine_tuning_may_change_how_positions_are_told(args: Namespace) -> None:
    args.rotary_base, args.finetune = 10_000, True
    check_load(args, exo_of(args))


def test_another_schedule_is_refused_unless_one_of_the_two_is_chosen(args: Namespace) -> None:
    args.train_iters = args.lr_decay_iters = 8
    message = (
        "trained on another schedule: decay samples 32, not 64; train samples 32, not 64; pass --override-opt-param"
    )
    with pytest.raises(CheckpointError, match=message):
        check_load(args, exo_of(args))
    for way_out in (
        "override_opt_param_scheduler",
        "use_checkpoint_opt_param_scheduler",
        "finetune",
        "no_load_optim",
        "skip_train",
    ):
        check_load(Namespace(**vars(args) | {way_out: True}), exo_of(args))


def test_the_checkpoints_schedule_comes_with_its_rates(args: Namespace) -> None:
    args.lr, args.min_lr, args.use_checkpoint_opt_param_scheduler = 5e-4, 1e-5, True
    check_load(args, exo_of(args))
    assert (args.lr, args.min_lr) == (1e-3, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "--bf16 --use-distributed-optimizer"], ids=["ordinary", "distributed"])
def test_a_run_goes_on_with_another_learning_rate_where_that_is_meant(run: Path, words: str) -> None:
    if words:
        shutil.rmtree(run)
        assert pretrain(run, *words.split(), "--exit-interval", "2").status == 0
    lower = [*words.split(), "--lr", "4e-4", "--min-lr", "1e-4", "--weight-decay", "0.3"]
    lower += ["--override-opt-param-scheduler", "--exo-accept-change", "training"]
    for steps in (["--exit-interval", "3"], []):  # with what is saved, it is the run's own
        outcome = pretrain(run, *lower, *steps)
        assert outcome.status == 0, outcome.err
    assert rates_of(run) == pytest.approx({1: 7.5e-4, 2: 5e-4, 3: 1.75e-4, 4: 1e-4})
    group = read_shared_state(run / "iter_0000004", read_index(run / "iter_0000004"))["optimizer"]
    groups = group.get("param_groups") or group["optimizer"]["param_groups"]
    assert {(each["max_lr"], each["min_lr"]) for each in groups} == {(4e-4, 1e-4)}
    assert max(each["weight_decay"] for each in groups) == 0.3


@pytest.mark.slow
def test_a_run_keeps_the_learning_rate_of_its_checkpoint_where_that_is_meant(run: Path) -> None:
    outcome = pretrain(run, "--lr", "4e-4", "--min-lr", "1e-4", "--use-checkpoint-opt-param-scheduler")
    assert outcome.status == 0, outcome.err
    assert rates_of(run) == pytest.approx({1: 7.5e-4, 2: 5e-4, 3: 2.5e-4, 4: 0.0})


def rates_of(run: Path) -> dict[int, float]:
    """Iteration → learning rate."""
    records = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]
    return {record["iteration"]: record["learning_rate"] for record in records if record["kind"] == "train"}


def test_a_run_that_has_not_begun_to_decay_is_extended_as_if_planned_so(args: Namespace, run: Path) -> None:
    """WSD: two of four steps are done; six of eight are flat, two of four are, one of four is not."""
    flat = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear", "lr_wsd_decay_iters": 2}
    longer = Namespace(**vars(args) | flat | {"train_iters": 8, "lr_decay_iters": 8})
    assert is_extension(Namespace(**vars(args) | flat), longer)
    assert not is_extension(Namespace(**vars(args) | flat | {"lr_wsd_decay_iters": 3}), longer)  # it is decaying
    assert not is_extension(Namespace(**vars(args) | flat | {"lr": 2e-3}), longer)
    assert not is_extension(args, Namespace(**vars(args) | {"train_iters": 8, "lr_decay_iters": 8}))  # linear


def test_a_run_whose_momentum_would_have_been_another_is_not_extended(args: Namespace) -> None:
    flat = {"lr_decay_style": "constant", "optimizer": "muon", "exo_muon_momentum_warmup": 0}
    for cooldown, same in ((0, True), (3, True), (4, False)):  # of four updates two are done, the second at 3 of 4
        plan = vars(args) | flat | {"exo_muon_momentum_cooldown": cooldown}
        longer = plan | {"train_iters": 8, "lr_decay_iters": 8}
        assert is_extension(Namespace(**plan), Namespace(**longer)) is same, cooldown
    growing = vars(args) | {"lr_decay_style": "constant", "weight_decay_incr_style": "linear"}
    assert not is_extension(Namespace(**growing), Namespace(**growing | {"train_iters": 8, "lr_decay_iters": 8}))


def test_the_state_of_another_optimizer_is_refused_by_name(args: Namespace) -> None:
    args.optimizer = "muon"
    with pytest.raises(
        CheckpointError, match="was trained with --optimizer adam, whose state does not fit muon; pass what"
    ):
        check_load(args, exo_of(args))
    check_load(Namespace(**vars(args) | {"finetune": True}), exo_of(args))


def test_numbers_that_are_in_the_optimizers_state_cannot_be_changed_by_the_command_line(args: Namespace) -> None:
    args.adam_beta2 = 0.5
    with pytest.raises(CheckpointError, match=r"what Megatron goes on with: adam_beta2 [.0-9]+, not 0.5; pass"):
        check_load(args, exo_of(args))
    check_load(Namespace(**vars(args) | {"finetune": True}), exo_of(args))


def test_a_folder_without_checkpoints_is_a_first_start_unless_one_is_demanded(args: Namespace, tmp_path: Path) -> None:
    args.load = args.save = str(tmp_path / "new")
    check_load(args, exo_of(args))
    args.exit_on_missing_checkpoint = True
    with pytest.raises(CheckpointError, match="new holds no checkpoint; check the path"):
        check_load(args, exo_of(args))


def test_random_weights_are_not_taken_for_those_of_a_folder_without_any(args: Namespace, tmp_path: Path) -> None:
    args.load = str(tmp_path / "runs" / "mistyped")
    with pytest.raises(CheckpointError, match="mistyped holds no checkpoint, and it is not the folder of --save"):
        check_load(args, exo_of(args))
    args.save = args.load
    check_load(args, exo_of(args))
    args.finetune = True
    with pytest.raises(CheckpointError, match="mistyped holds no checkpoint, and --finetune needs its weights; check"):
        check_load(args, exo_of(args))


def test_one_checkpoint_in_the_place_of_its_run_is_refused_with_what_to_pass(args: Namespace) -> None:
    run = args.load
    args.load = f"{run}/iter_0000002"
    with pytest.raises(CheckpointError, match=f"is one checkpoint, .*; pass --load {run} --ckpt-step 2$"):
        check_load(args, exo_of(args))


def test_weights_to_begin_with_may_be_of_another_schedule_optimizer_and_data(args: Namespace, tmp_path: Path) -> None:
    args.pretrained_checkpoint, args.load = args.load, str(tmp_path / "new")
    args.lr, args.seed, args.adam_beta2 = 5e-4, 5, 0.5
    check_load(args, exo_of(args))
    assert not args.finetune  # the next start goes on from the run's own
    args.load, args.pretrained_checkpoint = args.pretrained_checkpoint, None
    with pytest.raises(CheckpointError):
        check_load(args, exo_of(args))


def test_a_run_that_would_write_over_the_checkpoints_of_another_is_refused(run: Path, tmp_path: Path) -> None:
    words = f"{MODEL} {MOCK_DATA} {RUN} {SAVING} --save {run}".split()
    assert error_of(run_program(main, words)) == (
        f"--save {run} has checkpoints up to iteration 2, and a run that does not go on from one of them would write "
        f"over them; pass --load {run} to go on from the newest, or pass another --save"
    )
    assert read_manifest(run / "iter_0000002") is not None


def test_what_a_run_saves_to_is_what_it_goes_on_from(
    args: Namespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(args.save)
    (tmp_path / "link").symlink_to(run)
    args.load = str(tmp_path / "link")  # the same folder by another name
    check_save(args)
    for name, value, way_out in (
        ("load", str(tmp_path / "other"), f"pass --load {run} to go on"),
        ("finetune", True, "leave out --finetune to go on from the newest, or pass another folder as both"),
    ):
        with pytest.raises(CheckpointError, match=way_out):
            check_save(Namespace(**vars(args) | {name: value}))
    for name in ("skip_train", "replay"):  # nothing is saved
        check_save(Namespace(**vars(args) | {"load": None, name: "batch.pt"}))
    shutil.copytree(run / "iter_0000002", run / "iter_0000004")
    assert capsys.readouterr().out == ""
    args.ckpt_step = 2
    check_save(args)
    assert f"going back to checkpoint 2 of {run}, which has some up to 4" in capsys.readouterr().out
    shutil.rmtree(run / "iter_0000004")
    remove(MANIFEST)(run / "iter_0000002")
    remove("metadata.json")(run / "iter_0000002")
    args.load = None
    check_save(args)  # what a crash has left of a first save is nothing to go on from


def test_a_pretrained_checkpoint_is_read_only_where_there_is_no_own_one(args: Namespace, tmp_path: Path) -> None:
    args.load, args.pretrained_checkpoint = str(tmp_path / "new"), args.load
    assert folder_to_load(args) == Path(args.pretrained_checkpoint) / "iter_0000002"
    args.pretrained_checkpoint = str(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"--pretrained-checkpoint .*other holds none; check the path"):
        check_load(args, exo_of(args))


def test_another_iteration_can_be_asked_for(args: Namespace) -> None:
    args.ckpt_step = 3
    with pytest.raises(
        CheckpointError,
        match=r"iter_0000003 is missing \(there: iter_0000002\); "
        "go on from the newest whole one before it with --ckpt-step 2$",
    ):
        check_load(args, exo_of(args))


def test_a_checkpoint_of_another_program_is_refused(args: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading.torch, "load", lambda *_, **__: [{"args": Namespace(num_layers=4)}])
    with pytest.raises(CheckpointError, match="is not of an ExoFormer; load it into the program that saved it"):
        check_load(args, exo_of(args))


# -- damage -----------------------------------------------------------------------------------------------------


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def overwrite_shared_state(folder: Path) -> None:
    index = read_index(folder)
    (part,) = (part for key, part in index.storage_data.items() if key.fqn.startswith("common_state"))
    with (folder / part.relative_path).open("r+b") as file:
        file.seek(part.offset)
        file.write(bytes(part.length))


def flip_a_byte(name: str) -> Callable[[Path], object]:
    def flip(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.seek((folder / name).stat().st_size // 2)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))

    return flip


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (cut("__0_0.distcp", 5000), r"no complete checkpoint: __0_0\.distcp is cut off: 5000 bytes of \d+; copy it again"),
    (
        remove("__0_0.distcp"),
        r"no complete checkpoint: __0_0\.distcp is missing; copy it again, or start anew from anoth",
    ),
    (remove(".metadata"), r"no complete checkpoint: it has no index; copy it again"),
    (remove("metadata.json"), r"no complete checkpoint: it has no index"),
    (cut(".metadata", 1000), r"\.metadata is damaged: \w+: .*; copy it again"),
    (write(".metadata", b""), r"\.metadata is damaged: EOFError"),
    (write(".metadata", pickle.dumps({"a": 1})), r"\.metadata is damaged: UnpicklingError: it holds a dict"),
    (overwrite_shared_state, r"common_state.* is damaged: .*; copy it again"),
    (
        write(f"../{TRACKER}", b"two"),
        r"does not name an iteration but 'two'; write the number of a folder iter_N there, or go on from the newest "
        r"whole one with --ckpt-step 2$",
    ),
    (write(f"../{TRACKER}", b"6"), r"iter_0000006 is missing \(there: iter_0000002\)"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[message[:40] for _, message in DAMAGES])
def test_a_damaged_checkpoint_without_a_manifest_is_refused_with_what_is_wrong(
    args: Namespace, damage: Callable[[Path], object], message: str
) -> None:
    folder = Path(args.load) / "iter_0000002"
    remove(MANIFEST)(folder)
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as refusal:
        check_load(args, exo_of(args))
    assert "\n" not in str(refusal.value)


DAMAGES_BY_MANIFEST: list[tuple[Callable[[Path], object], str]] = [
    (flip_a_byte("__0_0.distcp"), r"__0_0\.distcp is damaged: its SHA-256 is not the one it was saved with"),
    (flip_a_byte(".metadata"), r"\.metadata is damaged: its SHA-256"),
    (flip_a_byte("metadata.json"), r"metadata\.json is damaged: its SHA-256"),
    (flip_a_byte(MANIFEST), rf"{MANIFEST} is damaged: "),
    (write(MANIFEST, b"{}"), rf"{MANIFEST} is damaged: KeyError: 'sha256'"),
    (cut(MANIFEST, 1000), rf"{MANIFEST} is damaged: JSONDecodeError: "),
    (cut("__0_0.distcp", 5000), r"__0_0\.distcp is cut off: 5000 bytes of \d+"),
    (cut("__0_0.distcp", 5_000_000), r"__0_0\.distcp is too long: 5000000 bytes instead of \d+"),
    (remove("__0_0.distcp"), r"__0_0\.distcp is missing"),
    (remove(".metadata"), r"\.metadata is missing"),
]


@pytest.mark.parametrize(
    ("damage", "message"), DAMAGES_BY_MANIFEST, ids=[message[:40] for _, message in DAMAGES_BY_MANIFEST]
)
def test_whatever_happens_to_a_file_is_seen_at_load_and_the_checkpoint_before_is_offered(
    args: Namespace, damage: Callable[[Path], object], message: str
) -> None:
    root = Path(args.load)
    shutil.copytree(root / "iter_0000002", root / "iter_0000004")
    (root / TRACKER).write_text("4")
    check_load(args, exo_of(args))
    damage(root / "iter_0000004")
    offer = "copy it again, or go on from the newest whole one before it with --ckpt-step 2$"
    with pytest.raises(CheckpointError, match=f"iter_0000004.*{message}.*; {offer}") as refusal:
        check_load(args, exo_of(args))
    assert "\n" not in str(refusal.value)
    args.ckpt_step = 2
    check_load(args, exo_of(args))


def test_a_damaged_checkpoint_is_not_offered_in_the_place_of_another(args: Namespace) -> None:
    root = Path(args.load)
    for step in (4, 6, 8):
        shutil.copytree(root / "iter_0000002", root / f"iter_{step:07d}")
    (root / TRACKER).write_text("8")
    remove(MANIFEST)(root / "iter_0000008")
    remove(".metadata")(root / "iter_0000008")
    flip_a_byte("__0_0.distcp")(root / "iter_0000006")
    with pytest.raises(CheckpointError, match=r"it has no index; copy it again, or .* with --ckpt-step 4$"):
        check_load(args, exo_of(args))


def test_a_folder_that_holds_only_a_partial_checkpoint_is_a_first_start(args: Namespace) -> None:
    folder = Path(args.load) / "iter_0000002"
    for name in (f"../{TRACKER}", MANIFEST, "metadata.json"):
        remove(name)(folder)
    assert folder_to_load(args) is None


@pytest.mark.parametrize("has_manifest", [True, False], ids=["with a manifest", "without"])
def test_a_first_checkpoint_cut_short_before_its_tracker_is_gone_on_from(
    args: Namespace, capsys: pytest.CaptureFixture[str], has_manifest: bool
) -> None:
    root = Path(args.load)
    shutil.copytree(root / "iter_0000002", root / "iter_0000004")
    remove("metadata.json")(root / "iter_0000004")
    remove(f"../{TRACKER}")(root / "iter_0000002")
    if not has_manifest:
        remove(MANIFEST)(root / "iter_0000002")
    args.pretrained_checkpoint = str(root)  # what Megatron would read without a tracker
    check_load(args, exo_of(args))
    assert (args.ckpt_step, args.pretrained_checkpoint) == (2, None)
    assert f"{root} has no {TRACKER}: going on from its newest whole checkpoint, 2\n" in capsys.readouterr().out


def test_a_run_killed_between_its_first_checkpoint_and_the_tracker_goes_on_by_itself(run: Path) -> None:
    (run / TRACKER).unlink()
    again = pretrain(run)
    assert again.status == 0, again.err
    assert f"loaded checkpoint 2 from {run}" in again.out
    assert (run / TRACKER).read_text() == "4"


def test_weights_to_begin_with_are_not_guessed(args: Namespace) -> None:
    args.pretrained_checkpoint, args.load = args.load, None
    remove(f"../{TRACKER}")(Path(args.pretrained_checkpoint) / "iter_0000002")
    with pytest.raises(CheckpointError, match=r"holds checkpoints but no .*; pass --ckpt-step 2 for the newest whole"):
        check_load(args, exo_of(args))


@pytest.mark.slow
def test_a_load_at_which_megatron_gives_up_is_no_success(tmp_path: Path) -> None:
    """A checkpoint in its older format that lacks what it looks for first."""
    folder = tmp_path / "iter_0000003" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save({"arguments": 1}, folder / "model_optim_rng.pt")
    (tmp_path / TRACKER).write_text("3")
    assert error_of(pretrain(tmp_path)).startswith("rank 0: Megatron has given up, which it does where it cannot load")


def test_a_checkpoint_without_a_manifest_loads(args: Namespace) -> None:
    remove(MANIFEST)(Path(args.load) / "iter_0000002")
    check_load(args, exo_of(args))


def test_files_are_read_by_one_process_of_each_machine_and_not_at_all_if_told_so(
    args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_a_byte("__0_0.distcp")(Path(args.load) / "iter_0000002")  # the second of three files

    def is_seen_by(rank: int, world_size: int, ranks_here: int) -> bool:
        names = {"RANK": rank, "LOCAL_RANK": rank % ranks_here, "WORLD_SIZE": world_size}
        for name, value in (names | {"LOCAL_WORLD_SIZE": ranks_here}).items():
            monkeypatch.setenv(name, str(value))
        try:
            check_load(args, exo_of(args))
        except CheckpointError:
            return True
        return False

    assert [is_seen_by(rank, 4, 4) for rank in range(4)] == [True, False, False, False]
    assert [is_seen_by(rank, 6, 2) for rank in range(6)] == [False, False, True, False, False, False]
    args.verify_checkpoint = False
    assert not any(is_seen_by(rank, 6, 2) for rank in range(6))


class Intruder:
    def __init__(self, traces: Path) -> None:
        self.traces = traces

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.traces,)


@pytest.mark.parametrize("call", ["plain", "hidden behind a module of checkpoints"])
def test_an_index_that_would_run_code_is_not_run(args: Namespace, tmp_path: Path, call: str) -> None:
    traces = tmp_path / "traces"
    content = pickle.dumps(Intruder(traces))
    if call != "plain":  # the same function, by a path that begins as allowed ones do
        program = b"ctorch.distributed.checkpoint.filesystem\nos.mkdir\n(V%b\ntR."
        content = b"\x80\x04" + program.replace(b"%b", str(traces).encode())
    remove(MANIFEST)(Path(args.load) / "iter_0000002")
    (Path(args.load) / "iter_0000002" / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged: UnpicklingError: it names .*does not need"):
        check_load(args, exo_of(args))
    assert not traces.exists()
    assert pickle.loads(content) is None  # the attack is a real one
    assert traces.exists()
