"""The script $SCRIPT with a loss that is multiplied by $FACTOR, which may depend on ``calls``."""

import importlib
import os

from torch import nn

from utils.start import launch

script = importlib.import_module(os.environ["SCRIPT"])


class Spoilt(nn.CrossEntropyLoss):
    calls = 0

    def forward(self, *arguments: object) -> object:
        Spoilt.calls += 1
        return super().forward(*arguments) * eval(os.environ["FACTOR"], {"calls": Spoilt.calls})


if __name__ == "__main__":
    script.nn.CrossEntropyLoss = Spoilt
    launch.run_main(script.main)
