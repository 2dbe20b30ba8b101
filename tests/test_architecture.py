"""What the shape of the package promises, proven by walking its source and by fresh interpreters."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest

import ckptool
from ckptool.errors import Cancelled, CkptoolError, Failure
from ckptool.pickles.reader import gc_paused
from tests.each import each

PACKAGE = Path(ckptool.__file__).parent
MODULES = [path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py"))]
# The reference trainer makes checkpoints with torch; no other module knows of it.
TOOL = [name for name in MODULES if not name.startswith("reference/")]
# The one door to torch also builds a class, which the user names and no file.
EDGE = ("loading/", "torch_ops/")
TRUSTED = "loading/load_model.py"
# It starts this Python, with this package, and hands it paths, and what was asked for: nothing of a file's.
STARTS = "cli/pool.py"
# The one room where the system's own calls are made.
SYSTEM = "system/"
# Two tables of our own names, whose modules are imported when they are asked for.
TABLES = {"__init__.py", "cli/verbs.py"}
INSIDE = sorted(name for name in TOOL if not name.startswith(EDGE))

# Raised and caught inside one package alone.
CONTROL_FLOW = {"NeedMore", "_NeedsProtocol4", "TemporaryFailure"}
LONG_FUNCTIONS = {"_loop": "the hot loop of the pickle interpreter: calls would double its time"}

RUNS = {
    "eval", "exec", "compile", "__import__", "breakpoint", "input", "pickle.load", "pickle.loads", "pickle.Unpickler",
    "marshal.load", "marshal.loads", "torch.load", "torch.jit.load", "torch.hub.load", "os.system", "os.popen",
    "os.fork",
}  # fmt: skip
RUNNERS = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "importlib", "runpy", "code",
    "codeop", "subprocess", "multiprocessing", "ctypes", "cffi", "socket", "urllib", "http", "shutil", "pkgutil", "imp",
}  # fmt: skip
NETWORK = "sources/remote/"
"""The one package that may talk to others, and only about the address that it was given."""
TALKS = {"socket", "http", "urllib", "ssl"}
OPENS = {
    "open", "os.open", "os.fdopen", "io.open", "io.FileIO", "codecs.open", "gzip.open", "zipfile.ZipFile",
    "tarfile.open", "mmap.mmap",
}  # fmt: skip
OPENING_METHODS = (".read_bytes", ".read_text", ".write_bytes", ".write_text")


@cache
def trees() -> dict[str, tuple[ast.Module, list[ast.AST]]]:
    """Return the tree of each module, and all that is in it."""
    with gc_paused():  # which takes as long as all the rest
        found = {name: ast.parse((PACKAGE / name).read_text("utf-8")) for name in MODULES}
        return {name: (tree, list(ast.walk(tree))) for name, tree in found.items()}


def parsed(name: str) -> ast.Module:
    return trees()[name][0]


def nodes(name: str) -> list[ast.AST]:
    return trees()[name][1]


@cache
def imported(name: str) -> list[str]:
    """Return the top-level package of each import, wherever it stands, unless it is for type checkers only."""
    skipped = {id(inner) for node in nodes(name) if _is_type_checking(node) for inner in ast.walk(node)}
    found = []
    for node in nodes(name):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module or "").partition(".")[0])
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@cache
def mentioned(name: str) -> frozenset[str]:
    """Return every name, and every dotted name, in the code."""
    return frozenset(_dotted(node) for node in nodes(name) if isinstance(node, ast.Name | ast.Attribute))


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


@each("name", TOOL)
def test_no_module_runs_what_a_file_says(name: str) -> None:
    if name == TRUSTED:
        return  # behind a parameter called ``trust``
    assert RUNS.isdisjoint(mentioned(name))


@each("name", INSIDE)
def test_no_module_has_the_means_to_run_anything(name: str) -> None:
    allowed = TALKS if name.startswith(NETWORK) else {"importlib"} if name in TABLES else set()
    allowed = {"multiprocessing"} if name == STARTS else {"ctypes"} if name.startswith(SYSTEM) else allowed
    if name == "sources/address.py":  # it takes addresses apart, and talks to nobody
        assert "from urllib.parse import" in (PACKAGE / name).read_text("utf-8")
        allowed = {"urllib"}
    assert ((RUNNERS | TALKS) - allowed).isdisjoint(imported(name))


def test_the_one_module_that_starts_processes_starts_its_own_function_alone() -> None:
    starts = [node for node in nodes(STARTS) if isinstance(node, ast.Call) and _dotted(node.func) == "_NEW.Process"]
    (target,) = [ast.unparse(one.value) for start in starts for one in start.keywords if one.arg == "target"]

    assert target == "_serve"
    assert 'multiprocessing.get_context("spawn")' in (PACKAGE / STARTS).read_text("utf-8")


@each("name", INSIDE)
def test_no_module_looks_names_up_by_what_a_file_says(name: str) -> None:
    calls = [node for node in nodes(name) if isinstance(node, ast.Call)]
    loops = [node for node in nodes(name) if isinstance(node, ast.For | ast.comprehension)]
    # ``for name in ("a", "b")`` asks for no other names than these.
    literal = {ast.unparse(loop.target) for loop in loops if _is_literal(loop.iter)}

    assert {"globals", "vars", "locals"}.isdisjoint(_dotted(call.func) for call in calls)
    assert "sys.modules" not in mentioned(name) or name == STARTS  # which hides the script from new processes
    for call in calls if name not in TABLES else ():
        if _dotted(call.func) in ("getattr", "setattr", "hasattr", "delattr"):
            assert isinstance(call.args[1], ast.Constant) or ast.unparse(call.args[1]) in literal


def _is_literal(node: ast.AST) -> bool:
    return isinstance(node, ast.Tuple) and all(isinstance(item, ast.Constant) for item in node.elts)


@each("name", INSIDE)
def test_torch_is_imported_by_the_bridge_alone(name: str) -> None:
    assert {"torch", "numpy"}.isdisjoint(imported(name))
    # What is written as safetensors is read again by the reference library.
    assert "safetensors" not in imported(name) or name == "migration/safetensors_plan.py"


def test_nothing_that_reads_a_file_reaches_the_bridge() -> None:
    loaded = loaded_by("import ckptool, ckptool.checking.structure, ckptool.inspecting.head")

    assert not [name for name in loaded if name.startswith(("ckptool.loading", "ckptool.torch_ops"))]


@each("name", sorted(name for name in INSIDE if not name.startswith((SYSTEM, "sources/", "migration/output/"))))
def test_only_sources_and_outputs_open_files(name: str) -> None:
    called = {_dotted(node.func) for node in nodes(name) if isinstance(node, ast.Call)}

    assert OPENS.isdisjoint(called)
    assert not [function for function in called if function.endswith(OPENING_METHODS)]


@each("name", sorted(name for name in TOOL if not name.startswith("cli/")))
def test_nothing_passes_over_a_cancellation(name: str) -> None:
    """Handlers that do not raise catch ``Failure``: that is every error but ``Cancelled``."""
    for node in nodes(name):
        if isinstance(node, ast.Call) and _dotted(node.func) == "suppress":
            assert "CkptoolError" not in map(_dotted, node.args), node.lineno
        for handler in node.handlers if isinstance(node, ast.Try) else ():
            caught = set() if handler.type is None else {_dotted(one) for one in ast.walk(handler.type)}
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(handler))
            if "Cancelled" in caught:
                break
            assert raises or "CkptoolError" not in caught, handler.lineno


def test_every_error_but_a_cancellation_is_a_failure() -> None:
    classes = [
        one for one in vars(ckptool.errors).values() if isinstance(one, type) and one.__module__ == "ckptool.errors"
    ]

    assert {one for one in classes if not issubclass(one, Failure)} == {CkptoolError, Cancelled}


@each("name", sorted(set(MODULES) - {"errors.py"}))
def test_only_errors_defines_exceptions(name: str) -> None:
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for node in nodes(name)
        if isinstance(node, ast.ClassDef)
    }
    known = {cls for cls in vars(ckptool.errors) if cls[0].isupper()}
    exceptions = {
        cls
        for cls, above in bases.items()
        if above & known or any(base.endswith(("Exception", "Error")) for base in above)
    }

    assert exceptions <= CONTROL_FLOW


@each("name", sorted(name for name in TOOL if not name.startswith("formats/")))
def test_formats_are_known_by_their_traits_outside_of_their_own_package(name: str) -> None:
    for node in nodes(name):
        looked_up: list[ast.expr] = []
        if isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Is | ast.IsNot):
            looked_up = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript):  # a table of formats compares, too
            looked_up = [node.slice]
        elif isinstance(node, ast.Call) and _dotted(node.func).endswith(".get"):
            looked_up = node.args[:1]
        for one in looked_up:
            assert not re.search(r"\.format\b(?!\()", ast.unparse(one)), ast.unparse(node)


def test_json_is_read_by_the_strict_parser() -> None:
    users = {name for name in TOOL if "json" in imported(name) and not name.startswith("cli/")}

    assert users == {
        "formats/strict_json.py",
        "formats/safetensors.py",  # writes
        "migration/safetensors_plan.py",  # writes
        "checking/scan.py",  # writes
        "inspecting/inspect.py",  # writes
        "formats/runnable/programs.py",  # looks at all texts in it, as those do who take any
        "formats/other_programs.py",  # looks at all texts in it, whatever is around them
        "formats/identify.py",  # only names what a file is; nothing is taken from it
    }
    for name in ("formats/safetensors.py", "migration/safetensors_plan.py"):
        assert {"json.load", "json.loads", "json.JSONDecoder"}.isdisjoint(mentioned(name))


ASKS = {
    "os.pread", "os.preadv", "os.pwrite", "os.pwritev", "os.copy_file_range", "os.posix_fadvise", "os.posix_fallocate",
    "os.fsync", "os.fdatasync", "os.fchmod", "os.fchown", "os.link", "os.rename", "os.replace", "os.readlink",
    "os.statvfs", "os.fstatvfs", "os.sysconf", "os.kill", "os.open", "os.getxattr", "os.setxattr", "os.listxattr",
    "os.name", "sys.platform",
}  # fmt: skip
SYSTEMS_MODULES = {"fcntl", "resource", "msvcrt", "selectors", "termios"}


@each("name", sorted(name for name in TOOL if not name.startswith(SYSTEM)))
def test_one_package_makes_the_calls_that_differ_between_systems(name: str) -> None:
    options = {one.arg for node in nodes(name) if isinstance(node, ast.Call) for one in node.keywords}
    texts = {node.value for node in nodes(name) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    found = {
        *(ASKS & mentioned(name)),
        *(SYSTEMS_MODULES & set(imported(name))),
        *({"dir_fd", "src_dir_fd"} & options),
        *(one for one in mentioned(name) if one.startswith("os.O_") or one.endswith((".CDLL", ".WinDLL"))),
        *(one for one in texts if one.startswith(("/proc/", "/sys/", "O_"))),
    }

    assert not found


def test_every_system_has_the_same_functions() -> None:
    posix, nt = (
        {
            node.name: (ast.unparse(node.args), ast.unparse(node.returns) if node.returns else "")
            for node in parsed(f"{SYSTEM}{one}.py").body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        }
        for one in ("posix", "nt")
    )

    assert posix == nt


def test_reading_never_opens_for_writing() -> None:
    for name in (name for name in MODULES if name.startswith("sources/")):
        assert {"os.O_WRONLY", "os.O_RDWR", "os.O_CREAT", "os.O_TRUNC"}.isdisjoint(mentioned(name))


@each("name", sorted(name for name in TOOL if not name.startswith("cli/")))
def test_only_the_command_line_prints(name: str) -> None:
    names = set(mentioned(name))
    if name == "sources/remote/bucket.py":
        names.discard("os.environ")  # who signs depends on whether keys are in it

    assert {"print", "click.echo", "sys.stdout", "sys.stderr", "sys.exit", "os.environ", "os.getenv"}.isdisjoint(names)


SPELLS_OPTIONS = {"checking/explain/__init__.py"}
"""What these say is for people who paste messages into a terminal, and ends in a command line."""


@each("name", sorted(name for name in TOOL if not name.startswith("cli/")))
def test_only_the_command_line_spells_options(name: str) -> None:
    texts = [node.value for node in nodes(name) if isinstance(node, ast.Constant)]
    spelled = [text for text in texts if isinstance(text, str) and re.search(r"(?<![\w-])--[a-z]", text)]

    assert bool(spelled) == (name in SPELLS_OPTIONS), spelled


def test_nothing_imports_the_reference_trainer_but_its_commands() -> None:
    users = {name for name in TOOL if "ckptool.reference" in (PACKAGE / name).read_text("utf-8")}

    assert all(name.startswith("cli/") for name in users)


def loaded_by(statement: str) -> set[str]:
    """Return the modules that a fresh interpreter holds after a statement."""
    code = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_ckptool_imports_nothing_else() -> None:
    # The command line begins with this, before anything of it could answer an interrupt.
    assert loaded_by("import ckptool") - loaded_by("pass") == {"ckptool", "__future__"}


def test_the_public_functions_and_errors_are_light() -> None:
    heavy = {"torch", "numpy", "safetensors", "click", "tabulate", "pickle", "subprocess", "socket", "difflib"}
    heavy |= {"ctypes"} if sys.platform != "win32" else set()  # which asks the system by it

    assert heavy.isdisjoint(loaded_by("import ckptool; ckptool.open_checkpoint, ckptool.CkptoolError"))


def test_the_command_line_needs_neither_torch_nor_numpy() -> None:
    loaded = loaded_by("import ckptool.cli")

    assert {"torch", "numpy", "safetensors"}.isdisjoint(loaded)
    assert "difflib" not in loaded, "from ckptool import MODULE asks ckptool for a name that is like it"


def test_the_top_level_holds_what_belongs_there() -> None:
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=PACKAGE.parent, capture_output=True, check=False)
    top = {name.partition("/")[0] for name in listed.stdout.decode().split("\0") if name}
    if not top:
        pytest.skip("not in a checkout of its own")

    assert {name for name in top if not name.startswith(".")} == {
        *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "pyproject.toml"),
        *("ckptool", "docs", "fixtures", "tests"),
    }


def test_modules_are_named_for_what_they_do() -> None:
    stems = {Path(name).stem.strip("_") for name in MODULES}

    assert stems.isdisjoint(
        {"utils", "util", "helpers", "helper", "manager", "common", "misc", "base", "core", "tools"}
    )


@each("name", MODULES)
def test_no_function_is_longer_than_80_lines(name: str) -> None:
    for node in nodes(name):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in LONG_FUNCTIONS:
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 80, node.name


@each("name", MODULES)
def test_makers_of_tuples_are_typed_as_the_tuples_are(name: str) -> None:
    # tuple.__new__ looks at nothing, so mypy must: it compares each call with what the maker is said to take.
    count = (PACKAGE / name).read_text("utf-8").count("tuple.__new__")
    if count:
        module = import_module(f"ckptool.{name.removesuffix('.py').replace('/', '.')}")
        written = {one: text for one, text in module.__annotations__.items() if one.lstrip("_").startswith("make_")}
        found = get_type_hints(SimpleNamespace(__annotations__=written), vars(module))
        assert len(found) == count, "a maker without a type"
        for maker, hint in found.items():
            (fields,), made = get_args(hint)
            assert vars(module)[maker].args == (made,)
            assert list(get_args(fields)) == list(get_type_hints(made).values()), maker


def test_the_page_on_architecture_names_what_is_there() -> None:
    page = (PACKAGE.parent / "docs/architecture.md").read_text("utf-8")
    named = set(re.findall(r"`([a-z_/]+(?:/|\.py))`", page)) - {"ckptool/"}
    rooms = {one.parent.relative_to(PACKAGE).as_posix() + "/" for one in PACKAGE.glob("*/__init__.py")}

    assert not [one for one in named if not (PACKAGE / one).exists() and not one.startswith("tests/")]
    assert rooms <= named, "a package is new: say in which row it belongs"


def test_the_page_for_contributors_names_files_that_are_there() -> None:
    root = PACKAGE.parent
    named = set(re.findall(r"`([\w./]+\.(?:py|ini|md))`", (root / "CONTRIBUTING.md").read_text("utf-8")))
    files = {one.name for folder in (root.glob("*"), PACKAGE.rglob("*")) for one in folder}

    assert not [one for one in named if not ((root / one).exists() if "/" in one else one in files)]


@each("name", MODULES)
def test_every_module_says_what_it_is(name: str) -> None:
    tree = parsed(name)

    assert ast.get_docstring(tree) or not tree.body
