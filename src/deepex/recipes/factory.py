"""From `package.module:function` to what makes a user's network; whatever else such a name could call is refused.

    make = find_factory("mycode.nets:build")
    network = make(channels=1, size=(28, 28), classes=10)

A configuration may come from somebody else, so it names networks and runs nothing else: of Python itself, PyTorch and DeepEx only
`deepex.nets` is called. To import the named module runs its code; that is what naming one's own module means.
"""

import inspect
import sys
import sysconfig
from collections.abc import Callable
from difflib import get_close_matches
from functools import reduce
from importlib import import_module
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from types import FunctionType, ModuleType, UnionType
from typing import Any, Final, Union, get_args, get_origin

from torch import nn

from deepex.errors import ConfigError, told

_RULE: Final = "it must be package.module:function, a class or function of that package which makes a torch.nn.Module"
_WRITE: Final = "write a function of your own that calls it"
_UNKNOWN: Final = object()


def find_factory(path: str) -> Callable[..., Any]:
    """Find the class or function that `path` names; ConfigError if it is none that makes a network."""
    module_name, _, name = path.partition(":")
    _check_name(path, module_name, name)
    module = _imported(path, module_name)
    if not hasattr(module, name):
        near = get_close_matches(name, vars(module), n=1)
        raise ConfigError(
            f"net is {path!r}, but {module_name} has no function {name!r}: " + (f"did you mean {near[0]}?" if near else _RULE)
        )
    found = getattr(module, name)
    complaint = _complaint(found, module_name)
    if complaint is not None:
        raise ConfigError(f"net is {path!r}, but {complaint}; {_RULE}")
    factory: Callable[..., Any] = found
    return factory


def _check_name(path: str, module_name: str, name: str) -> None:
    """Refuse what is no network by its name alone, before anything is imported."""
    top, *below = module_name.split(".")
    if not all(part.isidentifier() and not iskeyword(part) for part in (top, *below, name)):
        raise ConfigError(f"net is {path!r}, which is no such name; {_RULE}")
    if "__main__" in below:
        raise ConfigError(f"net is {path!r}, but {module_name} is a program, which would run; {_RULE}")
    if top == "torch":
        raise ConfigError(f"net is {path!r}, but PyTorch has layers and no networks; {_RULE}: {_WRITE}")
    if top == "deepex" and below[:1] != ["nets"]:
        raise ConfigError(
            f"net is {path!r}, but of deepex only deepex.nets makes networks: name one of these, for example resnet18"
        )
    if _is_pythons(top):
        raise ConfigError(f"net is {path!r}, but {top} belongs to Python itself; {_RULE}: a file of yours needs another name")


def _is_pythons(top: str) -> bool:
    """Whether a module comes with Python. Its tests do too, and are not in its list."""
    if top in sys.stdlib_module_names:
        return True
    try:
        spec = find_spec(top)
    except ValueError:  # of a program that was started as a file
        return False
    return spec is not None and spec.origin is not None and _is_installed(Path(spec.origin)) == "Python"


def _is_installed(file: Path) -> str:
    """Who brought a file: "Python", an installed "package", or "" for the user."""
    if {"site-packages", "dist-packages"} & set(file.parts):
        return "package"
    homes = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    return "Python" if any(file.is_relative_to(home) for home in homes if home) else ""


def _imported(path: str, module_name: str) -> ModuleType:
    try:
        return import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"net is {path!r}, but {module_name!r} cannot be imported ({error}); it must be package.module:function, found "
            "from the current directory or PYTHONPATH"
        ) from error
    except (Exception, SystemExit) as error:  # whatever a module does when it is imported
        raise ConfigError(f"net is {path!r}, but to import {module_name} raised {told(error)}; mend it there") from error


def _complaint(found: Any, module_name: str) -> str | None:
    """Why `found` in a module is nothing that makes a network; None if it may be."""
    if isinstance(found, nn.Module):
        return "that is a network already, whose weights do not follow from the seed: name what makes it"
    maker = found if inspect.isclass(found) else inspect.unwrap(found)
    if not isinstance(maker, type | FunctionType):
        return f"that is {type(found).__name__}, neither a function nor a class: {_WRITE}"
    home, own = str(maker.__module__), module_name.split(".", maxsplit=1)[0]
    if home.split(".", maxsplit=1)[0] != own:
        return f"{maker.__qualname__} comes from {home} and not from {own}: name it there, or {_WRITE}"
    return _class_complaint(maker) if isinstance(maker, type) else _function_complaint(maker)


def _class_complaint(maker: type) -> str | None:
    return None if issubclass(maker, nn.Module) else f"the class {maker.__qualname__} is no torch.nn.Module"


def _function_complaint(maker: FunctionType) -> str | None:
    """A function says what it returns. One that does not must be the user's, in a module that has to do with networks."""
    said = _returned(maker)
    kinds = get_args(said) if get_origin(said) in (Union, UnionType) else (said,)
    if said is None or any(isinstance(kind, type) for kind in kinds):
        fine = all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds)
        return None if fine else f"it says that it returns {getattr(said, '__name__', said)}, not a torch.nn.Module"
    remedy = "write `-> torch.nn.Module` at the end of its definition"
    file = maker.__globals__.get("__file__")
    if maker.__module__ != "__main__" and (file is None or _is_installed(Path(file).resolve())):
        return f"it does not say what it returns, and is not in a module of yours: {_WRITE}"
    if not any(_is_of_torch(value) for value in maker.__globals__.values()):
        return f"it does not say what it returns, and its module does not import torch: {remedy}"
    return None


def _returned(maker: FunctionType) -> Any:
    """What a function's annotation says it returns; `_UNKNOWN` if there is none, or its meaning cannot be told."""
    try:
        said = maker.__annotations__.get("return", _UNKNOWN)
    except NameError:  # annotations that are evaluated when they are asked for
        return _UNKNOWN
    if not isinstance(said, str):
        return said
    first, *rest = said.strip("'\"").split(".")
    builtins = vars(sys.modules["builtins"])
    names = {**builtins, **maker.__globals__}
    return reduce(lambda thing, name: getattr(thing, name, _UNKNOWN), rest, names.get(first, _UNKNOWN))


def _is_of_torch(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__.split(".")[0] == "torch"
    return isinstance(value, type) and issubclass(value, nn.Module)
