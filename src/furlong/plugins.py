"""A user's own code by name: ``package.module:name`` or ``path/to/file.py:name``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from furlong.errors import FurlongError, nearest


def load_object(name: str) -> object:
    """The user's class or function meant by ``package.module:name`` or ``path/to/file.py:name``."""
    source, _, attribute = name.rpartition(":")
    try:
        if not source:
            raise ImportError("the part before ':' is empty")
        own_file = source.endswith(".py")
        module = _load_file(Path(source)) if own_file else importlib.import_module(source)
    except (ImportError, OSError, SyntaxError) as error:
        raise FurlongError(f"{name!r}: cannot import {source!r}: {error}.") from error
    if not hasattr(module, attribute):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise FurlongError(
            f"{name!r}: {source!r} has no {attribute!r}. {nearest(attribute, public)}"
        )
    found: object = getattr(module, attribute)
    return found


def _load_file(path: Path) -> ModuleType:
    """The module in a user's file; the same file is run once, another of that name replaces it."""
    name, place = f"furlong_user_{path.stem}", str(path.resolve())
    known = sys.modules.get(name)
    if known is not None and known.__file__ == place:
        return known
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their annotations up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
