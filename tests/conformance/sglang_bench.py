"""sglang's bench_serving without torchvision: it imports the code of image models, and sends text only.

torchvision's wheels need the build of torch that they were made with, and the environment shares this repository's.
"""

import importlib.abc
import importlib.machinery
import sys
import types

# They look for torchvision once, while it is not there.
import transformers.image_utils
import transformers.loss.loss_utils


class Placeholder(types.ModuleType):
    """A module in which every name is a class that does nothing."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Placeholder(spec.name)

    def exec_module(self, module):
        pass


assert transformers.image_utils and transformers.loss.loss_utils
sys.meta_path.append(Finder())

from sglang.bench_serving import cli_main  # noqa: E402

cli_main()
