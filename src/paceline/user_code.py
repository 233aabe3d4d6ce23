"""What of a program is the user's: frames of a traceback that are not in libraries, and the places of functions."""

from __future__ import annotations

import functools
import inspect
import re
import site
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

FRAME = re.compile(r'File "([^"]+)", line (\d+)')
# Code in these folders is not the user's.
LIBRARIES = tuple(
    {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        str(Path(__file__).parent),
    }
    | {*site.getsitepackages(), site.getusersitepackages(), "<frozen", "<string>"}
)
PACKAGES = {  # by modules of another name
    "PIL": "pillow", "cv2": "opencv-python", "skimage": "scikit-image", "sklearn": "scikit-learn", "yaml": "PyYAML",
}  # fmt: skip
CELL = re.compile(
    r"([^\s(]*[/\\]ipykernel_\d+[/\\]\d+\.py|<ipython-input-[^>]*>):(\d+)"
)  # a line of a cell of a notebook


def is_library(filename: str) -> bool:
    """Whether a file is not the user's: it is in this Python, or installed in any other place."""
    return filename.startswith(LIBRARIES) or any(part in filename for part in ("/site-packages/", "/dist-packages/"))


def user_location(error: BaseException) -> str | None:
    """`file:line` of the innermost frame in the user's code; None if there is none."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    # The error of a DataLoader worker has its frames as text.
    frames += [(match[1], int(match[2])) for match in FRAME.finditer(str(error))]
    for filename, line in reversed(frames):
        if not is_library(filename):
            return f"{filename}:{line}"
    return None


def place_of(function: Any) -> str | None:
    """`file:line` where a function or class of the user is defined; None for those of libraries."""
    places = [
        f"{code.co_filename}:{code.co_firstlineno}"
        for code in (getattr(each, "__code__", None) for each in _methods(function))
        if code is not None and not is_library(code.co_filename)
    ]
    return places[0] if places else None


def with_place(name: str, function: Any) -> str:
    """The name of a function with the place of its definition in brackets, if it is the user's."""
    place = place_of(function)
    return name if place is None else f"{name} ({place})"


def described(value: Any) -> str:
    """What a function of the user has returned or given, for messages: None, or the class of the value."""
    return "None" if value is None else f"a {type(value).__name__}"


def install_command(module: str) -> str:
    """What to do about a module that cannot be found."""
    name = module.partition(".")[0]
    package = PACKAGES.get(name, name)
    return f"run: pip install {package}, or correct the name if it is a file of yours"


def render(error: BaseException) -> list[str]:
    """The lines of an uncaught error: the traceback without frames of libraries, then its class and text."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not is_library(each.filename)]
    text = _with_cells("".join(traceback.format_list(frames)))
    head = ["Traceback (most recent call last):", *text.splitlines()] if frames else []
    return [*head, *_with_cells(f"{type(error).__name__}: {error}").splitlines()]


def _methods(function: Any) -> list[Any]:
    """The functions of Python that a callable is made of: itself, or the methods of its class, the first one first."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else function
    if hasattr(function, "__code__") or inspect.ismethod(function):
        return [function]
    is_class = isinstance(function, type)
    kind = function if is_class else type(function)
    return [getattr(kind, "__init__" if is_class else "__call__", None), *vars(kind).values()]


def _with_cells(text: str) -> str:
    """The text with files that a notebook has made of its cells replaced by the numbers of the cells."""
    name_of = getattr(getattr(_notebook(), "compile", None), "format_code_name", None)
    if name_of is None:
        return text

    def named(path: str, line: str) -> str | None:
        label = name_of(path)  # ("Cell", "In[3]")
        return f"{label[0]} {label[1]}, line {line}" if label is not None else None

    text = FRAME.sub(lambda match: named(match[1], match[2]) or match[0], text)
    return CELL.sub(lambda match: named(match[1], match[2]) or match[0], text)


def is_notebook() -> bool:
    """Whether this code runs in a notebook or another shell of IPython."""
    return _notebook() is not None


def _notebook() -> Any:
    """The shell of IPython that runs this process; None if there is none."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None and hasattr(module, "get_ipython") else None
