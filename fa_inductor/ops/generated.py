"""How Inductor writes a call of ``fa_inductor::attention`` into the Python code that it generates.

As of any custom operator, but of another name: `direct.attention` takes the same arguments, and whether lse is wanted, and saves
the dispatcher.
Code for C++ (``cpp_wrapper``, AOTInductor) calls the operator.
"""
from __future__ import annotations

from functools import lru_cache
from typing import Any

NAME = "fa_inductor_attention"
IMPORT = f"from fa_inductor.ops.direct import attention as {NAME}"


@lru_cache(maxsize=1)
def install() -> None:
    """Register the lowering; once, and only when a graph is compiled: this imports Inductor."""
    from torch._inductor import ir
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen, SubgraphPythonWrapperCodegen
    from torch._inductor.lowering import add_needs_realized_inputs, fallbacks, register_lowering
    from torch._inductor.virtualized import V
    from torch.utils import _pytree as pytree

    from .library import attention

    class DirectCall(ir.FallbackKernel):
        def codegen(self, wrapper: PythonWrapperCodegen) -> None:
            if not V.graph.cpp_wrapper:
                root = wrapper
                while isinstance(root, SubgraphPythonWrapperCodegen):  # its own imports are not written
                    root = root.parent_wrapper
                root.add_import_once(IMPORT)
                self.python_kernel_name = NAME
            super().codegen(wrapper)

        def codegen_args(self) -> list[str]:
            args = super().codegen_args()
            if self.python_kernel_name == NAME and self.outputs[1].get_name() in V.graph.removed_buffers:
                args.append("False")  # nothing reads lse
            return args

    def lower(*args: Any, **kwargs: Any) -> Any:
        results = DirectCall.create(attention, *args, **kwargs)
        return pytree.tree_map(lambda x: ir.TensorBox.create(x) if isinstance(x, ir.IRNode) else x, results)

    lower._is_fallback_handler = True  # type: ignore[attr-defined]
    fallbacks.add(attention)
    add_needs_realized_inputs(attention)
    register_lowering(attention, type_promotion_kind=None)(lower)
