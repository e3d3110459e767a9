"""What every Python thread of this process is doing now, as text that a person can read.

It is made from another thread than the ones it shows, so it works while the training thread waits in a collective:
whoever waits in C has let go of the interpreter's lock.
"""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType

MOST_CHARACTERS = 32_000
MOST_FRAMES = 40


def stacks(first: int | None = None, limit: int = MOST_CHARACTERS) -> str:
    """The stacks of all Python threads, the innermost call last.

    Args:
        first: ``ident`` of the thread to show first, and to call the training thread.
        limit: most characters of the answer; what does not fit is counted.
    """
    threads = {thread.ident: thread for thread in threading.enumerate()}
    frames = sys._current_frames()
    own = threading.get_ident()
    blocks = []
    for ident in sorted(frames, key=lambda ident: (ident != first, ident == own, _name(threads.get(ident)))):
        thread = threads.get(ident)
        remark = " (training)" if ident == first else " (wrote this)" if ident == own else ""
        native = "" if thread is None else f", thread {thread.native_id}"
        # With a negative limit the innermost calls are kept, which say where a thread is stuck.
        entries = traceback.StackSummary.extract(_outermost_first(frames[ident]), limit=-MOST_FRAMES)
        blocks.append(f"-- {_name(thread)}{remark}{native}\n{''.join(entries.format())}")
    del frames  # frames keep all that their functions hold alive
    return _fit(blocks, limit)


def _outermost_first(frame: FrameType) -> list[tuple[FrameType, int]]:
    return list(traceback.walk_stack(frame))[::-1]


def _name(thread: threading.Thread | None) -> str:
    return "unnamed" if thread is None else thread.name


def _fit(blocks: list[str], limit: int) -> str:
    """As many blocks, in order, as fit into ``limit`` characters; of the first, its end at least."""
    note = "-- {} more threads did not fit\n"
    room = limit - len(note) - 8
    kept: list[str] = []
    for at, block in enumerate(blocks):
        if at == 0 and len(block) > room:
            head, _, rest = block.partition("\n")
            block = f"{head}\n  ...{rest[len(head) + 8 - room :]}"
        if len(block) > room:
            return "".join(kept) + note.format(len(blocks) - at)
        kept.append(block)
        room -= len(block)
    return "".join(kept)
