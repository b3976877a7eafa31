"""``#pragma unroll`` for Numba: an intrinsic written as the last statement of a loop body marks that loop."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.typing import signature


class _MarkedBlock(ir.Block):
    """A block whose terminator, the loop's backward branch, gets the loop's metadata when it is set."""

    @property
    def terminator(self):
        return self.__dict__.get("_branch")

    @terminator.setter
    def terminator(self, branch):
        self.__dict__["_branch"] = branch
        if branch is not None and "_loop_option" in self.__dict__:
            branch.set_metadata("llvm.loop", _loop_node(self.parent.module, self.__dict__["_loop_option"]))


def _loop_node(module: ir.Module, option: str) -> ir.MDValue:
    node = ir.MDValue(module, [], name=str(len(module.metadata)))  # enters the module's list by itself
    setting = module.add_metadata([ir.MetaDataString(module, option)])
    node.operands = (node, setting)  # LLVM tells loops apart by a node that names itself first
    return node


def _loop_mark(name: str, option: str) -> Any:
    def codegen(context, builder, sig, args):
        block = builder.block
        branch = block.__dict__.pop("terminator", None)
        block.__class__ = _MarkedBlock
        block.__dict__["_loop_option"] = option
        block.terminator = branch
        return context.get_dummy_value()

    scope = {"answer": (signature(types.void), codegen)}
    exec(f"def {name}(typingctx):\n    return answer\n", scope)
    return intrinsic(scope[name])


keep_rolled = _loop_mark("keep_rolled", "llvm.loop.unroll.disable")
unroll_fully = _loop_mark("unroll_fully", "llvm.loop.unroll.full")
