"""Compile-time choices carried by the *type* of an argument: one module-level function has one kernel per choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core.imputils import lower_constant
from numba.extending import NativeValue, intrinsic, models, register_model, typeof_impl, unbox


class Tag:
    """A value without content whose Numba type is its `name`, e.g. ``Tag("bfloat16")``."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return f"Tag({self.name!r})"


class TagType(types.Type):
    """The Numba type of a `Tag`; two tags of one name share it."""

    def __init__(self, name: str):
        self.tag = name
        super().__init__(name=f"Tag({name})")


@typeof_impl.register(Tag)
def _typeof_tag(tag, context):
    return TagType(tag.name)


@register_model(TagType)
class _NoMembers(models.StructModel):
    """A tag takes no room, so that a function of an address and tags is called like one of an address."""

    def __init__(self, manager, tag_type):
        super().__init__(manager, tag_type, [])


@unbox(TagType)
def _unbox_tag(tag_type, obj, context):
    return NativeValue(context.context.get_constant_undef(tag_type))


@lower_constant(TagType)
def _lower_tag(context, builder, tag_type, tag):
    return context.get_constant_undef(tag_type)


@intrinsic
def number_type(typingctx, kind):
    """Return the arithmetic type of a cache kind: ``np.float32``, or ``np.float64`` for float64 caches."""
    number = types.float64 if kind.tag == "float64" else types.float32
    return types.NumberClass(number)(kind), lambda context, *_: context.get_dummy_value()


def constants(function: Callable[[str], tuple[int, ...]]) -> Any:
    """Let compiled code call `function` of a tag: the numbers that it returns for the tag's name are constants."""

    def of_tag(typingctx, tag):
        numbers = function(tag.tag)

        def codegen(context, builder, sig, args):
            return context.get_constant_generic(builder, sig.return_type, numbers)

        return types.UniTuple(types.int64, len(numbers))(tag), codegen

    return intrinsic(of_tag)


CACHE_KINDS = {
    name: Tag(name) for name in ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8")
}
PLAIN, FULL = Tag("plain"), Tag("full")  # rules: positions only, or more
FEW, MANY = Tag("few"), Tag("many")  # packed query rows of a task
PAGED, SCATTERED = Tag("paged"), Tag("scattered")  # tokens of a block: in runs as long as pages, or anywhere
