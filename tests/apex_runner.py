"""imagenet_ddp_apex.py where Apex's amp is believed to be usable: the stand-in needs no GPU.

Prints the calls that Apex got. $CHANGE is code to run before.
"""

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "stand_in_apex"), str(Path(__file__).parents[1])]

import apex  # noqa: E402
import apex.amp  # noqa: E402

import imagenet_ddp_apex  # noqa: E402
from utils.amp import apex as choice  # noqa: E402
from utils.launch import supervise  # noqa: E402


def main() -> int:
    sys.argv[0], choice._has_gpu = "imagenet_ddp_apex.py", lambda: True
    exec(os.environ["CHANGE"], globals())
    code = imagenet_ddp_apex.main()
    sys.stdout.write("".join(f"{call!r}\n" for call in apex.calls))
    return code


if __name__ == "__main__":
    supervise.run_main(main)
