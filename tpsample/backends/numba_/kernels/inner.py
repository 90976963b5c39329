"""Compiles a kernel that only kernels call to code of LLVM, and no further.

By default Numba optimises such a kernel and makes it machine code, and then does both again in each
kernel that calls it. That was half of the time of a first step. Here only an entry does both, once.
"""

from __future__ import annotations

from typing import Any

from numba._dynfunc import make_function
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering, NopythonRewrites


class InnerLibrary(JITCodeLibrary):
    """The code of a kernel and of the kernels that it calls, before LLVM optimises it."""

    def _optimize_functions(self, module: Any) -> None:
        """Leave the functions as they are: the entry that takes them in optimises them."""
        module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalize_dynamic_globals()
        self._finalized = True


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
        found, its = state.cr, state.cr.fndesc
        # Numba finds the code of a kernel by this object, which Python cannot call.
        name = its.lookup_module(), its.qualname, ""
        entry_point = make_function(*name, 0, found.env, (state.library,))
        context.insert_user_function(entry_point, its, [state.library])
        state.cr = found._replace(cfunc=entry_point)
        return True


class InnerCompiler(CompilerBase):
    """Numba's compiler of functions, but for the lowering."""

    def define_pipelines(self) -> list[Any]:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [
            (InnerLowering, "inner lowering") if each is NativeLowering else (each, text)
            for each, text in passes.passes
            if each is not NopythonRewrites  # it joins sums of whole arrays, and no kernel has any
        ]
        passes.finalize()
        return [passes]
