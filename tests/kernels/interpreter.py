"""Makes Triton's interpreter quicker. Whenever one function calls another it looks through all members of the
language's modules for those that it has to replace, which is a third of its work; here it remembers them.

Must not know what a kernel computes.
"""

import inspect
from functools import cache
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@cache
def _builtins(package: ModuleType | type) -> list[str]:
    """What the interpreter replaces of a module or class, first asked while nothing of it is replaced."""
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package: ModuleType | type, builder: Any, scope: Any) -> None:
    for name in _builtins(package):
        if tl.core.is_builtin(member := getattr(package, name)):  # else it is replaced already, further up
            interpreter._patch_attr(package, name, member, builder, scope)


def quicken() -> None:
    """Once, before any kernel runs."""
    interpreter._patch_builtin = _patch_builtin
