"""Starts scripts/doctor.py on a node, for scripts/ssh/doctor_nodes.py.

It is sent over ssh's standard input, so that the values of --env are on no command line; it needs
Python 3.7 or newer.
"""

from __future__ import annotations

import os
import sys

ARGUMENTS = globals().get("ARGUMENTS")


def main(folder, python, options, environment):
    """Become the doctor, in the folder with this code. Returns an exit code if that fails."""
    os.environ.update(environment)
    try:
        os.chdir(os.path.join(os.path.expanduser("~"), folder))
        own = os.path.join(".venv", "bin", "python")
        python = python or (own if os.access(own, os.X_OK) else "python3")
        os.execvp(python, [python, "scripts/doctor.py", *options])
    except OSError as fault:
        text = "error: cannot start {} in {}: {}; is the code there (see --dir, --python)?"
        print(text.format(python or "python3", folder, fault.strerror), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(**ARGUMENTS))
