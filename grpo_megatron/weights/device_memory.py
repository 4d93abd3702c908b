"""Device memory that another process on the same device reads in place, and pinned host memory where that fails.

Imported by engines' own processes too: nothing but torch here.
"""

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_BYTES_FIELDS = ("handle", "counter_handle", "event_handle")


def allocate_shareable(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes] in an allocation of its own kind: expandable segments cannot be opened by other processes."""
    with _without_expandable_segments():
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


@contextmanager
def _without_expandable_segments() -> Iterator[None]:
    """torch's allocator then looks for room outside of expandable segments only, and asks cudaMalloc for more."""
    settings = torch._C._accelerator_getAllocatorSettings()
    if "expandable_segments:true" not in settings.replace(" ", "").lower():
        yield
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def export_handle(buffer: torch.Tensor) -> dict[str, Any]:
    """What another process needs to open this memory, as plain JSON values.

    Each call leaves a counter behind that lives as long as the buffer: export once, not at every use.
    """
    storage = buffer.untyped_storage()
    assert buffer.storage_offset() == 0 and storage.nbytes() == buffer.nbytes, "a view cannot be exported"
    fields = storage._share_cuda_()
    names = (
        "device",
        "handle",
        "num_bytes",
        "offset",
        "counter_handle",
        "counter_offset",
        "event_handle",
        "event_sync",
    )
    handle = dict(zip(names, fields, strict=True))
    handle |= {name: base64.b64encode(handle[name]).decode() for name in _BYTES_FIELDS}
    # Numbers of devices differ between processes; this does not.
    handle["device"] = str(torch.cuda.get_device_properties(buffer.device).uuid)
    return handle


def open_handle(handle: Mapping[str, Any]) -> torch.Tensor:
    """The memory of another process as uint8 [num_bytes]; stays open as long as the tensor lives.

    Raises:
        ValueError: its device is not among this process's.
    """
    device = _find_device(handle["device"])
    raw = {name: base64.b64decode(handle[name]) for name in _BYTES_FIELDS}
    storage = torch.UntypedStorage._new_shared_cuda(
        device,
        raw["handle"],
        handle["num_bytes"],
        handle["offset"],
        raw["counter_handle"],
        handle["counter_offset"],
        raw["event_handle"],
        handle["event_sync"],
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def pin(buffer: torch.Tensor) -> None:
    """Make host memory that is already there fast for copies to and from a device.

    Raises:
        RuntimeError: the device's driver refuses.
    """
    code = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    if int(code) != 0:
        raise RuntimeError(f"cannot pin {buffer.nbytes} bytes: CUDA error {int(code)}")


def _find_device(uuid: str) -> int:
    found = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if uuid not in found:
        raise ValueError(f"the memory lies on device {uuid}, which is not among {', '.join(found) or 'none'}")
    return found.index(uuid)
