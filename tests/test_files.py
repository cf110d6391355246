"""All file access goes through `gptworks.files`: every other call in the package that opens, reads, writes or copies a
file is listed here, with the reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import gptworks

ROOT = Path(gptworks.__file__).parent

METHODS = {
    "read_text", "read_bytes", "write_text", "write_bytes", "open", "touch", "hardlink_to", "symlink_to",
}  # fmt: skip
"""Of a pathlib.Path, or whatever has a method of this name."""
FUNCTIONS = {
    "open", "io.open", "io.FileIO", "os.open", "os.fdopen", "os.mkfifo", "os.link", "os.symlink", "os.truncate",
    "urllib.request.urlopen", "urlopen", "zipfile.ZipFile", "tarfile.open", "mmap.mmap", "fileinput.input",
    "tempfile.mkstemp", "tempfile.mkdtemp", "tempfile.NamedTemporaryFile", "tempfile.TemporaryDirectory",
    "tempfile.TemporaryFile", "tempfile.SpooledTemporaryFile", "mkstemp", "mkdtemp", "NamedTemporaryFile",
    "TemporaryDirectory", "shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree", "shutil.move",
    "pq.ParquetFile",
    "np.memmap", "np.fromfile", "np.load", "np.save", "np.savez", "np.loadtxt", "np.savetxt", "torch.load",
    "torch.save", "safe_open", "save_file", "load_file", "gzip.open", "bz2.open", "lzma.open", "gzip.GzipFile",
    "sqlite3.connect", "filelock.FileLock", "FileLock", "SummaryWriter",
}  # fmt: skip
AMBIGUOUS = {"open", "fdopen", "input", "link", "symlink", "truncate", "copy", "move", "load", "save", "connect"}
MORE = {
    "from_pretrained", "snapshot_download", "exec_module", "urlretrieve", "OSFile", "memory_map", "genfromtxt",
    "BZ2File", "LZMAFile", "mknod",
}  # fmt: skip
UNMISTAKABLE = ({each.rpartition(".")[2] for each in FUNCTIONS} - AMBIGUOUS) | MORE
"""Names that open a file under whatever name their module is imported."""
DOOR = "files/"


def calls() -> Iterator[tuple[str, str, str]]:
    """Yield each such call: the file, the function around it, and the function called."""
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(DOOR):
            yield from ((name, where, what) for where, what in _calls(ast.parse(path.read_text(encoding="utf-8")), ""))


def _calls(node: ast.AST, around: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inner = around
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{around}.{child.name}".lstrip(".")
        if isinstance(child, ast.Call) and (what := _opens(child.func)):
            yield around, what
        yield from _calls(child, inner)


def _opens(called: ast.expr) -> str | None:
    whole = ast.unparse(called)
    if whole in FUNCTIONS:
        return whole
    if isinstance(called, ast.Attribute) and called.attr in METHODS:
        return f".{called.attr}"
    return last if (last := whole.rpartition(".")[2]) in UNMISTAKABLE else None


OURS = "its name is that of a file that was just checked by, or made in a folder of, `gptworks.files`"
TREE = "`check_tree` has looked at the folder; transformers and PEFT read only safetensors, and run no code of it"
PACKAGE = "a file of the installed package"
MADE = "in a temporary folder of mode 0700 that it has just made"
BUILD = "a developer's command, which writes the module into the repository"
SYSTEM = "a file that the kernel makes, below /proc or /dev"
LOCK = "in the user's own cache of kernels; where a wheel is built, filelock may be missing"
STREAM = "it reads a stream that `gptworks.files` has opened"
NO_FILE = "it opens no file: a stream of requests"
CACHE = "the user's own cache of compiled kernels, in a folder whose owner and mode are checked"
JAIL = "inside the new root of a process that is confined"

LISTED = {
    ("cli/serve.py", "_invitations", "TemporaryDirectory"): "a folder of mode 0700, for a file of this process",
    ("confined/child.py", "_statm", ".read_text"): SYSTEM,
    ("confined/child.py", "serve", "os.fdopen"): "the pipe to the process that has started it",
    ("data/search.py", "_opened", "mmap.mmap"): STREAM,
    ("data/sources/archives.py", "_tar_members", "tarfile.open"): STREAM,
    ("data/sources/archives.py", "_zip", "zipfile.ZipFile"): STREAM,
    ("data/sources/extraction.py", "_epub", "zipfile.ZipFile"): "in a confined process, bytes that were read",
    ("data/sources/records.py", "_parquet_file", "pq.ParquetFile"): "a file that the user named, which is regular",
    ("data/sources/opening.py", "", "gzip.GzipFile"): STREAM,
    ("device.py", "BusyCores._counts", ".read_text"): SYSTEM,
    ("device.py", "_resident", ".read_text"): SYSTEM,
    ("device.py", "memory_figures", "open"): SYSTEM,
    ("device.py", "reset_peak", ".write_text"): SYSTEM,
    ("confined/jail.py", "_build_root", "open"): JAIL,
    ("confined/jail.py", "_build_root", "os.open"): JAIL,
    ("confined/jail.py", "_build_root", "os.symlink"): JAIL,
    ("confined/jail.py", "_write", "os.open"): SYSTEM,
    ("cli/__init__.py", "_open_standard_streams", "os.open"): "the null device, where a standard stream is closed",
    ("cli/__init__.py", "_open_standard_streams", "os.fdopen"): "the same",
    ("infer/engine.py", "Engine._receive", ".open"): NO_FILE,
    ("interop/huggingface/exporting.py", "write_tensors", "save_file"): OURS,
    ("interop/huggingface/importing.py", "read_tensors", "safe_open"): OURS,
    ("kernels/wasm/build.py", "", ".write_bytes"): BUILD,
    ("kernels/wasm/build.py", "", ".write_text"): BUILD,
    ("kernels/wasm/build.py", "build", ".read_bytes"): BUILD,
    ("kernels/wasm/build.py", "build", ".read_text"): BUILD,
    ("kernels/wasm/build.py", "build", ".write_text"): BUILD,
    ("kernels/wasm/build.py", "build", "tempfile.TemporaryDirectory"): BUILD,
    ("kernels/wasm/build.py", "sources", ".read_text"): BUILD,
    ("kernels/wasm/build.py", "sum_of_sources", ".read_bytes"): BUILD,
    ("interop/html_file/page.py", "_as_function", ".read_text"): PACKAGE,
    ("interop/html_file/page.py", "model_page", ".read_text"): PACKAGE,
    ("kernels/wasm/__init__.py", "module", ".read_bytes"): PACKAGE,
    ("interop/html_file/checking.py", "_script", ".read_text"): PACKAGE,
    ("interop/html_file/browser.py", "opened", "tempfile.TemporaryDirectory"): MADE,
    ("interop/peft.py", "_write", "save_file"): OURS,
    ("interop/peft.py", "_in_peft", "from_pretrained"): TREE,
    ("interop/peft.py", "_verify", "from_pretrained"): OURS,
    ("interop/hub.py", "_fetch", "snapshot_download"): "the hub's own client, into its own cache",
    ("interop/huggingface/verify.py", "load_their_tokenizer", "from_pretrained"): TREE,
    ("interop/huggingface/verify.py", "load_theirs", "from_pretrained"): TREE,
    ("interop/huggingface/verify.py", "verify_folder", "from_pretrained"): OURS,
    ("tokenizer.py", "_load_gpt2", "from_pretrained"): "a fixed name on the hub, by the hub's own client",
    ("training/objectives/reward_function.py", "load_reward", "exec_module"): "a program that the user's recipe names",
    ("training/record/writers.py", "TensorBoard.__init__", "SummaryWriter"): OURS,
    ("machine.py", "_lines", ".read_text"): SYSTEM,
    ("kernels/cache.py", "_alone", "filelock.FileLock"): LOCK,
    ("kernels/cache.py", "folders", "tempfile.mkdtemp"): CACHE,
    ("kernels/library.py", "_from_package", ".read_bytes"): PACKAGE,
    ("kernels/build.py", "key", ".read_bytes"): PACKAGE,
    ("kernels/cache.py", "_trusted_bytes", ".open"): CACHE,
    ("kernels/cache.py", "_write", "tempfile.NamedTemporaryFile"): CACHE,
    ("kernels/build.py", "build", ".read_bytes"): CACHE,
    ("kernels/build.py", "build", "tempfile.TemporaryDirectory"): CACHE,
    ("infer/backends/placement.py", "large_block", "mmap.mmap"): "memory, of no file",
    ("recipes/__init__.py", "shipped_recipes", ".read_text"): PACKAGE,
    ("describe/published.py", "_published", ".read_text"): PACKAGE,
    ("runs/bands.py", "shipped_bands", ".read_text"): PACKAGE,
    ("judge/tools.py", "serve", "os.fdopen"): "standard input, which requests come from",
    ("judge/tools.py", "serve", "os.open"): "/dev/null",
    ("serve/generate.py", "begin", ".open"): NO_FILE,
    ("studio/processes.py", "_holds", ".read_text"): SYSTEM,
    ("studio/processes.py", "_trains", ".read_bytes"): SYSTEM,
    ("tensors.py", "TensorFile.read", "safe_open"): OURS,
    ("tensors.py", "open_tensors", "safe_open"): OURS,
    ("tensors.py", "stored_tensors", "safe_open"): OURS,
    ("training/objectives/reward.py", "Reward._starting_model", "save_file"): OURS,
}  # fmt: skip
"""By file, function and call: why it does not go through the door."""


def test_every_file_is_opened_through_the_door_or_is_listed_with_a_reason() -> None:
    found = set(calls())
    new, gone = sorted(found - LISTED.keys()), sorted(LISTED.keys() - found)
    assert not new, f"use gptworks.files, or list it with its reason: {new}"
    assert not gone, f"no such call is there any more: {gone}"


def test_the_walk_sees_what_it_is_to_see() -> None:
    source = """
def f(path):
    open(path); path.open("w"); shutil.copytree(path, "b"); os.open(path, 0)
    class A:
        def g(self): return [Path(x).read_bytes() for x in "ab"]
"""
    seen = set(_calls(ast.parse(source), ""))
    aliased = "from shutil import copyfile as c, copytree\nimport numpy\ncopytree(a, b)\nnumpy.memmap(a)\nnumpy.load"
    assert set(_calls(ast.parse(aliased), "")) == {("", "copytree"), ("", "memmap")}
    assert seen == {("f", "open"), ("f", ".open"), ("f", "shutil.copytree"), ("f", "os.open"), ("f.A.g", ".read_bytes")}
