"""Functions by name: imports the callable that "module:name" in a config means, and names a callable."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import ConfigError
from paceline.user_code import install_command

_importing: ContextVar[str | None] = ContextVar("importing", default=None)  # the module that is being imported

MODEL_LOSS = "model"  # as `loss_fn`: the loss that the model itself returns


class FunctionNotFound(Exception):
    """A name has no function behind it; the text says why, in one sentence that follows the key and the name."""


def full_name(key: str, name: str) -> str:
    """The "module:name" of a config value: a bare name under `loss_fn` is a loss of torch.nn.functional."""
    return f"torch.nn.functional:{name}" if key == "loss_fn" and ":" not in name else name


def is_model_loss(key: str, value: object) -> bool:
    """Whether a config value means the loss that the model itself returns, which is not a function."""
    return key == "loss_fn" and isinstance(value, str) and value == MODEL_LOSS


def resolve(name: str, folder: Path | None) -> Callable[..., Any]:
    """The callable behind "module:name"; modules in `folder` precede installed ones."""
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        raise FunctionNotFound('is not a function; write it as "module:name"')
    found: Any = _import(module_name, folder)
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


def _import(module_name: str, folder: Path | None) -> ModuleType:
    top = module_name.partition(".")[0]
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # not removed again: the ranks get this sys.path
    _check_not_shadowed(top, folder)
    token = _importing.set(module_name)
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in (top, module_name):
            place = folder or "sys.path"
            raise FunctionNotFound(f"names a module that does not exist: {module_name}.py in {place}") from None
        raise FunctionNotFound(f"cannot be imported: {_cause(error, folder)}") from error
    finally:
        _importing.reset(token)


def check_not_importing() -> None:
    """Raise if a module is being imported for one of its functions, and would start a run of its own."""
    module = _importing.get()
    if module is not None:
        raise ConfigError(
            f"the module {module} starts a run when it is imported for one of its functions; put the lines that start "
            'the run under `if __name__ == "__main__":`'
        )


def _check_not_shadowed(module_name: str, folder: Path | None) -> None:
    """Raise if another module of this name is imported: Python would return it instead of the one in `folder`."""
    imported = getattr(sys.modules.get(module_name), "__file__", None)
    files = [folder / f"{module_name}.py", folder / module_name / "__init__.py"] if folder is not None else []
    if imported is not None and any(path.is_file() for path in files) and Path(imported) not in files:
        raise FunctionNotFound(f"names {module_name}, which is already imported from {imported}; rename one of them")


def is_object(function: Any) -> bool:
    """Whether a function is an object with `__call__`, which has no name of its own."""
    return callable(function) and not hasattr(function, "__qualname__")


def name_of(function: Callable[..., Any]) -> str:
    """ "module:name" for messages and config.yaml; lambdas and closures as Python names them, objects with "()"."""
    named = function if hasattr(function, "__qualname__") else type(function)
    is_method = inspect.ismethod(function) and not isinstance(function.__self__, type)
    name = f"{getattr(named, '__module__', '?')}:{getattr(named, '__qualname__', named)}"
    return f"{name}()" if named is not function or is_method else name


def home_of(function: Callable[..., Any]) -> Path | None:
    """The folder from which the module of a function is imported; None for an installed package."""
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
    """Takes the place of a function or table of an earlier run that cannot be found; raises ConfigError when called."""

    def __init__(self, what: str, why: str) -> None:
        self.what, self.why = what, why

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        raise ConfigError(f"{self.what} {self.why}")


def _cause(error: BaseException, folder: Path | None) -> str:
    """The error with its file and line, in the user's folder if the error passed through it."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    if isinstance(error, ModuleNotFoundError) and error.name:
        text = f"there is no module {error.name}; {install_command(error.name)}"
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in frames if folder is not None and Path(frame.filename).is_relative_to(folder)]
    frames = own or frames
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text
