"""Registrations with parts of torch that are dear to import: done when someone imports them, not before."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _Watch(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, register: Callable[[], None]) -> None:
        self.name, self.register = name, register

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if fullname != self.name:
            return None
        after = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in after)), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        # The watch ends here, not above: who looks for a module (importlib.util.find_spec) need not import it.
        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            self.register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def when_imported(name: str, register: Callable[[], None]) -> None:
    """Call `register` once the module `name` is imported: now, if it is."""
    if name in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _Watch(name, register))
