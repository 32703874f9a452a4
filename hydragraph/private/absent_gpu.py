"""Compilation for an absent GPU, which fills Inductor's cache."""

from __future__ import annotations

import ast
import ctypes
import functools
import hashlib
import inspect
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from hydragraph.errors import Unsupported
from hydragraph.kernels.gpu_arch import GpuArch


@dataclass(frozen=True)
class BuiltKernel:
    """Kernel that Inductor wrote and Triton compiled, in the first configuration that Inductor would try.

    Attributes:
        configurations: number of configurations that autotuning would time.
        bytes: bytes of device memory that a launch reads and writes.
    """

    cubin: bytes
    shared_bytes: int
    configurations: int
    bytes: int


@dataclass(frozen=True)
class Launch:
    name: str
    source: str


def launches(code: Any) -> list[Launch]:
    # sources: kernel name -> Triton source, from async_compile.triton("name", "source")
    tree = ast.parse(code.source_code)
    calls = [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    sources = {node.args[0].value: node.args[1].value for name, node in calls if name == "async_compile.triton"}
    launch_lines = [(node.lineno, name) for name, node in calls if name.endswith(".run") or name.startswith(_LIBRARIES)]
    names = [name.removesuffix(".run") for _, name in sorted(launch_lines)]
    return [Launch(name, sources.get(name, "")) for name in names]


_LIBRARIES = ("extern_kernels.", "torch.ops.")


@contextmanager
def absent_gpu(arch: GpuArch, kernels: dict[str, BuiltKernel]) -> Iterator[None]:
    """Let Inductor compile for an absent GPU with a fresh cache, and store kernels by source in `kernels`.

    Raises:
        Unsupported: Triton interprets kernels, or PyTorch's CPU build finds no C++ compiler.
    """
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise Unsupported("Triton interprets kernels", where="TRITON_INTERPRET=1", remedy="unset TRITON_INTERPRET")
    import triton
    from torch._dynamo import device_interface
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CacheBase
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.runtime import hints, triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.utils import fresh_cache

    guard()
    # Bytes by kernel
    traffic: dict[str, int] = {}
    binaries: list[Any] = []
    define: Any = TritonScheduling.define_kernel
    load: Any = AsyncCompile.triton
    build: Any = triton.compile
    # Fails for CUDA in a CPU build of PyTorch
    look_up: Any = device_interface.get_interface_for_device

    def measure(scheduling: Any, source: str, nodes: Any, kernel: Any) -> Any:
        name = define(scheduling, source, nodes, kernel)
        traffic[name] = int(kernel.estimate_kernel_num_bytes())
        return name

    def collect(compiler: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        # binaries: what Triton has compiled for this kernel, one per configuration
        binaries.clear()
        loaded = load(compiler, name, source, device_str)
        if binaries:
            first = binaries[0]
            measured = (len(binaries), traffic.get(name, 0))
            kernels[source] = BuiltKernel(first.asm["cubin"], first.metadata.shared, *measured)
        return loaded

    def compile_one(*args: Any, **options: Any) -> Any:
        binaries.append(build(*args, **options))
        return binaries[-1]

    cuda = device_interface.CudaInterface
    answers = _answers(arch)
    zeros = dict.fromkeys(("exchange_device", "maybe_exchange_device", "get_raw_stream"), _always(0))
    interface = {name: staticmethod(answer) for name, answer in {**answers, **zeros}.items()}
    # replaced: object -> {attribute: replacement}, to answer questions about the GPU, and to keep
    # the binary instead of loading it onto a device
    replaced: dict[Any, dict[str, Any]] = {
        torch.cuda: answers,
        torch._C: {"_cuda_getCurrentRawStream": _always(0)},
        cuda: interface,
        cuda.Worker: {"get_device_properties": staticmethod(answers["get_device_properties"])},
        AsyncCompile: {"triton": collect},
        TritonScheduling: {"define_kernel": measure},
        CachingAutotuner: {"_make_launchers": _always(None), "_dynamic_scale_rblock": _always(None)},
        triton_helpers: {"set_driver_to_gpu": _always(None)},
        triton: {"compile": compile_one},
        triton.runtime.driver: {"_active": _driver(arch)},
        device_interface: {
            "get_interface_for_device": lambda device: cuda if torch.device(device).type == "cuda" else look_up(device)
        },
    }
    create: Any = hints.DeviceProperties.create
    with ExitStack() as entered:
        for owner, changed in replaced.items():
            entered.enter_context(mock.patch.multiple(owner, create=True, **changed))
        entered.enter_context(config.patch(compile_threads=1))
        entered.enter_context(fresh_cache())
        entered.enter_context(mock.patch.object(CacheBase, "get_system", staticmethod(_system(arch.name))))
        # `create` caches devices' properties, which must not mix: clear it before and after.
        create.cache_clear()
        entered.callback(create.cache_clear)
        yield


def share_cache(arch: str) -> None:
    """Let GPUs of one architecture share Inductor's cache."""
    from torch._inductor.codecache import CacheBase

    CacheBase.get_system = staticmethod(_system(arch))


def _system(arch: str) -> Callable[[], Any]:
    from torch._inductor.codecache import CacheBase

    uncached: Any = inspect.unwrap(CacheBase.get_system)

    @functools.cache
    def system() -> Any:
        version = uncached().get("version", {})
        device = {"name": arch}
        digest = hashlib.sha256(json.dumps([device, version], sort_keys=True).encode()).hexdigest()
        return {"device": device, "version": version, "hash": digest}

    return system


def _answers(arch: GpuArch) -> dict[str, Callable[..., Any]]:
    major, minor = arch.capability
    properties = SimpleNamespace(
        name=arch.gpu,
        major=major,
        minor=minor,
        multi_processor_count=arch.multiprocessors,
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=arch.memory_bytes,
        L2_cache_size=arch.cache_bytes,
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=arch.shared_bytes,
        shared_memory_per_multiprocessor=arch.shared_bytes + 1024,
        gcnArchName="",
    )
    answers: dict[str, Any] = {
        **dict.fromkeys(("set_device", "synchronize", "set_rng_state", "_lazy_init"), None),
        **dict.fromkeys(("is_available", "is_bf16_supported", "_is_compiled"), True),
        **dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device"), 0),
        "is_initialized": False,
        "device_count": 1,
        "get_device_properties": properties,
        "get_device_capability": (major, minor),
        "get_device_name": arch.gpu,
        "get_arch_list": [arch.name],
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }
    return {name: _always(answer) for name, answer in answers.items()}


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _driver(arch: GpuArch) -> SimpleNamespace:
    from triton.backends.compiler import GPUTarget

    major, minor = arch.capability
    target = GPUTarget("cuda", 10 * major + minor, 32)
    return SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )


@functools.cache
def guard() -> None:
    """Register a device guard, so that PyTorch can select an absent GPU."""
    if torch.version.cuda is not None:
        torch._C._ensureCUDADeviceGuardSet()
        return
    root = Path(torch.__file__).parent
    with TemporaryDirectory() as folder:
        source = Path(folder) / "guard.cpp"
        library = Path(folder) / "guard.so"
        source.write_text(_GUARD)
        paths = [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10", "-o", str(library)]
        compiler = os.environ.get("CXX", "g++")
        try:
            subprocess.run([compiler, "-std=c++20", "-shared", "-fPIC", str(source), *paths], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            remedy = "install g++, or PyTorch's CUDA build, which works without a GPU"
            raise Unsupported(f"{compiler} fails ({error})", where="PyTorch's CPU build", remedy=remedy) from None
        ctypes.CDLL(str(library))


_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static const c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
static const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
"""
