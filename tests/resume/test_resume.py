"""What a run goes on from, and what is refused: another model, another schedule, a folder that is not meant."""

from __future__ import annotations

import re
import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_exo.checkpoints import reading
from megatron_exo.checkpoints.integrity import MANIFEST, read_manifest
from megatron_exo.checkpoints.reading import TRACKER, CheckpointError, read_index, read_shared_state
from megatron_exo.pretrain import main
from megatron_exo.resume import check_load, check_save, folder_to_load
from megatron_exo.schedule import is_extension
from tests.programs import MOCK_DATA, MODEL, RUN, Outcome, run_program
from tests.resume.runs import SAVING, error_of, exo_of, pretrain, rates_of, remove

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
