"""imagenet_ddp_apex.py where Apex's amp is believed to be usable: the stand-in needs no GPU.

Prints the calls that Apex got. $CHANGE is code to run before.
"""

import os
import sys
from pathlib import Path

import imagenet_ddp_apex
from utils.model import apex as choice
from utils.start import launch


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parent / "stand_in_apex"))
    import apex.amp

    sys.argv[0], choice.has_gpu = "imagenet_ddp_apex.py", lambda: True
    exec(os.environ["CHANGE"], globals() | {"apex": apex})
    code = imagenet_ddp_apex.main()
    sys.stdout.write("".join(f"{call!r}\n" for call in apex.calls))
    return code


if __name__ == "__main__":
    launch.run_main(main)
