"""Triton's interpreter for tests: kernels imported anew under it, and at the cost of one patch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import pytest

__all__ = ["interpreted", "patch_once"]


@contextmanager
def interpreted(names: Sequence[str]) -> Iterator[None]:
    """Have these modules with kernels imported once more, with the interpreter on. Local.

    Triton decides whether it interprets a kernel when that is imported.

    Args:
        names: Modules, each after those that it imports.
    """
    pytest.importorskip("triton", reason="triton has wheels for Linux only")
    import triton.language as tl  # type: ignore[import-untyped]
    from triton.runtime import interpreter  # type: ignore[import-untyped]
    from triton.runtime.interpreter import InterpretedFunction  # type: ignore[import-untyped]
    from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

    with _unpatched_afterwards(tl), pytest.MonkeyPatch.context() as patch:
        for name in ("_patch_lang", "_get_np_dtype"):
            patch.setattr(interpreter, name, getattr(interpreter, name))
        semantic, check = interpreter.interpreter_semantic, "binary_op_sanitize_overflow_impl"
        patch.setattr(semantic, check, getattr(semantic, check))
        patch_once()
        patch.setenv("TRITON_INTERPRET", "1")
        # Functions that Triton has written in its own language, such as `tl.sum`.
        for name, function in list(vars(tl.standard).items()):
            if isinstance(function, JITFunction):
                own = InterpretedFunction(function.fn)
                patch.setattr(tl.standard, name, own)
                if getattr(tl, name, None) is function:
                    patch.setattr(tl, name, own)
        for name in names:
            # Set before it is deleted, so that what is imported here goes when the tests are over;
            # the package that holds a module refers to it, too.
            package, _, leaf = name.rpartition(".")
            patch.setattr(import_module(package), leaf, None, raising=False)
            patch.setitem(sys.modules, name, None)
        for name in names:
            del sys.modules[name]
        for name in names:
            import_module(name)
        yield


@contextmanager
def _unpatched_afterwards(tl: Any) -> Iterator[None]:
    """Give the language its own functions back, with which later tests compile kernels."""
    places = [tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base]
    own = [dict(vars(place)) for place in places]
    yield
    for place, names in zip(places, own, strict=True):
        for name, value in names.items():
            if vars(place).get(name) is not value:
                setattr(place, name, value)


def patch_once() -> None:
    """Have the interpreter do the same, in a fraction of the time. Local.

    It replaces the functions of `triton.language` again for each function that a kernel calls,
    writes the table of NumPy's types anew for each type that it looks up, and works out whether
    integers overflow, by eight more operations for each addition or product of them, of which it
    then says nothing: it asserts in programs that are compiled with `debug` only.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    if patch.__module__ == __name__:
        return
    of_type, known = interpreter._get_np_dtype, dict[Any, Any]()

    def dtype_of(kind: Any) -> Any:
        # Of blocks it is that of their elements; pointers have no hash.
        scalar = kind.scalar
        if scalar.is_ptr():
            return of_type(scalar)
        if scalar not in known:
            known[scalar] = of_type(scalar)
        return known[scalar]

    def once(function: FunctionType) -> Any:
        named = [m for m in function.__globals__.values() if isinstance(m, ModuleType)]
        is_patched = not any(m in (tl, tl.core) and tl.core.is_builtin(m.load) for m in named)
        return interpreter._LangPatchScope() if is_patched else patch(function)

    interpreter._patch_lang = once
    interpreter._get_np_dtype = dtype_of
    semantic = interpreter.interpreter_semantic
    assert not semantic.builder.options.debug
    semantic.binary_op_sanitize_overflow_impl = lambda *_: None
