"""Functions by name: "module:name" in a config becomes the callable it means."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError


class FunctionNotFound(Exception):
    """Why a name could not be turned into a function, in one sentence."""


def resolve(name: str, folder: Path | None) -> Callable[..., Any]:
    """The callable behind "module:name"; modules in `folder` come before installed ones."""
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        raise FunctionNotFound('is not a function; write it as "module:name"')
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # stays: the ranks import from the same places
    _refuse_other(module_name.partition(".")[0], folder)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0] and error.name != module_name:
            raise FunctionNotFound(f"cannot be imported: {_cause(error, folder)}") from error
        raise FunctionNotFound(
            f"names a module that does not exist: {module_name}.py in {folder or 'sys.path'}"
        ) from None
    except Exception as error:
        raise FunctionNotFound(f"cannot be imported: {_cause(error, folder)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise FunctionNotFound(f"names {part}, which module {module_name} does not have{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise FunctionNotFound(f"is a {type(found).__name__}, not a function")
    result: Callable[..., Any] = found
    return result


def _refuse_other(module_name: str, folder: Path | None) -> None:
    """Python imports a name once: a second module of that name would in silence be the first."""
    imported = getattr(sys.modules.get(module_name), "__file__", None)
    mine = [folder / f"{module_name}.py", folder / module_name / "__init__.py"] if folder is not None else []
    if imported is not None and any(path.is_file() for path in mine) and Path(imported) not in mine:
        raise FunctionNotFound(f"names {module_name}, which is imported already from {imported}; rename one of them")


def name_of(function: Callable[..., Any]) -> str:
    """ "module:name" for people to read; lambdas and closures keep Python's own name for them, objects get a "()"."""
    named = function if hasattr(function, "__qualname__") else type(function)
    is_method = inspect.ismethod(function) and not isinstance(function.__self__, type)
    name = f"{getattr(named, '__module__', '?')}:{getattr(named, '__qualname__', named)}"
    return f"{name}()" if named is not function or is_method else name


def home_of(function: Callable[..., Any]) -> Path | None:
    """The folder that the module of a function was imported from; None if that is where packages are installed."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return None
    path = Path(file).resolve()
    above = list(path.parents)[module.__name__.count(".") + (path.name == "__init__.py") :]
    home = above[0] if above else path.parent
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return None if any(home.is_relative_to(folder) for folder in installed) else home


class Missing:
    """Stands for what a run was given and cannot be found again; says so when it is used."""

    def __init__(self, what: str, why: str) -> None:
        self.what, self.why = what, why

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        raise ConfigError(f"{self.what} {self.why}")


def _cause(error: BaseException, folder: Path | None) -> str:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return text
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in frames if folder is not None and Path(frame.filename).is_relative_to(folder)]
    frames = own or frames
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text
