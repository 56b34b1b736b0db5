"""The variables of a task, by what it was given."""

from __future__ import annotations

from peerload.agent.launcher.client import HeldDevices, held_devices, task_variables
from peerload.core.resources.devices import DeviceLedger, DeviceRequest
from peerload.model.config import DeviceConfig, GpuConfig
from peerload.model.resources import Device, DeviceMode, GpuShare, Profile, ResourceRequest
from tests.each import each

GIB = 1 << 30
CARDS = tuple(Device(f"nvidia:GPU-{number}", index=number, mem_bytes=80 * GIB) for number in range(4))
BOARDS = tuple(Device(f"fpga:f{number}", "fpga", number) for number in range(2))
SOFT = (
    "OMP_NUM_THREADS", "TF_FORCE_GPU_ALLOW_GROWTH", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE",
)  # fmt: skip


def test_advice_is_the_user_s_to_change_and_devices_are_not() -> None:
    held = HeldDevices(CARDS[:1], promised_bytes=20 * GIB)
    own = {name.encode(): b"mine" for name in (*SOFT, "CUDA_VISIBLE_DEVICES", "PEERLOAD_GPUS", "CUDA_DEVICE_ORDER")}
    assert set(SOFT) <= task_variables(ResourceRequest(), held, (), {}).keys()
    found = task_variables(ResourceRequest(), held, (), own)
    assert not set(SOFT) & found.keys()
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-0"


@each(("promised", "share"), [(20 * GIB, "0.25"), (80 * GIB, "1"), (GIB // 4, "0.01"), (27 * GIB, "0.337")])
def test_jax_takes_no_more_than_was_promised(promised: int, share: str) -> None:
    found = task_variables(ResourceRequest(), HeldDevices(CARDS[:2], promised_bytes=promised), (), {})
    assert found["XLA_PYTHON_CLIENT_MEM_FRACTION"] == share


def test_what_is_not_known_is_not_said() -> None:
    nameless = Device("gpu:5", index=5)
    found = task_variables(ResourceRequest(), HeldDevices((nameless,)), (), {})
    assert (found["CUDA_VISIBLE_DEVICES"], found["PEERLOAD_GPUS"]) == ("5", "5")
    assert not {"PEERLOAD_GPU_MEM_MB", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & found.keys()


def test_what_was_given_is_what_the_ledger_says() -> None:
    ledger = DeviceLedger(Profile("n", slots=4, cpus=4.0, devices=(*CARDS, *BOARDS)), GpuConfig())
    request = ResourceRequest(gpus=2, gpu_mem_bytes=4 * GIB, devices=(("fpga", 1),))
    names = ("nvidia:GPU-2", "nvidia:GPU-0", "fpga:f1")
    ledger.grant("key", names, DeviceRequest(request, GpuConfig()), 0.0)
    held = held_devices("key", (*names, "nvidia:GPU-gone"), ledger)
    assert [device.id for device in held.devices] == list(names)
    assert (held.mode, held.promised_bytes) == (DeviceMode.TIME, 4 * GIB)
    config = (
        DeviceConfig(kind="fpga", ids=("f0",), env={"A": "{ids}"}),
        DeviceConfig(kind="fpga", ids=("f1",), env={"B": "x"}),
    )
    found = task_variables(request, held, config, {})
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-2,GPU-0"
    assert {"A": "f1", "B": "x", "PEERLOAD_FPGA": "f1"}.items() <= found.items()

    alone = ResourceRequest(gpus=1, gpu_share=GpuShare.EXCLUSIVE)
    ledger.grant("other", ("nvidia:GPU-3",), DeviceRequest(alone, GpuConfig()), 0.0)
    held = held_devices("other", ("nvidia:GPU-3",), ledger)
    assert (held.mode, held.promised_bytes) == (DeviceMode.EXCLUSIVE, 72 * GIB - GIB // 2)
    found = task_variables(alone, held, (), {})
    assert (found["PEERLOAD_GPU_MEM_MB"], found["PEERLOAD_GPU_MODE"]) == (str(held.promised_bytes >> 20), "exclusive")
    assert held_devices("none", (), ledger) == HeldDevices()
