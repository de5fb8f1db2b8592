"""Code shared by the training scripts. Imports point downward only; see README.md here."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 (the system's own, where no environment is active)
    version, old = "{}.{}".format(*sys.version_info), sys.executable
    sys.stderr.write(
        f"error: {old} is Python {version}, and 3.10 or newer is needed: activate an environment "
        "that has it, or let `bash scripts/quickstart.sh` make one\n"
    )
    sys.exit(2)
