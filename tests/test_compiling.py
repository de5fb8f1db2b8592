"""--compile: once per run, and an error message where it cannot be done."""

import argparse

import pytest
import torch
from conftest import SMALL
from joined import command
from torch import nn

from utils.model import compiling
from utils.start.errors import UserError

# With the real tracer, and a back end that counts what it is given instead of compiling it.
COUNTED = """
import sys
import torch
from torch._dynamo.testing import CompileCounter
counter, real = CompileCounter(), torch.compile
def compile(module, mode, dynamic):
    print("mode:", mode, "dynamic:", dynamic)
    return real(module, backend=counter, dynamic=dynamic)
torch.compile = compile
import imagenet_nd
code = imagenet_nd.main()
print("compiled:", counter.frame_count)
sys.exit(code)
"""


def test_training_is_compiled_once_for_each_size_and_evaluation_not(folder, tmp_path):
    options = (*SMALL, "-a", "tiny_plain", "-b", "9", "--accum-steps", "2", "--epochs", "2")
    options += ("--progressive", "24,40", "--compile", "reduce-overhead")
    done = command("imagenet_nd", *options, "--output-dir", tmp_path, folder, BEFORE=COUNTED)
    assert done.code == 0, done.err
    assert "mode: reduce-overhead dynamic: False\n" in done.out
    assert "compiled: 2\n" in done.out
    assert done.out.count("with compilation") == 1


def test_what_cannot_be_compiled():
    sharded = nn.Identity()
    sharded.set_requires_gradient_sync = print
    for model, what in ((nn.DataParallel(nn.Identity()), "DataParallel"), (sharded, "sharded")):
        with pytest.raises(UserError, match=rf"not support {what}.*: use imagenet_ddp\.py"):
            compiling.compiled(model, argparse.Namespace(compile="default"))


def test_without_a_compiler_an_error_says_so():
    from torch._inductor import config  # takes seconds to import

    args = argparse.Namespace(compile="default", epoch_sizes=tuple(range(20)), global_batch=50)
    model = compiling.compiled(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), args)
    # Micro-batches of a global batch differ by an image.
    assert torch._dynamo.config.recompile_limit >= 40, "once for each size"
    step = compiling.first_step_timed(model, args, torch.device("cpu"))
    nowhere = {"cpp.cxx": (None, "/nowhere/g++"), "force_disable_caches": True}
    message = r"--compile default does not work here .*C\+\+ compiler"
    with config.patch(nowhere), pytest.raises(UserError, match=message):
        step(torch.zeros(1, 2))
