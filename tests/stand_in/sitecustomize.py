"""Python imports this first: a training does without torch's compiler, which loads for seconds.

torchvision, optimisers and DistributedDataParallel import ``torch._dynamo`` to ask whether
something is being compiled. Here they are told: no. Whoever wants more gets the real one.
NVIDIA's bindings are not loaded where no GPU is visible. Garbage is not collected among the many
objects that modules make, none of which is any.
"""

import atexit
import gc
import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

NAMES = ("torch._dynamo", "torch._dynamo.utils")


class Compiler(ModuleType):
    """In place of a module of `NAMES`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(real(self.__name__), name)


def real(name: str) -> ModuleType:
    """Import a module of `NAMES` in place of the stand-in."""
    for stand_in in NAMES:
        if isinstance(sys.modules[stand_in], Compiler):
            del sys.modules[stand_in]
    return importlib.import_module(name)


class Loaded:
    """Loads a module that is there."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        pass


class Finder:
    """Puts the stand-ins into their places when torchvision begins, which imports them.

    When another part of the compiler is imported, all of it is.
    """

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name == "torchvision":
            self.put_stand_ins()
        elif name.startswith(f"{NAMES[0]}.") and isinstance(sys.modules[NAMES[0]], Compiler):
            real(NAMES[0])
            if name in sys.modules:
                return ModuleSpec(name, Loaded())
        return None

    def put_stand_ins(self) -> None:
        compiler, utils = (Compiler(name) for name in NAMES)
        compiler.disable = lambda function=None, *_, **__: function
        compiler.graph_break = lambda *_, **__: None
        compiler.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)
        utils.is_compile_supported = lambda device: False
        utils.get_optimize_ddp_mode = str
        torch = importlib.util.find_spec("torch")
        places = torch.submodule_search_locations if torch else []
        compiler.utils, compiler.__path__ = utils, [f"{place}/_dynamo" for place in places]
        for one in (compiler, utils):
            sys.modules.setdefault(one.__name__, one)


sys.meta_path.insert(0, Finder())
if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    sys.modules["cuda"] = None  # importing it raises an ImportError, as without the package
gc.set_threshold(100_000, 50, 1000)
# Or the interpreter's end collects once more: half a second of CPU time.
atexit.register(gc.freeze)
