"""
What is known of calls that reach nothing outside, as data: those that only make data, and those that do a little more.

What objects of these classes get, and what is no function at all, is here, too. Nothing is looked up.
"""

from __future__ import annotations

from typing import Final


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def full(module: str, names: str) -> set[str]:
    return {f"{module}.{name}" for name in names.split()}


PLAIN: Final = frozenset(
    full(
        "builtins",
        "object dict list tuple set frozenset int long float complex str unicode basestring bytes bytearray bool slice"
        " range xrange NoneType Ellipsis NotImplemented iter reversed enumerate zip memoryview property staticmethod"
        " classmethod Exception BaseException ValueError TypeError KeyError IndexError RuntimeError AttributeError"
        " StopIteration ImportError OSError NotImplementedError AssertionError ArithmeticError LookupError NameError"
        " ZeroDivisionError UserWarning Warning DeprecationWarning FutureWarning RuntimeWarning",
    )
    | full("collections", "OrderedDict defaultdict Counter deque ChainMap UserDict UserList UserString")
    | full("copyreg", "_reconstructor __newobj__ __newobj_ex__")
    | full("torch.fx.immutable_collections", "immutable_list immutable_dict")
    | {"_codecs.encode", "torch.nn.backends.thnn._get_thnn_function_backend", "torch.autograd.variable.Variable"}
    | full("datetime", "date datetime time timedelta timezone tzinfo")
    | full("_datetime", "date datetime time timedelta timezone")
    | full("decimal", "Decimal")
    | full("_decimal", "Decimal")
    | full("fractions", "Fraction")
    | full("uuid", "UUID SafeUUID")
    | full("pathlib", "Path PurePath PosixPath PurePosixPath WindowsPath PureWindowsPath")
    | full("pathlib._local", "Path PurePath PosixPath PurePosixPath WindowsPath PureWindowsPath")
    | full("array", "array _array_reconstructor")
    | {"array._array_reconstructor", "zoneinfo.ZoneInfo._unpickle", "zoneinfo._common.ZoneInfo", "random.Random"}
    | full("re", "_compile RegexFlag")
    | full("types", "SimpleNamespace MappingProxyType NoneType EllipsisType")
    | full(
        "numpy",
        "dtype ndarray matrix recarray record void bool_ bool8 int8 int16 int32 int64 intc intp uint8 uint16 uint32"
        " uint64 uintc uintp float16 float32 float64 float128 longdouble complex64 complex128 complex256 str_ bytes_"
        " string_ unicode_ datetime64 timedelta64 object_ longlong ulonglong half single double float_ int_ bool"
        " core.numeric._frombuffer _core.numeric._frombuffer core.numeric.bool_"
        " _core._internal._convert_to_stringdtype_kwargs",
    )
    | full("numpy.core.multiarray", "scalar _reconstruct ndarray dtype")
    | full("numpy._core.multiarray", "scalar _reconstruct ndarray dtype")
    | full("numpy.ma.core", "_mareconstruct MaskedArray")
    | full("numpy.matrixlib.defmatrix", "matrix")
    | full("numpy.random", "RandomState Generator mtrand.RandomState _generator.Generator")
    | full(
        "numpy.random._pickle", "__randomstate_ctor __bit_generator_ctor __generator_ctor __bit_generator_randomstate"
    )
    | full("numpy.random", "__RandomState_ctor _mt19937.MT19937 _pcg64.PCG64 _philox.Philox _sfc64.SFC64")
    | {"numpy.random.bit_generator.SeedSequence", "numpy.dtypes.StringDType", "numpy.exceptions.AxisError"}
    | full(
        "torch",
        "Size Tensor device dtype layout memory_format Generator finfo iinfo _C.Generator _C._TensorBase"
        " _C.device _C.dtype _C.Size torch.Size storage.TypedStorage storage.UntypedStorage nn.Parameter"
        " serialization._get_layout random.Generator _weights_only_unpickler._get_layout",
    )
    | full(
        "torch.jit._pickle",
        "build_intlist build_tensorlist build_doublelist build_boollist build_tensor_from_id restore_type_tag",
    )
)
"""Calls that only make data."""

INDEX_CLASSES: Final = (
    r"torch\.distributed\.(?:_shard\.)?(?:checkpoint|sharded_tensor)\.(?:metadata|planner|filesystem)\."
    r"(?:_StorageInfo|StorageMeta|SavePlan|WriteItem|WriteItemType|TensorWriteData|BytesIOWriteData|TensorProperties"
    r"|(?:Bytes|Tensor|Chunk)StorageMetadata|Metadata|MetadataIndex|_?MEM_FORMAT_ENCODING)"
)
"""What the index of a ``torch.distributed.checkpoint`` is made of: dataclasses and enumerations."""

PLAIN_PATTERN: Final = (
    rf"{INDEX_CLASSES}|"
    r"torch(?:\.(?!multiprocessing)\w+)+\._rebuild_(?!from_type)\w+|torch\._tensor\._rebuild_from_type(?:_v2)?|torch\.return_types\.\w+"
    r"|torch\.(?:cuda\.|sparse\.|cuda\.sparse\.|_C\.)?[A-Z]\w*(?:Tensor|Storage)"
    r"|torch\.(?:cuda|sparse|cuda\.sparse)\.[A-Z]\w*(?:Tensor|Storage)"
    r"|torch\.storage\._?[A-Z]\w*Storage"
    r"|torch\.(?:nn|optim|ao\.nn|ao\.quantization|nn\.quantized|quantization|distributions)"
    r"(?:\.[a-z_][a-z0-9_]*)+\._?[A-Z]\w*"
    r"|numpy\.random\.(?:mtrand|_\w+)\.[A-Z]\w*"
    r"|numpy\.random\.\w+\.__pyx_unpickle_\w+"
    r"|__torch__(?:\.\w+)+"
)
"""Tensors, storages, torch's own layers and optimizers; TorchScript's classes, which Python does not import."""

NUMBERS_OF_C: Final = frozenset(
    full("ctypes", "c_bool c_byte c_ubyte c_short c_ushort c_int c_uint c_long c_ulong c_longlong c_ulonglong c_float")
    | full("ctypes", "c_double c_longdouble c_size_t c_ssize_t c_int8 c_int16 c_int32 c_int64 c_uint8 c_uint16")
    | full("ctypes", "c_uint32 c_uint64 c_char c_wchar")
)
"""Types of a single value, which is no pointer: their state is its bytes."""

ONLY_BUILT: Final = frozenset(("_frozen_importlib.ModuleSpec", "_frozen_importlib_external.SourceFileLoader"))
"""Classes of objects that do nothing by themselves, which dill keeps of the module of a script."""

METHODS_OF_VALUES: Final = r"<\w+(?: \w+)* '(\w+)' of '(dict|list|tuple|set|frozenset|str|int|float|bytes)' objects>"
"""How dill writes methods of plain values, for the second part of it to be evaluated."""

LITERALS: Final = r"NotImplemented|Ellipsis|x?range\(-?\d{1,19}(?:, ?-?\d{1,19}){0,2}\)"
"""What dill writes as text, for it to be evaluated."""

HARMLESS: Final = frozenset(
    full("builtins", "type getattr hasattr isinstance issubclass len abs round sum any all chr ord hash id repr ascii")
    | full("builtins", "bin hex oct divmod pow print format next super callable")
    | full("functools", "partial partialmethod cached_property")
    | full("operator", "itemgetter attrgetter getitem")
    | full("argparse", "Namespace ArgumentParser Action")
    | full("logging", "Logger RootLogger getLogger Formatter LogRecord Manager PlaceHolder NullHandler Filter")
    | full("threading", "Lock RLock Condition Event Semaphore BoundedSemaphore local _RLock")
    | full("queue", "Queue LifoQueue PriorityQueue SimpleQueue Empty")
    | full("enum", "Enum IntEnum Flag IntFlag StrEnum auto EnumMeta EnumType FlagBoundary")
    | full("dataclasses", "Field _MISSING_TYPE _HAS_DEFAULT_FACTORY_CLASS InitVar")
    | full("inspect", "Signature Parameter _ParameterKind _empty")
    | full("string", "Template Formatter")
    | full("ipaddress", "IPv4Address IPv6Address IPv4Network IPv6Network")
    | full("typing", "_GenericAlias _SpecialForm Union Optional TypeVar ForwardRef NewType _UnionGenericAlias")
    | full("types", "GenericAlias UnionType CellType ModuleType CodeType MethodType AttrGetterType ItemGetterType")
    | full("weakref", "WeakKeyDictionary WeakValueDictionary WeakSet")
    | full("_weakrefset", "WeakSet")
    | full("abc", "ABCMeta ABC")
    | full("itertools", "count cycle repeat chain islice product permutations combinations accumulate zip_longest")
    | full("time", "struct_time")
    | full("calendar", "Calendar TextCalendar")
    | full("random", "SystemRandom")
    | full("contextlib", "nullcontext ExitStack suppress")
    | full("numbers", "Number Integral Real")
    | full("configparser", "ConfigParser SectionProxy RawConfigParser")
    | full("collections.abc", "Mapping Sequence Callable Iterable")
    | full("signal", "Signals Handlers")
    | full("http", "HTTPStatus HTTPMethod")
    | full("socket", "AddressFamily SocketKind")
    | full("ssl", "TLSVersion")
    | full("json", "JSONEncoder JSONDecoder encoder.JSONEncoder decoder.JSONDecoder")
    | full("numpy", "core._ufunc_reconstruct _core._ufunc_reconstruct")
    | full("xml.etree.ElementTree", "Element")
    | full("_io", "StringIO BytesIO")
    | full("io", "StringIO BytesIO")
    | full("os", "stat_result")
    | full("textwrap", "TextWrapper")
    | NUMBERS_OF_C
    | full("statistics", "NormalDist")
    | full("difflib", "SequenceMatcher")
    | full("email", "message.Message message.EmailMessage _policybase.Compat32 policy.EmailPolicy")
    | full("logging", "PercentStyle StrFormatStyle StringTemplateStyle")
    | full("configparser", "ConverterMapping Interpolation BasicInterpolation ExtendedInterpolation _CommentSpec")
    | full("os", "terminal_size")
    | full("asyncio.exceptions", "CancelledError TimeoutError InvalidStateError")
    | full("subprocess", "CompletedProcess CalledProcessError TimeoutExpired")
    | {"urllib.error.URLError", "tarfile.TarInfo", "zipfile.ZipInfo", "resource.struct_rusage"}
    | {"functools.lru_cache", "_collections._tuplegetter", "collections._tuplegetter"}
    | {"operator.methodcaller", "types.PartialType", "dataclasses._DataclassParams"}
    | {"dill._dill._setattr", "dill._dill._delattr", "torch._dynamo.eval_frame.OptimizeContext"}
    | {"torch._dynamo.eval_frame.OptimizedModule", "torch.jit._script.unpackage_script_module"}
    | full("traceback", "FrameSummary StackSummary TracebackException")
    | full("urllib.parse", "ParseResult SplitResult DefragResult ParseResultBytes SplitResultBytes DefragResultBytes")
    | full("decimal", "Context")
    | {"platform.uname_result", "csv.excel", "graphlib.TopologicalSorter"}
)
"""Calls of Python's and numpy's own that do something, and yet reach nothing outside."""

MAKERS: Final = frozenset(
    full("types", "CodeType MethodType PartialType AttrGetterType ItemGetterType")
    | {"functools.partial"}
    | full("operator", "methodcaller attrgetter itemgetter")
)
"""Calls that give something to call: a function of the byte code in the file, mostly,"""

MAKER_NAMES: Final = words("_make_function _fill_function _make_skel_func _builtin_type _create_function")
"""and the names of others: dill's, and those of cloudpickle, of which other packages have copies."""

CHANGER_NAMES: Final = words(
    "_setattr _delattr _class_setstate _function_setstate _fill_function _rehydrate_skeleton_class"
)
"""Names of theirs, too, for calls that change their first argument: what the file has made, where they wrote them,"""

MAKE_NEW: Final = words(
    "_create_cell _make_cell _make_empty_cell _create_function _make_function _make_skeleton_class _make_skeleton_enum"
    " _make_skel_func"
)
"""by calls with these names,"""

METACLASSES: Final = frozenset(("builtins.type", "abc.ABCMeta", "enum.EnumMeta", "enum.EnumType"))
"""or as a class by one of these, and a call named ``_create_type``."""

SETS_ITEMS: Final = "_setitems"
"""Dill's call that gives items to its first argument, which it has made: the names that a function knows."""

MAKE_CLASSES: Final = words("_create_type _make_skeleton_class")
"""Calls that call their first argument, to make a class."""

MAKE_ENUMERATIONS: Final = "_make_skeleton_enum"
"""A call that makes a class and its members."""

ATTRIBUTES_AT: Final = {
    **dict.fromkeys(("_create_type", "_make_skeleton_class", MAKE_ENUMERATIONS), 3),
    **dict.fromkeys(("_class_setstate", "_function_setstate", "_fill_function", "_rehydrate_skeleton_class"), 1),
}
"""Which of their arguments has the attributes of a class or function: a dict, or a few."""

SET_ONE: Final = words("_setattr _delattr")
"""Calls that are given the name of an attribute, and maybe its value."""

OF_PICKLERS: Final = (
    words("_create_type _create_code _create_ftype _create_typing_tuple _create_lock _create_rlock _create_stringi")
    | words("_create_stringo _create_weakref _create_weakproxy _create_array _create_dtypemeta _create_namedtuple")
    | words("_load_type _get_attr _getattr _getattribute _import_module")
    | words("_setitems _make_skeleton_enum _make_typevar _make_dict_keys _make_dict_values _make_dict_items")
    | words("_get_dataclass_field_type_sentinel _gen_ellipsis _gen_not_implemented")
    | words("subimport dynamic_subimport _builtin_type")
)
"""What else dill and cloudpickle write calls of."""

WRITTEN_BY_PICKLERS: Final = OF_PICKLERS | MAKER_NAMES | CHANGER_NAMES | MAKE_NEW | MAKE_CLASSES

CALLED_CLASSES: Final = words(
    "ultralytics.YOLO ultralytics.models.yolo.model.YOLO ultralytics.engine.model.Model"
    " torch.utils.data.DataLoader torch.utils.data.dataloader.DataLoader"
    " joblib.Memory joblib.memory.Memory joblib.memory.MemorizedFunc joblib.MemorizedResult"
    " joblib.memory.MemorizedResult"
    " sentence_transformers.SentenceTransformer sentence_transformers.SentenceTransformer.SentenceTransformer"
)
"""Classes that load what they are told when they are called. Picklers make their objects without calling them."""

ITERATING: Final = frozenset(
    full("builtins", "list tuple set frozenset dict iter reversed enumerate zip sum any all next bytes bytearray")
    | full("collections", "OrderedDict defaultdict deque Counter ChainMap UserDict UserList")
    | full("itertools", "chain cycle islice product permutations combinations accumulate zip_longest")
    | full("torch.fx.immutable_collections", "immutable_list immutable_dict")
    | {"array.array", "torch.Size"}
)
"""Calls that take one thing after the other from what they are given, by its own methods."""

CONTAINERS: Final = frozenset(
    full("builtins", "dict list set bytearray")
    | full("collections", "OrderedDict defaultdict Counter deque")
    | full("torch.fx.immutable_collections", "immutable_list immutable_dict")
)
"""Classes whose objects picklers give items."""

KEEPING_ERRORS: Final = frozenset(
    full("builtins", "BaseException Exception ValueError TypeError RuntimeError NotImplementedError AssertionError")
    | full("builtins", "LookupError KeyError IndexError ArithmeticError OverflowError ZeroDivisionError EOFError")
)
"""Errors that keep what they are called with, whatever it is."""

KEEPING_BASES: Final = KEEPING_ERRORS | frozenset(
    full("builtins", "object dict list tuple set frozenset")
    | full("collections", "OrderedDict defaultdict")
    | {"typing.Generic", "abc.ABC"}
)
"""Classes that keep what they are called with, and call nothing of it or of their subclasses but ``__setitem__``."""

CONSTRUCTORS: Final = words("__init__ __new__ __bases__ __class__")
"""What the call of a class calls, and where that is looked for."""

STATELESS: Final = frozenset(
    full("types", "GenericAlias UnionType CellType MethodType CodeType")
    | full("typing", "_GenericAlias _UnionGenericAlias")
    | full("builtins", "type next super getattr")
    | {"operator.getitem", "logging.getLogger", "uuid.SafeUUID", "re.RegexFlag", "ssl.TLSVersion", "enum.FlagBoundary"}
    | full("signal", "Signals Handlers")
    | full("http", "HTTPStatus HTTPMethod")
    | full("socket", "AddressFamily SocketKind")
)
"""
Calls of which picklers give no state to the results.

Some results pass what sets a state on to what they are made of; others are classes, or objects that all share.
"""

METHODS: Final = frozenset(
    name for kind in (dict, list, set, tuple, str, bytes, bytearray, int, float) for name in dir(kind)
) | words(
    "__setstate__ __getstate__ __call__ __iter__ __next__ __getattr__ __del__ __enter__ __exit__ __bool__ __int__"
    " __index__ __torch_function__ __array__ __array_function__ __array_ufunc__ __fspath__ read write readline readinto"
    " seek tell close flush fileno to cpu cuda detach clone size dim stride view item numpy tolist set_ copy_ resize_"
    " requires_grad_ state_dict load_state_dict parameters buffers modules children named_parameters named_modules"
    " apply reshape flatten contiguous storage untyped_storage _untyped_storage element_size nbytes numel share_memory_"
    " dequantize unpack is_floating_point register_hook register_buffer register_parameter _load_from_state_dict"
    " __set_name__ __get__ __set__ __delete__ __instancecheck__ __subclasscheck__ __array_finalize__ __array_wrap__"
)
"""What containers, files, tensors, models and classes have as methods, which code that is given them calls."""

RUN_BY_LOADING: Final = words(
    "__new__ __setstate__ __setattr__ __getattribute__ __getattr__ __del__ __hash__ __eq__ __dict__ __init_subclass__"
    " __set_name__ __get__ __set__ __prepare__ __mro_entries__ __instancecheck__ __subclasscheck__ __setitem__ append"
    " extend add _missing_ mro __array_finalize__ __torch_function__ __torch_dispatch__ _patch_step_function"
    " __class__ __module__ __doc__ __name__ __qualname__ __parameters__ __typing_subst__ __isabstractmethod__"
    " __dataclass_fields__"
)
"""Methods of a class that unpickling itself may call: of its objects, of keys, of its subclasses, at their end."""

PLAIN_BASES: Final = (
    r"builtins\.(?:object|dict|list|tuple|set|frozenset|str|int|float|complex|bool|bytes|bytearray|[A-Z]\w*)"
    r"|collections\.(?:OrderedDict|defaultdict|Counter|deque|User\w+|ChainMap|abc\.\w+)|_collections_abc\.\w+"
    r"|abc\.ABC|typing\.\w+|contextlib\.\w+|enum\.\w*(?:Enum|Flag)|argparse\.\w+|types\.SimpleNamespace"
    r"|json\.(?:\w+\.)?JSON(?:En|De)coder|logging\.(?:Filter|Formatter|Handler|LoggerAdapter)|string\.Formatter"
    r"|datetime\.(?:date|datetime|time|timedelta)"
    r"|torch\.(?:_tensor\.)?Tensor|torch\.(?:nn|optim|distributions)\.(?!parallel\.)(?:\w+\.)*(?!\w*(?:Parameter|Buffer))\w+"
    r"|torch\.autograd\.(?:\w+\.)?Function"
    r"|torch\.utils\.data\.(?:\w+\.)?\w*(?:Dataset|Sampler)|numpy\.ndarray"
)
"""Classes of known packages that ask objects of their subclasses, while these are loaded, for no more than that,"""

RUN_FOR_BASES: Final = (
    (r"collections\.(?:User\w+|ChainMap)", words("data maps")),
    (r"(?:\w+\.)+(?:Tensor|CausalBias)", words("is_leaf set_ data requires_grad _backward_hooks")),
    (
        r"torch\.(?:nn|optim\.swa_utils)\.[\w.]+",
        words("_state_dict_hooks _state_dict_pre_hooks _load_state_dict_pre_hooks _load_state_dict_post_hooks")
        | words("_forward_hooks_with_kwargs _forward_hooks_always_called _forward_pre_hooks _backward_pre_hooks")
        | words("_forward_pre_hooks_with_kwargs _non_persistent_buffers_set _is_full_backward_hook padding_mode"),
    ),
    (
        r"torch\.nn\.modules\.(?:activation|linear_cross_entropy_options)\.\w+",
        words("dim batch_chunk_size allow_retain_graph"),
    ),
    (r"torch\.optim\.(?!lr_scheduler\.(?!Optimizer))[\w.]+", words("defaults param_groups state profile_hook_step")),
    (
        r"torch\.optim\.[\w.]+",
        words("_optimizer_step_pre_hooks _optimizer_step_post_hooks _optimizer_state_dict_pre_hooks")
        | words("_optimizer_state_dict_post_hooks _optimizer_load_state_dict_pre_hooks _zero_grad_profile_name")
        | words("_optimizer_load_state_dict_post_hooks"),
    ),
    (r"torch\.nn\.modules\.rnn\.\w+", words("all_weights _all_weights _flat_weights_names num_layers bidirectional")),
    (r"torch\.nn\.modules\.transformer\.\w+", words("activation")),
)
"""and for this, of subclasses of some. What others ask for is not known."""

USED_OF_STATES: Final = (
    (r"torch\.optim\.(?!lr_scheduler\.)[\w.]+", words("defaults param_groups state")),
    (r"numpy\.random\.[\w.]+", words("bit_generator state has_gauss gauss has_uint32 uinteger")),
    (r"torch\.nn\.modules\.rnn\.\w+", words("all_weights _all_weights num_layers bidirectional")),
)
"""What objects of known classes do more with than to keep it, when they get it as a part of their state."""

RUN_BY_ENUMERATIONS: Final = words("__init__ _generate_next_value_")
"""More of them, of an enumeration that is made with its members."""

KEEPERS: Final = frozenset(
    full("builtins", "dict list tuple set frozenset type property staticmethod classmethod object slice")
    | full("collections", "OrderedDict defaultdict")
    | full("functools", "partial partialmethod lru_cache")
    | full("types", "CodeType CellType MethodType SimpleNamespace GenericAlias UnionType PartialType")
    | full("typing", "_GenericAlias _UnionGenericAlias ForwardRef NewType")
    | full("argparse", "Namespace")
)
"""Calls that keep what they are given, and do not call it."""

_IN_PLACE: Final = "i?(?:add|sub|mul|truediv|floordiv|mod|pow|matmul|and_|or_|xor|lshift|rshift)"
OPERATORS: Final = rf"{_IN_PLACE}|neg|pos|invert|not_|eq|ne|lt|le|gt|ge|getitem"
SAFE_NAME: Final = r"[^\"'\\\x00-\x1f\x7f\x85\u2028\u2029]*"
"""What stays a name where it is written between quotes."""

VALUES: Final = (
    r"torch\.(?:q?u?int\d+(?:x\d)?|b?float\d+\w*|complex\d+|bits\w+|bool|double|half|float|long|short|int|c(?:float|double|half)"
    r"|strided|jagged|sparse_(?:coo|cs[rc]|bs[rc])|\w+_format|channels_last\w*|per_(?:tensor|channel)_\w+)"
    rf"|operator\.(?:{OPERATORS})"
    r"|dataclasses\.(?:MISSING|KW_ONLY|_FIELD\w*)|enum\.[A-Z]\w*\.__(?:new|repr|str|format|hash|dir|reduce_ex)__"
    r"|builtins\.(?:min|max|sorted|map|filter|(?:object|tuple|list|dict|set|frozenset|int|float|str|bytes|unicode)\.__new__"
    r"|(?:str|unicode|bytes|int|float)\.__(?:repr|str|format|hash)__)|typing\._no_init_or_replace_init"
)
"""
What a pickle may name without more: types of elements, layouts and the like, which are no functions; and functions
of Python that classes and schedules of honest files have. A call of these is not followed.
"""

CLASSES: Final = r"(?:torch|numpy)(?:\.[a-z_][a-z0-9_]*)*\._?[A-Z]\w*"
"""Classes of torch and numpy. Picklers make their objects without a call, but for members of enumerations,"""

ENUMERATIONS: Final = words(
    "OptState ObservationType MappingType TorchAODType ZeroPointDomain QuantType MEM_FORMAT_ENCODING CheckpointImpl"
    " LoadItemType WriteItemType HandleTrainingState TrainingState HandleShardingStrategy ShardedState BackwardPrefetch"
    " ShardingStrategy StateDictType OptimStateKeyType InputKind OutputKind CausalVariant JitScalarType ProfilerAction"
    " LoadEndianness CheckpointPolicy ArgumentKind Layout MemoryFormat ScalarType MutationType OutputType DimDynamic"
    " SymT DescaleType SplitPoint SerializationFormat AsyncCheckpointerType WorkerState QScheme"
)
"""which have these names in torch."""

HARMLESS_PATTERN: Final = (
    r"builtins\.(?:str|bytes|bytearray|int|float|bool|complex|list|dict|tuple|set|frozenset)\."
    r"(?:__[gs]etitem__|__delitem__|(?!format)[a-z]\w*)"
    rf"|{CLASSES}"
    r"|argparse\._?[A-Z]\w*"
    r"|typing\._?[A-Z]\w*"
    r"|ast\._?[A-Z]\w*"
    r"|(?!builtins\.[a-z])(?:[a-z_]\w*\.)+_?[A-Z]\w*(?:Error|Warning|Exception)"
)
"""More of them: methods of plain values, classes of torch and numpy that are not named above."""
