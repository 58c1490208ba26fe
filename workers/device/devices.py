"""The device of a worker: which device, how many threads, pinned memory, and figures that the device reports.

A GPU that was asked for and cannot be used is an error: there is no silent fall back to the CPU.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ipc.errors import MachineUnfit
from ipc.machine import available_cores, count_gpus
from ipc.settings import Settings

log = logging.getLogger(__name__)

CPU_BATCH_TOKENS = 2048
CUDA_BATCH_TOKENS = 32768


@dataclass(frozen=True, slots=True)
class Device:
    """The device of one worker: torch device, public name, uuid, threads for CPU work."""

    torch: torch.device
    name: str
    uuid: str
    threads: int


def select(settings: Settings) -> Device:
    """The device by `worker.device`. Raises `MachineUnfit` when a GPU is wanted or present but unusable."""
    choice = settings.worker.device
    if choice != "cpu" and torch.cuda.is_available():
        torch.set_num_threads(1)
        # NOTE: by default convolutions in float32 keep 10 bits of each factor, which moves vectors of pictures by 2e-4.
        torch.backends.cudnn.allow_tf32 = False
        properties = torch.cuda.get_device_properties(0)
        return Device(torch.device("cuda", 0), properties.name, str(getattr(properties, "uuid", "")), 1)
    if choice == "cuda":
        raise MachineUnfit("worker.device is cuda, but torch finds no CUDA device")
    if choice == "auto" and count_gpus():
        raise MachineUnfit(
            "this host has a GPU that torch cannot use; install a CUDA build of torch or set worker.device=cpu"
        )
    threads = settings.worker.torch_threads or max(1, available_cores() // settings.worker_count)
    torch.set_num_threads(threads)
    return Device(torch.device("cpu"), "cpu", "cpu", threads)


def batch_tokens(settings: Settings, device: Device) -> int:
    """Token budget of a batch."""
    return settings.batch.max_tokens or (
        CUDA_BATCH_TOKENS if device.torch.type == "cuda" else CPU_BATCH_TOKENS
    )


def pin(view: memoryview, device: Device) -> None:
    """Register the arena as pinned memory, so that results reach it by one DMA. Only on CUDA."""
    if device.torch.type != "cuda":
        return
    address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    code = torch.cuda.cudart().cudaHostRegister(address, view.nbytes, 0)  # type: ignore[no-untyped-call]
    if int(code) != 0:
        log.warning(
            "the arena could not be pinned (CUDA code %s); results are copied through pageable memory", code
        )


class Monitor:
    """Memory and utilization of the device, sampled on demand."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._nvml: Any = None
        self._handle: Any = None
        self._first_energy_j: float | None = None
        if device.torch.type == "cuda":
            with contextlib.suppress(Exception):
                import pynvml

                pynvml.nvmlInit()
                self._nvml = pynvml
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{device.uuid}")

    def memory_bytes(self) -> int:
        """Device memory in use; resident memory of this process on CPU."""
        return self.memory()[0]

    def memory(self) -> tuple[int, int]:
        """(used, total) bytes of the device; on CPU resident memory of this process and memory of the host."""
        if self._device.torch.type != "cuda":
            return self.resident_bytes(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if self._handle is not None:
            with contextlib.suppress(Exception):
                # PERF: NVML answers without the lock of the CUDA context that kernels are launched under.
                info = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
                return int(info.used), int(info.total)
        free, total = torch.cuda.mem_get_info()
        return int(total - free), int(total)

    @staticmethod
    def resident_bytes() -> int:
        """Resident memory of this process."""
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def utilization(self) -> float | None:
        """Share of the last second in which the device was busy, 0 to 1; None when nobody can tell."""
        if self._handle is None:
            return None
        with contextlib.suppress(Exception):
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100
        return None

    def power_w(self) -> tuple[float, float]:
        """(drawn, allowed) watts; 0 when nobody can tell."""
        drawn = limit = 0.0
        with contextlib.suppress(Exception):
            drawn = float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1000
            limit = float(self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle)) / 1000
        return drawn, limit

    def energy_j(self) -> float:
        """Joules that the device took since the first call; 0 when nobody can tell."""
        with contextlib.suppress(Exception):
            joules = float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000
            if self._first_energy_j is None:
                self._first_energy_j = joules
            return joules - self._first_energy_j
        return 0.0

    def temperature_c(self) -> float | None:
        """Temperature in degrees Celsius; None when nobody can tell."""
        if self._handle is None:
            return None
        with contextlib.suppress(Exception):
            sensor = self._nvml.NVML_TEMPERATURE_GPU
            return float(self._nvml.nvmlDeviceGetTemperature(self._handle, sensor))
        return None
