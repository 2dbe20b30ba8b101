"""
What the text of a ``torch.fx`` graph does: it is parsed, never compiled or run.

Torch saves a graph as Python: imports, and one function ``forward``. See torch/fx/graph.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from ckptool.pickles import dangerous_names as table
from ckptool.pickles.plain_names import OPERATORS, SAFE_NAME, words
from ckptool.pickles.reaching import package_of, reaching

_LONGEST: Final = 1 << 18
"""In characters."""
_MOST_WORDS: Final = 1 << 15
"""And other signs: a syntax tree takes up to a KiB for each."""
_WORD: Final = re.compile(r"\w+|[^\w\s]")
_ESCAPES: Final = re.compile(r"\\|\0|\b[fF][rR]?[\"']|\b[rR][fF][\"']")
"""What torch does not write, and the parser warns of, or takes long for: escapes, and expressions in texts."""
_PART: Final = re.compile(rf"(?!__)(?=.){SAFE_NAME}")
_STDLIB: Final = {
    "operator": OPERATORS,
    "math": r"\w+",
    "builtins": r"getattr|slice|len|int|float|bool|abs|round",
}
_BUILTINS: Final = frozenset(_STDLIB["builtins"].split("|"))
_TAKEN: Final = _BUILTINS | {"self", "Ellipsis", "NoneType", "type", "*"}
_VALUES: Final = re.compile(
    r"math\.(?:inf|nan|pi)|types\.NoneType"
    r"|torch\.(?:b?float\d*\w*|q?u?int\d+\w*|half|double|long|short|int|bool|c?complex\d*|cfloat|cdouble"
    r"|strided|sparse_\w+|\w+_format|channels_last\w*|per_\w+)"
)
"""Names of packages that may be given to a function: none that could be called."""
_FUNCTIONS: Final = re.compile(
    r"torch\.(?:nn\.functional\.|_C\._nn\.|functional\.|special\.|linalg\.|fft\.)?(\w+?)_?"
    r"|torch\.ops\.(?:aten|prims|quantized|torchvision)\.(\w+?)_?(?:\.(?!_)\w+)?"
)


_RECKONING: Final = words(
    "abs absolute acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d"
    " adaptive_max_pool2d add addbmm addcdiv addcmul addmm affine_grid all alpha_dropout amax amin aminmax"
    " angle any arange argmax argmin argsort asin asinh atan atan2 atanh avg_pool1d avg_pool2d avg_pool3d"
    " baddbmm batch_norm bernoulli bfloat16 bilinear bincount bitwise_and bitwise_not bitwise_or bmm bool"
    " broadcast_tensors broadcast_to bucketize byte cat cdist ceil celu chunk clamp clamp_max clamp_min clip"
    " clone complex concat conj contiguous conv1d conv2d conv3d conv_transpose1d conv_transpose2d"
    " conv_transpose3d copy cos cosh cosine_similarity count_nonzero cpu cross cross_entropy cuda cummax"
    " cummin cumprod cumsum deg2rad dequantize det detach device diag diag_embed diagonal diff dim div divide"
    " dot double dropout dropout1d dropout2d dropout3d dtype einsum element_size elu embedding embedding_bag"
    " empty empty_like eq equal erf erfc exp expand expand_as expm1 eye feature_dropout fill flatten flip"
    " float floor floor_divide fmod fold frac full full_like gather ge gelu get_device glu greater grid_sample"
    " group_norm gt half hardshrink hardsigmoid hardswish hardtanh hstack huber_loss hypot imag index"
    " index_add index_copy index_fill index_put index_select instance_norm int interpolate inverse"
    " is_complex is_contiguous is_floating_point isfinite isinf isnan item kthvalue l1_loss layer_norm le"
    " leaky_relu lerp less linear linspace log log10 log1p log2 log_softmax logaddexp logical_and logical_not"
    " logical_or logical_xor logit logsigmoid logsumexp long lt masked_fill masked_select matmul max"
    " max_pool1d max_pool2d max_pool3d maximum mean median meshgrid min minimum mish mm movedim mse_loss mul"
    " multi_head_attention_forward multiply mv nan_to_num narrow ndimension ne neg negative nelement new_empty"
    " new_full new_ones new_tensor new_zeros nll_loss nonzero norm normalize not_equal numel one_hot ones"
    " ones_like outer pad pairwise_distance permute pixel_shuffle pixel_unshuffle polar pow prelu prod q_scale"
    " q_zero_point qr quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic rad2deg rand"
    " rand_like randint randn randn_like ravel real reciprocal relu relu6 remainder repeat repeat_interleave"
    " requires_grad reshape reshape_as resolve_conj resolve_neg roll rot90 round rrelu rsqrt rsub"
    " scaled_dot_product_attention scatter scatter_add scatter_reduce select selu sgn short sigmoid sign silu"
    " sin sinh size slice slogdet smooth_l1_loss softmax softmin softplus softshrink softsign solve sort split"
    " split_with_sizes sqrt square squeeze stack std std_mean storage_offset stride sub subtract sum svd"
    " swapaxes sym_size t take take_along_dim tan tanh tanhshrink tensor tensor_split tensordot threshold tile"
    " to topk trace transpose tril triu true_divide trunc type type_as unbind unflatten unfold uniform unique"
    " unsqueeze upsample upsample_bilinear2d upsample_nearest2d var var_mean view view_as vstack where zero"
    " zeros zeros_like Size _assert"
)
"""Functions of torch and methods of tensors that give tensors and numbers, and call nothing that they are given."""


_EXPRESSIONS: Final = (
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp),
    *(ast.Tuple, ast.List, ast.Dict, ast.Subscript, ast.Slice),
)


class GraphText(NamedTuple):
    """What the text of a graph does, beyond reckoning."""

    modules: frozenset[tuple[str, ...]]
    """The paths of the modules that it calls, below the graph's own."""
    functions: frozenset[str]
    """The functions of other packages than torch that it imports."""


@lru_cache(maxsize=16)
def graph_text(text: str) -> GraphText | None:
    """Return what the text of a graph does; None if it is more than what torch writes."""
    if len(text) > _LONGEST or _ESCAPES.search(text) or sum(1 for _ in _WORD.finditer(text)) > _MOST_WORDS:
        return None
    try:
        reader = _Reader(ast.parse(text, ""))  # of what is wrong, the parser looks for a line in the file of this name
    except (_Odd, SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return GraphText(frozenset(reader.modules), frozenset(reader.functions))


class _Odd(Exception):
    """The text is more than what torch writes."""


class _Reader:
    """Walks through the text, and stops at what torch does not write."""

    def __init__(self, tree: ast.Module) -> None:
        self.modules: set[tuple[str, ...]] = set()
        """The paths of the modules that are called."""
        self.functions: set[str] = set()
        self._imported: dict[str, str] = {}
        """What names that the text imports stand for."""
        self._known: set[str] = set()
        """Arguments and local variables."""
        *before, forward = tree.body or [ast.Pass()]
        for one in before:
            self._before(one)
        if not isinstance(forward, ast.FunctionDef) or forward.name != "forward" or forward.decorator_list:
            raise _Odd
        self._forward(forward)

    def _before(self, one: ast.stmt) -> None:
        """Take an import, or ``wrap("name")``."""
        if isinstance(one, ast.Import):
            for alias in one.names:
                self._import(alias.asname or alias.name.partition(".")[0], alias.name, is_whole=alias.asname is None)
        elif isinstance(one, ast.ImportFrom) and one.module and not one.level:
            for alias in one.names:
                self._import(alias.asname or alias.name, f"{one.module}.{alias.name}")
        elif isinstance(one, ast.Assign) and ast.unparse(one) == "NoneType = type(None)":
            self._imported["NoneType"] = "types.NoneType"
        elif not (isinstance(one, ast.Expr) and self._is_wrap(one.value)):
            raise _Odd

    def _import(self, name: str, of: str, *, is_whole: bool = False) -> None:
        of = of.removeprefix("_") if of.startswith("_operator") else of
        if name in _TAKEN and of != f"builtins.{name}":
            raise _Odd
        package = package_of(of)
        if package not in ("torch", "typing", *_STDLIB):
            is_known = package in table.STDLIB or package == "numpy" or reaching(of, of.rpartition(".")[2])
            if is_whole or is_known:
                raise _Odd
            self.functions.add(of)
        self._imported[name] = package if is_whole else of

    def _is_wrap(self, call: ast.expr) -> bool:
        if not isinstance(call, ast.Call) or call.keywords or len(call.args) != 1:
            return False
        is_text = isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
        return is_text and self._named(call.func) in ("torch.fx._symbolic_trace.wrap", "torch.fx.wrap")

    def _forward(self, function: ast.FunctionDef) -> None:
        taken = function.args
        arguments = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs]
        arguments += [one for one in (taken.vararg, taken.kwarg) if one is not None]
        if not arguments or arguments[0].arg != "self" or "self" in self._imported:
            raise _Odd
        for default in (*taken.defaults, *(one for one in taken.kw_defaults if one is not None)):
            self._value(default)
        for annotation in (*(one.annotation for one in arguments), function.returns):
            self._annotation(annotation)
        for one in arguments[1:]:
            self._store(one.arg)
        for statement in function.body:
            self._statement(statement)

    def _annotation(self, found: ast.expr | None) -> None:
        """Take a type: names, and names in brackets."""
        for one in ast.walk(found) if found is not None else ():
            if not isinstance(one, ast.Name | ast.Attribute | ast.Subscript | ast.Tuple | ast.expr_context):
                if not (isinstance(one, ast.Constant) and one.value in (None, ...)):
                    raise _Odd
            elif isinstance(one, ast.Attribute) and not _PART.fullmatch(one.attr):
                raise _Odd

    def _store(self, name: str) -> None:
        if name in self._imported or name in _TAKEN or not _PART.fullmatch(name):
            raise _Odd
        self._known.add(name)

    def _statement(self, one: ast.stmt) -> None:
        if isinstance(one, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr):
            if one.value is not None:
                self._value(one.value)
            if isinstance(one, ast.AnnAssign):
                self._annotation(one.annotation)
            targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
            for target in filter(None, targets):
                if not isinstance(target, ast.Name):
                    raise _Odd
                self._store(target.id)
        elif not isinstance(one, ast.Pass):
            raise _Odd

    def _value(self, one: ast.expr) -> None:
        """Take an expression."""
        if isinstance(one, ast.Call):
            self._call(one)
        elif isinstance(one, ast.Name | ast.Attribute):
            self._read(one)
        elif not isinstance(one, ast.Constant):
            if not isinstance(one, _EXPRESSIONS):
                raise _Odd
            for part in _parts(one):
                self._value(part)

    def _read(self, one: ast.Name | ast.Attribute) -> None:
        """Take a variable, an attribute of a value, or a constant of a package."""
        named = self._named(one)
        if named is not None:
            if not _VALUES.fullmatch(named):
                raise _Odd
        elif isinstance(one, ast.Name):
            if one.id not in self._known and one.id != "Ellipsis":
                raise _Odd
        elif self._path(one) is None:
            self._attribute(one.value, one.attr)

    def _attribute(self, of: ast.expr, name: str) -> None:
        if not _PART.fullmatch(name) or name.startswith("_") or isinstance(of, ast.Constant):
            raise _Odd
        self._value(of)

    def _call(self, call: ast.Call) -> None:
        if any(keyword.arg in (None, "key") for keyword in call.keywords):  # written as it is; called
            raise _Odd
        for one in (*call.args, *(keyword.value for keyword in call.keywords)):
            self._value(one)
        func = call.func
        looked_up = _looked_up(call)
        named = self._named(func)
        path = self._path(func)
        if looked_up is not None:
            if self._path(call) is None:
                self._attribute(*looked_up)
        elif named is not None:
            if not self._reckons(named):
                raise _Odd
        elif path is not None:
            self.modules.add(path)
        elif isinstance(func, ast.Name):
            if func.id not in _BUILTINS - {"getattr"} or func.id in self._known:
                raise _Odd
        elif isinstance(func, ast.Attribute) and func.attr.removesuffix("_") in _RECKONING:
            self._attribute(func.value, func.attr)
        else:
            raise _Odd

    def _reckons(self, name: str) -> bool:
        package = package_of(name)
        if name in self.functions:
            return True
        if package in _STDLIB:
            return re.fullmatch(_STDLIB[package], name.partition(".")[2]) is not None
        found = _FUNCTIONS.fullmatch(name)
        return found is not None and (found[1] or found[2]) in _RECKONING

    def _named(self, one: ast.expr) -> str | None:
        """Return the full name of something that the text imports; None if this is something else."""
        if isinstance(one, ast.Name):
            return self._imported.get(one.id)
        if not isinstance(one, ast.Attribute):
            return None
        above = self._named(one.value)
        return None if above is None else f"{above}.{one.attr}"

    def _path(self, one: ast.expr) -> tuple[str, ...] | None:
        """Return the path of an attribute of ``self``; None if this is something else."""
        if isinstance(one, ast.Name):
            return () if one.id == "self" else None
        looked_up = _looked_up(one) if isinstance(one, ast.Call) else None
        of, name = (one.value, one.attr) if isinstance(one, ast.Attribute) else looked_up or (None, "")
        above = self._path(of) if of is not None else None
        if above is None:
            return None
        if not _PART.fullmatch(name):
            raise _Odd
        return (*above, name)


def _parts(one: ast.expr) -> Iterator[ast.expr]:
    return (part for part in ast.iter_child_nodes(one) if isinstance(part, ast.expr))


def _looked_up(call: ast.Call) -> tuple[ast.expr, str] | None:
    """Return what ``getattr(…, "name")`` looks a name up in, and the name."""
    is_getattr = isinstance(call.func, ast.Name) and call.func.id == "getattr"
    if not is_getattr or call.keywords or len(call.args) != 2:
        return None
    of, name = call.args
    return (of, name.value) if isinstance(name, ast.Constant) and isinstance(name.value, str) else None
