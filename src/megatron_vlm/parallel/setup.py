"""Process groups, devices and seeds: from torchrun's environment to Megatron's parallel state."""

import gc
import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vlm import files
from megatron_vlm.config import ConfigError, ParallelConfig
from megatron_vlm.job import watchdog
from megatron_vlm.messages import join_lines
from megatron_vlm.parallel import cpu
from megatron_vlm.validate import check_gpus, layout_problems

cpu.install()  # before Megatron is imported, which compiles functions then

from megatron.core import parallel_state, tensor_parallel  # noqa: E402

_runs = itertools.count()


def init_distributed(parallel: ParallelConfig, seed: int, deterministic: bool = False) -> None:
    """Join the processes that torchrun started, or be a single process without it, and lay them out.

    Sets up `torch.distributed`, `megatron.core.parallel_state`, all generators, the CUDA device and, on CPU,
    the number of threads. Raises ConfigError for a layout that cannot run, before any process waits for
    another, and for machines that have other layouts or seeds.
    """
    _check_layout(parallel, int(os.environ.get("WORLD_SIZE", 1)))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_gpu(torch.cuda.device_count()))
    else:
        torch.set_num_threads(cpu.threads())
    # In PyTorch's own attention, cuDNN plans each length of keys anew: one plan for each token of an answer.
    # Since 9.15 it also loses gradients of masked queries. `attention_kernels` calls it all the same.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if deterministic:
        _repeat_exactly()
    if "RANK" in os.environ:
        timeout = collective_timeout()
        store, rank, processes = next(dist.rendezvous("env://", timeout=timeout))
        # a second run in these processes would find the addresses of the first one's groups in the store
        run_store = dist.PrefixStore(f"run {next(_runs)}", store)
        dist.init_process_group(backend, store=run_store, rank=rank, world_size=processes, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if watchdog.has_several_machines():
        watched = watchdog.watch()
        compared = vars(parallel) | {"seed": seed, "run_dir": watched and watched.errors.absolute().parent}
        of_ranks = from_all_ranks({f"{name}={value}" for name, value in compared.items()})
        if differing := sorted({item for of_rank in of_ranks for item in of_rank ^ of_ranks[0]}):
            raise ConfigError(
                f"the machines differ in {', '.join(differing)}; start the same command on each."
            )
    _make_groups(parallel)
    seed_all(seed)


def reset_layout(parallel: ParallelConfig, seed: int) -> None:
    """Lay the running processes out again, as `init_distributed` would; earlier models become unusable."""
    _check_layout(parallel, dist.get_world_size())
    gc.collect()  # a model's cycles keep its groups, whose threads wake a hundred times a second
    _destroy_groups()
    _make_groups(parallel)
    seed_all(seed)


def _repeat_exactly() -> None:
    """Lets torch use only algorithms that give the same bits in every run, also in FlashAttention's backward.

    On CUDA torch then raises RuntimeError at an operation that has none.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it begins
    torch.use_deterministic_algorithms(True)


@contextmanager
def pretend_rank(parallel: ParallelConfig, processes: int, rank: int = 0) -> Iterator[None]:
    """Lays this process out as `rank` of many that do not exist: enough to build on the meta device, and to
    run there under `cpu.stand_in`."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 registers the backend

    _check_layout(parallel, processes)
    dist.init_process_group("cpu:fake,meta:fake", store=dist.HashStore(), rank=rank, world_size=processes)
    _make_groups(parallel)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def group_beside() -> dist.ProcessGroup:
    """All processes once more, for a thread that works while they train. Collective; `shutdown` ends it."""
    return dist.new_group(timeout=collective_timeout(), backend="gloo")


def shutdown() -> None:
    """Leave all process groups, `group_beside`'s, too. Every process calls it when its work is done."""
    _destroy_groups()
    dist.destroy_process_group()


@contextmanager
def left_on_error() -> Iterator[None]:
    """Leave the process groups that were joined within, if an error ends it in a single process.

    A notebook can then go on. Of several processes the others still wait in them, and the job ends.
    """
    was_joined = dist.is_initialized()
    try:
        yield
    except BaseException:
        if not was_joined and dist.is_initialized() and dist.get_world_size() == 1:
            shutdown()
        raise


def collective_timeout() -> timedelta:
    """The timeout of collectives: longer than the watchdog waits, which knows better which rank hangs."""
    watched = watchdog.watch()
    return timedelta(seconds=max(1800, 2 * watched.hang_seconds if watched else 0))


def local_gpu(gpus: int) -> int:
    """The number of this process's GPU among the GPUs that it sees.

    torchrun shows a machine's GPUs to all its processes, Slurm may show each its own
    alone. Raises ConfigError unless each process has one.
    """
    if gpus == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0
    check_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), gpus)
    return int(os.environ.get("LOCAL_RANK", 0))


def use_device(device: torch.device) -> None:
    """Makes this thread's current device the process's; each thread begins with the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def device() -> torch.device:
    """This process's device."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else cpu.device()


def is_first_rank() -> bool:
    return dist.get_rank() == 0


def on_first_rank(do: Callable, *arguments: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Returns on every rank what `do` returns on rank 0, or raises its ValueError or OSError.

    Every rank calls it, over a group of all ranks. So all ranks act on what one sees, whatever a network file
    system shows the others.
    """
    answer = [None, None]
    if dist.get_rank() == 0:
        try:
            answer = [do(*arguments), None]
        except (ValueError, OSError) as error:
            answer = [None, error]
    dist.broadcast_object_list(answer, src=0, group=group, device=torch.device("cpu"))
    if answer[1] is not None:
        raise answer[1].with_traceback(None)
    return answer[0]


def local_rank_0_first[T](do: Callable[[], T]) -> list[T]:
    """Return what `do` returns on every rank; on each machine the others begin when local rank 0 is done.

    So what it compiles and keeps on disk is there for the others. Collective.
    """
    leads = int(os.environ.get("LOCAL_RANK", 0)) == 0
    result = do() if leads else None
    from_all_ranks(None)
    return from_all_ranks(result if leads else do())


def from_all_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The `value` of each rank of a group, of all without one; each of these ranks calls it."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def atomic_directory(output: str | Path) -> Iterator[Path]:
    """`files.atomic_directory`, made and named by rank 0 for all ranks, which must share the file system.

    Collective where it begins and where it ends; every rank raises what rank 0 does.
    """
    with ExitStack() as aside:
        yield on_first_rank(aside.enter_context, files.atomic_directory(output))
        on_first_rank(aside.close)


def data_parallel_place() -> tuple[int, int]:
    """(rank, size) of data parallelism: which share of the data this process trains on."""
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


def seed_all(seed: int) -> None:
    """Seed python, numpy, torch and Megatron's tracker: seeds differ by stage, not by data-parallel rank."""
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _check_layout(parallel: ParallelConfig, processes: int) -> None:
    if problems := list(layout_problems(parallel, processes)):
        raise ConfigError(join_lines(problems))


def _make_groups(parallel: ParallelConfig) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=collective_timeout() / timedelta(minutes=1),
        create_gloo_process_groups=False,  # the default groups can send CPU tensors already
    )


def _destroy_groups() -> None:
    """Ends the groups' threads and sockets; `destroy_model_parallel` only forgets the groups."""
    globals_of_megatron = vars(parallel_state).values()
    groups = {group for group in globals_of_megatron if isinstance(group, dist.ProcessGroup)} - {
        dist.group.WORLD
    }
    dist.barrier()
    for group in sorted(groups, key=lambda group: group.group_name):
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def on_device(numbers: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """The numbers on a device. What leaves the host is copied out of pinned memory, behind the work that the
    device has to do: from other memory, or blocking, the host would wait until all of that is done."""
    tensor = torch.from_numpy(numbers) if isinstance(numbers, np.ndarray) else numbers
    if tensor.device.type == "cpu" and device.type != "cpu":
        tensor = tensor.contiguous().pin_memory()  # else the driver's copy would need a copy itself
    return tensor.to(device, non_blocking=True)
