"""Run a function on N ranks: real processes, real gloo, a free port, nothing left behind."""

import os
import pickle
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 300,
    may_die: Collection[int] = (),
) -> list[Any]:
    """`function(*args)` on each of `world_size` fresh processes that have RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

    Returns the results by rank (None for a rank that may die and did). When a rank raises, the first error is raised
    here with its traceback and all ranks are ended. `function` must be importable (spawn); the rendezvous store lives
    here, so that its port is never free.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    links, processes = [], []
    try:
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # env:// then connects to our store on rank 0 too
                "OMP_NUM_THREADS": "1",
            }
            process = context.Process(target=_rank_main, args=(there, environment, function, args), daemon=True)
            process.start()
            there.close()
            links.append(here)
            processes.append(process)
        return _collect(links, timeout_s, may_die)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(links: list[Connection], timeout_s: float, may_die: Collection[int]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(links):
        waiting = [link for rank, link in enumerate(links) if rank not in results]
        ready = wait(waiting, timeout=timeout_s)
        if not ready:
            raise TimeoutError(f"ranks {sorted(set(range(len(links))) - set(results))} did not answer in {timeout_s} s")
        for link in ready:
            rank = links.index(link)  # type: ignore[arg-type]
            try:
                succeeded, value = pickle.loads(links[rank].recv_bytes())
            except EOFError:
                succeeded, value = (True, None) if rank in may_die else (False, "the process ended without a result")
            if not succeeded:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(links))]


def _rank_main(link: Connection, environment: dict[str, str], function: Callable[..., Any], args: Any) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        answer = (True, function(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    link.send_bytes(pickle.dumps(answer))  # plain pickle: torch's own would lend memory that dies with this process
    link.close()
