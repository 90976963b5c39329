"""Compiles a kernel that only kernels call to code of LLVM, and no further.

By default Numba optimises such a kernel and makes it machine code, and then does both again in each
kernel that calls it. That was half of the time of a first step. Here only an entry does both, once.
An entry links each kernel once, however many of the others call it.
"""

from __future__ import annotations

from typing import Any

from llvmlite.binding import Linkage
from numba._dynfunc import make_function
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering, NopythonRewrites


class InnerLibrary(JITCodeLibrary):
    """The code of a kernel, before LLVM optimises it."""

    def _optimize_functions(self, module: Any) -> None:
        """Leave the functions as they are: the entry that takes them in optimises them."""
        module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        for function in self.get_defined_functions():
            if function.linkage == Linkage.external:
                function.linkage = Linkage.linkonce_odr
        self._finalize_dynamic_globals()
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        """Return the code of the kernel and of all kernels that it calls, each of them once."""
        if self._shared_module is None:
            self._shared_module = self._final_module.clone()
            for library in self._called():
                inner = isinstance(library, InnerLibrary)
                code = library._final_module if inner else library._get_module_for_linking()
                self._shared_module.link_in(code, preserve=True)
        return self._shared_module

    def _called(self) -> list[Any]:
        """Return the libraries of the kernels that this one calls, and that those call."""
        libraries, callers = dict[Any, None](), [self]
        while callers:
            called = dict.fromkeys(callers.pop()._linking_libraries)
            new = [library for library in called if library not in libraries]
            libraries.update(dict.fromkeys(new))
            callers += [library for library in new if isinstance(library, InnerLibrary)]
        return list(libraries)


@register_pass(mutates_CFG=True, analysis_only=False)
class InnerLowering(NativeLowering):
    """Lower a kernel to code of LLVM, and register that for the kernels that call it."""

    _name = "inner_lowering"

    def run_pass(self, state: Any) -> bool:
        context = state.targetctx
        state.library = InnerLibrary(context.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        state.library._ensure_finalized()
        compiled, descriptor = state.cr, state.cr.fndesc
        # Numba finds the code of a kernel by this object, which Python cannot call.
        name = descriptor.lookup_module(), descriptor.qualname, ""
        entry_point = make_function(*name, 0, compiled.env, (state.library,))
        context.insert_user_function(entry_point, descriptor, [state.library])
        state.cr = compiled._replace(cfunc=entry_point)
        return True


class InnerCompiler(CompilerBase):
    """Numba's own compiler of functions, but with `InnerLowering` in place of its lowering."""

    def define_pipelines(self) -> list[Any]:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [
            (InnerLowering, "inner lowering") if kind is NativeLowering else (kind, text)
            for kind, text in passes.passes
            if kind is not NopythonRewrites  # it joins sums of whole arrays, and no kernel has any
        ]
        passes.finalize()
        return [passes]
