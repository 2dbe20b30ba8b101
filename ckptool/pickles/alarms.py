"""
Names of calls that reach the system (commands, files, network): an alarm, never a proof of safety.

The tables of names are only text: nothing in them is looked up. No such list is complete: a name that is not in it
still counts as code. Calls that only look a name up (``getattr(os, "system")``) are resolved to that name, and names
among the arguments of a call count, too. Also ``Verdict``, the result of judging a call, and how calls are shown.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain, islice
from typing import Final, Literal, NamedTuple, TypeAlias

from ckptool.messages import cut
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, Global, Inert, Set, Unknown
from ckptool.pickles.values import describe


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def each(pattern: str, text: str) -> tuple[str, ...]:
    """Return ``pattern`` filled with each of the words."""
    return tuple(map(pattern.format, text.split()))


_STDLIB: Final = frozenset(sys.stdlib_module_names) | words(
    "asynchat asyncore audioop binhex cgi cgitb chunk commands crypt distutils exceptions formatter imghdr"
    " imp lib2to3 macpath mailcap msilib nis nntplib nt org ossaudiodev pipes popen2 posix smtpd sndhdr spwd"
    " sunau symbol telnetlib test uu xdrlib _bootsubprocess __builtin__ _testcapi riscos riscospath ce os2"
    " copy_reg _pyrepl _interpreters _interpchannels _interpqueues _xxsubinterpreters _xxinterpchannels interpreters"
    " _colorize _suggestions _opcode_metadata _android_support _apple_support _ios_support annotationlib compression"
    " _zstd _remote_debugging _testinternalcapi _testlimitedcapi _testclinic _testmultiphase _testbuffer pathlib"
    " rexec compiler hotshot ihooks imputil new user bsddb dircache mhlib mimetools parser dummy_threading"
    " _dummy_thread _dummy_threading macurl2path _bootlocale _msi _ctypes _sqlite3 _winreg winreg _curses"
)
"""Top-level modules of Python's standard library, of this release and of others."""

EVALUATES: Final = "runs or compiles text or byte code"
LOADS: Final = "runs what another pickle, library or module says"
FILES: Final = "opens, changes or removes files"
_THROUGH: Final = "reaches through a module or the inside of an object, as no pickler writes it"
UNFOLLOWED: Final = "cannot be followed"
PASSED: Final = "is given what reaches the system"
CHANGED: Final = "changes what the name stands for, for the whole process"
IMPORTED: Final = "acts as soon as it is imported"
SOURCE: Final = "is source code in the file"
NATIVE: Final = "is native code in the file, or is compiled to it"
SETTINGS: Final = "is called by its settings"
_TELLING_NAME: Final = "is called like what runs commands or text"

_DANGEROUS: Final = {
    name: reason
    for reason, names in {
        "runs commands or programs": "os.system os.popen os.execl os.execle os.execlp os.execlpe os.execv os.execve"
        " os.execvp"
        " os.execvpe os.spawnl os.spawnle os.spawnlp os.spawnlpe os.spawnv os.spawnve os.spawnvp"
        " os.spawnvpe os.posix_spawn os.posix_spawnp os.startfile os.fork os.forkpty os.kill os.killpg"
        " os.abort os._exit posix nt subprocess _posixsubprocess pty commands popen2"
        " asyncio.create_subprocess_exec asyncio.create_subprocess_shell asyncio.subprocess"
        " multiprocessing.Process multiprocessing.util.spawnv_passfds platform.popen pydoc.pipepager"
        " pydoc.tempfilepager pydoc.pager ctypes cffi distutils setuptools pip ensurepip venv pexpect"
        " ptyprocess psutil.Popen sh plumbum invoke fabric webbrowser antigravity idlelib signal _winapi"
        " torch.utils.collect_env torch.distributed.elastic.multiprocessing torch.distributed.run"
        " torch.distributed.launch torch.utils.cpp_extension numpy.distutils numpy.f2py gevent.subprocess"
        " eventlet.green.subprocess wmi win32com torch.multiprocessing torch.utils.data.datapipes"
        " torch.utils._zip torch.utils.viz torch.utils._functools uuid._get_command_stdout"
        " test.support.script_helper joblib.externals.loky.backend git.Repo git.cmd tqdm.utils"
        " torch._inductor torch.testing scipy.weave execnet rpyc ultralytics.utils.checks"
        " sarge delegator envoy docker kubernetes nox tox notebook jupyter_client nbconvert gevent.os trio.run_process"
        " trio.lowlevel anyio.run_process anyio.open_process anyio.to_thread anyio.to_process twisted.internet"
        " tornado.process celery.bin gunicorn uvicorn hypercorn wheel.cli easy_install _distutils_hack"
        " accelerate.commands deepspeed.launcher deepspeed.ops.op_builder click.launch click.edit"
        " click._termui_impl typer.launch"
        " PIL.ImageShow PIL.ImageGrab PIL.EpsImagePlugin.Ghostscript PIL.GifImagePlugin._save_netpbm Image.show"
        " cupy.RawKernel"
        " cupy.RawModule triton.compile sympy.printing.preview sympy.utilities._compilation sympy.utilities.autowrap"
        " sympy.utilities.runtests sympy.testing sympy.plotting pandas.io.clipboard pandas.util._tester pandas.testing"
        " pandas._testing sklearn.utils._testing matplotlib.texmanager matplotlib.dviread matplotlib.testing"
        " moviepy.tools moviepy.config imageio_ffmpeg streamlit gradio.launch flask.Flask.run werkzeug.serving",
        EVALUATES: "builtins.eval builtins.exec builtins.compile builtins.execfile builtins.breakpoint code codeop"
        " pdb bdb cProfile profile timeit trace runpy doctest numpy.testing numpy.lib.utils.safe_eval"
        " numpy.safe_eval numexpr.evaluate pandas.eval pandas.core.computation sympy.sympify sympy.parsing"
        " torch.fx.graph_module torch.fx._lazy_graph_module torch.ao.quantization.fx.graph_module"
        " torch.utils.bottleneck IPython ipykernel mako"
        " jinja2 yaml.load yaml.unsafe_load yaml.full_load js2py execjs py_compile compileall lib2to3"
        " tkinter turtle sympy.core.sympify.sympify sympy.core.sympify.kernS sympy.S sympy.core.singleton.S"
        " sympy.lambdify sympy.utilities.lambdify sympy.preview DataFrame.query DataFrame.eval Series.eval"
        " PIL.ImageMath attr._make._compile_and_eval attr._make._linecache_and_compile decorator.FunctionMaker"
        " dill._dill._eval_repr Config.fromfile"
        " attr.make_class attr.s attr.attrs attr.attributes attr.dataclass attr.define attr.frozen attr.mutable"
        " attrs.make_class attrs.define attrs.frozen attrs.mutable attr._make.attrs attr._make.make_class"
        " attr._make._ClassBuilder attr._next_gen sympy.N sympy.Matrix sympy.Poly sympy.nsimplify"
        " sympy.core.evalf sympy.solvers sympy.simplify sympy.solve sympy.utilities.source fire.Fire fire.core"
        " transformers.tools transformers.agents tornado.template werkzeug.debug Config.from_pyfile"
        " Config.from_object numba.core.serialize pandas.io.formats.style.Styler.from_custom_template"
        " Styler.from_custom_template keras.utils.python_utils keras.src.utils.python_utils"
        " tensorflow.keras.utils.func_load jax.experimental.host_callback scipy.LowLevelCallable nbformat"
        " torch.utils.benchmark types.FunctionType torch._C._jit_load"
        " torch.jit.CompilationUnit torch._C.CompilationUnit tensorflow.py_function tensorflow.numpy_function"
        " typing.get_type_hints typing_extensions.get_type_hints typing_extensions.evaluate_forward_ref"
        " annotationlib mpmath.identify",
        LOADS: "pickle.load pickle.loads pickle.Unpickler pickle._load pickle._loads pickle._Unpickler _pickle"
        " cPickle marshal.load marshal.loads shelve dill.load dill.loads cloudpickle.load"
        " cloudpickle.loads joblib.load joblib.numpy_pickle.load jsonpickle.decode pandas.read_pickle"
        " numpy.load torch.load torch.serialization.load"
        " torch.cuda.CUDAPluggableAllocator torch.cuda.memory.CUDAPluggableAllocator"
        " torch.jit.load torch.hub torch.package __torch__.torch.classes.aten.OpaqueObject"
        " torch.ops.load_library torch.classes.load_library importlib imp builtins.__import__ zipimport"
        " pkgutil site sitecustomize _frozen_importlib _frozen_importlib_external _imp"
        " multiprocessing.reduction multiprocessing.connection logging.config xmlrpc"
        " torch.storage._load_from_bytes joblib.numpy_pickle_compat pkg_resources"
        " numpy.ctypeslib.load_library nltk.data.load pandas.io.pickle pandas.compat.pickle_compat.load"
        " joblib.numpy_pickle._unpickle sklearn.externals.joblib.load dill._dill.load dill.temp dill.session"
        " yaml.load_all yaml.full_load_all ruamel.yaml.load pyarrow.deserialize fickling.load pytest _pytest"
        " nose transformers.dynamic_module_utils cloudpickle.cloudpickle.load"
        " transformers.pipeline transformers.pipelines.pipeline transformers.commands twisted.python.reflect"
        " transformers.utils.import_utils tornado.util.import_object celery.utils.imports django.core.management"
        " dask.utils.import_required fairseq.checkpoint_utils fairseq.utils.import_user_module"
        " detectron2.utils.env gensim.utils.unpickle"
        " stable_baselines3.common.save_util pydantic.parse_raw_as pydantic.parse_file_as pydantic.parse"
        " pydantic.deprecated.parse pydantic.deprecated.tools pydantic.tools pydantic.v1.parse pydantic.v1.tools"
        " datasets.load_dataset datasets.load datasets.packaged_modules evaluate.load timm.create_model"
        " timm.models.load_checkpoint timm.models._helpers open_clip.create_model open_clip.factory"
        " ultralytics.nn.tasks.torch_safe_load"
        " ultralytics.nn.tasks.attempt_load_weights lightning.fabric.utilities.cloud_io"
        " lightning_fabric.utilities.cloud_io lightning.pytorch.cli.LightningCLI spacy.util.load_model zope.dottedname",
        FILES: "builtins.open io.open io.open_code io.FileIO _io.open _io.open_code _io.FileIO codecs.open os"
        " argparse.FileType shutil mailbox zipapp wave.Wave_write wave.Wave_read logging.handlers"
        " logging.FileHandler logging.basicConfig modulefinder pyclbr filecmp netrc"
        " configparser.ConfigParser.read xml.etree.ElementTree.parse fileinput tempfile zipfile tarfile gzip bz2"
        " lzma sqlite3 dbm mmap linecache glob pathlib.Path.open pathlib.Path.write_text pathlib.Path.write_bytes"
        " pathlib.Path.read_text pathlib.Path.read_bytes pathlib.Path.touch pathlib.Path.mkdir pathlib.Path.rmdir"
        " pathlib.Path.rename pathlib.Path.replace pathlib.Path.chmod pathlib.Path.lchmod pathlib.Path.symlink_to"
        " pathlib.Path.hardlink_to pathlib.Path.link_to pathlib.Path.unlink numpy.fromfile numpy.save numpy.savez"
        " numpy.savetxt numpy.loadtxt numpy.genfromtxt numpy.memmap numpy.DataSource torch.save"
        " torch.serialization.save torch.serialization._open_file torch.serialization._open_file_like"
        " torch.serialization._open_zipfile_reader torch.serialization._open_zipfile_writer"
        " torch.serialization._open_zipfile_writer_file torch.serialization._open_zipfile_writer_buffer"
        " torch.from_file fsspec.open fsspec.core numpy.lib.npyio numpy.lib._npyio_impl numpy.lib._datasource"
        " numpy.core.memmap numpy._core.memmap numpy.lib.format numpy.lib._format_impl PIL.Image.open"
        " pandas.read_csv pandas.read_table pandas.read_fwf pandas.read_json pandas.read_html pandas.read_xml"
        " pandas.read_excel pandas.read_parquet pandas.read_feather pandas.read_orc pandas.read_hdf"
        " pandas.read_sql pandas.read_stata pandas.read_sas pandas.read_spss pandas.io.parsers pandas.io.sql"
        " pandas.io.common torch._C.PyTorchFileReader torch._C.PyTorchFileWriter smart_open tensorflow.io"
        " torch.utils.tensorboard matplotlib.cbook.open_file_cm tensorflow.python.lib.io pandas.HDFStore"
        " pandas.ExcelWriter pandas.ExcelFile scipy.io scipy.sparse.load_npz scipy.sparse.save_npz"
        " sklearn.datasets.load_files sklearn.datasets.load_svmlight_file sklearn.datasets.dump_svmlight_file"
        " joblib.dump joblib.numpy_pickle.dump joblib.disk joblib.backports joblib.func_inspect joblib.pool"
        " joblib.executor PIL.ImageFont.truetype Image.save Image.open click.open_file click.utils.LazyFile"
        " click.testing h5py.File tables.open_file netCDF4.Dataset pyarrow.parquet pyarrow.csv pyarrow.OSFile"
        " pyarrow.memory_map polars.read_csv polars.read_parquet polars.read_json polars.scan_csv"
        " polars.scan_parquet onnxruntime.InferenceSession tensorflow.raw_ops cv2.imread cv2.imwrite"
        " cv2.VideoCapture cv2.VideoWriter cv2.FileStorage imageio skimage.io soundfile librosa.load"
        " torchaudio.load torchaudio.save torchaudio.info torchaudio.sox_effects torchvision.io plotly.io"
        " bokeh.io matplotlib.pyplot.savefig matplotlib.image.imread matplotlib.image.imsave dill.source"
        " dill._dill._create_filehandle safetensors.torch.save_file safetensors.numpy.save_file zarr.open"
        " onnx.save fsspec.implementations"
        + "".join(
            f" {kind}.to_{form}"
            for kind in ("DataFrame", "Series", "NDFrame")
            for form in words("csv pickle json excel parquet feather hdf sql html xml stata orc latex markdown")
        ),
        "opens connections": "socket _socket ssl socketserver http urllib urllib2 urllib3 requests httpx aiohttp ftplib"
        " poplib"
        " imaplib smtplib smtpd telnetlib nntplib asyncio paramiko websocket websockets wget gdown boto3"
        " huggingface_hub torchvision.datasets.utils torch.distributed.rpc"
        " torch.distributed.nn ultralytics.utils.downloads torch.distributed.TCPStore"
        " torch.distributed.FileStore torch._C._distributed_c10d sklearn.datasets.fetch_openml keras.utils.get_file"
        " keras.utils.file_utils keras.src.utils.file_utils transformers.utils.hub transformers.file_utils.cached_path"
        " nltk.download nltk.downloader scipy.datasets scipy.misc.face seaborn.load_dataset torchtext.utils wandb.init"
        " wandb.login wandb.restore wandb.save clearml.Task.init ultralytics.hub.login",
        "changes the running interpreter": "sys.setprofile sys.settrace sys.exit"
        " sys.addaudithook atexit gc threading.Thread threading.Timer _thread os.putenv os.unsetenv"
        " os.environ.update os.chdir os.fchdir os.chroot os.umask os.nice os.register_at_fork os.setuid os.setgid"
        " os.seteuid os.setegid os.setreuid os.setregid os.setresuid os.setresgid os.setgroups os.initgroups os.setsid"
        " builtins.exit builtins.quit tracemalloc fcntl syslog cgitb multiprocessing.process"
        " multiprocessing.context.Process multiprocessing.managers"
        " copyreg.pickle copyreg.add_extension weakref.finalize functools.update_wrapper sys.modules sys.path"
        " sys.meta_path sys.path_hooks sys.path_importer_cache"
        " faulthandler resource _ctypes concurrent multiprocessing.Pool multiprocessing.pool fickling.hook"
        " fickling.context",
        "calls or finds what its arguments name": "builtins.vars builtins.globals builtins.locals builtins.dir"
        " builtins.input builtins.help builtins.type.__call__"
        " operator.call codecs.decode"
        " codecs.encode codecs.getdecoder codecs.lookup copy.copy copy.deepcopy inspect.getattr_static"
        " types.DynamicClassAttribute hydra.utils hydra._internal dask.core.get dask.get kombu.utils.imports"
        " DataFrame.pipe Series.pipe NDFrame.pipe",
    }.items()
    for name in names.split()
}
"""How functions, classes and whole modules reach the system when they are called."""

_TELLING: Final = words(
    "eval exec execfile system popen popen2 popen3 popen4 Popen check_call check_output getoutput getstatusoutput"
    " run_module run_path import_module __import__ runstring spawnv spawnl execv execve load_library unsafe_load"
    " create_subprocess_shell create_subprocess_exec os subprocess sys builtins loads read_pickle exec_ unsafe_eval"
    " unsafe_load_all import_string import_path import_by_path load_module load_source load load_model open urlopen"
    " urlretrieve hf_hub_download snapshot_download from_pretrained load_from_checkpoint load_state_dict_from_url"
    " download_url fromfile from_file write_text write_bytes write_file runctx runsource runcode run_string"
    " _unpickle"
    " fork_exec spawn startfile parse_raw parse_file unpickle import_object import_user_module from_pyfile read_hdf"
)
"""Last components of names that count in every module, which may have imported them from those above."""

_TELLING_CLASSES: Final = words(
    "Thread Timer Process ThreadPoolExecutor ProcessPoolExecutor TemporaryFile NamedTemporaryFile TemporaryDirectory"
    " SpooledTemporaryFile HTTPServer ThreadingHTTPServer BaseHTTPRequestHandler TCPServer EntryPoint Environment"
    " DictLoader Connection Listener Stats TestCase ZipFile TarFile FileIO FileHandler CDLL Pickler Unpickler"
    " FunctionType LambdaType CodeType MethodType PackageImporter PackageExporter CompilationUnit RRef GraphModule"
    " _LazyGraphModule LazyGraphModule ObservedGraphModule QuantizedGraphModule FusedGraphModule"
    " ObservedStandaloneGraphModule FxGraphCache CompiledFxGraph AOTCompiledArtifact CustomKnapsackSolver"
    " DefaultLogsSpecs _DefaultLogsSpecs PyTorchFileReader PyTorchFileWriter DataSource memmap"
    " Store TCPStore FileStore HashStore PrefixStore EtcdStore _WorkerServer Popen _TemporaryFileWrapper FileLock"
    " BaseFileLock UnixFileLock SourceFileLoader ForkingPickler BufferedReader BufferedWriter GdsFile StreamWrapper"
    " ExecutionTraceObserver CUDASanitizer _ReaderView _AsyncCheckpointProcess NcclCommRegistration StorageWeakRef"
    " EtcdRendezvous EtcdRendezvousHandler IncrementRecursionCount _LazyModule _MultiProcessingDataLoaderIter"
)
"""Classes that count in every module of torch, numpy and joblib, as these import them from each other."""

_INSIDE: Final = words(
    "__class__ __base__ __bases__ __mro__ __subclasses__ __globals__ __builtins__ __code__ __closure__ __dict__"
    " __getattribute__ __getattr__ __init_subclass__ __import__ __loader__ __spec__ __func__ __self__ __wrapped__"
    " __reduce__ __reduce_ex__ __init__ __setattr__ __delattr__ __call__ __set_name__ __defaults__ __kwdefaults__"
    " f_globals f_builtins f_locals gi_frame cr_frame tb_frame mro"
)
"""Attributes that lead from an object to its internals."""

ACTING: Final = r"antigravity|this|idlelib\.idlew?|test\.(?:autotest|mp_fork_bomb)|(?:\w+\.)+__main__"
"""Modules that act when they are imported, so that looking up a name in one is enough."""

_HARMLESS: Final = frozenset(
    each("signal.{}", "Signals Handlers")
    + each("http.{}", "HTTPStatus HTTPMethod")
    + each("socket.{}", "AddressFamily SocketKind")
    + each("asyncio.exceptions.{}", "CancelledError TimeoutError InvalidStateError")
    + each("subprocess.{}", "CompletedProcess CalledProcessError TimeoutExpired")
    + each("urllib.parse.{}", "ParseResult SplitResult DefragResult")
    + each("urllib.parse.{}Bytes", "ParseResult SplitResult DefragResult")
    + each("ctypes.c_{}", "bool byte ubyte short ushort int uint long ulong longlong ulonglong float double longdouble")
    + each("ctypes.c_{}", "size_t ssize_t int8 int16 int32 int64 uint8 uint16 uint32 uint64 char wchar")
    + ("urllib.error.URLError", "tarfile.TarInfo", "zipfile.ZipInfo", "resource.struct_rusage", "ssl.TLSVersion")
    + ("_ctypes._unpickle", "types.CodeType", "types.MethodType", "torch.jit._script.unpackage_script_module")
    + ("os.stat_result", "os.terminal_size", "os.PathLike", "os._Environ")
    + ("_frozen_importlib.ModuleSpec", "_frozen_importlib_external.SourceFileLoader")
)
"""Exceptions from the tables above, which reach nothing: enumerations, errors, records, single numbers."""

_OF_VALUES: Final = (
    r"builtins\.(?:str|bytes|bytearray|int|float|bool|complex|list|dict|tuple|set|frozenset|object|range|slice)"
    r"\.(?:[a-z]\w*|__(?:new|repr|str|format|hash|[gs]etitem|delitem)__)"
    r"|enum\.[A-Z]\w*\.__(?:new|repr|str|format|hash|dir|reduce_ex)__"
)
"""Methods of Python's own types, which honest classes have as attributes."""

PACKED: Final = words("quantized rnn sparse mkldnn xnnpack")
"""Namespaces of torch's C++ classes for packed weights; other C++ classes unpickle their arguments, or open files."""
_MODULES: Final = words("os sys builtins posix nt subprocess importlib socket shutil ctypes __builtin__")
"""Modules that are reached as attributes of other modules that imported them."""

_MAKERS: Final = frozenset(("types.FunctionType", "types.LambdaType", "types.MethodType"))
_MAKER_NAMES: Final = words("_make_function _fill_function _make_skel_func _create_function")
"""Functions of dill, cloudpickle and their copies that make a function from byte code."""

_CHANGER_NAMES: Final = words(
    "setattr delattr _setattr _delattr _class_setstate _function_setstate _fill_function _rehydrate_skeleton_class"
)
"""Functions that change their first argument, also theirs: they call them on objects that the file itself makes."""

_LITERALS: Final = r"NotImplemented|Ellipsis|x?range\(-?\d{1,19}(?:, ?-?\d{1,19}){0,2}\)"
"""Texts that dill writes to be evaluated."""

CALLED_CLASSES: Final = words(
    "ultralytics.YOLO ultralytics.models.yolo.model.YOLO ultralytics.engine.model.Model"
    " torch.utils.data.DataLoader torch.utils.data.dataloader.DataLoader"
    " joblib.Memory joblib.memory.Memory joblib.memory.MemorizedFunc joblib.MemorizedResult"
    " joblib.memory.MemorizedResult"
    " sentence_transformers.SentenceTransformer sentence_transformers.SentenceTransformer.SentenceTransformer"
)
"""Classes that load a file or another object when they are called; picklers make their objects without a call."""

_METHODS: Final = frozenset(name for kind in (dict, list, set, str) for name in dir(kind)) | words(
    "__setstate__ __getstate__ __call__ __iter__ __next__ __getattr__ __del__ __enter__ __exit__ __bool__ __int__"
    " __index__ __torch_function__ __array__ __array_function__ __array_ufunc__ __fspath__ read write readline readinto"
    " seek tell close flush fileno to cpu cuda detach clone size dim stride view item numpy tolist __set_name__ __get__"
    " __set__ __delete__"
)
"""Names of methods that code calls on objects that it takes for containers, files or tensors."""


Grade: TypeAlias = Literal["data", "program", "code", "system"]
"""
data: it only makes data; program: a program that only its own loader runs; code: it runs code of a package, or may;
system: it is known to run commands or text, open files or connections, import modules, or change the interpreter.
"""
How: TypeAlias = Literal["refers", "calls", "builds", "sets", "adds", "asks", "runs", "odd"]
"""
refers: a name is looked up, and its module imported; calls: REDUCE, INST, OBJ; builds: NEWOBJ, NEWOBJ_EX;
sets: BUILD, which calls ``__setstate__`` or sets attributes; adds: items, by ``append``, ``extend``, ``add`` or
``__setitem__`` of an object that is not a plain container; asks: a persistent id, which the loader looks up; runs: a
program beside the pickles does it when its loader runs it; odd: its effect is not known.
"""
_LONGEST: Final = 120


class Verdict(NamedTuple):
    """What one call or name of a pickle may do."""

    grade: Grade
    name: str
    """The full name that is called, built, changed or referred to."""
    how: How
    why: str | None
    shown: Callable[[], str]
    """Returns the call with its arguments, cut to one line. The text may contain any characters of the file."""


def cut_text(value: Inert) -> str:
    return cut(describe(value), _LONGEST)


def call_text(name: str, args: Inert) -> str:
    shown = describe(args if isinstance(args, tuple) else (args,))
    return f"{cut(name, _LONGEST)}{shown if len(shown) <= _LONGEST else f'{shown[:_LONGEST]}…'}"


_MOST_PARTS: Final = 32
"""Components of a dotted name; no import has more."""
_DEEPEST: Final = 12
"""Nesting of calls that look names up: each may look up two more, so time doubles with each level."""
_LONGEST_LISTED: Final = max(name.count(".") + 1 for name in _DANGEROUS)
_MOST_LOOKED_AT: Final = 1 << 12
"""Values inside the arguments of one call that are inspected."""
_MOST_PAIRS: Final = 1000
_RENAMED: Final = {"_operator": "operator", "torch.tensor": "torch._tensor"}
"""Other names of modules: of a C module, and of one that ``torch.load`` renames in zips."""
_GET: Final = ("builtins.getattr", "dill._dill._get_attr", "dill._dill._getattribute", "dill._dill._getattr")
_IMPORT: Final = (
    "importlib.import_module",
    "builtins.__import__",
    "cloudpickle.cloudpickle.subimport",
    "dill._dill._import_module",
)
_UFUNCS: Final = ("numpy.core._ufunc_reconstruct", "numpy._core._ufunc_reconstruct")
_TYPES: Final = ("cloudpickle.cloudpickle._builtin_type", "dill._dill._load_type")
_FINDERS: Final = frozenset((*_GET, *_IMPORT, *_UFUNCS, *_TYPES, "operator.attrgetter", "pkgutil.resolve_name"))


@lru_cache(maxsize=1 << 12)
def canonical(module: str, name: str) -> str:
    """Return the full name in Python 3 for a name of Python 2 or 3, and of the Python module for one in C."""
    import _compat_pickle as compat  # the tables that pickle itself uses

    module, name = compat.NAME_MAPPING.get((module, name), (module, name))
    module = _RENAMED.get(module) or compat.IMPORT_MAPPING.get(module, module)
    return f"{module}.{name}" if name else module


def package_of(name: str) -> str:
    """Return the top-level package of a full name."""
    return name.partition(".")[0]


@lru_cache(maxsize=1 << 12)
def reaching(name: str, qualified: str) -> str | None:
    """
    Return how the object of this full name reaches the system, if it is known to, else None.

    ``qualified`` is the part after its module, which may lead through other modules that this one imported.
    """
    if name in _HARMLESS or re.fullmatch(_OF_VALUES, name):
        return None
    if reason := listed(name):
        return reason
    parts = qualified.split(".", _MOST_PARTS)
    if len(parts) > _MOST_PARTS:
        return _THROUGH
    for index in range(1, len(parts)):
        if reason := listed(".".join(parts[index - 1 :])):
            return reason
    if not _INSIDE.isdisjoint(parts) or not _MODULES.isdisjoint(parts[:-1]):
        return _THROUGH
    is_telling = package_of(name) in ("torch", "numpy", "joblib") and not _TELLING_CLASSES.isdisjoint(parts)
    is_method = len(parts) > 1 and package_of(name) == "builtins"
    return _TELLING_NAME if is_telling or (parts[-1] in _TELLING and not is_method) else None


def reach(named: Global) -> str | None:
    """Return how a name reaches the system, if it is known to, else None."""
    return reaching(canonical(named.module, named.name), named.name)


def listed(name: str) -> str | None:
    """Return how a name, or a module or class that it is a part of, reaches the system by the table, else None."""
    parts = name.split(".", _LONGEST_LISTED)[:_LONGEST_LISTED]
    for count in range(len(parts), 0, -1):
        if reason := _DANGEROUS.get(".".join(parts[:count])):
            return reason
    return None


def is_known(name: str) -> bool:
    """Return whether a name is of Python's standard library, or known to reach the system."""
    return package_of(name) in _STDLIB or listed(name) is not None


def is_maker(name: str) -> bool:
    """Return whether calls of this name make a function from byte code, mostly of the file."""
    return name in _MAKERS or name.rpartition(".")[2] in _MAKER_NAMES


def found(node: Inert, depth: int = 0) -> Global | None:
    """Return the name that a node stands for, also if a call looks it up or wraps it; None if there is none."""
    named = nodes.global_of(node)
    if named is not None or type(node) is not Call or depth > _DEEPEST:
        return named
    if type(node.args) is not tuple or not node.args:
        return None
    func = found(node.func, depth + 1)
    if func is None:
        return None
    name, args = canonical(func.module, func.name), node.args
    first, second = args[0], args[1] if len(args) > 1 else None
    if name in _GET and type(second) is str:
        return _attribute(first, second, depth)
    if name == "operator.getitem" and type(second) is str:
        holder = found(first, depth + 1)
        is_modules = holder is not None and canonical(holder.module, holder.name) == "sys.modules"
        return Global(second, "") if is_modules else _attribute(first, second, depth)
    if name in _IMPORT and type(first) is str:
        return Global(first, "")
    if name == "pkgutil.resolve_name" and type(first) is str:
        module, _, rest = first.partition(":") if ":" in first else first.rpartition(".")
        return Global(module, rest)
    if name in _UFUNCS and type(first) is str and type(second) is str:
        return Global(first, second)
    if name in _TYPES and type(first) is str:
        return Global("types", first)
    if name == "functools.partial":
        return found(node.state[0] if type(node.state) is tuple and node.state else first, depth + 1)
    return None


def _attribute(holder: Inert, attribute: str, depth: int) -> Global | None:
    """Return the name of an attribute of a named object, of an instance of a class, or of a plain value, else None."""
    named = found(holder, depth + 1) or nodes.class_of(holder)
    if named is not None:
        return Global(named.module, f"{named.name}.{attribute}" if named.name else attribute)
    if type(holder) is Call:
        return None
    kind = "dict" if type(holder) is Dict else "set" if type(holder) is Set else type(holder).__name__
    return Global("builtins", f"{kind}.{attribute}")


def passed(values: Iterable[Inert]) -> str | None:
    """Return the first name inside some values that reaches the system, or a text for an unknown value; else None."""
    todo: list[Inert] = list(values)
    seen: set[int] = set()
    for one in todo:  # which grows
        if len(todo) > _MOST_LOOKED_AT:
            return None
        kind = type(one)
        if kind is Unknown:
            return str(one.why)
        if kind is Global or kind is Call:
            named = found(one)
            if named is not None and named.name and reach(named):
                return canonical(named.module, named.name)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if kind is tuple or kind is list:
            todo += one[:_MOST_LOOKED_AT]
        elif kind is Set:
            todo += one.items[:_MOST_LOOKED_AT]
        elif kind is Dict:
            todo += chain.from_iterable(one.pairs[:_MOST_LOOKED_AT])
        elif kind is Call:
            todo += [held for held in (one.state, one.items, one.kwargs, one.args) if held is not None]
            todo += [value for _, value in (one.pairs or ())[:_MOST_LOOKED_AT]]
    return None


def as_method(state: Inert) -> str | None:
    """Return the first name in a state that reaches the system and is set in place of a method, else None."""
    parts = (part for part in nodes.state_parts(state) if type(part) in (Dict, Call))
    pairs = list(chain.from_iterable(part.pairs or () for part in parts))
    inner = (value.pairs or () for _, value in pairs[:_MOST_PAIRS] if type(value) in (Dict, Call))
    every = islice(chain(pairs, chain.from_iterable(inner)), _MOST_PAIRS)
    return passed([value for key, value in every if type(key) is not str or key in _METHODS])


def is_wary(named: Global) -> bool:
    """Return whether, in a pickle that refers to this name, the arguments of all calls must be inspected."""
    name = canonical(named.module, named.name)
    return name in _FINDERS or reach(named) is not None or is_maker(name)


def asked(call: Call) -> Global | None:
    """Return the name that a ``getattr`` call looks up, if that reaches the system, else None."""
    func = nodes.global_of(call.func)
    one = found(call) if func is not None and canonical(func.module, func.name) in _GET else None
    return one if one is not None and reach(one) else None


def of_call(named: Global, how: How, call: Call, *, is_wary: bool) -> str | None:
    """Return how a call of a name reaches the system, by the name or its arguments; None if it is not known to."""
    args = call.args if type(call.args) is tuple and call.args else (call.args,)
    name = canonical(named.module, named.name)
    one = found(call) if name in (*_IMPORT, *_UFUNCS) else None
    if one is not None and re.fullmatch(ACTING, one.module):
        return IMPORTED
    if name in _GET and len(args) > 1 and type(args[1]) is not str:
        return UNFOLLOWED
    if name in _GET and type(args[0]) is Call and nodes.global_of(args[0].func) == named:
        return None  # an attribute of an attribute: the inner call was judged by itself
    if name == "dill._dill._eval_repr" and type(args[0]) is str and re.fullmatch(_LITERALS, args[0]):
        return None
    if why := reach(named):
        return why
    if how == "calls" and name in CALLED_CLASSES:
        return LOADS
    if named.name.rpartition(".")[2] in _CHANGER_NAMES and type(args[0]) is Global:
        return CHANGED if args[0].module != "__main__" else None
    if not is_wary:
        return None
    given = passed((*args, call.kwargs))
    return f"{PASSED}: {given}" if given else None
