"""Remove the code that an earlier --sync brought to a node, and that is gone since: launcher.py.

The pre-flight check compares the files below utils/, so a node with old ones could not train with
a new node. Other files stay. This file is sent to hosts, which need only Python (3.7 or newer).
"""

from __future__ import annotations

import contextlib
import os
import sys

LISTED = ".synced"  # names the files that the last call has brought
ARGUMENTS = globals().get("ARGUMENTS")  # given when this file was sent over ssh


def forget(folder, names):
    """``names``: the files that are there now, relative to ``folder``; the next call reads them."""
    path, before = os.path.join(folder, LISTED), []
    with contextlib.suppress(OSError), open(path) as file:
        before = file.read().splitlines()
    for name in sorted(set(before) - set(names)):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))
            print(name)
    with open(path, "w") as file:
        file.write("".join(f"{name}\n" for name in names))


if __name__ == "__main__" and ARGUMENTS is not None:
    try:
        forget(**ARGUMENTS)
    except OSError as error:
        sys.exit(f"error: {error}")
