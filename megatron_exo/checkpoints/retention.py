"""Which checkpoints of a run stay (``--keep-last``, ``--keep-every``), and how the others go."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from megatron_exo.checkpoints.integrity import damages
from megatron_exo.checkpoints.reading import folder_of, steps_of

DELETED = "deleted_"
"""How the name of a folder begins that is on its way out: it is no checkpoint from then on, whatever is still in it."""


def remove_old(root: Path, newest: int, *, keep_last: int, keep_every: int | None) -> list[int]:
    """Remove the checkpoints that are older than ``newest`` and that nothing keeps; in the background.

    What is newer stays: it may be on its way in, or of a line that the run has turned back from. Links stay, as what
    they point to may not be this run's, and so do checkpoints in Megatron's older format, which cannot be told whole
    from partial. Partial ones of before ``newest`` are what a crash has left, and go.

    Args:
        root: the folder of the run.
        newest: the iteration that the tracker names, which is whole.
        keep_last: how many whole ones stay, ``newest`` among them; at least 1.
        keep_every: those whose iteration is a multiple of it stay as well.

    Returns:
        The iterations that are gone.

    Raises:
        OSError: a folder cannot be renamed.
    """
    older = [step for step in steps_of(root) if step < newest and _is_ours(folder_of(root, step))]
    whole = [step for step in older if not damages(folder_of(root, step), checksums=False)]
    kept = set(whole[-(keep_last - 1) :]) if keep_last > 1 else set()
    if keep_every is not None:
        kept |= {step for step in whole if step % keep_every == 0}
    gone = [step for step in older if step not in kept]
    for step in gone:
        folder = folder_of(root, step)
        folder.rename(_free_name(root / f"{DELETED}{folder.name}"))
    if leftovers := [path for path in root.glob(f"{DELETED}iter_*") if path.is_dir()]:
        # Large files on a shared disk take their time, and all ranks would wait.
        threading.Thread(target=lambda: [shutil.rmtree(path, ignore_errors=True) for path in leftovers]).start()
    return gone


def _is_ours(folder: Path) -> bool:
    return not folder.is_symlink() and not any(folder.glob("mp_rank_*"))


def _free_name(path: Path) -> Path:
    """``path``, or with a number behind it: the same iteration may have been saved and removed before."""
    number, free = 1, path
    while free.exists():
        number, free = number + 1, path.with_name(f"{path.name}.{number}")
    return free
