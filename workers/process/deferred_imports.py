"""Defers modules that PyTorch imports for what a worker seldom does, until something uses them.

`import torch` runs a thousand modules. Shapes of operators without numbers alone, which what traces programs needs,
take a quarter of its time. A worker that reads packed weights runs compiled kernels, and uses none of that. A
deferred module is there under its name, and its code runs when one of its names is first asked for: late, rather
than never. What such a module registers with PyTorch is not asked for by a name; so the import of what may need it
(`WHOLE`) runs all that is deferred first. The modules of PyTorch import each other in circles, so another order may
fail: only versions with which this is tested are imported so (`VERSIONS`), any other one as a whole.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

VERSIONS = frozenset(("2.13",))
"""Of PyTorch, by their first two numbers."""
DEFERRED = frozenset(
    (
        "torch._meta_registrations",
        "torch.ao",
        "torch.distributed._meta_registrations",
        "torch.distributions",
        "torch.nn.intrinsic",
        "torch.nn.qat",
        "torch.nn.quantizable",
        "torch.nn.quantized",
        "torch.quantization",
    )
)
"""They are imported last by PyTorch, and by nothing else of it that runs on import."""
WHOLE = frozenset(("transformers", "torch._dynamo", "torch._inductor"))
"""What may need all that PyTorch registers."""
NOT_OF_CODE = frozenset(("__path__", "__file__", "__cached__"))
"""Names that the import system itself gives to modules, and asks for before it has."""


class DeferredModule(ModuleType):
    """A module whose code runs when a name is first looked up that the import system has not given it.

    loading: which runs it.
    """

    def __init__(self, name: str, loading: DeferringLoader) -> None:
        super().__init__(name)
        self.loading = loading

    def __getattr__(self, name: str) -> Any:
        if name in NOT_OF_CODE or not self.loading.run(self):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self, name)


class DeferringLoader(Loader):
    """Loads a module without running its code. loader: which runs it."""

    def __init__(self, loader: SourceFileLoader) -> None:
        self._loader = loader
        self._lock = threading.RLock()
        self._is_running = False

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See `Loader`."""
        return DeferredModule(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        """See `Loader`: this is what is deferred."""

    def run(self, module: ModuleType) -> bool:
        """Run the module's code unless that is done. False while it runs: a name is missing so far."""
        with self._lock:
            if self._is_running:
                return False
            if isinstance(module, DeferredModule):
                self._is_running = True
                try:
                    self._loader.exec_module(module)
                finally:
                    self._is_running = False
                del module.loading
                module.__class__ = ModuleType  # type: ignore[assignment]
            return True


class PresentLoader(Loader):
    """Loads a module that is there. spec: its own."""

    def __init__(self, spec: ModuleSpec | None) -> None:
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See `Loader`."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """See `Loader`: its code has run."""
        module.__spec__ = self._spec


class DeferringFinder(MetaPathFinder):
    """Finds the modules of `names`, to be loaded by a `DeferringLoader`."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        if not self.names:
            return None
        if name in WHOLE and is_imported("torch"):
            run_deferred()
        parent = sys.modules.get(name.rpartition(".")[0])
        if isinstance(parent, DeferredModule):  # its code runs before that of its parts, and may import them
            parent.loading.run(parent)
            if (present := sys.modules.get(name)) is not None:
                # The import system loads what it has found by the module's own `__spec__`.
                spec = ModuleSpec(name, PresentLoader(present.__spec__))
                present.__spec__ = spec
                return spec
        if name not in self.names:
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is not None and isinstance(found.loader, SourceFileLoader):
            found.loader = DeferringLoader(found.loader)
        return found


_finder = DeferringFinder(frozenset())


def is_imported(name: str) -> bool:
    """True if a module is there, and its code has run."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


def defer() -> None:
    """Defer `DEFERRED` from now on, unless PyTorch is imported already, or is of another version."""
    if "torch" not in sys.modules and torch_version() in VERSIONS:
        _finder.names = DEFERRED
        sys.meta_path.insert(0, _finder)


def torch_version() -> str:
    """The first two numbers of the installed version; empty if it is not installed as a package."""
    try:
        return ".".join(version("torch").split(".")[:2])
    except PackageNotFoundError:
        return ""


def run_deferred() -> None:
    """Run the code of all modules that are deferred, and defer no more."""
    _finder.names = frozenset()
    for module in list(sys.modules.values()):
        if isinstance(module, DeferredModule):
            module.loading.run(module)
