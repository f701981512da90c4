"""Two ways to do one thing, timed in turn in one process."""

import gc
import math
import platform
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from tqdm.auto import tqdm

CLEAR_PEAK = Path("/proc/self/clear_refs")


def check_seconds(seconds: float):
    """Raises ValueError unless a time is a positive number."""
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds must be a positive number, got {seconds}.")


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


def peak_memory(build: Callable[..., Callable[[], object]], *args) -> int | None:
    """
    Bytes that the calls of a function take beyond what was there before them, measured in a process of its own. On
    Linux or a GPU only.

    Args:
        build: a module-level function; `build(*args)` gives the function that is called three times.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_peak_memory, build, args).result()


def _peak_memory(build, args) -> int | None:
    function = build(*args)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated
    elif CLEAR_PEAK.exists():
        # Otherwise the peak would be that of building, or even of the process that started this one.
        CLEAR_PEAK.write_text("5")
        before, peak = _resident("VmRSS"), lambda: _resident("VmHWM")
    else:
        return None
    for _ in range(3):
        function()
    return peak() - before


def _resident(field: str) -> int:
    """VmRSS, the memory that this process holds, or VmHWM, its peak, in bytes."""
    return 1024 * int(re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])


def mebibytes(count: int | None) -> str:
    """A number of bytes as a table shows it; nothing where it wasn't measured."""
    return "" if count is None else f"{count / 2**20:.0f}"


def machine() -> str:
    """What the measurements ran on, in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return f"{name[1] if name else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
