"""Python processes for tests, forked from a server that has imported the large libraries once.

A process of ours imports torch, transformers and peft for 4 to 8 seconds of processor time before
it does its work. `forked_processes` makes `subprocess` fork such a process from a server instead,
in some hundredths of a second. The caller gets a child of its own, with the arguments, descriptors,
environment, folder and session it asked for, which it waits for and kills as usual. The server
imports and never computes, since a fork copies no thread.

Inductor makes no code in a fork: the operations of a compiled graph call torch's own code. g++
would compile some twenty kernels for a layer, each for more than a second. OWN_CODE has it do so.
"""

import atexit
import builtins
import ctypes
import fcntl
import gc
import importlib
import io
import itertools
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import autotune

ROOT = Path(__file__).parents[2]
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MADV_COLLAPSE = 25
# of glibc's malloc.h
MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_ARENA_MAX": -8}
READ_AT_START = (
    "OMP_",
    "MKL_",
    "LD_",
    "PYTHONHASHSEED",
    "PYTHONIOENCODING",
    "PYTHONWARNINGS",
    "HF_HOME",
)
FLAGS, OPTIONS = ("-P", "-u"), ("-m", "-c")
# they start no Python process
LEAVES = ("autotune.probe.worker", "autotune.dry.worker", "autotune.probe.demo_model")
# They import triton, which torch for CPUs lacks, or another trainer.
FOR_GPUS = ("autotune.trainer.grouped_kernels", "autotune.api.axolotl_plugin")
PROGRAMS = (
    *LEAVES,
    "autotune.__main__",
    "autotune.probe.learner",
    "autotune.probe.ahead_worker",
    "autotune.export.run.child",
)
# no look-ups and no threads
QUIET = {"HF_HUB_OFFLINE": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
# Autotune passes variables of torch on to the processes that it starts.
OWN_CODE = "TORCHINDUCTOR_OWN_CODE"
# Few tests need exact times, so probes on the CPU time few steps. FULL_TIMES has them time as many
# steps as for a user.
SHORT_SHARE = 0.02
FULL_TIMES = "TORCH_TEST_FULL_TIMES"
HIGH = 512  # above every descriptor of a test
MESSAGE_BYTES = 150_000  # more than a socket takes as one message is an error
LIBRARIES = (
    *(
        "torch",
        "transformers",
        "peft",
        "accelerate",
        "trl",
        "transformers.models.llama.modeling_llama",
    ),
    *(
        "sqlalchemy.orm",
        "sqlalchemy.dialects.postgresql",
        "sqlalchemy.dialects.sqlite",
        "optuna.storages._rdb.models",
        "alembic.autogenerate",
        "plotly.graph_objs._figure",
        "rich._emoji_codes",
    ),
)

_fork_exec: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]


class Client:
    """The side of the process that starts others. The server is its child, and ends with it."""

    def __init__(
        self,
        channel: socket.socket,
        environment: Mapping[str, str],
        server: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        """`environment` is the one that the libraries of the server have read."""
        self.channel, self._environment, self._server = channel, environment, server
        self._owner = os.getpid()
        self._one_at_a_time = threading.Lock()

    @classmethod
    def start(cls) -> "Client":
        """Start a server, which imports its libraries meanwhile."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | QUIET | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno())]
        server = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        return cls(ours, environment, server)

    def close(self) -> None:
        """End the server."""
        self.channel.close()
        if self._server is not None:
            self._server.wait()

    def fork_exec(
        self,
        args: Sequence[Any],
        executables: Any,
        close_fds: bool,
        kept: Sequence[int],
        cwd: Any,
        environment: Sequence[bytes] | None,
        *more: Any,
    ) -> int:
        """Stand in for `_posixsubprocess.fork_exec`: return the process id of a new child of this
        process.
        """
        (
            p2cread,
            _,
            _,
            c2pwrite,
            _,
            errwrite,
            _,
            errpipe,
            _,
            new_session,
            group,
            *identity,
            preexec,
        ) = more[:16]
        variables = _variables(environment)
        words = list(map(os.fsdecode, args))
        is_plain = (
            close_fds
            and preexec is None
            and group == -1
            and all(one in (None, -1) for one in identity)
        )
        folder = os.path.abspath(os.fsdecode(cwd or os.curdir))
        if not (is_plain and os.path.isdir(folder) and self._can_run(words, variables)):
            return _fork_exec(args, executables, close_fds, kept, cwd, environment, *more)
        # a fork of the owner, which is no ancestor of the owner's server
        if self._owner != os.getpid():
            opened = {*kept, *more[:8]}.difference(range(-1, 3))
            self.channel, self._owner = _template(opened).channel, os.getpid()
        handles = {0: p2cread, 1: c2pwrite, 2: errwrite} | {
            handle: handle for handle in kept if handle != errpipe
        }
        request = {
            "parent": os.getpid(),
            "group": None if new_session else os.getpgrp(),
            "arguments": words[1:],
            "cwd": folder,
            "variables": variables,
            "handles": list(handles),
        }
        return self._ask(
            request, [number if handle == -1 else handle for number, handle in handles.items()]
        )

    def _can_run(self, words: list[str], variables: Mapping[str, str]) -> bool:
        """Whether a fork of the server does the same as a new process."""
        first = next((word for word in words[1:] if word not in FLAGS), "")
        named = {
            name for name in (*variables, *self._environment) if name.startswith(READ_AT_START)
        }
        return (
            words[0] == sys.executable
            and (first in OPTIONS or not first.startswith("-"))
            and all(variables.get(name) == self._environment.get(name) for name in named)
        )

    def _ask(self, request: dict[str, Any], handles: list[int]) -> int:
        """Have the server fork twice: the kernel gives an orphan to its nearest forebear that is a
        subreaper.
        """
        message = json.dumps(request).encode()
        with self._one_at_a_time:
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self.channel, [message], handles)
                answer = self.channel.recv(64)
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise ChildProcessError(
                "the server that forks processes has ended; its stderr says why"
            )
        return int(answer)


def _variables(environment: Sequence[bytes] | None) -> dict[str, str]:
    if environment is None:
        return dict(os.environ)
    pairs = (os.fsdecode(one).partition("=") for one in environment)
    return {name: value for name, _, value in pairs}


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


@contextmanager
def forked_processes(client: Client, only: str | None = None) -> Iterator[None]:
    """Inside, this process's new Python processes are forks of the client's server, if those do the
    same. With `only`, the processes that run this module.
    """

    def fork_exec(args: Sequence[Any], *more: Any) -> int:
        fork = client.fork_exec if only is None or only in args else _fork_exec
        return fork(args, *more)

    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess._fork_exec = _fork_exec  # type: ignore[attr-defined]


def serve(channel: socket.socket) -> None:
    """Fork a process for each request, until the client closes its end."""
    while True:
        message, handles, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 253)
        if not message:
            return
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                _run(json.loads(message), handles, channel)
            os._exit(0)
        os.waitpid(between, 0)
        for handle in handles:
            os.close(handle)


def _run(request: dict[str, Any], received: list[int], channel: socket.socket) -> NoReturn:
    """Become the process that was asked for. This never returns."""
    code = 1
    try:
        _wait_for_parent(request["parent"])
        if request["group"] is None:
            os.setsid()
        else:
            os.setpgid(0, request["group"])
        arguments = request["arguments"]
        client = None if set(LEAVES).intersection(arguments) else _template(received)
        channel = _take(dict(zip(request["handles"], received, strict=True)), channel, client)
        _settle(request)
        if client is not None:
            subprocess._fork_exec = client.fork_exec  # type: ignore[attr-defined]
        channel.send(str(os.getpid()).encode())
        channel.close()
        code = _main(arguments)
    finally:
        os._exit(code)


def _wait_for_parent(parent: int) -> None:
    """Wait until the intermediate process has ended: then the client is the parent."""
    until = time.monotonic() + 10
    while os.getppid() != parent:
        if time.monotonic() > until:
            os._exit(1)
        time.sleep(0.0002)


def _template(received: Iterable[int]) -> Client:
    """Fork a server for the processes that this one starts, before this one does anything.

    The server closes the received descriptors.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork():
        theirs.close()
        return Client(ours, dict(os.environ))
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            ours.close()
            for handle in received:
                os.close(handle)
            serve(theirs)
    finally:
        os._exit(0)


def _take(
    handles: Mapping[int, int], channel: socket.socket, client: Client | None
) -> socket.socket:
    """Have the received descriptors under the numbers that the client has for them, and close all
    others.

    Returns the channel, which gets a new number.
    """
    moved = {number: fcntl.fcntl(handle, fcntl.F_DUPFD, HIGH) for number, handle in handles.items()}
    channel = _raised(channel)
    if client is not None:
        client.channel = _raised(client.channel)
    os.closerange(0, HIGH)
    for number, handle in moved.items():
        os.dup2(handle, number)
        os.close(handle)
    return channel


def _raised(channel: socket.socket) -> socket.socket:
    """The same socket with a high number."""
    return socket.socket(fileno=fcntl.fcntl(channel.detach(), fcntl.F_DUPFD_CLOEXEC, HIGH))


def _settle(request: dict[str, Any]) -> None:
    """Set what Python and the libraries read when they start."""
    import numpy
    from torch._inductor import config as inductor

    from autotune.probe import recorder

    variables = request["variables"]
    inductor.fallback_by_default = OWN_CODE not in variables
    if FULL_TIMES not in variables:
        recorder.CPU_SHARE = SHORT_SHARE
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*own, *(path for path in sys.path if path not in inherited)]
    sys.orig_argv = [sys.executable, *request["arguments"]]
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(variables)
    for name, option in MALLOPT.items():
        if name in variables:
            ctypes.CDLL(None).mallopt(option, int(variables[name]))
    time.tzset()
    tempfile.tempdir = None
    numpy.random.seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    through = "PYTHONUNBUFFERED" in variables or "-u" in request["arguments"]
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = _output(1, "strict", through)
    sys.stderr = sys.__stderr__ = _output(2, "backslashreplace", through)
    sys.stderr.reconfigure(line_buffering=True)
    custom = next((file for path in own if (file := Path(path, "sitecustomize.py")).exists()), None)
    if custom is not None:
        runpy.run_path(str(custom))


def _output(handle: int, errors: str, through: bool) -> io.TextIOWrapper:
    file = os.fdopen(handle, "w", errors=errors, closefd=False)
    file.reconfigure(write_through=through)
    return file


def _main(arguments: list[str]) -> int:
    """Run a program as Python does from its command line, and return the exit code."""
    code = 0
    try:
        _execute(arguments)
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:
        error.__traceback__ = _of_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code & 0xFF


def _execute(arguments: list[str]) -> None:
    flags = list(itertools.takewhile(FLAGS.__contains__, arguments))
    safe, (option, *rest) = "-P" in flags, arguments[len(flags) :]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if option == "-m":
        sys.argv = rest
        sys.path[:0] = [] if safe else [os.getcwd()]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        return
    if option == "-c":
        sys.argv, text, name, first = ["-c", *rest[1:]], rest[0], "<string>", ""
    else:
        sys.argv, text, name = [option, *rest], Path(option).read_text(), option
        first = os.path.dirname(os.path.realpath(option))
        main.__file__ = option
    sys.path[:0] = [] if safe else [first]
    exec(compile(text, name, "exec"), main.__dict__)


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _of_program(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Skip the frames of this file and of `runpy`; return the frames of the program."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (
        __file__,
        runpy.__file__,
        "<frozen runpy>",
    ):
        trace = trace.tb_next
    return trace


def _own_modules() -> list[str]:
    """List the modules of autotune, without PROGRAMS and FOR_GPUS.

    `runpy` warns if it runs a loaded module.
    """
    names = [module.name for module in pkgutil.walk_packages(autotune.__path__, "autotune.")]
    return [name for name in names if name not in (*PROGRAMS, *FOR_GPUS)]


def _collapse_pages() -> None:
    """Have the kernel keep memory in huge pages, which halves the time of a fork.

    A huge page that is not resident as a whole stays as it is: filling it would hide the memory
    that a probe allocates. Linux before 6.1 has no such call, and refuses it.
    """
    size = int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    page = os.sysconf("SC_PAGE_SIZE")
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    regions = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for bounds, access, _, _, _, *name in regions:
            if "w" not in access or name not in ([], ["[heap]"]):
                continue
            first, end = (int(bound, 16) for bound in bounds.split("-"))
            for begin in range(-(-first // size) * size, end - size + 1, size):
                entries = os.pread(pagemap.fileno(), size // page * 8, begin // page * 8)
                # bit 63 of an entry: the page is present
                if all(entry >> 63 for entry in memoryview(entries).cast("Q")):
                    libc.madvise(begin, size, MADV_COLLAPSE)


def main() -> None:
    """Import the libraries, and serve the parent on the socket whose descriptor is the argument."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    from transformers import conversion_mapping

    for name in (*LIBRARIES, *_own_modules()):
        importlib.import_module(name)
    # Torch's operators, which a process would take down one by one when it ends.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    # 900 regular expressions, which the library keeps
    conversion_mapping.get_checkpoint_conversion_mapping("llama")
    gc.freeze()
    gc.enable()
    # resident free blocks would hide the memory that a probe allocates
    ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):  # a kernel without huge pages
        _collapse_pages()
    assert len(os.listdir("/proc/self/task")) == 1, (
        "a fork has one thread: an import has started another"
    )
    serve(channel)
    os._exit(0)


if __name__ == "__main__":
    main()
