"""Tests memory of a GPU that two ends share, with a stand-in for the CUDA driver that is compiled against cuda.h."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator

import pytest
import torch

from tests.support.cuda import UNIT, StandIn, stand_in
from tests.support.threads import in_child
from wire.gpu_window import memory as driver_module
from wire.gpu_window.memory import (
    AccessDescription,
    AllocationProperties,
    Driver,
    DriverError,
    Location,
    SharedMemory,
    Uuid,
    allocate,
    import_,
)

CPU = torch.device("cpu")


@pytest.fixture
def cuda() -> Iterator[StandIn]:
    """Provides the stand-in, and checks afterwards that nothing is left mapped or held."""
    made = stand_in()
    gc.collect()
    before = made.mapped_bytes, made.num_handles
    yield made
    made.limit()
    made.misses()
    gc.collect()
    assert (made.mapped_bytes, made.num_handles) == before


@pytest.fixture
def driver(cuda: StandIn) -> Driver:
    return Driver(0, cuda.library)


def shared(driver: Driver, size: int = UNIT) -> tuple[SharedMemory, SharedMemory]:
    """Returns both ends' view of one allocation."""
    mine, descriptor = allocate(driver, CPU, size)
    try:
        return mine, import_(driver, CPU, descriptor, mine.size)
    finally:
        os.close(descriptor)


def test_structures_and_constants_are_those_of_cuda_h(cuda: StandIn) -> None:
    properties = AllocationProperties
    assert [cuda.layout(which) for which in range(13)] == [
        ctypes.sizeof(properties),
        properties.location.offset,
        properties.win32.offset,
        properties.flags.offset,
        ctypes.sizeof(AccessDescription),
        AccessDescription.flags.offset,
        ctypes.sizeof(Location),
        ctypes.sizeof(Uuid),
        ctypes.sizeof(ctypes.c_ulonglong),
        ctypes.sizeof(ctypes.c_ulonglong),
        ctypes.sizeof(ctypes.c_int),
        driver_module.CAN_MAP,
        driver_module.CAN_EXPORT,
    ]


def test_what_one_end_writes_the_other_reads(driver: Driver) -> None:
    mine, theirs = shared(driver)
    numbers = torch.arange(12, dtype=torch.int32).view(3, 4)
    mine.matrix(256, 3, 4).copy_(numbers)
    assert torch.equal(theirs.matrix(256, 3, 4), numbers)
    theirs.matrix(UNIT - 4, 1, 1).fill_(-7)
    assert mine.matrix(UNIT - 4, 1, 1).item() == -7


def test_a_reply_that_stays_on_the_device_is_a_copy(driver: Driver) -> None:
    """The provider can change the window after the tenant has read it, and the copy is what the tenant checks."""
    mine, theirs = shared(driver)
    mine.write(64, torch.ones(2, 3, dtype=torch.int32))
    kept = mine.read(64, 2, 3, stays=True)
    theirs.write(64, torch.zeros(2, 3, dtype=torch.int32))
    assert kept.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert kept.device == mine.device


def test_memory_begins_as_zeros(driver: Driver) -> None:
    """The stand-in's fresh memory holds what another process has left."""
    mine, theirs = shared(driver)
    for end in (mine, theirs):
        assert not end.matrix(0, 1, UNIT // 4).any()


def test_each_allocation_is_one_of_its_own(driver: Driver) -> None:
    (one, _), (other, _) = shared(driver), shared(driver)
    one.matrix(0, 1, UNIT // 4).fill_(1)
    assert not other.matrix(0, 1, UNIT // 4).any()


@pytest.mark.parametrize(
    ("offset", "num_rows", "cols"), [(2, 1, 1), (-4, 1, 1), (0, 1, UNIT // 4 + 1), (UNIT, 1, 1), (4, UNIT // 8, 2)]
)
def test_no_view_goes_beyond_the_memory(driver: Driver, offset: int, num_rows: int, cols: int) -> None:
    mine, _ = shared(driver)
    with pytest.raises(ValueError, match="beyond the shared memory"):
        mine.matrix(offset, num_rows, cols)


def test_memory_stays_mapped_while_a_tensor_views_it(driver: Driver, cuda: StandIn) -> None:
    """A product may still read the rows when the stream has ended; afterwards the memory goes."""
    gc.collect()
    before = cuda.mapped_bytes
    mine, theirs = shared(driver)
    assert cuda.mapped_bytes == before + 2 * UNIT
    theirs.matrix(0, 2, 3).fill_(5)
    rows = mine.matrix(0, 2, 3)[1:].view(3)
    del mine, theirs
    gc.collect()
    assert cuda.mapped_bytes == before + UNIT
    assert rows.tolist() == [5, 5, 5]
    del rows
    gc.collect()
    assert cuda.mapped_bytes == before


def test_sizes_are_rounded_up(driver: Driver) -> None:
    mine, theirs = shared(driver, UNIT + 1)
    assert (mine.size, theirs.size) == (2 * UNIT, 2 * UNIT)


def test_a_size_that_is_not_the_allocations_is_refused(driver: Driver) -> None:
    mine, descriptor = allocate(driver, CPU, UNIT)
    for size in (2 * UNIT, UNIT // 2):  # More than the allocation, and less than one can be.
        with pytest.raises(DriverError, match="failed with CUDA error 1"):
            import_(driver, CPU, descriptor, size)
    os.close(descriptor)
    assert mine.size == UNIT


def test_a_descriptor_of_something_else_is_refused(driver: Driver) -> None:
    with open(os.devnull, "rb") as file, pytest.raises(DriverError):
        import_(driver, CPU, file.fileno(), UNIT)


def test_memory_of_another_gpu_is_refused(cuda: StandIn) -> None:
    mine, descriptor = allocate(Driver(1, cuda.library), CPU, UNIT)
    with pytest.raises(DriverError, match="cuMemGetAllocationPropertiesFromHandle"):
        import_(Driver(0, cuda.library), CPU, descriptor, mine.size)
    os.close(descriptor)


def test_descriptors_are_not_inherited(driver: Driver) -> None:
    _, descriptor = allocate(driver, CPU, UNIT)
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_memory_that_is_mapped_in_inference_mode_can_be_written_later(driver: Driver) -> None:
    with torch.inference_mode():
        mine, theirs = shared(driver)
        mine.write(0, torch.ones(2, 2, dtype=torch.int32))
    mine.write(0, torch.full((2, 2), 2, dtype=torch.int32))
    assert theirs.read(0, 2, 2).tolist() == [[2, 2], [2, 2]]


def test_every_copy_is_waited_for(driver: Driver) -> None:
    """The other process reads the memory as soon as it is told to."""
    mine, _ = shared(driver)
    waited: list[int] = []
    numbers = mine.matrix(0, 1, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedMemory, "synchronize", lambda _: waited.append(int(numbers)))
        mine.write(0, torch.full((1, 1), 7, dtype=torch.int32))
        assert waited == [7]
        assert mine.read(0, 1, 1).item() == 7
        mine.fill_with_zeros()
    assert waited == [7, 7, 0]


def test_a_forked_child_leaves_the_parents_memory_alone(driver: Driver, cuda: StandIn) -> None:
    mine, _ = shared(driver)
    mine.write(0, torch.full((1, 1), 7, dtype=torch.int32))

    def in_the_child() -> str:
        before = cuda.mapped_bytes
        nonlocal mine
        del mine
        gc.collect()
        return str(cuda.mapped_bytes - before)

    assert in_child(in_the_child) == "0"
    assert mine.read(0, 1, 1).item() == 7


def test_a_device_without_memory(driver: Driver, cuda: StandIn) -> None:
    cuda.limit(UNIT)
    with pytest.raises(DriverError) as error:
        allocate(driver, CPU, 2 * UNIT)
    assert error.value.is_out_of_memory


@pytest.mark.parametrize("attribute", [driver_module.CAN_MAP, driver_module.CAN_EXPORT])
def test_a_device_that_cannot_share_memory(cuda: StandIn, attribute: int) -> None:
    cuda.misses(attribute)
    with pytest.raises(DriverError, match="801"):
        Driver(0, cuda.library)


def test_a_device_or_a_driver_that_is_not_there(cuda: StandIn) -> None:
    with pytest.raises(DriverError, match="cuDeviceGet failed with CUDA error 101"):
        Driver(7, cuda.library)
    with pytest.raises(OSError, match="no-such-library"):
        Driver(0, "no-such-library.so")
    with pytest.raises(DriverError, match="cuInit failed with CUDA error 500"):
        Driver(0, "libc.so.6")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_a_real_gpu() -> None:
    device, torch_bytes = torch.device("cuda", 0), torch.zeros(1, device="cuda:0")
    driver = Driver(0)
    mine, descriptor = allocate(driver, device, UNIT + 1)
    theirs = import_(driver, device, descriptor, mine.size)
    os.close(descriptor)
    assert not theirs.matrix(0, 1, mine.size // 4).any()
    numbers = torch.arange(12, dtype=torch.int32).view(3, 4)
    mine.matrix(256, 3, 4).copy_(numbers)
    mine.synchronize()
    assert torch.equal(theirs.matrix(256, 3, 4).cpu(), numbers)
    rows = mine.matrix(256, 3, 4)
    del mine, theirs
    gc.collect()
    assert torch.equal(rows.cpu(), numbers), "still mapped"
    assert torch_bytes.item() == 0


def test_two_gpus_have_names_of_their_own(cuda: StandIn) -> None:
    one, other = (Driver(ordinal, cuda.library).uuid() for ordinal in (0, 1))
    assert (len(one), one == other, one == Driver(0, cuda.library).uuid()) == (16, False, True)
    assert one[3:] == bytes([1]) + bytes(11) + b"\xfe", "bytes behind a zero count too"
