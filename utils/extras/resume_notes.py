"""Log notes about a resumed run: the options and the script that have changed. Always on.

Interface: `utils.resume.load_parts` calls `describe`.
Without this file, the log does not name the changed options.
"""

import os
import sys
from typing import Any

from utils.resume import as_option, changed_options
from utils.snapshots import TrainState


def describe(state: TrainState, args: Any, content: dict[str, Any]) -> list[str]:
    """Return notes for the log about everything that has changed since the snapshot."""
    saved, before, notes = content["options"], content["progress"], []
    batch, now = before["global_batch"], state.global_batch
    if (images := before["step"] * batch - state.step * now) > 0:
        notes.append(
            f"note: the global batch is {now} now, so {images} images of this epoch are repeated, "
            f"from step {state.step} on"
        )
    changes = []
    commands = (sys.argv[0], *str(saved.get("command")).split()[:1])
    scripts = [name for name in map(os.path.basename, commands) if name.startswith("imagenet_")]
    if len(set(scripts)) > 1:
        changes.append(f"the script is {scripts[0]} (was {scripts[1]})")
    if batch != now:
        changes.append(f"the global batch is {now} (was {batch})")
    for key in changed_options(saved, args):
        changes.append(f"{as_option(key, vars(args)[key])} (was {saved[key]})")
    if changes:
        notes.append(f"changed since the snapshot: {', '.join(changes)}")
    return notes
