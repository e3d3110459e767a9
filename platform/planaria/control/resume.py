"""Where a generation starts: the newest checkpoint that is intact as far as is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planaria.config import JobConfig
from planaria.control.failure import JobFailed
from planaria.data.identity import DataIdentity, differences
from planaria.data.skips import Windows, same_past
from planaria.state.vault import CheckpointInfo, Vault

Tell = Callable[..., None]


class Resume:
    """Chooses the checkpoint to start from, and remembers which turned out to be damaged."""

    def __init__(
        self, vault: Vault, job: JobConfig, run_dir: str, tell: Tell, data: DataIdentity | None = None
    ) -> None:
        self._data = data
        self._vault, self._job, self._run_dir, self._tell = vault, job, run_dir, tell
        self._offered: CheckpointInfo | None = None
        self._damaged: set[tuple[int, str]] = set()
        self._checked = False
        self.windows: Windows = ()
        """Batches that training leaves out."""

    def give_up_beyond(self, step: int) -> None:
        """Training went back to ``step``: later checkpoints belong to a past that is no more."""
        for info in self._vault.list("shallow"):
            if info.step > step:
                self._damaged.add((info.step, info.identity))

    def damaged(self, problem: str) -> None:
        """Never offer the checkpoint again that was offered last; one that replaces it is another."""
        if self._offered is not None:
            self._reject(self._offered, problem)

    def step(self, saved: int | None = None) -> int | None:
        """Step of the checkpoint to start from; None to start afresh.

        Args:
            saved: step of the newest checkpoint that this run has saved, so that there must be one.

        Raises:
            JobFailed: there are (or were) checkpoints but none is intact, or they are another model's.
        """
        found = self._vault.list("shallow")
        self._damaged &= {(info.step, info.identity) for info in found}
        for info in found:
            if info.intact and (info.step, info.identity) not in self._damaged:
                if not self._same_job_and_past(info.step):
                    self._reject(info, f"checkpoint of step {info.step} belongs to a past that was given up")
                    continue
                self._offered = info
                return info.step
            self._reject(info, info.problem or f"checkpoint of step {info.step} is damaged")
        if found:
            raise JobFailed(
                f"none of the {len(found)} checkpoints in {self._run_dir} is intact (see events.jsonl); restore one, "
                f"or start afresh under another name"
            )
        if saved is not None:
            raise JobFailed(
                f"{self._run_dir} no longer holds any checkpoint, though that of step {saved} had been saved; bring "
                f"the folder back (is its storage mounted?), or give the same command again to start afresh"
            )
        return None

    def _reject(self, info: CheckpointInfo, problem: str) -> None:
        if (info.step, info.identity) not in self._damaged:
            self._damaged.add((info.step, info.identity))
            self._tell("checkpoint_damaged", f"{problem}; falling back to an older checkpoint", step=info.step)

    def _same_job_and_past(self, step: int) -> bool:
        """A run directory belongs to one job: refuse another model, tell of a changed course. Whether the state has
        seen the batches that it should have seen."""
        if self._checked and not self.windows:
            return True
        with self._vault.at(step) as checkpoint:
            before = dict(checkpoint.meta.get("job") or {})
            skips = tuple((first, last) for first, last in checkpoint.meta.get("skips") or ())
            data = checkpoint.meta.get("data")
        if not self._checked and not self.windows:
            self.windows = skips  # of an earlier submission whose journal is not here
        if not same_past(step, skips, self.windows):
            return False
        if self._checked:
            return True
        self._checked = True
        now = self._job.model_dump(mode="json")
        if before.get("model") != now["model"]:
            raise JobFailed(
                f"{self._run_dir} holds checkpoints of another model ({before.get('model')}, not {now['model']}); "
                f"choose another name, or remove that folder"
            )
        other = self._other_data(data)
        changed = [key for key in ("seed", "data", "optim", "train") if before.get(key) != now[key]]
        note = f"; changed since: {', '.join(changed)}" if changed else ""
        note += f"; other training data, as accepted ({other})" if other else ""
        self._tell("resumed", f"going on from the checkpoint of step {step}{note}", step=step, changed=changed)
        return True

    def _other_data(self, tree: Any) -> str:
        """What has changed about the training data since the checkpoint, if that was accepted; nothing, if nothing has.

        Raises:
            JobFailed: they changed, and nobody said that they may.
        """
        if self._data is None or not tree:
            return ""
        found = "; ".join(differences(DataIdentity.from_tree(tree), self._data))
        if found and not self._job.data.accept_changes:
            raise JobFailed(
                f"the training data are not those that the checkpoints in {self._run_dir} were made with: {found}. The "
                f"order of samples would be another one, some would come twice and some never. Bring the former data "
                f"back, or go on all the same with --set data.accept_changes=true"
            )
        return found
