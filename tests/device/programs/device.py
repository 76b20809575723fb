"""What the simulated device itself does."""

import ctypes
import os
import threading

import torch
import torch_npu


def _signal_of(work) -> int:
    """The signal that ends a process that does ``work``; 0 for none."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def _late(schedule: str) -> dict[str, bool]:
    """Which of two streams has run before anybody waits."""
    torch_npu.configure(schedule=schedule)
    side = torch.npu.Stream(torch.device("npu:0"))
    kernel, copy = torch.npu.Event(), torch.npu.Event()
    pinned = torch.zeros(4, pin_memory=True)
    source = torch.ones(4, device="npu:0")
    torch.npu.synchronize()
    source.mul_(2)
    kernel.record(torch.npu.current_stream())
    with torch.npu.stream(side):
        pinned.copy_(source.new_ones(4), non_blocking=True)
        copy.record(side)
    found = {
        "kernel": kernel.query(),
        "copy": copy.query(),
        "arrived": pinned.tolist() == [1.0] * 4,
    }
    copy.synchronize()
    return found | {"then": pinned.tolist() == [1.0] * 4}


def _reused(*, told: bool) -> list[float]:
    """What a late copy finds in a tensor that was dropped, and whose memory was taken again."""
    torch_npu.configure(schedule="copies")
    side, event = torch.npu.Stream(torch.device("npu:0")), torch.npu.Event()
    source, pinned = torch.full((4,), 5.0, device="npu:0"), torch.zeros(4, pin_memory=True)
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        pinned.copy_(source, non_blocking=True)
        event.record(side)
    if told:
        source.record_stream(side)
    del source
    again = torch.full((4,), 7.0, device="npu:0")
    event.synchronize()
    del again
    return pinned.tolist()


def _in_thread(*, set_first: bool) -> str | None:
    """Waiting for an event in a thread of its own: the error."""
    torch_npu.configure(strict_threads=True)
    event, errors = torch.npu.Event(), []
    event.record(torch.npu.current_stream())

    def wait() -> None:
        try:
            if set_first:
                torch.npu.set_device(0)
            event.synchronize()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    return errors[0] if errors else None


def _error(work) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _switches() -> dict[str, str]:
    """What each switch refuses."""
    found = {}
    ones, twos = torch.ones(2, 2, device="npu"), torch.full((1, 2, 2), 2.0, device="npu")
    double = ones.double()
    for name, value, work in (
        ("no_float64", 1, ones.double),
        ("no_float64_products", 1, lambda: double @ double),
        ("missing", "silu", lambda: torch.nn.functional.silu(ones)),
        ("max_bytes", 1 << 20, lambda: torch.empty(1 << 20, device="npu")),
        ("no_pinned", 1, lambda: torch.empty(1, pin_memory=True)),
        ("no_streams", True, lambda: torch.npu.Stream()),
    ):
        torch_npu.configure(**{name: value})
        found[name] = _error(work)
    torch_npu.configure(wrong="silu")
    found["wrong"] = (torch.nn.functional.silu(ones) / torch.nn.functional.silu(ones.cpu())[0, 0])[
        0, 0
    ].item()
    torch_npu.configure(short_products=1)
    found["short_products"] = torch.bmm(twos * (1 + 2.0**-12), twos).flatten().tolist()
    torch_npu.configure(pinned_by_base=1)
    pinned = torch.empty(64, dtype=torch.uint8, pin_memory=True)
    cut = torch.frombuffer(memoryview(pinned.numpy())[16:], dtype=torch.uint8)
    found["pinned_by_base"] = [pinned[16:].is_pinned(), cut.is_pinned()]
    torch_npu.configure()
    return found


def _same() -> dict[str, bool]:
    """Results against the host's, bit for bit."""
    torch_npu.configure()
    torch.manual_seed(0)
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    x, y = a.npu(), b.to("npu:1").to("npu:0")
    z = x.clone()
    z[1:2].fill_(3)
    z.index_put_((torch.tensor([0]).npu(),), torch.tensor(5.0).npu())
    w = a.clone()
    w[1:2] = 3
    w[0] = 5
    x.requires_grad_()
    (x * x).sum().backward()
    pairs = {
        "product": (x @ y, a @ b),
        "softmax": (torch.softmax(x, -1), torch.softmax(a, -1)),
        "layer norm": (torch.layer_norm(x, (7,)), torch.layer_norm(a, (7,))),
        "by values": (x[x > 0], a[a > 0]),
        "view": (x.t()[1:3].reshape(-1), a.t()[1:3].reshape(-1)),
        "in place": (z, w),
        "two devices": (y.to("npu:1").cumsum(0), b.cumsum(0)),
        "complex": (torch.complex(x, x).conj() * 2, torch.complex(a, a).conj() * 2),
        "gradient": (x.grad, 2 * a),
    }
    return {name: torch.equal(one.detach().cpu(), two) for name, (one, two) in pairs.items()}


def answers(work, model) -> dict:
    tensor = torch.ones(4, device="npu:0")
    pinned = torch.empty(64, dtype=torch.uint8, pin_memory=True)
    return {
        "touched": _signal_of(lambda: ctypes.c_char.from_address(tensor.data_ptr()).value),
        "pinned": [pinned.is_pinned(), pinned[16:].is_pinned(), torch.empty(3).is_pinned()],
        "late": {schedule: _late(schedule) for schedule in torch_npu.SCHEDULES},
        "reused": {str(told): _reused(told=told) for told in (False, True)},
        "threads": [_in_thread(set_first=False), _in_thread(set_first=True)],
        "switches": _switches(),
        "same": _same(),
    }
