"""What a run folder holds is set aside while another command replaces it, and may come back.

Nothing is copied, and nothing is deleted before the new run is whole: finished results and
unfinished work move into the folder of unfinished work, and back if the new command is refused.
Either way takes several renames, and a kill may come between any two of them:

    moving/            on its way, there or back: whoever leads next brings it back first
    replaced/          all is there, and the job in the run folder replaces it
    no record of a job what lies beside `replaced/` is of a job that had not begun, or was refused
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path


class SetAside:
    """The place of what a job replaces.

    Args:
        output: the run folder.
        work: its folder of unfinished work.
        lock: file of `work` that stays where it is.
        names: what a run consists of in `output`: its summary, without which nobody takes the rest
            for a run, the record of its job, and the results.
    """

    def __init__(self, output: Path, work: Path, lock: Path, names: Sequence[str]) -> None:
        self._output = output
        self._work = work
        self._stays = {lock}
        self._names = names
        self._moving = work / "moving"
        self.folder = work / "replaced"

    @property
    def unsettled(self) -> bool:
        """Whether a kill came between two renames: then `bring_back` comes before all else."""
        begun = (self._output / self._names[1]).exists()
        return self._work.exists() and (self._moving.exists() or not begun)

    def take(self) -> None:
        """Set aside what there is of a run, finished or not."""
        unfinished = self._unfinished()
        found = [self._output / name for name in self._names if (self._output / name).exists()]
        if not found:
            return
        (self._moving / self._work.name).mkdir(parents=True)
        for path in found:
            os.replace(path, self._moving / path.name)
        for path in unfinished:
            os.replace(path, self._moving / self._work.name / path.name)
        os.replace(self._moving, self.folder)

    def bring_back(self) -> None:
        """Discard the job in the run folder, and undo `take`; the folder of work stays if used."""
        if not self._moving.exists():
            (self._output / self._names[1]).unlink(missing_ok=True)
            for path in self._unfinished():
                if path != self.folder:
                    _remove(path)
            if self.folder.exists():
                os.replace(self.folder, self._moving)
        for path in (self._moving / self._work.name).glob("*"):
            os.replace(path, self._work / path.name)
        back = [path for path in self._moving.glob("*") if path.name != self._work.name]
        for path in sorted(back, key=lambda path: path.name in self._names[:2]):
            os.replace(path, self._output / path.name)
        if self._moving.exists():
            shutil.rmtree(self._moving)
        if not self._unfinished():
            shutil.rmtree(self._work)

    def _unfinished(self) -> list[Path]:
        return [path for path in self._work.iterdir() if path not in self._stays]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
