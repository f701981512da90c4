"""Two ways to do one thing, timed in turn in one process."""

import gc
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from tqdm.auto import tqdm


def compare(sides: dict[str, Callable[[], object]], rounds: int = 5, seconds: float = 1.0, desc: str = "") -> dict:
    """
    Times each side in turn, round after round, so that whatever else the machine does falls on both.

    Args:
        sides: two functions by name, the yardstick first.
        rounds: how often each is timed.
        seconds: a round's time for a side: it is called again until that is spent.

    Returns:
        `seconds`, for each side the time of one call in each round; `median`, of each side; `ratio`, how many times
        as fast the second is: `median`, `lowest` and `highest` of the rounds.
    """
    times = {name: [] for name in sides}
    for function in sides.values():
        function()
    for _ in tqdm(range(rounds), desc=desc, leave=False):
        for name, function in sides.items():
            gc.collect()
            calls, start = 0, _now()
            while calls == 0 or _now() - start < seconds:
                function()
                calls += 1
            times[name].append((_now() - start) / calls)
    yardstick, ours = times.values()
    ratios = [one / other for one, other in zip(yardstick, ours)]
    return {
        "seconds": times,
        "median": {name: statistics.median(values) for name, values in times.items()},
        "ratio": {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)},
    }


def peak_memory(build: Callable[..., Callable[[], object]], *args) -> int:
    """
    Bytes that the calls of a function take beyond what was there before them, measured in a process of its own.

    Args:
        build: a module-level function; `build(*args)` gives the function that is called three times.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_peak_memory, build, args).result()


def _peak_memory(build, args) -> int:
    function = build(*args)
    cuda = torch.cuda.is_available()
    before = torch.cuda.memory_allocated() if cuda else _peak_resident()
    for _ in range(3):
        function()
    return (torch.cuda.max_memory_allocated() if cuda else _peak_resident()) - before


def _peak_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
